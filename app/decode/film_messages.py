"""What travels between the service and a film worker, besides the film and its pixels, which go by memory file.

Towards the service only JSON: nothing that a worker says is executed.
"""

import json
from dataclasses import asdict
from typing import Any, Final

from app.decode.film_facts import FilmFacts
from app.decode.media import MediaOptions
from app.errors import CorruptMedia, LimitExceeded, UnsupportedMedia
from encoder import InputError, InvalidSegment

READY: Final = b"ready"
MESSAGE_BYTES: Final = 64 << 10  # longest message; a Unix socket takes it whole

_ERRORS: Final[dict[str, type[InputError]]] = {
    leaf.__name__: leaf for leaf in (CorruptMedia, InvalidSegment, LimitExceeded, UnsupportedMedia)
}


def dump_job(options: MediaOptions) -> bytes:
    return json.dumps(asdict(options)).encode()


def load_job(message: bytes) -> MediaOptions:
    return MediaOptions(**json.loads(message))


def dump_facts(facts: FilmFacts) -> bytes:
    return json.dumps(asdict(facts)).encode()


def load_facts(text: bytes) -> FilmFacts:
    facts: dict[str, Any] = json.loads(text)
    facts |= {name: tuple(facts[name]) for name in ("original_size", "resized_size")}
    return FilmFacts(**facts | {"grids": [tuple(grid) for grid in facts["grids"]]})


def dump_done(pixel_bytes: int) -> bytes:
    """The worker's answer to a good film: where in the result's memory file the pixels end and the facts begin."""
    return json.dumps({"pixel_bytes": pixel_bytes}).encode()


def dump_refusal(error: InputError) -> bytes:
    return json.dumps({"error": type(error).__name__, "message": str(error)}).encode()


def dump_bug(traceback: str) -> bytes:
    return json.dumps({"bug": traceback[-MESSAGE_BYTES // 8 :]}).encode()


def load_answer(message: bytes) -> int:
    """Bytes of pixels in the result's memory file.

    Raises:
        InputError: the leaf that the worker refused the film with.
        RuntimeError: a bug in the worker, with its traceback.
    """
    answer: dict[str, Any] = json.loads(message)
    if "bug" in answer:
        raise RuntimeError(f"film worker failed\n{answer['bug']}")
    if "error" in answer:
        raise _ERRORS[answer["error"]](answer["message"])
    return int(answer["pixel_bytes"])
