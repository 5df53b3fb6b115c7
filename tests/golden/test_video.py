"""Video sampling, chunk sizes and chunk pixels of video/, exactly."""

from typing import Any

import pytest
import torch
from PIL import Image

from encoder.device_pixels_plain import expand
from encoder.grid import num_tokens, plan_frames, plan_video
from encoder.preprocess import defer_frames, preprocess_frames, preprocess_image
from encoder.segments import pack
from tests.golden.goldens import config, read_json, tensors

VIDEO: dict[str, Any] = read_json("video/video.json")
CHUNKS = tensors("video/chunk_pixels.safetensors")


def entries(section: str) -> list[Any]:
    return [
        pytest.param(model, entry, id=f"{model}-{i}")
        for model, cases in VIDEO[section].items()
        for i, entry in enumerate(cases)
    ]


@pytest.mark.parametrize(("model", "entry"), entries("sampling"))
def test_plan_video_samples_and_prints_as_the_reference(model: str, entry: dict[str, Any]) -> None:
    plan = plan_video(entry["num_frames"], entry["fps"], config(model))
    assert plan.frame_indices == entry["frame_indices"]
    assert plan.chunks == entry["chunks"]
    text = "{}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    assert [text.format(timestamp) for timestamp in plan.timestamps] == entry["prompts"]
    assert plan.start_s == [chunk[0] / entry["fps"] for chunk in entry["chunks"]]


@pytest.mark.parametrize(("model", "entry"), entries("chunk_resize"))
def test_plan_frames_gives_the_reference_sizes(model: str, entry: dict[str, Any]) -> None:
    width, height = entry["size_wh"]
    plan = plan_frames(width, height, entry["t"], config(model).media)
    assert (plan.width, plan.height) == (entry["new_w"], entry["new_h"])
    assert (plan.pad_width, plan.pad_height) == (entry["pad_w"], entry["pad_h"])
    assert list(plan.grid(entry["t"])) == entry["grid_thw"]
    assert num_tokens(plan.grid(entry["t"]), config(model)) == entry["num_tokens"]


def test_chunk_image_and_single_frame_pack_as_one_reference_call() -> None:
    frames = CHUNKS["frames_u8"]
    segments = [
        preprocess_frames(frames, config("k25")),
        preprocess_image(Image.fromarray(frames[0].numpy()), config("k25")),
        preprocess_frames(frames[1:2], config("k25")),
    ]
    batch = pack(segments, config("k25"))
    assert [list(grid) for grid in batch.grids] == CHUNKS["grid_thws"].tolist()
    torch.testing.assert_close(batch.pixel_values, CHUNKS["pixel_u8"], rtol=0, atol=0)


@pytest.mark.parametrize("as_pictures", [False, True])
def test_large_frames_are_resized_as_the_reference(as_pictures: bool) -> None:
    # The stored frames are cells of 29 x 29 equal pixels, cropped to 1300 x 1000.
    cells = CHUNKS["downscale/frame_cells_u8"]
    frames = cells.repeat_interleave(29, dim=1).repeat_interleave(29, dim=2)[:, :1000, :1300]
    chunk = [Image.fromarray(frame) for frame in frames.numpy()] if as_pictures else frames
    segment = preprocess_frames(chunk, config("k25"))
    assert [list(segment.grid_thw)] == CHUNKS["downscale/grid_thws"].tolist()
    deferred = pack([defer_frames(chunk, config("k25"))], config("k25")).staged
    assert deferred is not None
    for patches in (segment.pixel_values, expand(deferred, None)):
        sampled = patches[CHUNKS["downscale/patch_index"]]
        torch.testing.assert_close(sampled, CHUNKS["downscale/patches_u8"], rtol=0, atol=0)
