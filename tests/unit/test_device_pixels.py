"""Pictures left to the device: what crosses between processes, one buffer a batch, and the same bits as Pillow's."""

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from encoder import Engine, InvalidSegment, Picture, SetupError, load_config, pack
from encoder import device_pixels as device_pixels_module
from encoder.config import parse_config
from encoder.device_pixels import DevicePixels, check_wanted, choose, difference
from encoder.device_pixels_plain import expand
from encoder.device_pixels_staging import Fact, StagedPixels, stage
from encoder.families import FAMILY_MEDIA, Family
from encoder.grid import Grid, plan_image
from encoder.picture import MAX_SIDE_PX
from encoder.preprocess import defer_frames, defer_image, preprocess_frames, preprocess_image
from encoder.resample import is_vertical_first, mixing_tables, weights
from encoder.segments import Segment, normalize
from tests.modes import DEVICE_MODES, FAMILIES, MODES, config, picture

CPU = torch.device("cpu")
SIZES = [(97, 61), (40, 150), (61, 20), (14, 90), (30, 200), (55, 55), (3, 170), (1, 1), (90, 3)]


def prepared(segment: Segment, model: Any) -> Tensor:
    """Patches of one segment, by the plain version if it was deferred."""
    staged = pack([segment], model).staged
    return segment.pixel_values if staged is None else expand(staged, model.media.transparent_background)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_deferred_picture_gives_the_bits_of_pillow(mode: str, family: Family) -> None:
    for seed, (width, height) in enumerate(SIZES):
        for patches in (1, 6, 40):
            model = config(family, patches)
            image = picture(mode, width, height, seed)
            want = preprocess_image(image, model)
            deferred = defer_image(image, model)
            assert deferred.picture is not None
            assert len(deferred.pixel_values) == 0
            assert deferred.grid_thw == want.grid_thw
            assert torch.equal(prepared(deferred, model), want.pixel_values), (width, height, patches)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(600, 9000), (9000, 600), (2500, 2000)])
def test_released_limits_give_the_bits_of_pillow(size: tuple[int, int], family: Family) -> None:
    model = config(family, 4096)
    image = picture("L", *size)
    assert torch.equal(prepared(defer_image(image, model), model), preprocess_image(image, model).pixel_values)


@pytest.mark.parametrize("mode", MODES)
def test_deferring_leaves_the_callers_picture_as_it_was(mode: str) -> None:
    for size in [(20, 28), (400, 30)]:
        image = picture(mode, *size)
        pixels, info = image.tobytes(), dict(image.info)
        palette = image.getpalette("RGBA") if image.mode == "P" else None
        defer_image(image, config("kimi_k3", 4))
        assert (image.tobytes(), image.info) == (pixels, info)
        assert (image.getpalette("RGBA") if image.mode == "P" else None) == palette


def test_only_a_model_with_a_background_sees_alpha_and_inks() -> None:
    modes = {mode: defer_image(picture(mode, 9, 9), config("kimi_k25")).picture.mode for mode in MODES}  # type: ignore[union-attr]
    assert set(modes.values()) == {"L", "RGB"}
    assert (modes["LA"], modes["CMYK"]) == ("L", "RGB")
    modes = {mode: defer_image(picture(mode, 9, 9), config("kimi_k3")).picture.mode for mode in DEVICE_MODES}  # type: ignore[union-attr]
    assert all(mode == found for mode, found in modes.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_frames", [1, 2, 4])
def test_deferred_frames_give_the_bits_of_pillow(num_frames: int, family: Family) -> None:
    for seed, (width, height) in enumerate(SIZES):
        model = config(family, 6)
        frames = np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
        want = preprocess_frames(frames, model)
        turned = np.ascontiguousarray(frames[:, ::-1])[:, ::-1]
        forms: list[Any] = [frames, torch.from_numpy(frames), list(frames), [*map(Image.fromarray, frames)], turned]
        for form in forms:
            deferred = defer_frames(form, model)
            assert deferred.grid_thw == want.grid_thw
            assert torch.equal(prepared(deferred, model), want.pixel_values)


def test_one_array_of_frames_is_not_copied() -> None:
    frames = np.zeros((2, 30, 40, 3), np.uint8)
    deferred = defer_frames(frames, config("kimi_k3")).picture
    assert deferred is not None
    assert np.shares_memory(deferred.pixels, frames)


def test_a_side_beyond_the_limit_is_prepared_at_once() -> None:
    model = config("kimi_k3")
    for size in [(MAX_SIDE_PX + 1, 1), (1, MAX_SIDE_PX + 1)]:
        image = picture("L", *size)
        segment = defer_image(image, model)
        assert segment.picture is None
        assert torch.equal(segment.pixel_values, preprocess_image(image, model).pixel_values)
    frames = np.zeros((1, 1, MAX_SIDE_PX + 1, 3), np.uint8)
    assert defer_frames(frames, model).picture is None


@pytest.mark.parametrize("size", [(0, 0), (0, 5)])
def test_a_picture_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidSegment, match="must be at least 1"):
        defer_image(Image.new("RGB", size), config("kimi_k3"))
    with pytest.raises(InvalidSegment, match="a PIL picture, got str"):
        defer_image("picture.png", config("kimi_k3"))  # type: ignore[arg-type]


# ---- Pillow's numbers


def test_weights_of_one_pixel_are_those_of_the_kernel() -> None:
    # 2 pixels to 1: distances of a quarter of the support, weights of either are one half of 2**22.
    assert weights(2, 1).tolist() == [[0], [1 << 21], [1 << 21]]
    assert weights(3, 3).tolist() == [[0, 1, 2], [1 << 22] * 3]


def test_the_order_of_passes_is_that_of_pillow() -> None:
    # Height loses 4 or 5 pixels, width 2: 4 is not more than twice as many, 5 is.
    assert not is_vertical_first(12, 14, 10, 10)
    assert is_vertical_first(12, 15, 10, 10)
    assert is_vertical_first(12, 15, 14, 10)
    assert not is_vertical_first(12, 10, 14, 12)


def test_mixing_is_what_the_cpu_path_makes_of_every_level_and_alpha() -> None:
    model = config("kimi_k3")
    board = model.media.transparent_background
    assert board is not None
    level, alpha = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    table = mixing_tables(board)
    # Each pixel eight times, as wide as a square: a level lies on white or gray by its column and row.
    eight = np.stack([level, alpha], axis=-1).repeat(8, axis=1)
    composed = preprocess_image(Image.fromarray(eight, "LA"), config("kimi_k3", 1 << 20))
    grid = composed.grid_thw
    rows = composed.pixel_values.view(grid.h, grid.w, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(-1, grid.w * 14, 3)
    got = rows[:256, : 256 * 8 : 8, 0].numpy()
    odd = (np.arange(256)[:, None] // 8 + np.arange(256)) % 2
    want = np.where(odd == 1, table[0, 0], table[0, 1])
    np.testing.assert_array_equal(got, want)
    inks = np.stack([level, level, level, alpha], axis=-1)
    rgb = np.asarray(Image.frombytes("CMYK", (256, 256), inks.tobytes()).convert("RGB"))[..., 0]
    np.testing.assert_array_equal(table[2, 0], rgb)
    np.testing.assert_array_equal(table[2, 1], rgb)


# ---- one buffer a batch


def mixed_segments(model: Any) -> tuple[list[Segment], list[Segment]]:
    """Ready and deferred segments in turn, and all of them ready."""
    images = [picture(mode, 40 + 9 * i, 90 - 7 * i, i) for i, mode in enumerate(DEVICE_MODES)]
    frames = np.random.default_rng(3).integers(0, 256, (3, 50, 70, 3), dtype=np.uint8)
    ready = [*(preprocess_image(image, model) for image in images), preprocess_frames(frames, model)]
    deferred = [*(defer_image(image, model) for image in images), defer_frames(frames, model)]
    return [s for pair in zip(deferred, ready, strict=True) for s in pair], [s for s in ready for _ in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_may_mix_ready_and_deferred_segments(family: Family) -> None:
    model = config(family, 10)
    mixed, ready = mixed_segments(model)
    batch, want = pack(mixed, model), pack(ready, model)
    assert batch.staged is not None
    assert want.staged is None
    assert (batch.grids, batch.num_tokens, batch.cu_seqlens) == (want.grids, want.num_tokens, want.cu_seqlens)
    assert torch.equal(expand(batch.staged, model.media.transparent_background), want.pixel_values)


def test_a_packed_batch_survives_pickling() -> None:
    model = config("kimi_k3", 10)
    mixed, _ = mixed_segments(model)
    batch = pack(mixed, model)
    copy = pickle.loads(pickle.dumps(batch))  # noqa: S301
    board = model.media.transparent_background
    assert batch.staged is not None
    assert torch.equal(expand(copy.staged, board), expand(batch.staged, board))


def test_the_buffer_holds_little_but_pixels() -> None:
    model = config("kimi_k3")
    images = [defer_image(picture("RGB", 1600, 1200, i), model) for i in range(2)]
    staged = pack(images, model).staged
    assert staged is not None
    pixels = sum(segment.picture.pixels.nbytes for segment in images if segment.picture)
    assert pixels <= staged.buffer.nbytes <= 1.02 * pixels


def test_equal_sizes_share_their_weights() -> None:
    model = config("kimi_k3", 10)
    one = pack([defer_image(picture("RGB", 90, 60), model)], model).staged
    two = pack([defer_image(picture("RGB", 90, 60, i), model) for i in range(2)], model).staged
    assert one is not None
    assert two is not None
    assert len(one.parts(one.buffer).weights) == len(two.parts(two.buffer).weights)


def test_deferred_segments_beside_normalised_ones_are_normalised() -> None:
    model = config("kimi_k3", 10)
    image = picture("RGBA", 90, 60)
    want = normalize(preprocess_image(image, model).pixel_values, model)
    ready = Segment(torch.full((4, 3, 14, 14), 0.25), Grid(1, 2, 2))
    batch = pack([ready, defer_image(image, model)], model)
    assert batch.staged is None
    assert torch.equal(batch.pixel_values, torch.cat([ready.pixel_values, want]))


def test_a_deferred_segment_of_another_model_is_refused() -> None:
    model = config("kimi_k3")
    other = replace(model, media=replace(model.media, patch_size=16))
    with pytest.raises(InvalidSegment, match=r"segments\[0\]: patches of 16 pixels a side, the model has 14"):
        pack([defer_image(picture("RGB", 90, 60), other)], model)


@pytest.mark.parametrize("spec", ["demo:k3-tiny", "demo:k25-tiny"])
def test_an_engine_on_a_cpu_takes_deferred_segments(spec: str) -> None:
    engine = Engine.load(spec)
    assert not engine.defers_preprocessing
    mixed, ready = mixed_segments(engine.config)
    for got, want in zip(engine.encode(mixed), engine.encode(ready), strict=True):
        assert torch.equal(got, want)


# ---- facts


def round_trip(made: Picture, model: Any) -> Picture:
    return Picture.from_facts(json.loads(json.dumps(made.facts())), made.pixels.tobytes(), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_and_bytes_make_the_same_picture(family: Family) -> None:
    model = config(family, 10)
    images = [picture(mode, width, height) for mode in MODES for width, height in [(90, 60), (28, 28), (40, 200)]]
    frames = np.random.default_rng(3).integers(0, 256, (3, 50, 70, 3), dtype=np.uint8)
    for deferred in [*(defer_image(image, model) for image in images), defer_frames(frames, model)]:
        assert deferred.picture is not None
        copy = Segment.deferred(round_trip(deferred.picture, model))
        assert copy.grid_thw == deferred.grid_thw
        assert torch.equal(prepared(copy, model), prepared(deferred, model))


def test_bytes_of_a_picture_are_not_copied() -> None:
    memory = bytearray(90 * 60 * 3)
    facts = {"mode": "RGB", "width": 90, "height": 60, "num_frames": 1, "is_film": False, "is_resized": False}
    made = Picture.from_facts(facts, memoryview(memory), config("kimi_k3"))
    memory[0] = 7
    assert made.pixels[0, 0, 0, 0] == 7


@pytest.mark.parametrize(
    ("change", "num_bytes", "said"),
    [
        ({}, 90 * 60 * 3 - 1, "picture of 16199 bytes, its facts say 1x60x90x3"),
        ({}, 90 * 60 * 3 + 1, "picture of 16201 bytes"),
        ({}, 0, "picture of 0 bytes"),
        ({"mode": "L"}, 90 * 60 * 3, "facts say 1x60x90x1"),
        ({"mode": "P"}, 90 * 60, "mode of a picture must be one of L, LA, RGB, RGBA, CMYK, got 'P'"),
        ({"mode": "RGBA", "is_film": True}, 90 * 60 * 4, "must be one of L, RGB, got 'RGBA'"),
        ({"mode": ["RGB"]}, 90 * 60 * 3, "mode of a picture must be"),
        ({"width": 0}, 0, "width of a picture must be an integer from 1 to 32768, got 0"),
        ({"width": -90, "height": -60}, 90 * 60 * 3, "width of a picture"),
        ({"height": 60.0}, 90 * 60 * 3, "height of a picture must be an integer"),
        ({"height": True}, 90 * 3, "height of a picture must be an integer"),
        ({"height": 1 << 40}, 90 * 60 * 3, "height of a picture must be an integer"),
        ({"width": 1 << 15, "height": 1 << 15}, 90 * 60 * 3, "allowed up to 1073741824 bytes"),
        ({"num_frames": 2}, 2 * 90 * 60 * 3, "num_frames of a picture must be an integer from 1 to 1, got 2"),
        ({"num_frames": 5, "is_film": True}, 5 * 90 * 60 * 3, "from 1 to 4, got 5"),
        ({"num_frames": 2, "is_film": True}, 90 * 60 * 3, "facts say 2x60x90x3"),
        ({"is_resized": 1}, 90 * 60 * 3, "is_resized of a picture must be true or false, got int"),
        ({"is_film": "yes"}, 90 * 60 * 3, "is_film of a picture must be true or false, got str"),
        ({"more": 1}, 90 * 60 * 3, "facts of a picture must be height, is_film"),
    ],
)
def test_facts_that_do_not_fit_are_refused(change: dict[str, Any], num_bytes: int, said: str) -> None:
    facts = {"mode": "RGB", "width": 90, "height": 60, "num_frames": 1, "is_film": False, "is_resized": False}
    with pytest.raises(InvalidSegment, match=said):
        Picture.from_facts(facts | change, bytes(num_bytes), config("kimi_k3"))


def test_a_sender_cannot_choose_the_size_after_the_resize() -> None:
    model = config("kimi_k3", 10)
    plan = plan_image(90, 60, model.media)
    facts = {"mode": "RGB", "width": 90, "height": 60, "num_frames": 1, "is_film": False, "is_resized": True}
    assert Picture.from_facts(facts, bytes(plan.width * plan.height * 3), model).plan == plan
    with pytest.raises(InvalidSegment, match="its facts say"):
        Picture.from_facts(facts, bytes(90 * 60 * 3), model)
    with pytest.raises(InvalidSegment, match="mode of a picture must be one of L, RGB"):
        Picture.from_facts(facts | {"mode": "CMYK"}, bytes(90 * 60 * 4), config("kimi_k25"))


# ---- the kernels, and their place in service

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled here: tests/gpu/test_preprocess.py")


@interpreted
@pytest.mark.parametrize("spec", ["demo:k3", "demo:k25"])
def test_kernels_give_the_bits_of_the_cpu_path(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton, from the extra gpu or dev")
    monkeypatch.setattr(device_pixels_module, "TEST_SIZES", ((45, 31), (20, 60), (1, 50), (50, 1), (20, 28)))
    model = load_config(spec)
    assert difference(DevicePixels(model, CPU), model, CPU) == 0


@interpreted
@pytest.mark.parametrize("tile", [256, 2048])
def test_kernels_agree_with_the_plain_version_whatever_the_tile(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton, from the extra gpu or dev")
    monkeypatch.setattr("encoder.device_pixels.TILE", tile)
    monkeypatch.setattr("encoder.device_pixels_staging.TILE", tile)
    board = {"pattern": "chessboard", "chessboard_square_size": 3, "chessboard_square_on_top_left": False}
    media = FAMILY_MEDIA["kimi_k3"] | {"transparent_bg_config": board, "in_patch_limit": 4}
    model = parse_config({"model_type": "kimi_k3"}, {"media_proc_cfg": media}, source="k3")
    segments = [defer_image(picture("RGBA", 33, 50), model), preprocess_image(picture("L", 28, 20), model)]
    staged = pack([*segments, defer_image(picture("LA", 20, 20), model)], model).staged
    assert staged is not None
    want = expand(staged, model.media.transparent_background)
    assert torch.equal(DevicePixels(model, CPU).expand(staged, staged.buffer), want)


def test_the_check_at_start_meets_every_kind_of_resize() -> None:
    media = config("kimi_k3", device_pixels_module.TEST_LIMIT).media
    seen = set()
    for width, height in device_pixels_module.TEST_SIZES:
        plan = plan_image(width, height, media)
        first = is_vertical_first(width, height, plan.width, plan.height)
        seen.add((plan.width < width, plan.height < height, first))
    assert seen >= {(True, True, False), (True, True, True), (True, False, False), (False, True, True)}
    assert (False, False, False) in seen


def test_a_batch_of_ready_patches_alone_needs_no_kernel() -> None:
    patches = torch.arange(4 * 588, dtype=torch.int32).to(torch.uint8).view(4, 3, 14, 14)
    staged = stage([patches], 14)
    assert torch.equal(DevicePixels(config("kimi_k3"), CPU).expand(staged, staged.buffer), patches)


class Wrong(DevicePixels):
    """One bit of one byte differs."""

    def expand(self, staged: StagedPixels, buffer: Tensor) -> Tensor:
        patches = expand(staged, self._board)
        patches[-1, 1, 2, 3] ^= 1
        return patches


class Failing(DevicePixels):
    def expand(self, staged: StagedPixels, buffer: Tensor) -> Tensor:
        raise RuntimeError("no such instruction")


class Right(DevicePixels):
    def expand(self, staged: StagedPixels, buffer: Tensor) -> Tensor:
        return expand(staged, self._board)


@pytest.mark.parametrize(
    ("found", "said"),
    [(Wrong, "1 bytes differ from the CPU path"), (Failing, "failed: RuntimeError"), (Right, None)],
)
def test_one_wrong_bit_takes_the_kernels_out_of_service(
    found: type[DevicePixels], said: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_pixels_module, "DevicePixels", found)
    monkeypatch.setattr(device_pixels_module, "_why_not", lambda device: None)
    model = load_config("demo:k3-tiny")
    chosen = choose("auto", model, CPU)
    if said is None:
        assert isinstance(chosen, Right)
        assert isinstance(choose("cuda", model, CPU), Right)
        assert not caplog.records
    else:
        assert chosen is None
        assert [r.getMessage() for r in caplog.records] == [f"preprocessing is out of service on cpu: {said}"]
        with pytest.raises(SetupError, match=f"preprocess_device cuda: {said}"):
            choose("cuda", model, CPU)
    assert choose("cpu", model, CPU) is None


def test_names_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(SetupError, match="preprocess_device 'gpu': allowed are auto, cpu, cuda"):
        check_wanted("gpu", CPU)
    with pytest.raises(SetupError, match="preprocess_device cuda: the tower runs on cpu"):
        Engine.load("demo:k3-tiny", preprocess_device="cuda")
    for wanted in ("auto", "cpu"):
        assert not Engine.load("demo:k3-tiny", preprocess_device=wanted).defers_preprocessing


def test_every_number_of_a_frame_is_set() -> None:
    staged = pack([defer_image(picture("RGBA", 90, 60), config("kimi_k3", 10))], config("kimi_k3", 10)).staged
    assert staged is not None
    assert staged.parts(staged.buffer).frames.shape == (1, len(Fact))
    assert list(Fact) == list(range(len(Fact)))
