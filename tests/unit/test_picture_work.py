"""Small files that ask for the same pixels again and again are refused before they are decoded."""

import io
import struct
import time
import zlib
from typing import Any

import pytest
from PIL import Image

from app.decode.media import DecodeLimits
from app.decode.picture import open_picture
from app.errors import LimitExceeded
from encoder import EncoderConfig, load_config


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    return load_config("demo:k3-tiny")


def saved(picture_format: str, size: tuple[int, int] = (40, 30), mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, picture_format, **options)
    return buffer.getvalue()


def opened(data: bytes, picture_format: str, config: EncoderConfig) -> Image.Image:
    return open_picture(data, picture_format, DecodeLimits(), config)


def with_scans(data: bytes, num_scans: int) -> bytes:
    """A progressive JPEG of ten scans whose last one is repeated."""
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (num_scans - 10) + b"\xff\xd9"


def png_chunk(name: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")


def test_scans_of_a_jpeg_are_limited(config: EncoderConfig) -> None:
    data = saved("JPEG", progressive=True)
    assert opened(with_scans(data, 100), "JPEG", config).tobytes() == opened(data, "JPEG", config).tobytes()
    with pytest.raises(LimitExceeded, match=r"^JPEG of 101 scans, limit 100 at 1200 pixels$"):
        opened(with_scans(data, 101), "JPEG", config)


def test_a_large_jpeg_may_have_fewer_scans(config: EncoderConfig) -> None:
    """Repeated 1500 times, they took minutes in a thread that nothing can stop."""
    data = saved("JPEG", (7900, 7900), progressive=True)
    for num_scans in (33, 1500):
        started = time.perf_counter()
        with pytest.raises(LimitExceeded, match=rf"^JPEG of {num_scans} scans, limit 32 at 62410000 pixels$"):
            opened(with_scans(data, num_scans), "JPEG", config)
        assert time.perf_counter() - started < 1


def test_scans_behind_the_end_or_within_a_segment_do_not_count(config: EncoderConfig) -> None:
    data = saved("JPEG")
    scan = data[data.rindex(b"\xff\xda") : -2]
    comment = b"\xff\xfe" + (2 + 200 * 4).to_bytes(2, "big") + b"\xff\xda\x00\x02" * 200
    assert opened(data[:2] + comment + data[2:] + scan * 200, "JPEG", config).size == (40, 30)


def test_a_jpeg_of_endless_segments_is_refused(config: EncoderConfig) -> None:
    data = saved("JPEG")
    with pytest.raises(LimitExceeded, match=r"^JPEG of more than 10000 segments$"):
        opened(data[:2] + b"\xff\xfe\x00\x02" * 20_000 + data[2:], "JPEG", config)


@pytest.mark.parametrize("name", [b"iCCP", b"zTXt"])
def test_chunks_that_unpack_are_limited(name: bytes, config: EncoderConfig) -> None:
    """Each may become 1 MB; where it ends in an error, Pillow forgets that it was large."""
    data = saved("PNG")
    body = b"a\x00\x00" + zlib.compress(bytes(1 << 20), 9)[:-4] + b"xxxx"
    with pytest.raises(LimitExceeded, match=r"^PNG of more than 1000 chunks besides its pixels$"):
        opened(data[:33] + png_chunk(name, body) * 1000 + data[33:], "PNG", config)
    assert opened(data[:33] + png_chunk(b"teXt", b"a") * 900 + data[33:], "PNG", config).size == (40, 30)


def test_a_png_may_have_many_pieces_of_pixels_but_not_endless(config: EncoderConfig) -> None:
    data = saved("PNG")
    assert opened(data[:33] + png_chunk(b"IDAT", b"") * 5000 + data[33:], "PNG", config).size == (40, 30)
    with pytest.raises(LimitExceeded, match=r"^PNG of more than 200000 chunks$"):
        opened(data[:33] + png_chunk(b"IDAT", b"") * 200_001 + data[33:], "PNG", config)


def test_a_gif_of_endless_blocks_is_refused(config: EncoderConfig) -> None:
    data = saved("GIF", mode="P")
    first_frame = data.index(b",", 13 + 3 * (2 << (data[10] & 7)))
    assert opened(data, "GIF", config).size == (40, 30)
    for blocks in (b"!\xfe" + b"\x01a" * 300_000 + b"\x00", b"!\xf1\x01a\x00" * 300_000):
        with pytest.raises(LimitExceeded, match=r"^GIF picture in more than 200000 pieces$"):
            opened(data[:first_frame] + blocks + data[first_frame:], "GIF", config)


def run_length_coded(size: tuple[int, int], runs: bytes) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, *size, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + bytes(1024) + runs


def test_run_length_coded_bmp(config: EncoderConfig) -> None:
    """Pillow decodes them in Python."""
    assert opened(run_length_coded((40, 30), b"\x28\x05\x00\x00" * 30), "BMP", config).tobytes() == b"\x05" * 1200
    with pytest.raises(LimitExceeded, match=r"^run-length coded BMP of 16008000 pixels, limit 16000000$"):
        opened(run_length_coded((4000, 4002), b"\x01\x05\x00\x00" * 4002), "BMP", config)
    assert opened(saved("BMP", (4000, 4002), mode="L"), "BMP", config).size == (4000, 4002)
    with pytest.raises(LimitExceeded, match=r"^BMP picture in more than 4000000 pieces$"):
        opened(run_length_coded((4000, 4000), b"\x00\x02\x00\x00" * 1_500_000), "BMP", config)
