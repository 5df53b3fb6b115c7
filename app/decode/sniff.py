"""What bytes are, by their own first bytes: nothing that a client declares is believed, and no text format gets in.

FFmpeg opens playlists, and lists of files to concatenate, from memory too, and then reads what they name; decord cannot
be told which formats to open. So a film passes here first.
"""

from dataclasses import dataclass
from typing import Final

from app.decode.media import Kind
from app.errors import UnsupportedMedia

PICTURES: Final = "JPEG, PNG, WebP, GIF, BMP or AVIF"
FILMS: Final = "MP4, MOV, Matroska, WebM, AVI, MPEG-TS, FLV, Ogg or animated GIF"

TS_PACKET_BYTES: Final = 188
_MAX_PNG_CHUNKS: Final = 64
_AVIF_BRANDS: Final = frozenset({b"avif", b"avis"})
_OTHER_STILL_BRANDS: Final = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})


@dataclass(frozen=True)
class Sniffed:
    """A format that we read. `film` is true where the bytes can only be a film, `animated` where they may be one."""

    format: str
    film: bool = False
    animated: bool = False


def identify(data: bytes, declared: Kind | None) -> Kind:
    """The kind that `data` will be decoded as; looks at its first bytes only.

    Raises:
        UnsupportedMedia: no format that we read, or the other kind than declared.
    """
    return settle_kind(sniff(data), declared)


def sniff(data: bytes) -> Sniffed:
    """Name the format of `data`.

    Raises:
        UnsupportedMedia: no format that we read.
    """
    found = _picture(data) or _film(data)
    if found is None:
        raise UnsupportedMedia(
            f"{len(data)} bytes that are no picture or film we read; pictures: {PICTURES}; films: {FILMS}"
        )
    return found


def settle_kind(found: Sniffed, declared: Kind | None) -> Kind:
    """Whether the bytes are taken as a picture or a film; undeclared, an animation is a picture.

    Raises:
        UnsupportedMedia: a film declared as a picture, or a still picture declared as a film.
    """
    if declared is None:
        return "video" if found.film else "image"
    if declared == "image" and found.film:
        raise UnsupportedMedia(f"a film ({found.format}) sent as a picture; pictures: {PICTURES}")
    if declared == "video" and not found.film:
        if not found.animated:
            raise UnsupportedMedia(f"a still picture ({found.format}) sent as a film; films: {FILMS}")
        if found.format != "GIF":
            raise UnsupportedMedia(
                f"an animated {found.format} sent as a film; of the animations only GIF is read as one"
            )
    return declared


def _picture(data: bytes) -> Sniffed | None:
    if data.startswith(b"\xff\xd8\xff"):
        return Sniffed("JPEG")
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return Sniffed("PNG", animated=_is_animated_png(data))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return Sniffed("WebP", animated=data[12:16] == b"VP8X" and bool(data[20:21]) and bool(data[20] & 0x02))
    if data[:4] == b"GIF8":
        return Sniffed("GIF", animated=True)  # whether it has a second frame is known once it is opened as a film
    if data[:2] == b"BM":
        return Sniffed("BMP")
    if _brands(data) & _AVIF_BRANDS:
        return Sniffed("AVIF", animated=data[8:12] == b"avis")
    return None


def _film(data: bytes) -> Sniffed | None:
    if brands := _brands(data):
        return None if data[8:12] in _OTHER_STILL_BRANDS else Sniffed("MOV" if b"qt  " in brands else "MP4", film=True)
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return Sniffed("Matroska", film=True)
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return Sniffed("AVI", film=True)
    if data.startswith(b"FLV\x01"):
        return Sniffed("FLV", film=True)
    if data.startswith(b"OggS"):
        return Sniffed("Ogg", film=True)
    starts = data[: 5 * TS_PACKET_BYTES : TS_PACKET_BYTES]
    if len(starts) > 1 and starts == b"G" * len(starts):
        return Sniffed("MPEG-TS", film=True)
    return None


def _brands(data: bytes) -> frozenset[bytes]:
    """Major and compatible brands of an ISO base media file; empty if it is none."""
    if data[4:8] != b"ftyp":
        return frozenset()
    end = min(int.from_bytes(data[:4], "big"), 4096, len(data))
    return frozenset({data[8:12]} | {data[at : at + 4] for at in range(16, end - 3, 4)})


def _is_animated_png(data: bytes) -> bool:
    """Whether an `acTL` chunk stands before the first `IDAT`, as the format demands."""
    at = 8
    for _ in range(_MAX_PNG_CHUNKS):
        name = data[at + 4 : at + 8]
        if name in (b"acTL", b"IDAT", b""):
            return name == b"acTL"
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return False
