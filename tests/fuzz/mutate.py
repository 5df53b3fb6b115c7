"""Broken media, made from sound ones: bits flipped, lengths overwritten, pieces cut, doubled, filled and joined."""

import functools
import io
import random
import struct
import zlib
from pathlib import Path

from PIL import Image

from tests.clips import make_film

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = (ROOT / "tests/golden/preprocess/images", ROOT / "samples")
MAX_SEED_BYTES = 60_000
HEAD_BYTES = 600  # where most of a format's structure is
ODD_INTEGERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)

FILMS = (
    ("mp4", "libx264", "yuv420p"),
    ("mov", "libx265", "yuv420p"),
    ("matroska", "libvpx-vp9", "yuv420p"),
    ("webm", "libvpx", "yuv420p"),
    ("avi", "mpeg4", "yuv420p"),
    ("avi", "mjpeg", "yuvj420p"),
    ("mpegts", "libx264", "yuv420p"),
    ("flv", "libx264", "yuv420p"),
    ("gif", "gif", "rgb8"),
)


@functools.cache
def pictures() -> tuple[bytes, ...]:
    """Small pictures: every sample of the tests that is small, and one of each format and mode Pillow writes."""
    found = [path.read_bytes() for folder in SAMPLES for path in sorted(folder.iterdir()) if path.suffix != ".mp4"]
    found = [data for data in found if len(data) <= MAX_SEED_BYTES]
    noise = Image.effect_noise((40, 30), 80)
    options: list[tuple[str, str, dict[str, object]]] = [
        ("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    ]
    options += [("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")]
    options += [("JPEG", "RGB", {"progressive": True}), ("JPEG", "RGB", {"subsampling": 0, "restart_marker_blocks": 2})]
    options += [("WEBP", "RGBA", {"lossless": True}), ("WEBP", "RGB", {}), ("AVIF", "RGB", {}), ("AVIF", "RGBA", {})]
    options += [("BMP", mode, {}) for mode in ("1", "L", "P", "RGB")]
    options += [("GIF", "P", {"save_all": True, "append_images": [noise.convert("P")]})]
    options += [("WEBP", "RGB", {"save_all": True, "append_images": [noise.convert("RGB")]})]
    options += [("PNG", "RGB", {"save_all": True, "append_images": [noise.convert("RGB")]})]
    for picture_format, mode, extra in options:
        buffer = io.BytesIO()
        noise.convert(mode if mode != "I;16" else "L").convert(mode).save(buffer, picture_format, **extra)
        found.append(buffer.getvalue())
    return tuple(found)


@functools.cache
def films() -> tuple[bytes, ...]:
    """Six frames in each container and codec that is read and can be written here."""
    return tuple(
        make_film(
            6,
            container=container,
            codec=codec,
            pix_fmt=pix_fmt,
            size=(192, 160),
            fps=6,
            codec_options={"x265-params": "log-level=none"} if codec == "libx265" else None,
        )
        for container, codec, pix_fmt in FILMS
    )


def mutate(data: bytes, others: tuple[bytes, ...], choice: random.Random) -> bytes:
    """A broken variant; checksums of PNG chunks are mostly put right again, or nothing behind them is ever reached."""
    broken = bytearray(data)
    for _ in range(choice.choice((1, 1, 1, 2, 3, 5, 8))):
        if len(broken) < 4:
            break
        at = choice.randrange(min(len(broken), HEAD_BYTES) if choice.random() < 0.7 else len(broken))
        length = min(len(broken) - at, 1 << choice.randrange(10))
        match choice.randrange(9):
            case 0:
                broken[at] ^= 1 << choice.randrange(8)
            case 1:
                broken[at] = choice.choice((0, 1, 0x7F, 0x80, 0xFF, choice.randrange(256)))
            case 2 | 3:
                form = choice.choice((">I", "<I", ">H", "<H", ">Q"))
                value = choice.choice(ODD_INTEGERS) & ((1 << 8 * struct.calcsize(form)) - 1)
                broken[at : at + struct.calcsize(form)] = struct.pack(form, value)
            case 4:
                del broken[at : at + length]
            case 5:
                broken[at:at] = broken[at : at + length] * choice.randint(1, 4)
            case 6:
                broken[at : at + length] = choice.randbytes(length)
            case 7:
                del broken[at + 1 :]
            case 8:
                other = choice.choice(others)
                start = choice.randrange(len(other))
                broken[at:] = other[start : start + len(broken) - at]
    if broken[:8] == b"\x89PNG\r\n\x1a\n" and choice.random() < 0.8:
        put_checksums_right(broken)
    return bytes(broken)


def put_checksums_right(png: bytearray) -> None:
    """Every chunk's CRC, as far as the chunks' lengths lead."""
    at = 8
    while at + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, at)
        end = at + 8 + length
        if end + 4 > len(png):
            return
        struct.pack_into(">I", png, end, zlib.crc32(png[at + 4 : end]))
        at = end + 4
