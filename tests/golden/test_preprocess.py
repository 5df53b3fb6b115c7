"""Every picture of preprocess/ through both models: sizes, tokens and every pixel, exactly."""

from typing import Any

import pytest
import torch
from PIL import Image

from encoder.device_pixels_plain import expand
from encoder.grid import num_tokens, plan_image
from encoder.preprocess import defer_image, preprocess_image
from encoder.segments import Segment, normalize, pack
from tests.golden.goldens import GOLDEN, canvas, config, read_json, sha256, tensors

IMAGES: dict[str, Any] = read_json("preprocess/images.json")["images"]
PIXELS = tensors("preprocess/pixels.safetensors")


def segment_of(name: str, model: str) -> Segment:
    with Image.open(GOLDEN / "preprocess" / "images" / name) as image:
        return preprocess_image(image, config(model))


@pytest.mark.parametrize("model", ["k3", "k25"])
@pytest.mark.parametrize("name", IMAGES)
def test_picture_gives_the_reference_pixels(name: str, model: str) -> None:
    expected = IMAGES[name][model]
    segment = segment_of(name, model)

    assert list(segment.grid_thw) == expected["grid_thw"]
    assert num_tokens(segment.grid_thw, config(model)) == expected["num_tokens"]
    assert segment.pixel_values.dtype == torch.uint8
    assert list(segment.pixel_values.shape) == expected["pixel_values_shape"]
    assert sha256(normalize(segment.pixel_values, config(model))) == expected["pixel_values_sha256"]
    assert sha256(canvas(segment.pixel_values, segment.grid_thw)) == expected["canvas_sha256"]


@pytest.mark.parametrize("model", ["k3", "k25"])
@pytest.mark.parametrize("name", IMAGES)
def test_deferred_picture_gives_the_reference_pixels(name: str, model: str) -> None:
    expected = IMAGES[name][model]
    with Image.open(GOLDEN / "preprocess" / "images" / name) as image:
        batch = pack([defer_image(image, config(model))], config(model))
    assert batch.staged is not None
    patches = expand(batch.staged, config(model).media.transparent_background)
    assert [list(grid) for grid in batch.grids] == [expected["grid_thw"]]
    assert sha256(canvas(patches, batch.grids[0])) == expected["canvas_sha256"]


@pytest.mark.parametrize("model", ["k3", "k25"])
@pytest.mark.parametrize("name", IMAGES)
def test_stored_pixels_are_equal_one_by_one(name: str, model: str) -> None:
    # Says where a picture differs when the hashes above only say that it does.
    segment = segment_of(name, model)
    stored = f"{model}/{name}/canvas"
    if stored in PIXELS:
        torch.testing.assert_close(canvas(segment.pixel_values, segment.grid_thw)[0], PIXELS[stored], rtol=0, atol=0)
    else:
        rows = PIXELS[f"{model}/{name}/patch_index"]
        expected = PIXELS[f"{model}/{name}/patches_u8"]
        torch.testing.assert_close(segment.pixel_values[rows], expected, rtol=0, atol=0)


@pytest.mark.parametrize("model", ["k3", "k25"])
@pytest.mark.parametrize("name", IMAGES)
def test_plan_gives_the_reference_sizes(name: str, model: str) -> None:
    expected = IMAGES[name][model]
    width, height = IMAGES[name]["size_wh"]
    plan = plan_image(width, height, config(model).media)
    assert (plan.width, plan.height) == (expected["new_w"], expected["new_h"])
    assert (plan.pad_width, plan.pad_height) == (expected["pad_w"], expected["pad_h"])
    assert ((plan.width, plan.height) != (width, height)) == expected["resized"]


@pytest.mark.parametrize("model", ["k3", "k25"])
def test_several_pictures_pack_as_one_reference_call(model: str) -> None:
    batch = read_json("preprocess/images.json")["batch"]
    packed = pack([segment_of(name, model) for name in batch["names"]], config(model))
    assert [list(grid) for grid in packed.grids] == batch[model]["grid_thws"]
    assert list(packed.pixel_values.shape) == batch[model]["pixel_values_shape"]
    assert sha256(normalize(packed.pixel_values, config(model))) == batch[model]["pixel_values_sha256"]


@pytest.mark.parametrize("model", ["k3", "k25"])
@pytest.mark.parametrize("table", ["preprocess/pixels.safetensors", "video/chunk_pixels.safetensors"])
def test_normalize_gives_the_reference_table_bit_for_bit(model: str, table: str) -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).repeat(1, 3, 1, 1)
    expected = tensors(table)["pixel_lut"].view(256, 1, 1, 1).repeat(1, 3, 1, 1)
    assert sha256(normalize(levels, config(model))) == sha256(expected)
