"""Endpoints: parse, call the pipeline, return. The contract is docs/api.md."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import structlog
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.responses import Response

from app.answer import Stamp, answer, entry, usage, usage_line
from app.boundary import error_response, problem_response
from app.errors import ModelNotFound
from app.info import describe_service
from app.intake import FORM, Job, check_head, parse, read_body
from app.openapi import problems
from app.payload import Body, answer_json, entry_json, safetensors_file
from app.pipeline import EncodedItem, FailedItem, Result
from app.problems import ALL_PROBLEMS, NOT_FOUND, describe, document, problem_type, retry_after
from app.responses import BodyResponse, LinesResponse, until_client_leaves
from app.schemas import JSON, NDJSON, SAFETENSORS, EncodeAnswer, Health, Model, ModelList
from app.service import Service

logger = structlog.get_logger("moonvit.encode")
router = APIRouter()

Results = AsyncGenerator[Result, None]

PARSED_AT_ONCE_BYTES = 1024 * 1024  # of a raw body, which is only copied: in 0.1 ms, as a thread takes to wake up


@router.post(
    "/v1/encode",
    summary="Encode pictures and films",
    response_model=EncodeAnswer,
    responses=problems()
    | {
        200: {
            "model": EncodeAnswer,
            "content": {
                SAFETENSORS: {"schema": {"type": "string", "format": "binary"}},
                NDJSON: {"schema": {"type": "string"}},
            },
        }
    },
    openapi_extra={"requestBody": {"$ref": "#/components/requestBodies/Encode"}},
)
async def encode(request: Request) -> Response:
    """Media in one of three forms; one embedding per item, in order. A bad item fails alone."""
    service: Service = request.app.state.service
    stamp = Stamp(request.state.id, service.model_name, request.state.start_s, int(time.time()))
    job = await _read_job(request, service)
    if job.options.model not in (None, service.model_name):
        raise ModelNotFound(f"model {job.options.model[:80]!r} is not served here; served: {service.model_name}")
    asked_ms = job.options.deadline_ms or service.settings.deadline_ms
    deadline_s = min(asked_ms, service.settings.deadline_ms) / 1000
    results = _noted(service.pipeline.results(job, deadline_s), stamp)
    work = _stream(results, job, stamp, request) if job.stream else _whole(results, job, stamp, request, service)
    return await until_client_leaves(request.receive, work)


async def _read_job(request: Request, service: Service) -> Job:
    settings = service.settings
    media_type = check_head(request.headers)
    is_json, is_raw = media_type == JSON, media_type not in (JSON, FORM)
    declared = request.headers.get("content-length", "")
    body = await read_body(
        request.stream(),
        int(declared) if declared.isdecimal() else None,
        min(settings.max_json_bytes, settings.max_body_bytes) if is_json else settings.max_body_bytes,
        settings.body_timeout_s,
        request.state.body_hold,
    )
    accept = ",".join(request.headers.getlist("accept"))
    query = request.query_params.multi_items()
    if is_raw and len(body) <= PARSED_AT_ONCE_BYTES:
        return parse(request.headers, accept, query, body, settings.max_items)
    return await asyncio.to_thread(parse, request.headers, accept, query, body, settings.max_items)


async def _whole(results: Results, job: Job, stamp: Stamp, request: Request, service: Service) -> Response:
    found: list[Result] = []
    async with aclosing(results):
        async for result in results:
            found.append(result)
            if isinstance(result, FailedItem) and job.options.on_error == "fail":
                _log(request, found)
                return _problem(result, stamp)
    found.sort(key=lambda result: result.index)
    _log(request, found)
    if all(isinstance(result, FailedItem) for result in found):
        return _all_failed(found, job, stamp)
    if len(found) == 1 and found[0].item.kind != "video":  # in less time than a thread takes to wake up
        return _render(found, job, stamp, service)
    return await asyncio.to_thread(_render, found, job, stamp, service)


async def _stream(results: Results, job: Job, stamp: Stamp, request: Request) -> Response:
    """Lines as items finish. They start with the first good item, so that a request of which nothing succeeds has the
    same status as without streaming."""
    first: list[Result] = []
    async for result in results:
        first.append(result)
        if isinstance(result, EncodedItem):
            return LinesResponse(_lines(first, results, job, stamp, request), NDJSON, {})
        if job.options.on_error == "fail":
            await results.aclose()
            _log(request, first)
            return _problem(result, stamp)
    first.sort(key=lambda result: result.index)
    _log(request, first)
    return _all_failed(first, job, stamp)


async def _lines(
    first: list[Result], rest: Results, job: Job, stamp: Stamp, request: Request
) -> AsyncGenerator[Body, None]:
    found: list[Result] = []
    async with aclosing(rest):
        async for result in _chain(first, rest):
            found.append(result)
            _log(request, found)
            yield _line(result, stamp, job)
            if isinstance(result, FailedItem) and job.options.on_error == "fail":
                request.state.log["code"] = problem_type(result.error).code
                return
    yield Body.of(to_json(usage_line(found, stamp)), b"\n")


async def _chain(first: list[Result], rest: Results) -> AsyncGenerator[Result, None]:
    for result in first:
        yield result
    async for result in rest:
        yield result


async def _noted(results: Results, stamp: Stamp) -> Results:
    """The same results; logs what went wrong with an item: a bug with its traceback, the sender's fault as a line."""
    async with aclosing(results):
        async for result in results:
            if isinstance(result, FailedItem):
                problem = describe(result.error, stamp.id, result.index)
                bug = problem.code == "internal"
                log = logger.error if bug else logger.info
                log("item failed", id=stamp.id, code=problem.code, detail=problem.detail, exc_info=bug and result.error)
            yield result


def _text(result: Result) -> Body | None:
    return result.text if isinstance(result, EncodedItem) else None


def _line(result: Result, stamp: Stamp, job: Job) -> Body:
    return Body.of(entry_json(entry(result, stamp, job.options.dtype), _text(result)), b"\n")


def _render(found: list[Result], job: Job, stamp: Stamp, service: Service) -> Response:
    """The whole answer, in the form that was asked for."""
    good = [result for result in found if isinstance(result, EncodedItem)]
    document = answer(found, stamp, job.options.dtype)
    stages = document.timing_ms.model_dump().items()
    headers = {"Server-Timing": ", ".join(f"{stage};dur={ms}" for stage, ms in stages)}
    if len(good) == len(found) == 1:
        headers["X-Content-Key"] = good[0].stored.key
    if job.encoding_format != "safetensors":
        entries = [entry_json(each, _text(result)) for each, result in zip(document.data, found, strict=True)]
        return BodyResponse(answer_json(document, entries), JSON, headers)
    file = safetensors_file(
        [result.tensor for result in good],
        [result.num_tokens if isinstance(result, EncodedItem) else 0 for result in found],
        service.config.vision.text_hidden_size,
        job.options.dtype,
        document.model_dump(mode="json", exclude_none=True),
    )
    return BodyResponse(file, SAFETENSORS, headers)


def _problem(result: FailedItem, stamp: Stamp, **extension: object) -> Response:
    return problem_response(describe(result.error, stamp.id, result.index), retry_after(result.error), **extension)


def _all_failed(found: list[Result], job: Job, stamp: Stamp) -> Response:
    """The first item's problem; with several items, the member `data` has every item's own."""
    failed = [result for result in found if isinstance(result, FailedItem)]
    if len(failed) == 1:
        return _problem(failed[0], stamp)
    data = [entry(result, stamp, job.options.dtype).model_dump(mode="json", exclude_none=True) for result in failed]
    return _problem(failed[0], stamp, data=data)


def _log(request: Request, found: list[Result]) -> None:
    totals = usage(found)
    failed = sum(isinstance(result, FailedItem) for result in found)
    hits = sum(isinstance(result, EncodedItem) and result.cache == "hit" for result in found)
    stages = [result.times for result in found if isinstance(result, EncodedItem)]
    request.state.log.update(
        code="partial" if failed else "ok",
        items=totals.items,
        failed=failed,
        cache_hits=hits,
        patches=totals.patches,
        tokens=totals.tokens,
        media_bytes=totals.media_bytes,
        **{
            f"{stage}_ms": round(1000 * max(getattr(times, f"{stage}_s") for times in stages), 3)
            for stage in ("fetch", "decode", "queue", "encode")
            if stages
        },
    )


# ---- everything else


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", response_model=Health)
async def live() -> Health:
    """200 while the process can serve anything."""
    return Health(status="live")


@router.head("/health/ready", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/health/ready", response_model=Health, responses=problems(503))
@router.get("/health", response_model=Health, responses=problems(503))
async def ready(request: Request) -> Response:
    """200 after weights, self-test and warm-up; 503 with the reason while starting, draining or after a failure."""
    obstacle = request.app.state.service.obstacle()
    if obstacle is not None:
        return error_response(obstacle, request.state.id)
    return JSONResponse(Health(status="ready").model_dump())


@router.get("/v1/models", response_model=ModelList)
async def models(request: Request) -> ModelList:
    """The served model, in OpenAI's list shape."""
    service: Service = request.app.state.service
    model = Model(
        id=service.model_name,
        created=service.created_s,
        owned_by="moonvit-serve",
        demo_weights=service.config.is_demo,
    )
    return ModelList(data=[model])


@router.get("/v1/info")
async def info(request: Request) -> dict[str, Any]:
    """What runs here: model, device, attention backend and why not the others, limits, batching."""
    service: Service = request.app.state.service
    return describe_service(service)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "docs/metrics.md"}},
)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms for Prometheus, in its text format or OpenMetrics."""
    service: Service = request.app.state.service
    content, content_type = service.metrics.exposition(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": content_type})


@router.get("/problems/{slug}", responses=problems(404))
async def problem(slug: str, request: Request) -> Response:
    """What a problem's `type` refers to."""
    kind = ALL_PROBLEMS.get(slug.replace("-", "_"))
    if kind is None:
        return problem_response(document(NOT_FOUND, f"no problem is called {slug[:80]!r}", request.state.id))
    return JSONResponse({"type": kind.type, "code": kind.code, "title": kind.title, "status": kind.status})
