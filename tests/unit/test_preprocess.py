"""Pictures and frames to patches, on pictures small enough to recompute; the goldens hold the exact rest."""

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from encoder.config import EncoderConfig, parse_config
from encoder.errors import InvalidSegment
from encoder.families import FAMILY_MEDIA, Family
from encoder.grid import Grid
from encoder.preprocess import preprocess_frames, preprocess_image
from encoder.segments import Segment


def config(family: Family, **media: Any) -> EncoderConfig:
    return parse_config({"model_type": family}, {"media_proc_cfg": FAMILY_MEDIA[family] | media}, source=family)


K3, K25 = config("kimi_k3"), config("kimi_k25")


def noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def canvas(segment: Segment) -> NDArray[np.uint8]:
    """The picture a one-frame segment was cut from, put together patch by patch."""
    _, h, w = segment.grid_thw
    picture = np.zeros((h * 14, w * 14, 3), np.uint8)
    for i, patch in enumerate(segment.pixel_values.numpy()):
        y, x = divmod(i, w)
        for channel in range(3):
            picture[y * 14 : y * 14 + 14, x * 14 : x * 14 + 14, channel] = patch[channel]
    return picture


@pytest.mark.parametrize("model", [K3, K25])
def test_picture_is_padded_with_zeros_and_cut_in_raster_order(model: EncoderConfig) -> None:
    pixels = noise(31, 60, 3)
    segment = preprocess_image(Image.fromarray(pixels), model)
    assert segment.grid_thw == Grid(1, 4, 6)
    assert segment.pixel_values.dtype == torch.uint8
    padded = np.zeros((56, 84, 3), np.uint8)
    padded[:31, :60] = pixels
    np.testing.assert_array_equal(canvas(segment), padded)


def test_padding_can_hold_whole_rows_of_patches() -> None:
    # 29 rows of pixels become 56: the last of the four patch rows has none of the picture.
    segment = preprocess_image(Image.new("RGB", (28, 29), (7, 8, 9)), K3)
    assert segment.grid_thw == Grid(1, 4, 2)
    patches = segment.pixel_values.numpy()
    assert np.unique(patches[:4]).tolist() == [7, 8, 9]
    assert np.unique(patches[4:6, :, 0]).tolist() == [7, 8, 9]
    assert np.unique(patches[4:6, :, 1:]).tolist() == [0]
    assert np.unique(patches[6:]).tolist() == [0]


def test_transparent_pixels_show_the_chessboard_and_padding_does_not() -> None:
    picture = canvas(preprocess_image(Image.new("RGBA", (20, 20), (10, 20, 30, 0)), K3))
    board = np.array([[255, 180, 255], [180, 255, 180], [255, 180, 255]], np.uint8).repeat(8, 0).repeat(8, 1)
    for channel in range(3):
        np.testing.assert_array_equal(picture[:20, :20, channel], board[:20, :20])
    assert picture[20:].max() == picture[:, 20:].max() == 0


@pytest.mark.parametrize(
    ("alpha", "on_white", "on_gray"),
    [
        (255, 100, 100),
        (128, 177, 139),  # 128/255 * 100 + 127/255 * 255 = 177.196, and + 127/255 * 180 = 139.84: truncated
        (1, 254, 179),  # 254.39 and 179.68
    ],
)
def test_alpha_is_mixed_and_truncated(alpha: int, on_white: int, on_gray: int) -> None:
    picture = canvas(preprocess_image(Image.new("RGBA", (28, 28), (100, 100, 100, alpha)), K3))
    assert picture[0, 0].tolist() == [on_white] * 3
    assert picture[0, 8].tolist() == [on_gray] * 3


def test_chessboard_follows_the_configuration() -> None:
    board = {
        "pattern": "chessboard",
        "chessboard_square_size": 3,
        "chessboard_square_on_top_left": False,
        "chessboard_white_value": 200,
        "chessboard_gray_value": 50,
    }
    model = config("kimi_k3", transparent_bg_config=board)
    picture = canvas(preprocess_image(Image.new("LA", (28, 28), (0, 0)), model))
    assert picture[0, [0, 2, 3, 5, 6], 0].tolist() == [50, 50, 200, 200, 50]
    assert picture[[0, 3, 15, 18], 0, 0].tolist() == [50, 200, 200, 50]  # row 15 is the second of another patch row


def test_without_a_background_alpha_is_dropped() -> None:
    picture = canvas(preprocess_image(Image.new("RGBA", (28, 28), (10, 20, 30, 0)), K25))
    assert picture.reshape(-1, 3).tolist() == [[10, 20, 30]] * 784


def palette_picture(transparency: int | bytes) -> Image.Image:
    """28 x 28 of colour 1, blue, in a palette whose colour 1 is transparent."""
    image = Image.new("P", (28, 28), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.info["transparency"] = transparency
    return image


@pytest.mark.parametrize("transparency", [1, b"\xff\x00"])
def test_transparent_palette_colour(transparency: int | bytes) -> None:
    shown = canvas(preprocess_image(palette_picture(transparency), K3))
    assert shown[0, [0, 8]].tolist() == [[255, 255, 255], [180, 180, 180]]
    dropped = canvas(preprocess_image(palette_picture(transparency), K25))
    assert dropped[0, [0, 8]].tolist() == [[0, 0, 255], [0, 0, 255]]


def test_colour_key_of_an_rgb_picture_is_ignored() -> None:
    image = Image.new("RGB", (28, 28), (1, 2, 3))
    image.info["transparency"] = (1, 2, 3)
    assert canvas(preprocess_image(image, K3))[0, 0].tolist() == [1, 2, 3]


def test_palettes_are_resized_by_nearest_neighbour_only_in_their_own_mode() -> None:
    # 7170 columns become 7168. Nearest keeps the two colours; bicubic on RGB makes others between them.
    image = Image.fromarray(np.tile(np.array([0, 0, 1], np.uint8), (1, 2390)), mode="P")
    image.putpalette([255, 0, 0, 0, 0, 255])
    nearest = canvas(preprocess_image(image, K3))[0]
    assert {tuple(colour) for colour in nearest.tolist()} == {(255, 0, 0), (0, 0, 255)}
    assert len({tuple(colour) for colour in canvas(preprocess_image(image, K25))[0].tolist()}) > 2


def test_sixteen_bit_gray_clips_at_255() -> None:
    image = Image.fromarray(np.array([[0, 200, 255, 256, 65535]], np.uint16))
    assert image.mode == "I;16"
    for model in (K3, K25):
        assert canvas(preprocess_image(image, model))[0, :5, 0].tolist() == [0, 200, 255, 255, 255]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"])
@pytest.mark.parametrize("model", [K3, K25])
@pytest.mark.parametrize("size", [(30, 20), (7200, 2)])
def test_the_callers_picture_is_left_as_it_was(mode: str, model: EncoderConfig, size: tuple[int, int]) -> None:
    image = Image.new(mode, size, 1 if mode not in ("LA", "RGBA", "CMYK", "RGB", "YCbCr") else None)
    if mode == "P":
        image = palette_picture(b"\xff\x80").resize(size)
    pixels, info, palette = image.tobytes(), dict(image.info), image.getpalette("RGBA") if mode == "P" else None
    segment = preprocess_image(image, model)
    assert segment.num_patches == (8 if size == (30, 20) else 1024)
    assert (image.mode, image.size, image.info) == (mode, size, info)
    assert image.tobytes() == pixels
    assert (image.getpalette("RGBA") if mode == "P" else None) == palette


def test_a_picture_not_yet_loaded_gives_what_a_loaded_one_gives() -> None:
    # A gray PNG whose transparent level is written after its pixels: Pillow knows of it only once it has decoded.
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 9, 1, 8, 0, 0, 0, 0)  # 9x1 pixels of 8 bits, gray
    pixels = zlib.compress(bytes([0] + [77] * 9))
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"tRNS", b"\x00\x4d"), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in chunks)
    lazy, loaded = Image.open(BytesIO(data)), Image.open(BytesIO(data))
    loaded.load()
    for image in (lazy, loaded):
        assert canvas(preprocess_image(image, K3))[0, :9, 0].tolist() == [255] * 8 + [180]


def test_orientation_is_not_applied() -> None:
    image = Image.fromarray(noise(28, 56, 3))
    image.getexif()[0x0112] = 6  # turn by 90 degrees
    np.testing.assert_array_equal(canvas(preprocess_image(image, K3)), np.asarray(image))


@pytest.mark.parametrize("size", [(0, 0), (0, 5)])
def test_picture_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidSegment, match="must be at least 1"):
        preprocess_image(Image.new("RGB", size), K3)


@pytest.mark.parametrize("model", [K3, K25])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
def test_every_form_of_a_chunk_gives_the_same_segment(model: EncoderConfig, num_frames: int) -> None:
    frames = noise(num_frames, 40, 50, 3)
    segment = preprocess_frames(frames, model)
    assert segment.grid_thw == Grid(num_frames, 4, 4)
    alone = [preprocess_image(Image.fromarray(frame), model).pixel_values for frame in frames]
    assert torch.equal(segment.pixel_values, torch.cat(alone))
    reversed_and_back = np.ascontiguousarray(frames[:, ::-1])[:, ::-1]  # a view with negative strides
    for same in (
        torch.from_numpy(frames),
        reversed_and_back,
        list(frames),
        [torch.from_numpy(frame) for frame in frames],
        [Image.fromarray(frame) for frame in frames],
    ):
        assert torch.equal(preprocess_frames(same, model).pixel_values, segment.pixel_values)


def test_frames_have_a_smaller_limit_than_an_image() -> None:
    frame = noise(1300, 1300, 3)  # 92 * 92 whole patches, above 4096
    chunk = preprocess_frames(frame[None], K25)
    image = preprocess_image(Image.fromarray(frame), K25)
    assert (chunk.grid_thw, image.grid_thw) == (Grid(1, 66, 66), Grid(1, 94, 94))


def test_alpha_of_frames_is_dropped_in_either_family() -> None:
    frames = [Image.new("RGBA", (28, 28), (10, 20, 30, 0))]
    for model in (K3, K25):
        assert canvas(preprocess_frames(frames, model))[0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "chunk of 0 frames, allowed 1 to 4"),
        (noise(5, 4, 4, 3), "chunk of 5 frames, allowed 1 to 4"),
        (noise(4, 4, 3), r"frames must be \(t, H, W, 3\), got \(4, 4, 3\)"),
        (noise(2, 4, 4, 4), r"frames\[0\] must be uint8 \(H, W, 3\), got uint8 \(4, 4, 4\)"),
        (noise(2, 4, 4, 3).astype(np.float32), r"frames\[0\] must be uint8 \(H, W, 3\), got float32"),
        (torch.zeros(1, 4, 4, 3), r"frames\[0\] must be uint8 \(H, W, 3\), got float32"),
        ([Image.new("RGB", (4, 6)), Image.new("RGB", (6, 4))], r"frames\[1\] has 6x4 pixels, the first .* 4x6"),
        ([noise(4, 4, 3), noise(4, 5, 3)], r"frames\[1\] has 5x4 pixels, the first .* 4x4"),
        ([noise(4, 4, 3), None], r"frames\[1\] must be a picture or an array, got NoneType"),
        (noise(2, 0, 4, 3), "at least 1"),
        (Image.new("RGB", (4, 4)), "a sequence, got Image"),
    ],
)
def test_chunks_the_tower_cannot_take_are_refused(frames: Any, said: str) -> None:
    with pytest.raises(InvalidSegment, match=said):
        preprocess_frames(frames, K3)
