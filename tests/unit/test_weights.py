"""Strict loading: what is read, what is refused, and what the model then holds."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from encoder import CheckpointMismatch, load_config
from encoder.export import export_checkpoint
from encoder.weights import load_model

CPU = torch.device("cpu")
SPEC = "demo:k25-tiny"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return export_checkpoint(SPEC, tmp_path / "checkpoint")


def rewrite(checkpoint: Path, change: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) drop tensors of model.safetensors."""
    path = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()} | change
    path.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def shard(checkpoint: Path, *, forget: str | None = None) -> None:
    """Cut model.safetensors in two shards beside one of a language model that is not there."""
    path = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    files = {"vision_tower.": "model-2-of-3.safetensors", "mm_projector.": "model-3-of-3.safetensors"}
    weight_map = {"language_model.embed.weight": "model-1-of-3.safetensors"}
    for prefix, file in files.items():
        part = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix) and name != forget}
        save_file(part, checkpoint / file)
        weight_map |= {name: file for name in tensors if name.startswith(prefix)}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_holds_the_stored_values_in_the_wanted_dtype(checkpoint: Path, dtype: torch.dtype) -> None:
    model, _ = load_model(load_config(checkpoint), device=CPU, dtype=dtype)
    stored = load_file(checkpoint / "model.safetensors")
    state = model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name].to(dtype)) for name in stored)
    held = [*model.parameters(), *model.buffers()]
    assert {tensor.dtype for tensor in held} == {dtype}
    assert {tensor.device.type for tensor in held} == {"cpu"}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_weights_outlive_their_file(checkpoint: Path) -> None:
    """bfloat16 stays bfloat16 here, so a view of the mapped file would show the overwritten bytes."""
    model, _ = load_model(load_config(checkpoint), device=CPU, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = checkpoint / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_hash_is_over_sorted_names_dtypes_shapes_and_bytes(checkpoint: Path) -> None:
    _, weights_sha256 = load_model(load_config(checkpoint), device=CPU, dtype=torch.float32)
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(checkpoint / "model.safetensors").items()):
        shape = ",".join(str(side) for side in tensor.shape)
        digest.update(f'["{name}","bfloat16",[{shape}]]\n'.encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    assert weights_sha256 == digest.hexdigest()


def test_one_error_lists_everything_that_does_not_fit(checkpoint: Path) -> None:
    rewrite(
        checkpoint,
        {
            "vision_tower.encoder.blocks.0.wo.bias": None,
            "mm_projector.proj.2.weight": None,
            "vision_tower.encoder.blocks.7.wo.bias": torch.zeros(3),
            "mm_projector.post_norm.weight": torch.zeros(4),
            "vision_tower.patch_embed.proj.bias": torch.zeros(7),
            "vision_tower.encoder.final_layernorm.bias": torch.zeros(144, dtype=torch.int8),
            "language_model.lm_head.weight": torch.zeros(1),
        },
    )
    with pytest.raises(CheckpointMismatch) as error:
        load_model(load_config(checkpoint), device=CPU, dtype=torch.float32)
    assert str(error.value).splitlines() == [
        f"{checkpoint} does not fit its config.json:",
        "  mm_projector.proj.2.weight is missing",
        "  vision_tower.encoder.blocks.0.wo.bias is missing",
        "  mm_projector.post_norm.weight is left over: the configuration has no such tensor",
        "  vision_tower.encoder.blocks.7.wo.bias is left over: the configuration has no such tensor",
        "  vision_tower.encoder.final_layernorm.bias is stored as I8, readable: BF16, F16, F32",
        "  vision_tower.patch_embed.proj.bias has shape [7], expected [144]",
    ]


def test_shards_of_the_language_model_need_not_exist(checkpoint: Path) -> None:
    whole, whole_sha256 = load_model(load_config(checkpoint), device=CPU, dtype=torch.float32)
    shard(checkpoint)
    cut, cut_sha256 = load_model(load_config(checkpoint), device=CPU, dtype=torch.float32)
    assert cut_sha256 == whole_sha256
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in cut.state_dict().items())


def test_a_missing_shard_of_ours_is_named_once(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model-3-of-3.safetensors").unlink()
    with pytest.raises(CheckpointMismatch) as error:
        load_model(load_config(checkpoint), device=CPU, dtype=torch.float32)
    _, problem = str(error.value).splitlines()
    assert problem.startswith(
        "  model-3-of-3.safetensors is missing, it holds 6 of the tensors: mm_projector.pre_norm.bias"
    )


def test_a_tensor_that_is_not_where_the_index_says_is_named(checkpoint: Path) -> None:
    shard(checkpoint, forget="mm_projector.proj.0.bias")
    with pytest.raises(CheckpointMismatch, match=r"proj\.0\.bias is not in model-3-of-3\.safetensors, where the index"):
        load_model(load_config(checkpoint), device=CPU, dtype=torch.float32)


def test_a_single_truncated_shard_is_named(checkpoint: Path) -> None:
    shard(checkpoint)
    path = checkpoint / "model-3-of-3.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointMismatch, match=r"model-3-of-3\.safetensors is not a readable safetensors file"):
        load_model(load_config(checkpoint), device=CPU, dtype=torch.float32)
