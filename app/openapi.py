"""The OpenAPI document: FastAPI's own, plus the three forms of a request body, which no signature can express."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.auth import Keys
from app.problems import ALL_PROBLEMS
from app.schemas import JSON, PROBLEM, EncodeOptions, EncodeRequest, Problem, RawOptions

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_REF = "#/components/schemas/{model}"


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that can answer these problems; all there are, if none is named."""
    wanted = statuses or sorted({problem.status for problem in ALL_PROBLEMS.values()})
    content = {PROBLEM: {"schema": {"$ref": _REF.format(model="Problem")}}}
    return {
        status: {
            "description": "; ".join(problem.title for problem in ALL_PROBLEMS.values() if problem.status == status),
            "content": content,
        }
        for status in wanted
    }


def install(app: FastAPI, keys: Keys | None) -> None:
    """Make `app.openapi()` describe the request bodies, and keys where they are asked for; built once, when called."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
            if keys is not None:
                _add_keys(app.openapi_schema, keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
    )
    models: list[tuple[type[BaseModel], Any]] = [
        (EncodeRequest, "validation"),
        (EncodeOptions, "validation"),
        (Problem, "serialization"),
    ]
    _, definitions = models_json_schema(models, ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    components["requestBodies"] = {
        "Encode": {
            "required": True,
            "description": "JSON with chat-style parts, a form of files, or one raw picture or film.",
            "content": {
                JSON: {"schema": {"$ref": _REF.format(model="EncodeRequest")}},
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "description": "every file part is one item, in order",
                        "properties": {
                            "request": {"$ref": _REF.format(model="EncodeOptions")},
                            "file": {"type": "array", "items": _BINARY["schema"]},
                            "image_url": {"type": "array", "items": {"type": "string"}},
                            "video_url": {"type": "array", "items": {"type": "string"}},
                        },
                    },
                    "encoding": {"request": {"contentType": JSON}},
                },
                "image/*": _BINARY,
                "video/*": _BINARY,
                "application/octet-stream": _BINARY,
            },
        }
    }
    operation = document["paths"]["/v1/encode"]["post"]
    operation["parameters"] = [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": "raw bodies only"}
        for name, schema in RawOptions.model_json_schema()["properties"].items()
    ]
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None) if _is_frameworks(operation) else None
    return document


def _add_keys(document: dict[str, Any], keys: Keys) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in () if keys.is_open(path) else operations.values():
            operation["security"] = [{"key": []}]
            operation["responses"] |= {str(status): answer for status, answer in problems(401).items()}


def _is_frameworks(operation: dict[str, Any]) -> bool:
    """Whether the 422 is FastAPI's own, which is never sent: we answer 400."""
    return "HTTPValidationError" in str(operation["responses"].get("422", ""))
