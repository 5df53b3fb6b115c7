"""The whole tower on a GPU: recorded goldens on every backend, fused steps, transfers, graphs, memory."""

import logging
import shutil
from dataclasses import replace

import pytest
import torch

from encoder import DeviceOutOfMemory, Engine, Grid, Segment, load_config, pack, split
from encoder.attention import BACKENDS
from encoder.fusion import DIFFERENCES, TOLERANCES, choose_ops, names
from encoder.graphs import BUCKETS
from encoder.ops import PLAIN, Ops
from encoder.segments import normalize
from tests.golden import goldens, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles its kernels on first use
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda", 0)
SMALL = [Grid(1, 16, 16), Grid(4, 4, 6), Grid(1, 2, 2), Grid(1, 8, 12)]
engines: dict[tuple[str, str, str], Engine] = {}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Model name -> directory with the recorded weights."""
    directories = {}
    for model in tiny.MODELS:
        directories[model] = tmp_path_factory.mktemp(model)
        shutil.copy(goldens.GOLDEN / f"{model}_config.json", directories[model] / "config.json")
        shutil.copy(goldens.GOLDEN / f"{model}_weights.safetensors", directories[model] / "model.safetensors")
    return directories


@pytest.fixture(params=[entry for entry in BACKENDS if entry.tolerance is None], ids=lambda entry: entry.name)
def entry(request):
    return request.param


@pytest.fixture(params=tiny.MODELS)
def model(request):
    return request.param


def load(checkpoints, model, entry, dtype="bfloat16"):
    """Each once in a session: loading may compile."""
    head_dim = tiny.config(model).vision.head_dim
    if reason := entry.why_not(GPU, getattr(torch, dtype), head_dim):
        pytest.skip(f"{entry.name}: {reason}")
    key = (model, entry.name, dtype)
    if key not in engines:
        engines[key] = Engine.load(checkpoints[model], device=GPU, dtype=dtype, attention_backend=entry.name)
    return engines[key]


def plain_engine(spec="demo:k3-tiny", **options):
    return Engine.load(spec, device=GPU, attention_backend="sdpa", **options)


def random_batch(engine, grids, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(grid.num_patches, 3, 14, 14) for grid in grids]
    pixels = [torch.randint(0, 256, size, generator=generator, dtype=torch.uint8) for size in sizes]
    return pack([Segment(p, g) for p, g in zip(pixels, grids, strict=True)], engine.config)


def relative_error(got, want):
    want = want.float().cpu()
    return ((got.float().cpu() - want).norm() / want.norm()).item()


def test_goldens_in_bfloat16(checkpoints, model, entry):
    engine = load(checkpoints, model, entry)
    for name in tiny.case_names(model):
        case = tiny.case(model, name)
        batch = pack(case.segments(), engine.config)
        got, want = engine.run_to_host(batch), case.stages["fp32/projected"]
        assert relative_error(got, want) <= 0.03
        for got_item, want_item in zip(split(got, batch), split(want, batch), strict=True):
            assert relative_error(got_item, want_item) <= 0.05


def test_goldens_in_float32(checkpoints, model, entry):
    assert not torch.backends.cuda.matmul.allow_tf32
    engine = load(checkpoints, model, entry, "float32")
    for name in tiny.case_names(model):
        case = tiny.case(model, name)
        assert relative_error(torch.cat(engine.encode(case.segments())), case.stages["fp32/projected"]) <= 2e-5


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("step", DIFFERENCES)
@pytest.mark.parametrize("spec", ["demo:k3", "demo:k25", "demo:k3-tiny", "demo:k25-tiny"])
def test_fused_steps_are_plain_steps(spec, step, dtype):
    from encoder.fused import FUSED

    difference = DIFFERENCES[step](FUSED, load_config(spec), GPU, dtype)
    assert difference <= (0 if step == "patches" else TOLERANCES[dtype])


@pytest.mark.parametrize("spec", ["demo:k3", "demo:k25"])
def test_every_step_is_fused(spec):
    assert set(names(choose_ops(load_config(spec), GPU, torch.bfloat16)).values()) == {"fused"}


@pytest.mark.parametrize("spec", ["demo:k3-tiny", "demo:k25-tiny"])
def test_the_fused_tower_is_the_plain_tower(spec):
    engine = plain_engine(spec)
    batch = random_batch(engine, SMALL)
    fused = engine.run(batch)
    engine.model.ops = PLAIN
    assert relative_error(fused, engine.run(batch)) <= 0.02


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device(checkpoints, model, entry):
    if entry.name == "reference":
        pytest.skip("reference: not made for speed")
    engine = load(checkpoints, model, entry)
    batch = random_batch(engine, SMALL)
    other = random_batch(engine, [Grid(1, 6, 10), Grid(2, 16, 16)])  # sizes that no table is kept for yet
    engine.run(batch)
    try:
        torch.cuda.set_sync_debug_mode("error")
        engine.forward(batch)
        engine.forward(other)
        results = [engine.submit(batch) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(results[0](), results[1]())


def test_submitted_batches_keep_their_results():
    engine = plain_engine()
    batches = [random_batch(engine, grids, seed) for seed, grids in enumerate([SMALL, SMALL[::-1], SMALL[:1]])]
    want = [engine.run(batch).cpu() for batch in batches]
    for _ in range(5):
        torch.cuda._sleep(5_000_000)
        pending = [engine.submit(batch) for batch in batches]
        for result, expected in zip(pending, want, strict=True):
            got = result()
            assert got.is_pinned()
            assert torch.equal(got, expected)


def test_a_batch_too_large_leaves_the_engine_usable():
    engine = plain_engine()
    small, large = random_batch(engine, SMALL), random_batch(engine, [Grid(1, 256, 256)] * 2)
    want = engine.run(small)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(GPU).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + 128 * 2**20) / total, GPU)
        with pytest.raises(DeviceOutOfMemory):
            engine.run_to_host(large)
        held = torch.cuda.memory_allocated(GPU)
        assert torch.equal(engine.run(small), want)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    assert torch.equal(engine.run(small), want)
    assert held <= torch.cuda.memory_allocated(GPU) + 16 * 2**20


def test_normalised_levels_are_those_of_a_cpu():
    config = load_config("demo:k3-tiny")
    uneven = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
    media = replace(config.media, **uneven)
    levels = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).expand(256, 3, 14, 14).contiguous()
    for each in (config, replace(config, media=media)):
        want = normalize(levels, each)
        assert torch.equal(normalize(levels.to(GPU), each).cpu(), want)
        for ops in (PLAIN, choose_ops(each, GPU, torch.bfloat16)):
            for dtype in TOLERANCES:
                got = ops.patches(levels.to(GPU), each, dtype).cpu()
                assert torch.equal(got[:, : 3 * 14 * 14], want.flatten(1).to(dtype))
                assert not got[:, 3 * 14 * 14 :].any()


@pytest.mark.parametrize("spec", ["demo:k3-tiny", "demo:k25-tiny"])
def test_graphs_give_what_the_eager_blocks_give(spec, caplog):
    with caplog.at_level(logging.WARNING):
        engine = plain_engine(spec, cuda_graphs=True)
        engine.warm_up()
    assert engine.graphs.buckets == list(BUCKETS), caplog.text
    eager = replace(engine, graphs=None)
    mixes = [
        [Grid(1, 32, 64)],  # fills the largest graph
        SMALL,
        [Grid(1, 2, 2)],  # a small image after large ones
        [Grid(1, 16, 16)],
        [Grid(1, 2, 2)] * 3,
        [Grid(4, 10, 12), Grid(1, 18, 24)],
    ]
    for seed, grids in enumerate(mixes):
        batch = random_batch(engine, grids, seed)
        assert engine.graphs.fits(batch.lengths)
        got, want = engine.run_to_host(batch), eager.run_to_host(batch)
        for got_item, want_item in zip(split(got, batch), split(want, batch), strict=True):
            assert relative_error(got_item, want_item) <= 0.02
    assert not engine.graphs.fits([BUCKETS[-1] + 4])
    assert not engine.graphs.fits([4] * BUCKETS[0])


@pytest.mark.parametrize(("backend", "wanted"), [("auto", True), ("triton", True), ("sdpa", False)])
def test_a_named_backend_is_not_replaced_by_a_graph(backend, wanted):
    engine = Engine.load("demo:k3-tiny", device=GPU, attention_backend=backend)
    assert (engine.graphs is not None) == wanted
    assert backend == "auto" or engine.attention_for([256]) == backend


def test_a_graph_that_differs_stays_out_of_service(monkeypatch, caplog):
    engine = plain_engine(cuda_graphs=True)
    monkeypatch.setattr("encoder.graphs.TOLERANCE", -1.0)
    engine.warm_up()
    assert engine.graphs.buckets == []
    assert "differs by" in caplog.text
    batch = random_batch(engine, SMALL)
    assert torch.equal(engine.run(batch), replace(engine, graphs=None).run(batch))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_graph_does_not_wait_for_the_device():
    engine = plain_engine(cuda_graphs=True)
    engine.warm_up()
    batch = random_batch(engine, SMALL)
    engine.run(batch)
    try:
        torch.cuda.set_sync_debug_mode("error")
        engine.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_that_does_not_compile_is_replaced(monkeypatch, caplog):
    def failing(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("encoder.fused.FUSED", replace(PLAIN, rotate=failing))
    ops = choose_ops(load_config("demo:k3-tiny"), GPU, torch.bfloat16)
    assert ops == Ops()
    assert "fused rotate is out of service on cuda:0: failed: RuntimeError" in caplog.text
