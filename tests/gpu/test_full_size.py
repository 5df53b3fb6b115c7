"""The full-size K3 demo model in bfloat16: every backend against float32 with exact attention, and the largest
segments there are."""

import copy
import logging
from dataclasses import replace

import pytest
import torch

from benchmarks.tower import MIXED, make_batch
from encoder import Engine, Grid, attention, largest_segment, split
from encoder.attention import BACKENDS
from encoder.attention.reference import ReferenceAttention
from encoder.capacity import patches_that_fit
from encoder.ops import PLAIN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def engine():
    return replace(Engine.load("demo:k3", device=GPU), graphs=None)


def on(engine: Engine, name: str) -> Engine:
    vision = engine.config.vision
    where = {"device": GPU, "dtype": engine.dtype, "head_dim": vision.head_dim}
    resolution = attention.resolve(name, family=engine.config.family, **where)
    return replace(engine, attention=attention.start(resolution, num_heads=vision.num_heads, **where))


def item_errors(got, want):
    return [float((g.float() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]


@pytest.fixture(scope="module")
def exact(engine):
    """Rows of each item of the mixed batch in float32, and the errors of plain PyTorch in bfloat16."""
    batch = make_batch(MIXED)
    with torch.inference_mode():
        wide = copy.deepcopy(engine.model).float()
        wide.ops = PLAIN
        attend = ReferenceAttention().plan(batch.lengths, torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=GPU))
        want = split(wide(batch.pixel_values, batch.grids, attend), batch)
    del wide
    fused, engine.model.ops = engine.model.ops, PLAIN
    plain = item_errors(split(on(engine, "sdpa").run(batch), batch), want)
    engine.model.ops = fused
    return batch, want, plain


@pytest.mark.parametrize(
    "entry", [entry for entry in BACKENDS if entry.tolerance is None], ids=lambda entry: entry.name
)
def test_a_mixed_batch_is_at_most_twice_as_far_off_as_plain_pytorch(engine, exact, entry):
    if reason := entry.why_not(GPU, engine.dtype, engine.config.vision.head_dim):
        pytest.skip(f"{entry.name}: {reason}")
    batch, want, plain = exact
    errors = item_errors(split(on(engine, entry.name).run(batch), batch), want)
    assert max(found / allowed for found, allowed in zip(errors, plain, strict=True)) <= 2
    assert max(errors) <= 0.02


@pytest.mark.parametrize("grid", [Grid(1, 256, 256), Grid(4, 124, 144)], ids=str)
def test_the_largest_segments_run_beside_others(engine, grid):
    assert grid.num_patches in (65536, largest_segment(engine.config.media))
    batch = make_batch([tuple(grid), (1, 16, 16), (4, 26, 46)])
    together = split(engine.run(batch), batch)
    alone = engine.run(make_batch([tuple(grid)]))
    assert torch.isfinite(alone).all()
    # The same seed gives the same pixels to the first segment of both.
    assert float((together[0].float() - alone.float()).norm() / alone.float().norm()) <= 0.02


def test_the_budget_follows_from_free_memory(engine):
    fits = patches_that_fit(engine)
    free, _ = torch.cuda.mem_get_info(GPU)
    assert largest_segment(engine.config.media) < fits < free // 10_000


def test_a_backend_that_gives_nan_in_service_is_replaced(engine, caplog, monkeypatch):
    auto = on(engine, "auto")
    first, batch = auto.attention.name, make_batch(MIXED)
    want = auto.run(batch).clone()
    plan = auto.attention.backend.plan

    def spoilt(lengths, cu_seqlens):
        attend = plan(lengths, cu_seqlens)
        return lambda q, k, v: attend(q, k, v).fill_(float("nan"))

    monkeypatch.setattr(auto.attention.backend, "plan", spoilt)
    with caplog.at_level(logging.ERROR):
        got = auto.submit(batch)()
    assert auto.attention.name != first
    assert auto.attention.out_of_service == {first: "gave values that are not finite"}
    assert float((got.float() - want.cpu().float()).norm() / want.cpu().float().norm()) <= 0.02
