"""What travels between the service and a worker over their socket. Media and pixels go by memory file instead.

Towards the service only JSON: nothing that a worker says is executed, and every length is checked.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, Final

from app.decode.duty import MAX_FACTS_BYTES, Duty
from app.decode.facts import BadAnswer
from app.decode.media import DecodeLimits, MediaOptions
from app.errors import CorruptMedia, LimitExceeded, UnsupportedMedia
from encoder import EncoderConfig, InputError, InvalidSegment

MESSAGE_BYTES: Final = 64 << 10  # longest message; a Unix socket takes it whole
PID: Final = struct.Struct("=q")  # the template's word on a worker's process
STATUS: Final = struct.Struct("=i")  # and on its end: minus a signal's number, or an exit code

_MAX_TEXT_CHARACTERS: Final = 500
_ERRORS: Final[dict[str, type[InputError]]] = {
    leaf.__name__: leaf for leaf in (CorruptMedia, InvalidSegment, LimitExceeded, UnsupportedMedia)
}


@dataclass(frozen=True)
class Introduction:
    """What stays the same for all items of a worker; the only thing that is pickled, and only towards it."""

    duty: Duty
    limits: DecodeLimits
    config: EncoderConfig


@dataclass(frozen=True)
class Job:
    """One item: so many bytes in the worker's input file, and what they are.

    Attributes:
        defer: leave of a picture to the device what can be left to it.
    """

    num_bytes: int
    format: str
    options: MediaOptions
    defer: bool


@dataclass(frozen=True)
class Result:
    """Where in the result's memory file the pixels end and the facts behind them end."""

    pixel_bytes: int
    facts_bytes: int


def dump_job(job: Job) -> bytes:
    return json.dumps(asdict(job)).encode()


def load_job(message: bytes) -> Job:
    said: dict[str, Any] = json.loads(message)
    return Job(**said | {"options": MediaOptions(**said["options"])})


def dump_ready(sandbox: dict[str, str]) -> bytes:
    return json.dumps({"sandbox": sandbox}).encode()


def load_ready(message: bytes) -> dict[str, str]:
    """The layers of its sandbox; sent before the worker has seen a client's bytes. Raises `BadAnswer`."""
    try:
        return dict(json.loads(message)["sandbox"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadAnswer("a worker that does not say that it is ready") from error


def dump_result(result: Result) -> bytes:
    return json.dumps(asdict(result)).encode()


def dump_refusal(error: InputError) -> bytes:
    return json.dumps({"error": type(error).__name__, "text": str(error)[:_MAX_TEXT_CHARACTERS]}).encode()


def dump_bug(traceback: str) -> bytes:
    return json.dumps({"bug": traceback[-MESSAGE_BYTES // 8 :]}).encode()


def load_answer(message: bytes, duty: Duty) -> Result:
    """A worker's answer to a job.

    Raises:
        InputError: the leaf that the worker refused the item with.
        RuntimeError: a bug in the worker, with its traceback.
        BadAnswer: nothing that a worker of ours says.
    """
    try:
        said = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise BadAnswer("an answer that is no JSON") from error
    match said:
        case {"bug": str(traceback)}:
            raise RuntimeError(f"{duty.noun} worker failed\n{_printable(traceback, lines=True)}")
        case {"error": str(name), "text": str(text)} if name in _ERRORS and len(text) <= _MAX_TEXT_CHARACTERS:
            raise _ERRORS[name](_printable(text))
        case {"pixel_bytes": int(pixel_bytes), "facts_bytes": int(facts_bytes)}:
            is_within = pixel_bytes > 0 and 0 < facts_bytes <= MAX_FACTS_BYTES
            if is_within and pixel_bytes + facts_bytes <= duty.max_result_bytes:
                return Result(pixel_bytes, facts_bytes)
    raise BadAnswer("an answer of another form")


def _printable(text: str, *, lines: bool = False) -> str:
    """Without what a terminal or log would take as a command."""
    return "".join(each if each.isprintable() or (lines and each == "\n") else "?" for each in text)
