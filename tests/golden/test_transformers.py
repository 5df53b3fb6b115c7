"""The same weights through the transformers library's own port of the Kimi-K2.5 tower and projector."""

import pytest
import torch

from encoder.attention.sdpa import SdpaAttention
from encoder.segments import normalize, pack
from tests.golden import tiny

transformers_k25 = pytest.importorskip("benchmarks.transformers_k25", reason="the extra `dev` brings transformers")


@pytest.fixture(scope="module")
def other() -> torch.nn.Module:
    return transformers_k25.TransformersK25(tiny.config("k25_tiny"), tiny.weights("k25_tiny"))


@pytest.mark.parametrize("name", tiny.case_names("k25_tiny"))
def test_transformers_agrees(name: str, other: torch.nn.Module) -> None:
    config = tiny.config("k25_tiny")
    batch = pack(tiny.case("k25_tiny", name).segments(), config)
    attend = SdpaAttention().plan(batch.lengths, torch.tensor(batch.cu_seqlens, dtype=torch.int32))
    ours = tiny.tower("k25_tiny", torch.float32)(batch.pixel_values, batch.grids, attend)
    theirs = other(normalize(batch.pixel_values, config), batch.grids)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= 1e-5
