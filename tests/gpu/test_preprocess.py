"""Pictures prepared on a GPU: the bits of the CPU path at any size, in any company, without waiting for the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from encoder import Engine, defer_frames, defer_image, load_config, pack, preprocess_frames, preprocess_image
from encoder.device_pixels import DevicePixels, difference
from encoder.device_pixels_plain import expand
from tests.golden.goldens import GOLDEN, canvas, read_json, sha256
from tests.golden.goldens import config as golden_config
from tests.modes import FAMILIES, MODES, config, picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda", 0)
SPECS = ["demo:k3-tiny", "demo:k25-tiny"]
NUM_RANDOM, BATCH = 500, 10


def on_device(staged, model):
    return DevicePixels(model, GPU).expand(staged, staged.buffer.to(GPU)).cpu()


def check(segments, want, model):
    """One batch on the device against the CPU path, picture by picture so that a failure says which."""
    staged = pack(segments, model).staged
    assert staged is not None
    got = on_device(staged, model).split([segment.num_patches for segment in want])
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other.pixel_values), f"picture {i} of {len(want)}: {other.grid_thw}"


@pytest.mark.parametrize("spec", ["demo:k3", "demo:k25"])
def test_the_start_finds_no_difference(spec):
    model = load_config(spec)
    assert difference(DevicePixels(model, GPU), model, GPU) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_random_pictures_up_to_4k(family):
    random = np.random.default_rng(11)
    for first in range(0, NUM_RANDOM, BATCH):
        # Released limits in every other batch; smaller ones make every ratio.
        patches = None if first // BATCH % 2 else int(np.exp(random.uniform(0, np.log(16384))))
        model = config(family, patches)
        segments, want = [], []
        for seed in range(first, first + BATCH):
            width, height = (int(np.exp(random.uniform(0, np.log(side)))) for side in (3840, 2160))
            if seed % 5 == 0:
                width, height = int(random.integers(1, 3841)), int(random.integers(1, 2161))
            if seed % 3 == 0:
                width, height = height, width
            image = picture(MODES[seed % len(MODES)], width, height, seed)
            want.append(preprocess_image(image, model))
            segments.append(defer_image(image, model))
        check(segments, want, model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("mode", "width", "height"),
    [
        ("RGB", 4000, 3000),
        ("RGBA", 3000, 4000),
        ("CMYK", 4000, 3000),
        ("L", 8000, 8000),
        ("RGB", 900, 20_000),  # rows first
        ("RGB", 32_768, 3),
        ("LA", 3, 32_768),
        ("RGB", 7169, 1861),
    ],
)
def test_large_and_thin_pictures(family, mode, width, height):
    model = config(family)
    image = picture(mode, width, height)
    check([defer_image(image, model)], [preprocess_image(image, model)], model)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_beside_pictures_and_ready_patches(family):
    model = config(family)
    random = np.random.default_rng(5)
    segments, want = [], []
    for seed, (t, height, width) in enumerate([(4, 1080, 1920), (1, 2160, 3840), (3, 300, 200), (2, 1920, 1080)]):
        frames = random.integers(0, 256, (t, height, width, 3), dtype=np.uint8)
        image = picture("RGBA", 300 + seed, 200, seed)
        ready = preprocess_image(image, model)
        segments += [defer_frames(frames, model), ready, defer_image(image, model)]
        want += [preprocess_frames(frames, model), ready, ready]
    check(segments, want, model)


def test_many_small_pictures():
    model = config("kimi_k3")
    images = [picture(MODES[i % len(MODES)], 1 + i % 97, 1 + i % 61, i) for i in range(2000)]
    check([defer_image(i, model) for i in images], [preprocess_image(i, model) for i in images], model)


@pytest.mark.parametrize("model", ["k3", "k25"])
def test_goldens(model):
    from PIL import Image

    for name, expected in read_json("preprocess/images.json")["images"].items():
        with Image.open(GOLDEN / "preprocess" / "images" / name) as image:
            batch = pack([defer_image(image, golden_config(model))], golden_config(model))
        patches = on_device(batch.staged, golden_config(model))
        assert sha256(canvas(patches, batch.grids[0])) == expected[model]["canvas_sha256"], name


def mixed(model, seed=0):
    """Deferred and ready segments in turn, and the same all ready."""
    images = [picture(mode, 130 + 31 * i, 400 - 23 * i, seed + i) for i, mode in enumerate(MODES)]
    ready = [preprocess_image(image, model) for image in images]
    deferred = [defer_image(image, model) for image in images]
    return [d if i % 3 else r for i, (d, r) in enumerate(zip(deferred, ready, strict=True))], ready


@pytest.mark.parametrize("spec", SPECS)
def test_a_mixed_batch_gives_the_rows_of_a_prepared_one(spec):
    engine = Engine.load(spec, device=GPU)
    assert engine.defers_preprocessing
    deferred, ready = (pack(segments, engine.config) for segments in mixed(engine.config))
    assert torch.equal(engine.run_to_host(deferred), engine.run_to_host(ready))
    late = replace(engine, pixels=None)  # pictures that arrive although the device does not take them
    assert torch.equal(late.run_to_host(deferred), engine.run_to_host(ready))


def test_the_choice_of_the_cpu_is_kept():
    assert not Engine.load("demo:k3-tiny", device=GPU, preprocess_device="cpu").defers_preprocessing
    assert Engine.load("demo:k3-tiny", device=GPU, preprocess_device="cuda").defers_preprocessing


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device():
    engine = Engine.load("demo:k3-tiny", device=GPU)
    batch, other = (pack(mixed(engine.config, seed)[0], engine.config) for seed in (0, 100))
    engine.run(batch)
    try:
        torch.cuda.set_sync_debug_mode("error")
        engine.forward(batch)
        results = [engine.submit(each) for each in (batch, other)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, each in zip(results, (batch, other), strict=True):
        assert torch.equal(got(), engine.run_to_host(each))


def test_batches_in_flight_do_not_touch_each_other():
    engine = Engine.load("demo:k3-tiny", device=GPU)
    batches = [pack(mixed(engine.config, seed)[0], engine.config) for seed in (0, 50, 100)]
    want = [engine.run(pack(mixed(engine.config, seed)[1], engine.config)).cpu() for seed in (0, 50, 100)]
    for _ in range(5):
        torch.cuda._sleep(5_000_000)
        pending = [engine.submit(batch) for batch in batches]
        for result, expected in zip(pending, want, strict=True):
            assert torch.equal(result(), expected)


def test_the_plain_version_agrees_on_either_device():
    model = config("kimi_k3", 200)
    staged = pack([defer_image(picture(mode, 500, 900), model) for mode in MODES], model).staged
    board = model.media.transparent_background
    there = replace(staged, buffer=staged.buffer.to(GPU))
    assert torch.equal(expand(there, board).cpu(), expand(staged, board))
    assert torch.equal(on_device(staged, model), expand(staged, board))


def test_batches_packed_into_pinned_memory_hold_the_same_bytes():
    model = load_config("demo:k3")
    pictures = [picture("RGB", 100 + 30 * i, 80) for i in range(3)]
    deferred = [defer_image(each, model) for each in pictures]
    ready = [preprocess_image(each, model) for each in pictures]
    pinned, plain = pack(deferred, model, pin_memory=True), pack(deferred, model)
    assert pinned.staged.buffer.is_pinned()
    # Between the parts of a buffer lie bytes that nobody writes or reads.
    board = model.media.transparent_background
    assert torch.equal(expand(pinned.staged, board), expand(plain.staged, board))
    together = pack(ready, model, pin_memory=True)
    assert together.pixel_values.is_pinned()
    assert torch.equal(together.pixel_values, pack(ready, model).pixel_values)
