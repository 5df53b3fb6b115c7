"""JPEGs that simplejpeg decodes are the same bits as Pillow's; whatever it would decode otherwise is Pillow's."""

import io
import random
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from app.decode import jpeg_turbo
from app.decode.jpeg_turbo import agrees_with_pillow, decode_rgb
from app.decode.media import DecodeLimits, MediaOptions
from app.decode.picture import decode_picture, prepare_picture
from app.errors import CorruptMedia
from encoder import EncoderConfig, load_config, preprocess_image

LIMITS = DecodeLimits()
SIZES = [(1, 1), (1, 17), (33, 2), (8, 8), (15, 16), (17, 31), (64, 48), (250, 131), (641, 479)]


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    return load_config("demo:k3-tiny")


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Smooth colours and noise together, so that chroma is interpolated."""
    small = np.random.default_rng(width * height).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noise = np.random.default_rng(1).integers(-20, 20, smooth.shape)
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).convert(mode)


def jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFile, "MAXBLOCK", 1 << 22)  # a progressive file is written in one piece
        image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def ours(data: bytes) -> "np.ndarray[Any, Any] | None":
    return decode_rgb(data, Image.open(io.BytesIO(data)))


def pillows(data: bytes) -> "np.ndarray[Any, Any]":
    return np.asarray(Image.open(io.BytesIO(data)))


def test_both_libraries_agree_here() -> None:
    assert agrees_with_pillow()


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "4:1:1"])
@pytest.mark.parametrize("progressive", [False, True])
def test_pixels_are_the_same_bits(subsampling: str, progressive: bool) -> None:
    for (width, height), quality, restarts in product(SIZES, (30, 75, 95, 100), (0, 1)):
        options = {"quality": quality, "subsampling": subsampling, "progressive": progressive}
        data = jpeg(picture(width, height), restart_marker_rows=restarts, **options)
        pixels = ours(data)
        assert pixels is not None
        assert np.array_equal(pixels, pillows(data))


def test_rgb_without_a_change_of_colours_is_the_same_too() -> None:
    data = jpeg(picture(65, 47), keep_rgb=True)
    pixels = ours(data)
    assert pixels is not None
    assert np.array_equal(pixels, pillows(data))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_modes_are_pillows(mode: str, config: EncoderConfig) -> None:
    data = jpeg(picture(65, 47, mode))
    assert ours(data) is None
    decoded = decode_picture(data, "JPEG", LIMITS, config)
    assert isinstance(decoded, Image.Image)
    assert decoded.mode == mode


def test_damaged_files_are_as_pillow_alone_decodes_or_refuses_them(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut anywhere, bytes changed, junk behind the end: simplejpeg takes part without being seen."""
    chance = random.Random(0)
    files: list[bytes] = []
    for progressive, restarts in product((False, True), (0, 1)):
        whole = jpeg(picture(90, 70), progressive=progressive, restart_marker_rows=restarts)
        files += [whole, whole[:-1], whole[:-2], whole + b"junk" * 50, whole[:-2] + b"\xff\xff\xff\xd9"]
        files += [whole[: chance.randrange(200, len(whole))] for _ in range(40)]
        for _ in range(150):
            damaged = bytearray(whole)
            for _ in range(chance.choice((1, 3, 20))):
                damaged[chance.randrange(2, len(whole))] = chance.randrange(256)
            files.append(bytes(damaged))

    def outcome(data: bytes) -> tuple[object, bytes]:
        try:
            prepared = prepare_picture(data, "JPEG", MediaOptions(), LIMITS, config)
        except Exception as error:
            return type(error).__name__, str(error).encode()
        return prepared.segments[0].grid_thw, prepared.segments[0].pixel_values.numpy().tobytes()

    with_both = [outcome(data) for data in files]
    num_ours = sum(_opens(data) and ours(data) is not None for data in files)
    monkeypatch.setattr(jpeg_turbo, "agrees_with_pillow", lambda: False)
    assert [outcome(data) for data in files] == with_both
    assert 20 < num_ours < len(files) - 100
    assert sum(kind == CorruptMedia.__name__ for kind, _ in with_both) > 50


def _opens(data: bytes) -> bool:
    try:
        Image.open(io.BytesIO(data))
    except Exception:
        return False
    return True


@pytest.mark.parametrize("model", ["demo:k3-tiny", "demo:k25-tiny"])
@pytest.mark.parametrize("size", [(320, 200), (5000, 4000)])
def test_segments_are_the_same_with_and_without_a_resize(size: tuple[int, int], model: str) -> None:
    config = load_config(model)
    data = jpeg(picture(*size))
    segment = prepare_picture(data, "JPEG", MediaOptions(), LIMITS, config).segments[0]
    reference = preprocess_image(Image.open(io.BytesIO(data)), config)
    assert segment.grid_thw == reference.grid_thw
    assert segment.pixel_values.equal(reference.pixel_values)


def test_where_the_libraries_differ_pillow_decodes(config: EncoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = jpeg_turbo.simplejpeg.decode_jpeg
    monkeypatch.setattr(jpeg_turbo.simplejpeg, "decode_jpeg", lambda *args, **rest: real(*args, fastdct=True, **rest))
    agrees_with_pillow.cache_clear()
    try:
        assert not agrees_with_pillow()
        assert ours(jpeg(picture(64, 48))) is None
    finally:
        agrees_with_pillow.cache_clear()
