"""What a worker says of an item besides its pixels. The service believes none of it before it is checked."""

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from app.decode.media import DecodeLimits, Kind, Prepared
from encoder import Segment

_MAX_SIDE_PX: Final = 1 << 24
_MAX_SECONDS: Final = 1e9
_MAX_TIMESTAMP_CHARACTERS: Final = 32


class BadAnswer(Exception):
    """A worker said what no worker of ours says: something else runs in it."""


@dataclass(frozen=True)
class Facts:
    """All of a prepared item but its pixels; see `Prepared`.

    Attributes:
        grids: one for a picture, one for each chunk of a film.
        deferred: `encoder.picture.Picture.facts` of pixels that are not patches yet; None if they are.
    """

    grids: list[tuple[int, int, int]]
    original_size: tuple[int, int]
    resized_size: tuple[int, int]
    frame_indices: list[int] | None
    start_s: list[float] | None
    timestamps: list[str] | None
    decode_s: float
    preprocess_s: float
    deferred: dict[str, Any] | None = None


def facts_of(prepared: Prepared) -> Facts:
    return Facts(
        grids=[(grid.t, grid.h, grid.w) for grid in (segment.grid_thw for segment in prepared.segments)],
        original_size=prepared.original_size,
        resized_size=prepared.resized_size,
        frame_indices=prepared.frame_indices,
        start_s=prepared.start_s,
        timestamps=prepared.timestamps,
        decode_s=prepared.decode_s,
        preprocess_s=prepared.preprocess_s,
        deferred=picture.facts() if (picture := prepared.segments[0].picture) is not None else None,
    )


def prepared_of(kind: Kind, facts: Facts, segments: list[Segment]) -> Prepared:
    return Prepared(
        kind=kind,
        segments=segments,
        original_size=facts.original_size,
        resized_size=facts.resized_size,
        frame_indices=facts.frame_indices,
        start_s=facts.start_s,
        timestamps=facts.timestamps,
        decode_s=facts.decode_s,
        preprocess_s=facts.preprocess_s,
    )


def dump_facts(facts: Facts) -> bytes:
    return json.dumps(asdict(facts)).encode()


def load_facts(text: bytes, pixel_bytes: int, patch_size: int, limits: DecodeLimits) -> Facts:
    """Facts as a worker sent them, if they are facts and describe so many bytes of pixels.

    Raises:
        BadAnswer: they are not, or do not.
    """
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadAnswer("facts that are no JSON") from error
    if not isinstance(said, dict) or said.keys() != {field.name for field in fields(Facts)}:
        raise BadAnswer("facts with other names")
    grids = [_integers(grid, 3, 1, limits.max_patches) for grid in _list(said["grids"], limits.max_patches)]
    num_patches = sum(t * h * w for t, h, w in grids)
    is_deferred = said["deferred"] is not None
    if num_patches > limits.max_patches or (not is_deferred and num_patches * 3 * patch_size**2 != pixel_bytes):
        raise BadAnswer(f"{pixel_bytes} bytes of pixels for {num_patches} patches")
    is_film = said["frame_indices"] is not None
    if is_deferred and (is_film or not isinstance(said["deferred"], dict)):
        raise BadAnswer("deferred pixels of another form")
    if not is_film and (len(grids) != 1 or said["start_s"] is not None or said["timestamps"] is not None):
        raise BadAnswer("a picture of several chunks")
    return Facts(
        grids=[(t, h, w) for t, h, w in grids],
        original_size=_size(said["original_size"]),
        resized_size=_size(said["resized_size"]),
        frame_indices=_frame_indices(said["frame_indices"], grids, limits) if is_film else None,
        start_s=[_seconds(value) for value in _list(said["start_s"], len(grids), exactly=True)] if is_film else None,
        timestamps=[_stamp(v) for v in _list(said["timestamps"], len(grids), exactly=True)] if is_film else None,
        decode_s=_seconds(said["decode_s"]),
        preprocess_s=_seconds(said["preprocess_s"]),
        deferred=said["deferred"],
    )


def _frame_indices(value: Any, grids: list[list[int]], limits: DecodeLimits) -> list[int]:
    return _integers(value, sum(t for t, _, _ in grids), 0, limits.max_walked_frames)


def _list(value: Any, length: int, *, exactly: bool = False) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= length or (exactly and len(value) != length):
        raise BadAnswer("facts with a list of another length")
    return value


def _integers(value: Any, length: int, least: int, most: int) -> list[int]:
    values = _list(value, length, exactly=True)
    if not all(type(each) is int and least <= each <= most for each in values):
        raise BadAnswer("facts with numbers out of bounds")
    return values


def _size(value: Any) -> tuple[int, int]:
    width, height = _integers(value, 2, 1, _MAX_SIDE_PX)
    return width, height


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not -_MAX_SECONDS <= value <= _MAX_SECONDS:
        raise BadAnswer("facts with a time out of bounds")
    return float(value)


def _stamp(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TIMESTAMP_CHARACTERS or not value.isascii():
        raise BadAnswer("facts with a time stamp that is none")
    if not value.isprintable():
        raise BadAnswer("facts with a time stamp that is none")
    return value
