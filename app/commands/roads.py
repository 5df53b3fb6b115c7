"""The two roads from a file's bytes to its embedding: the pipeline in this process, or a service's HTTP interface."""

import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import httpx
import orjson
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from app.answer import Stamp, answer
from app.decode import Kind, MediaOptions
from app.intake import Item, Job
from app.pipeline import EncodedItem
from app.schemas import (
    SAFETENSORS,
    Embedding,
    EncodeAnswer,
    EncodeOptions,
    FailedItem,
    ModelList,
    Problem,
    Timing,
    Usage,
)
from app.service import Service
from app.settings import Settings
from encoder import SetupError

NO_DEADLINE_S = 7 * 24 * 3600.0
"""Nobody waits for a command with a deadline; a film's own decoding deadline still holds."""


class Unreachable(SetupError):
    """No service answers at `--url`, or what answers is not one."""


@dataclass(frozen=True, eq=False)
class Reply:
    """One file's part of the answer.

    Attributes:
        tensor: (m, E) in the wanted dtype; None where the file failed.
        model, usage, timing: of the request this file was; None where it never became one.
    """

    entry: Embedding | FailedItem
    tensor: Tensor | None = None
    model: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None

    @classmethod
    def failed(cls, index: int, code: str, detail: str) -> "Reply":
        problem = Problem(
            type="about:blank", title="The file failed", status=400, detail=detail, code=code, index=index
        )
        return cls(FailedItem(index=index, type=None, error=problem))


@dataclass(frozen=True)
class Road:
    """What is asked for each file, several at a time.

    Attributes:
        title: the model at its end.
        encode: (index, bytes of the file) -> reply. A file that fails is a reply too.
    """

    title: str
    encode: Callable[[int, bytes], Awaitable[Reply]]


@asynccontextmanager
async def in_process(settings: Settings, kind: Kind | None, options: EncodeOptions) -> AsyncIterator[Road]:
    """The service's own pipeline, without its HTTP part.

    Raises:
        SetupError: a configuration that cannot work.
    """
    service = Service(settings)
    media_options = MediaOptions(
        fps=options.fps,
        max_frames=options.max_frames,
        allow_partial=bool(options.allow_partial),
        apply_exif_orientation=bool(options.apply_exif_orientation),
    )

    async def encode(index: int, data: bytes) -> Reply:
        stamp = Stamp("in-process", service.model_name, time.monotonic(), int(time.time()))
        job = Job([Item(kind, data, media_options)], options, "safetensors", stream=False)
        (result,) = [replace(found, index=index) async for found in service.pipeline.results(job, NO_DEADLINE_S)]
        document = answer([result], stamp, options.dtype)
        tensor = result.tensor if isinstance(result, EncodedItem) else None
        return Reply(document.data[0], tensor, document.model, document.usage, document.timing_ms)

    try:
        await service.start()
        yield Road(_title(service.config.source, service.config.is_demo), encode)
    finally:
        await service.stop()


@asynccontextmanager
async def over_http(url: str, kind: Kind | None, options: EncodeOptions, key: str | None = None) -> AsyncIterator[Road]:
    """A running service; each file is one request whose body is the file.

    Args:
        key: the API key, where the service wants one.
    Raises (also while files are encoded):
        Unreachable: no connection, or an answer that is not this service's.
    """
    base = url.rstrip("/")
    query = options.model_dump(exclude_defaults=True)
    # The top-level type says which of the two it is; with the last one the bytes decide.
    headers = {"Content-Type": f"{kind}/*" if kind else "application/octet-stream", "Accept": SAFETENSORS}

    async def encode(index: int, data: bytes) -> Reply:
        with _answers_of(base):
            response = await client.post(f"{base}/v1/encode", params=query, content=data, headers=headers)
            if response.is_success:
                return _parse_answer(response.content, index)
            problem = Problem.model_validate_json(response.content)
        own = {"index": index, "detail": problem.detail.replace("input[0]", f"input[{index}]", 1)}
        return Reply(FailedItem(index=index, type=None, error=problem.model_copy(update=own)))

    # A large film may take its minute to decode; the service's own deadline is the one that counts.
    authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=httpx.Timeout(300, connect=10), headers=authorization) as client:
        with _answers_of(base):
            answer = await client.get(f"{base}/v1/models")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise Unreachable(f"{base} wants {'another' if key else 'an'} API key: --key-file")
        with _answers_of(base):
            models = ModelList.model_validate_json(answer.content)
            served = models.data[0]
        yield Road(_title(f"{served.id} at {base}", served.demo_weights), encode)


@contextmanager
def _answers_of(url: str) -> Iterator[None]:
    """The one place where what httpx and the parsers raise becomes ours."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"{url} does not answer: {str(error) or type(error).__name__}") from error
    except (ValueError, LookupError, SafetensorError, struct.error) as error:
        raise Unreachable(f"{url} answers, but not as moonvit-serve does") from error


def _title(model: str, is_demo: bool) -> str:
    return f"{model} (DEMO weights: the embeddings mean nothing)" if is_demo else model


def _parse_answer(body: bytes, index: int) -> Reply:
    """A safetensors answer of one item; its JSON part lies in the header, whose length comes first."""
    (length,) = struct.unpack("<Q", body[:8])
    header = orjson.loads(body[8 : 8 + length])
    document = EncodeAnswer.model_validate_json(header["__metadata__"]["response"])
    entry = document.data[0].model_copy(update={"index": index})
    return Reply(entry, load(body)["embeddings"], document.model, document.usage, document.timing_ms)
