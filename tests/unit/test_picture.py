"""Pictures: the first frame in its own mode, whole or not at all. Row numbers (m01) are those of the media cases."""

import io
import random
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from app.decode.media import DecodeLimits, MediaOptions, Prepared
from app.decode.picture import open_picture, prepare_picture
from app.decode.sniff import sniff
from app.errors import CorruptMedia, LimitExceeded
from encoder import EncoderConfig, load_config, preprocess_image

LIMITS = DecodeLimits()
GOLDEN_PICTURES = Path(__file__).parents[1] / "golden/preprocess/images"
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF"]


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    return load_config("demo:k3-tiny")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(image: Image.Image, picture_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, picture_format, **options)
    return buffer.getvalue()


def prepare(data: bytes, config: EncoderConfig, *, limits: DecodeLimits = LIMITS, turn: bool = False) -> Prepared:
    return prepare_picture(data, sniff(data).format, MediaOptions(apply_exif_orientation=turn), limits, config)


def opened(data: bytes, config: EncoderConfig) -> Image.Image:
    return open_picture(data, sniff(data).format, LIMITS, config)


def png_of_zeros(width: int, height: int) -> bytes:
    """A 1-bit PNG that is large only once decoded; rows are packed without ever being held together."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + (width + 7) // 8)) for _ in range(height)) + packer.flush()
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_m01_exif_orientation_is_applied_only_when_asked(config: EncoderConfig) -> None:
    image = Image.new("RGB", (640, 480), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 60, 480), fill="red")
    draw.rectangle((61, 420, 640, 480), fill="green")
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(image, "JPEG", exif=exif)

    as_stored = prepare(data, config)
    assert as_stored.segments[0].grid_thw == (1, 36, 46)
    assert as_stored.original_size == as_stored.resized_size == (640, 480)
    assert as_stored.segments[0].pixel_values[46 * 16, :, 7, 7].tolist() == pytest.approx([254, 0, 0], abs=4)

    turned = prepare(data, config, turn=True)
    assert turned.segments[0].grid_thw == (1, 46, 36)
    assert turned.original_size == (480, 640)
    assert turned.segments[0].pixel_values[17, :, 7, 7].tolist() == pytest.approx([254, 0, 0], abs=4)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_m01_every_orientation_turns_as_pillow_does(orientation: int, config: EncoderConfig) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(noise(45, 31), "PNG", exif=exif)
    reference = preprocess_image(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), config)
    segment = prepare(data, config, turn=True).segments[0]
    assert segment.grid_thw == reference.grid_thw
    assert segment.pixel_values.equal(reference.pixel_values)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_m01_unreadable_exif_leaves_the_picture_as_it_is(config: EncoderConfig) -> None:
    data = saved(noise(30, 20), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert prepare(data, config, turn=True).original_size == (30, 20)


@pytest.mark.parametrize("path", sorted(GOLDEN_PICTURES.glob("*")), ids=lambda path: path.name)
def test_m02_to_m06_pictures_arrive_in_their_own_mode(path: Path, config: EncoderConfig) -> None:
    """Alpha, palette, CMYK, 16-bit, LA, L and 1-bit: what decoding adds to the goldens is nothing."""
    reference = Image.open(io.BytesIO(path.read_bytes()))
    reference.load()
    image = opened(path.read_bytes(), config)
    assert (image.mode, image.size) == (reference.mode, reference.size)
    assert image.tobytes() == reference.tobytes()
    assert image.info.get("transparency") == reference.info.get("transparency")


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (13, 13), (26, 28)])
def test_m07_tiny_pictures_are_padded(size: tuple[int, int], config: EncoderConfig) -> None:
    prepared = prepare(saved(noise(*size)), config)
    assert prepared.segments[0].grid_thw == (1, 2, 2)
    assert prepared.original_size == size


@pytest.mark.parametrize(("size", "grid"), [((1093, 5), (1, 2, 80)), ((7169, 3), (1, 2, 512))])
def test_m08_extreme_aspects_are_accepted(
    size: tuple[int, int], grid: tuple[int, int, int], config: EncoderConfig
) -> None:
    assert prepare(saved(noise(*size)), config).segments[0].grid_thw == grid


def test_m09_a_huge_picture_is_refused_by_its_header(config: EncoderConfig) -> None:
    data = png_of_zeros(12000, 12000)
    assert len(data) < 30_000
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(LimitExceeded, match=r"^picture of 12000x12000 pixels, limit 64000000$"):
        prepare(data, config)
    assert time.perf_counter() - started < 0.5
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_m09_also_beyond_the_size_that_pillow_refuses(config: EncoderConfig) -> None:
    with pytest.raises(LimitExceeded, match=r"^picture of 20000x20000 pixels, limit 64000000$"):
        prepare(png_of_zeros(20000, 20000), config)


def test_patches_are_limited_by_the_header(config: EncoderConfig) -> None:
    data = saved(noise(280, 280))
    assert prepare(data, config, limits=DecodeLimits(max_patches=400)).segments[0].num_patches == 400
    with pytest.raises(LimitExceeded, match=r"^picture of 400 patches, limit 399$"):
        prepare(data, config, limits=DecodeLimits(max_patches=399))


def test_m10_a_truncated_jpeg_is_corrupt(config: EncoderConfig) -> None:
    for progressive in (False, True):
        data = saved(noise(200, 150), "JPEG", progressive=progressive)
        with pytest.raises(CorruptMedia, match=r"^JPEG picture that does not decode completely$"):
            prepare(data[:-128], config)


@pytest.mark.parametrize("picture_format", FORMATS)
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.97])
def test_m10_any_format_cut_short_is_corrupt(picture_format: str, kept: float, config: EncoderConfig) -> None:
    data = saved(noise(120, 90), picture_format)
    with pytest.raises(CorruptMedia, match=r"picture that does not decode completely$"):
        prepare(data[: max(int(len(data) * kept), 32)], config)


def test_m11_messages_are_fixed(config: EncoderConfig) -> None:
    """Known first bytes with nothing behind them: the message never depends on what the library says."""
    for start in (b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"RIFF\x00\x00\x00\x00WEBP"):
        data = start + bytes(range(100, 112))
        with pytest.raises(CorruptMedia) as caught:
            prepare(data, config)
        assert str(caught.value) == f"{sniff(data).format} picture that does not decode completely"


def test_compressed_text_in_a_png_is_no_bomb(config: EncoderConfig) -> None:
    data = saved(noise(20, 20))
    body = b"Comment\x00\x00" + zlib.compress(bytes(200_000_000), 9)
    bomb = len(body).to_bytes(4, "big") + b"zTXt" + body + zlib.crc32(b"zTXt" + body).to_bytes(4, "big")
    with pytest.raises(CorruptMedia):
        prepare(data[:33] + bomb + data[33:], config)


@pytest.mark.parametrize("picture_format", ["GIF", "WEBP", "PNG", "MPO"])
def test_an_animation_is_its_first_frame(picture_format: str, config: EncoderConfig) -> None:
    first = Image.new("RGB", (40, 30), (250, 10, 10))
    data = saved(first, picture_format, save_all=True, append_images=[Image.new("RGB", (40, 30), (10, 10, 250))])
    prepared = prepare(data, config)
    assert prepared.segments[0].grid_thw == (1, 4, 4)
    assert prepared.segments[0].pixel_values[0, :, 5, 5].tolist() == pytest.approx([250, 10, 10], abs=6)


@pytest.mark.parametrize("picture_format", FORMATS)
def test_damaged_pictures_decode_or_are_refused(picture_format: str, config: EncoderConfig) -> None:
    """Whatever a few changed bytes do, only our own errors come out."""
    chance = random.Random(picture_format)
    data = saved(noise(40, 30), picture_format)
    outcomes = set()
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(6):
            damaged[chance.randrange(12, len(damaged))] = chance.randrange(256)
        try:
            outcomes.add(type(prepare(bytes(damaged), config)))
        except (CorruptMedia, LimitExceeded) as error:
            outcomes.add(type(error))
    assert outcomes & {CorruptMedia, LimitExceeded, Prepared}
