"""What a film is before it is decoded: the header, then a walk over the packets, checked against the limits.

Only the walk tells how many frames there really are, and which films decord would get wrong without saying so.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from app.decode.film_facts import FilmHeader
from app.decode.film_open import codec_of, decode, opened, packets
from app.decode.film_parameters import frame_parameters
from app.decode.media import DecodeLimits
from app.errors import CorruptMedia, LimitExceeded, UnsupportedMedia

_DECORD_CONTAINERS: Final = frozenset({"mov", "matroska", "flv"})  # it fails on or misreads the others
_DECORD_CODECS: Final = frozenset({"h264", "hevc", "vp8", "vp9"})  # of these a change of size is seen in the packets
_DECORD_MIN_WIDTH_PX: Final = 160  # some widths up to 144 come out as garbage
_PROGRESSIVE: Final = frozenset({0, 1})  # AV_FIELD_UNKNOWN, AV_FIELD_PROGRESSIVE
_VP8_SHOWN: Final = 0x10  # bit of a packet's first byte: it becomes a frame
_PROBE_BYTES: Final = 1 << 20  # FFmpeg looks no further when it guesses a format


@dataclass
class _Walk:
    """What the packets show."""

    stamps: list[int | None] = field(default_factory=list)  # of the packets that become a frame, in file order
    num_read: int = 0
    last_dts: int | None = None
    first_frame: Any = None
    not_for_decord: str | None = None


def read_header(path: str, limits: DecodeLimits) -> FilmHeader:
    """Read the header of the file at `path`, whose bytes have passed `sniff`.

    Raises:
        UnsupportedMedia: no video stream, a codec outside the list, a still picture, a turn by an odd angle.
        LimitExceeded: pixels, duration or frames.
        CorruptMedia: nothing in it decodes.
    """
    with opened(path, limits.max_pixels) as (container, stream):
        _check_size(stream.codec_context.width, stream.codec_context.height, limits)
        _check_length(container, stream, limits)
        walk = _walk(container, stream, limits)
        first = walk.first_frame
        if first is None:
            raise CorruptMedia("film of which no frame decodes")
        _check_size(first.width, first.height, limits)
        if container.format.name == "gif" and len(walk.stamps) == 1:
            raise UnsupportedMedia("a still picture (GIF) sent as a film")
        rotation = _rotation(first)
        interlaced = stream.codec_context.field_order not in _PROGRESSIVE or first.interlaced_frame
        num_missing = max(_num_promised(container, stream, walk) - walk.num_read, 0)
        num_frames = len(walk.stamps) + num_missing
        index_of_stamp = _index_of_stamp(walk, cut=num_missing > 0)
        fps = _frames_per_second(container, stream, num_frames)
        in_fields = interlaced and container.format.name == "mpegts"
        not_for_decord = (
            walk.not_for_decord
            or _unfit_stream(container, stream)
            or ("markup" if _may_be_markup(path) else None)
            or ("frames are missing" if num_missing else None)
            or ("interlaced" if interlaced else None)
            or ("equal or missing stamps" if index_of_stamp is None else None)
        )
    if in_fields:  # a packet may be one field of a frame there: only decoding tells how many frames they make
        num_frames, index_of_stamp = _count_frames(path, limits), None
    header = FilmHeader(first.width, first.height, rotation, num_frames, fps, index_of_stamp, not_for_decord)
    if not_for_decord is None and header.turned_size[0] < _DECORD_MIN_WIDTH_PX:
        return replace(header, not_for_decord="narrow")
    return header


def _walk(container: Any, stream: Any, limits: DecodeLimits) -> _Walk:
    """Read every packet, decoding until the first frame comes out."""
    walk = _Walk()
    codec, extradata = codec_of(stream), stream.codec_context.extradata
    begun = False
    key_stamp: int | None = None
    parameters: bytes = b""
    for packet in packets(container, stream):
        walk.num_read += 1
        if walk.num_read > limits.max_walked_frames:
            raise LimitExceeded(f"film of more than {limits.max_walked_frames} frames")
        walk.last_dts = packet.dts if packet.dts is not None else walk.last_dts
        begun = begun or packet.is_keyframe
        if not packet.size or not begun:
            continue  # a frame that repeats the one before, or one that leans on what was cut off in front
        if walk.first_frame is None:
            walk.first_frame = next(iter(decode(stream, packet) or []), None)
        if packet.is_discard:
            walk.not_for_decord = "edit list"
            continue
        if codec == "vp8" and not memoryview(packet)[0] & _VP8_SHOWN:
            walk.not_for_decord = "hidden frames"
            continue
        walk.stamps.append(packet.pts)
        if packet.is_corrupt:
            walk.not_for_decord = "damaged packets"
        if packet.is_keyframe:
            key_stamp = packet.pts
            found = frame_parameters(codec, extradata, bytes(packet))
            if packet.has_sidedata("new_extradata") or (parameters and found and found != parameters):
                walk.not_for_decord = "frame parameters change"
            parameters = found or parameters
        elif key_stamp is not None and packet.pts is not None and packet.pts < key_stamp:
            walk.not_for_decord = "open GOP"
    if walk.first_frame is None:
        walk.first_frame = next(iter(decode(stream, None) or []), None)
    return walk


def _rotation(frame: Any) -> int:
    rotation: int = round(frame.rotation) % 360
    if rotation % 90:
        raise UnsupportedMedia(f"film turned by {rotation} degrees, allowed: multiples of 90")
    return rotation


def _num_promised(container: Any, stream: Any, walk: _Walk) -> int:
    """Packets there would be if the file were whole, where the container says so."""
    if container.format.name.startswith("mov"):
        return len(stream.index_entries)  # edit lists are already worked in, unlike in `stream.frames`
    return int(stream.frames) if container.format.name == "avi" else walk.num_read


def _index_of_stamp(walk: _Walk, *, cut: bool) -> dict[int, int] | None:
    stamps = [stamp for stamp in walk.stamps if stamp is not None]
    if len(stamps) < len(walk.stamps) or len(set(stamps)) < len(stamps):
        return None
    last_dts = walk.last_dts
    # Where the file was cut, a frame stamped after the last packet's decoding time may have lost one before it.
    known = [stamp for stamp in sorted(stamps) if not cut or last_dts is None or stamp <= last_dts]
    return {stamp: index for index, stamp in enumerate(known)}


def _unfit_stream(container: Any, stream: Any) -> str | None:
    if container.format.name.split(",")[0] not in _DECORD_CONTAINERS:
        return "container"
    if codec_of(stream) not in _DECORD_CODECS:
        return "codec"
    if len(container.streams.video) > 1:
        return "several video streams"
    return None


def _may_be_markup(path: str) -> bool:
    """Whether FFmpeg could also take the file for a manifest in XML, which it recognises anywhere before a zero byte.

    PyAV is told which formats to open, decord cannot be.
    """
    with Path(path).open("rb") as file:
        return b"<" in file.read(_PROBE_BYTES).partition(b"\0")[0]


def _frames_per_second(container: Any, stream: Any, num_frames: int) -> float:
    rate = stream.average_rate or stream.guessed_rate
    if rate:
        return float(rate)
    duration = _duration_s(container, stream)
    return num_frames / duration if duration else 1.0


def _duration_s(container: Any, stream: Any) -> float:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return (container.duration or 0) / 1_000_000


def _check_size(width: int, height: int, limits: DecodeLimits) -> None:
    if width * height > limits.max_pixels:
        raise LimitExceeded(f"film of {width}x{height} pixels, limit {limits.max_pixels}")


def _check_length(container: Any, stream: Any, limits: DecodeLimits) -> None:
    if stream.frames > limits.max_walked_frames:
        raise LimitExceeded(f"film of {stream.frames} frames, limit {limits.max_walked_frames}")
    if _duration_s(container, stream) > limits.max_film_duration_s:
        duration, limit = _duration_s(container, stream), limits.max_film_duration_s
        raise LimitExceeded(f"film of {duration:.0f} s, limit {limit:.0f} s")


def _count_frames(path: str, limits: DecodeLimits) -> int:
    with opened(path, limits.max_pixels) as (container, stream):
        decoded = (decode(stream, packet) for packet in packets(container, stream) if packet.size)
        return sum(len(frames or []) for frames in decoded) + len(decode(stream, None) or [])
