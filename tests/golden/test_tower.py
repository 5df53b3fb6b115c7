"""Whole tower and projector against the reference's recorded stages; tolerances are those of README.md."""

import shutil
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from encoder import Engine, Segment
from encoder.attention.reference import ReferenceAttention
from encoder.model import Block
from encoder.segments import pack, split
from tests.golden import goldens, tiny

CASES = [pytest.param(model, name, id=f"{model}-{name}") for model in tiny.MODELS for name in tiny.case_names(model)]


def run(model: str, segments: list[Segment], dtype: torch.dtype, hooks: dict[str, Tensor] | None = None) -> Tensor:
    """The module on packed segments, with the oracle's attention; `hooks` collects the output of every submodule.

    Of a block that is the residual stream, which it changes in place: its result is the norm that follows it.
    """
    module, batch = tiny.tower(model, dtype), pack(segments, tiny.config(model))
    attend = ReferenceAttention().plan(batch.lengths, torch.tensor(batch.cu_seqlens, dtype=torch.int32))
    handles = []
    if hooks is not None:
        for name, submodule in module.named_modules():
            handles.append(submodule.register_forward_hook(record(hooks, name)))
    try:
        return module(batch.pixel_values, batch.grids, attend)
    finally:
        for handle in handles:
            handle.remove()


def record(hooks: dict[str, Tensor], name: str):
    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        hooks[name] = (inputs[0] if isinstance(module, Block) else output).clone()

    return hook


def largest_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return (got - want).abs().max().item()


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("model", "name"), CASES)
def test_every_stage_matches_in_float32(model: str, name: str) -> None:
    case, seen = tiny.case(model, name), {}
    projected = run(model, case.segments(), torch.float32, seen)
    blocks = range(tiny.config(model).vision.num_layers)
    assert largest_error(seen["vision_tower.patch_embed"], case.stages["fp32/patch_embed"]) <= 2e-5
    for i in blocks:
        assert largest_error(seen[f"vision_tower.encoder.blocks.{i}"], case.stages[f"fp32/block{i}"]) <= 5e-5
    assert largest_error(seen["vision_tower.encoder.final_layernorm"], case.stages["fp32/final_norm"]) <= 2e-5
    assert largest_error(projected, case.stages["fp32/projected"]) <= 2e-5


@pytest.mark.parametrize("model", tiny.MODELS)
def test_first_block_matches_step_by_step(model: str) -> None:
    case, seen = tiny.case(model, "mixed"), {}
    run(model, case.segments(), torch.float32, seen)
    block = "vision_tower.encoder.blocks.0"
    stages = {
        "vision_tower.patch_embed.proj": "patch_proj",
        f"{block}.norm0": "block0_norm0",
        f"{block}.wqkv": "block0_wqkv",
        f"{block}.wo": "block0_wo",
        f"{block}.norm1": "block0_norm1",
        f"{block}.mlp.fc0": "block0_mlp_fc0",
        f"{block}.mlp": "block0_mlp",
    }
    errors = {name: largest_error(seen[name], case.stages[f"fp32/{stage}"]) for name, stage in stages.items()}
    assert max(errors.values()) <= 2e-5, errors


@pytest.mark.parametrize(("model", "name"), CASES)
def test_one_segment_at_a_time_matches_the_packed_reference(model: str, name: str) -> None:
    case = tiny.case(model, name)
    alone = [run(model, [segment], torch.float32) for segment in case.segments()]
    assert largest_error(torch.cat(alone), case.stages["fp32/projected"]) <= 2e-5


@pytest.mark.parametrize(("model", "name"), CASES)
def test_bfloat16_stays_near_float32(model: str, name: str) -> None:
    case = tiny.case(model, name)
    projected = run(model, case.segments(), torch.bfloat16)
    want = case.stages["fp32/projected"]
    assert projected.dtype == torch.bfloat16
    assert relative_error(projected, want) <= 0.03
    batch = pack(case.segments(), tiny.config(model))
    for got_item, want_item in zip(split(projected, batch), split(want, batch), strict=True):
        assert relative_error(got_item, want_item) <= 0.05


@pytest.mark.parametrize("model", tiny.MODELS)
def test_float_pixels_give_the_same_as_bytes(model: str) -> None:
    case = tiny.case(model, "mixed")
    as_bytes = run(model, case.segments(torch.uint8), torch.float32)
    as_floats = run(model, case.segments(torch.float32), torch.float32)
    assert torch.equal(as_bytes, as_floats)


@pytest.mark.parametrize("model", tiny.MODELS)
def test_engine_on_a_checkpoint_directory(model: str, tmp_path: Path) -> None:
    """The same through everything a user calls: files on disk, the backend that `auto` takes, `encode`."""
    shutil.copy(goldens.GOLDEN / f"{model}_config.json", tmp_path / "config.json")
    shutil.copy(goldens.GOLDEN / f"{model}_weights.safetensors", tmp_path / "model.safetensors")
    engine = Engine.load(tmp_path)
    for name in tiny.case_names(model):
        case = tiny.case(model, name)
        assert largest_error(torch.cat(engine.encode(case.segments())), case.stages["fp32/projected"]) <= 2e-5


@pytest.mark.parametrize("model", tiny.MODELS)
def test_cases_cover_every_patch_once(model: str) -> None:
    """The recorded grids add up to the recorded rows, so no comparison above is about a part of a case only."""
    for name in tiny.case_names(model):
        case = tiny.case(model, name)
        *_, patches = accumulate(grid.num_patches for grid in case.grids)
        assert patches == len(case.pixel_u8) == len(case.stages["fp32/patch_embed"])
        assert sum(g.h * g.w // 4 for g in case.grids) == len(case.stages["fp32/projected"])
