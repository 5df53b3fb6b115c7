"""An HTTP request -> a `Job`: read the body within its limits, then parse whichever of the three forms it has."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from app.budget import Hold
from app.decode import Kind, MediaOptions
from app.errors import ClientTooSlow, InvalidRequest, LimitExceeded, UnsupportedMedia
from app.forms import split_form
from app.schemas import (
    JSON,
    NDJSON,
    SAFETENSORS,
    ChatMessage,
    EncodeOptions,
    EncodeRequest,
    EncodingFormat,
    ImagePart,
    RawOptions,
    VideoPart,
)

Options = TypeVar("Options", bound=EncodeOptions)

FORM = "multipart/form-data"
BINARY = "application/octet-stream"
MEDIA_PARTS = ("image_url", "video_url")
MAX_JSON_MARKS = 65_536  # commas and brackets: about 60 ms of parsing, at worst
_REFUSED = re.compile(r";\s*q=0(\.0*)?\s*(;|$)")

ALLOWED_BODIES = f"{JSON}, multipart/form-data, image/*, video/* or application/octet-stream"


@dataclass(frozen=True)
class Item:
    """One picture or film of a request.

    Attributes:
        kind: what the caller says it is; None lets the bytes decide.
        source: the bytes themselves, or a `data:`, `https:` or `http:` URL.
    """

    kind: Kind | None
    source: bytes | str = field(repr=False)
    options: MediaOptions
    uuid: str | None = None

    def without_bytes(self) -> "Item":
        """The same, for an answer: the media itself is done with."""
        return replace(self, source=b"")


@dataclass(frozen=True)
class Job:
    """A parsed request: its items in order, and how the answer is to look."""

    items: list[Item]
    options: EncodeOptions
    encoding_format: EncodingFormat
    stream: bool


async def read_body(
    chunks: AsyncIterator[bytes],
    declared_bytes: int | None,
    max_bytes: int,
    timeout_s: float,
    hold: Hold,
) -> bytearray:
    """Collect a request body.

    Args:
        hold: this body's share of what all bodies may hold. It grows with what arrives: a length that was only
            announced is checked, and keeps nobody else out.
    Raises:
        LimitExceeded: more than `max_bytes`, from `Content-Length` or while reading (a chunked body has none).
        Overloaded: it has no room beside the other bodies, now or once it arrives.
        ClientTooSlow: not complete within `timeout_s`.
    """
    if declared_bytes is not None and declared_bytes > max_bytes:
        raise LimitExceeded(f"request body of {declared_bytes} bytes, limit {max_bytes}")
    hold.check(declared_bytes or 0)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in chunks:
                if len(body) + len(chunk) > max_bytes:
                    raise LimitExceeded(f"request body of more than {max_bytes} bytes")
                hold.take(len(chunk))
                body += chunk
    except TimeoutError as error:
        raise ClientTooSlow(f"{len(body)} bytes of the request body arrived within {timeout_s:g} s") from error
    return body


def check_head(headers: Mapping[str, str]) -> str:
    """The media type of a body that can be read, known before any of it arrives.

    Raises:
        UnsupportedMedia: a content type that is none of the three forms.
        InvalidRequest: a compressed body.
    """
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise InvalidRequest("header Content-Encoding: compressed request bodies are not read; allowed: identity")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    major = media_type.partition("/")[0]
    if media_type in (JSON, FORM, BINARY) or major in ("image", "video"):
        return media_type
    came = f"content type {media_type[:80]!r}" if media_type else "no Content-Type"
    raise UnsupportedMedia(f"request body with {came}, allowed: {ALLOWED_BODIES}")


def parse(
    headers: Mapping[str, str], accept: str, query: list[tuple[str, str]], body: bytes | bytearray, max_items: int
) -> Job:
    """Parse a complete request. Runs off the event loop: a body may hold many megabytes of base64.

    Args:
        accept: all `Accept` headers, joined by commas.
    Raises:
        InvalidRequest: a form that is not the contract's; names the field.
        LimitExceeded: more than `max_items` items.
        UnsupportedMedia: a content type that is none of the three forms.
    """
    media_type = check_head(headers)
    if media_type == JSON:
        _refuse_query(query)
        options, items = _parse_json(body, max_items)
    elif media_type == FORM:
        _refuse_query(query)
        options, items = _parse_form(headers["content-type"], bytes(body), max_items)
    else:
        options, items = _parse_raw(media_type, query, bytes(body))
    return Job(items, options, *_answer_form(accept, options.encoding_format))


def _parse_json(body: bytes | bytearray, max_items: int) -> tuple[EncodeOptions, list[Item]]:
    # Parsing and validating hold the interpreter for as long as they take, which grows with the number of values
    # rather than of bytes; so does the list of all that is wrong with a document.
    marks = sum(body.count(mark) for mark in (b",", b"{", b"["))
    if marks > MAX_JSON_MARKS:
        raise LimitExceeded(f"request body with {marks} commas and brackets, limit {MAX_JSON_MARKS}")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"request body is not JSON (line {error.lineno}, column {error.colno})") from error
    if not isinstance(document, dict):
        raise InvalidRequest("request body must be a JSON object")
    given = document.get("input")
    if isinstance(given, list) and len(given) > max_items:
        raise LimitExceeded(f"input: {len(given)} items, limit {max_items}")
    request = validate(EncodeRequest, document)
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("request body must have exactly one of input and messages")
    parts = request.input if request.input is not None else _media_parts(request.messages or [])
    if not parts:
        raise InvalidRequest("messages: no image_url or video_url part in any of them")
    if len(parts) > max_items:
        raise LimitExceeded(f"messages: {len(parts)} media parts, limit {max_items}")
    return request, [_item(part, request) for part in parts]


def _media_parts(messages: list[ChatMessage]) -> list[ImagePart | VideoPart]:
    return [
        part
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ImagePart | VideoPart)
    ]


def _item(part: ImagePart | VideoPart, request: EncodeOptions) -> Item:
    if isinstance(part, ImagePart):
        return Item("image", part.image_url.url, _media_options(request, part), part.uuid)
    return Item("video", part.video_url.url, _media_options(request, part), part.uuid)


def _media_options(request: EncodeOptions, part: ImagePart | VideoPart | None = None) -> MediaOptions:
    def choose(name: str) -> Any:
        own = getattr(part, name, None)
        return getattr(request, name) if own is None else own

    return MediaOptions(
        fps=choose("fps"),
        max_frames=choose("max_frames"),
        allow_partial=bool(choose("allow_partial")),
        apply_exif_orientation=bool(choose("apply_exif_orientation")),
    )


def _parse_raw(media_type: str, query: list[tuple[str, str]], body: bytes) -> tuple[EncodeOptions, list[Item]]:
    fields: dict[str, str] = {}
    for name, value in query:
        if name in fields:
            raise InvalidRequest(f"query: {name} is given twice")
        fields[name] = value
    options = validate(RawOptions, fields, strings=True)
    return options, [Item(_kind(media_type), body, _media_options(options), options.uuid)]


def _parse_form(content_type: str, body: bytes, max_items: int) -> tuple[EncodeOptions, list[Item]]:
    options = EncodeOptions()
    found: list[tuple[Kind | None, bytes | str]] = []
    seen_options = False
    for part in split_form(content_type, body, max_parts=max_items + 1):
        if part.name == "request":
            if seen_options:
                raise InvalidRequest("form part request is given twice")
            try:
                document = orjson.loads(part.data)
            except orjson.JSONDecodeError as error:
                raise InvalidRequest(
                    f"form part request is not JSON (line {error.lineno}, column {error.colno})"
                ) from error
            options, seen_options = validate(EncodeOptions, document, "request: "), True
        elif part.is_file:
            found.append((_kind(part.media_type), part.data))
        elif part.name in ("image_url", "video_url"):
            kind: Kind = "image" if part.name == "image_url" else "video"
            found.append((kind, part.data.decode("utf-8", errors="replace")))
        else:
            raise InvalidRequest(
                f"form field {part.name[:80]!r} is unknown; allowed: file parts, request, image_url, video_url"
            )
    if not found:
        raise InvalidRequest("form has no file part; every file part is one item")
    if len(found) > max_items:
        raise LimitExceeded(f"form: more than {max_items} items")
    return options, [Item(kind, source, _media_options(options)) for kind, source in found]


def _kind(media_type: str) -> Kind | None:
    major = media_type.partition("/")[0].strip().lower()
    return "image" if major == "image" else "video" if major == "video" else None


def _answer_form(accept: str, asked: EncodingFormat | None) -> tuple[EncodingFormat, bool]:
    """(encoding_format, whether it is streamed) from the `Accept` header and the request's own field."""
    types = {entry.partition(";")[0].strip().lower() for entry in accept.split(",") if not _REFUSED.search(entry)}
    stream = NDJSON in types
    if SAFETENSORS in types and not stream:
        if asked not in (None, "safetensors"):
            raise InvalidRequest(f"header Accept asks for {SAFETENSORS}, encoding_format for {asked!r}")
        return "safetensors", False
    if stream and asked in ("safetensors", "float"):  # lines carry base64
        raise InvalidRequest(f"header Accept asks for {NDJSON}, encoding_format for {asked!r}")
    return asked or "base64", stream


def _refuse_query(query: list[tuple[str, str]]) -> None:
    if query:
        raise InvalidRequest(f"query: {query[0][0][:80]!r} is unknown; options of this form stand in its body")


def validate(model: type[Options], document: Any, where: str = "", *, strings: bool = False) -> Options:
    """Validate against a wire model.

    Raises:
        InvalidRequest: names the first field that is wrong and says what is allowed.
    """
    try:
        return model.model_validate_strings(document) if strings else model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequest(where + _explain(first)) from error


def _explain(error: Any) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{_name(part)}" for part in _field_path(error["loc"]))
    path = f"{path.removeprefix('.')}: " if path else ""
    match error["type"]:
        case "extra_forbidden":
            return f"{path}unknown field"
        case "missing":
            return f"{path}required"
        case "union_tag_not_found" | "union_tag_invalid" | "model_attributes_type":
            return f"{path}must be an object with a type, {' or '.join(MEDIA_PARTS)}"
        case "model_type":
            return f"{path}must be an object"
        case _:
            return f"{path}{error['msg']}"


def _name(field: str) -> str:
    """A field's name as an error shows it: what a client made up may be long, empty or unprintable."""
    shown = field[:80]
    return shown if shown.isprintable() and shown else repr(shown)


def _field_path(loc: tuple[int | str, ...]) -> list[int | str]:
    """Pydantic's location without the union tags it puts after a list index."""
    tags = (*MEDIA_PARTS, "text")
    path: list[int | str] = []
    for i, part in enumerate(loc):
        if i > 0 and ((part in tags and isinstance(loc[i - 1], int)) or (part == "parts" and loc[i - 1] == "content")):
            continue
        path.append(part)
    return path
