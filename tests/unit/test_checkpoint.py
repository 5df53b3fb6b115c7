"""Configuration files and the search for tensors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from encoder import CheckpointMismatch, SetupError, load_config
from encoder.checkpoint import find_tensors
from encoder.config import RMS_NORM_EPS


def tensors(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(2) for name in names}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def test_reads_both_files(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "kimi_k25", "vision_config": {"vt_num_hidden_layers": 5}})
    write_json(tmp_path / "preprocessor_config.json", {"media_proc_cfg": {"in_patch_limit": 1234}})
    config = load_config(tmp_path)
    assert (config.family, config.vision.num_layers, config.media.in_patch_limit) == ("kimi_k25", 5, 1234)
    assert (config.source, config.is_demo) == (str(tmp_path), False)


def test_rms_norm_epsilon_is_the_references_unless_given() -> None:
    assert load_config("demo:k3").vision.norm_eps == RMS_NORM_EPS == 2**-23
    assert load_config("demo:k3", rms_norm_eps=2**-7).vision.norm_eps == 2**-7


@pytest.mark.parametrize(("spec", "eps"), [("demo:k25", 1e-6), ("demo:k3", 0.0), ("demo:k3", float("nan"))])
def test_an_epsilon_without_meaning_is_refused(spec: str, eps: float) -> None:
    with pytest.raises(SetupError, match="epsilon"):
        load_config(spec, rms_norm_eps=eps)


def test_what_is_neither_directory_nor_demo_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"no-such-model is neither a checkpoint directory nor a demo model"):
        load_config(tmp_path / "no-such-model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        (b"{", "config.json is not JSON"),
        (b"\xff\xfe", "config.json is not JSON"),
        (b"[1]", "config.json must hold a JSON object, got list"),
    ],
)
def test_a_bad_config_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointMismatch, match=message):
        load_config(tmp_path)


def test_a_bad_preprocessor_file_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "kimi_k3"})
    (tmp_path / "preprocessor_config.json").write_text("no")
    with pytest.raises(CheckpointMismatch, match=r"preprocessor_config\.json is not JSON"):
        load_config(tmp_path)


def test_without_an_index_the_file_is_model_safetensors(tmp_path: Path) -> None:
    save_file(tensors("vision_tower.a", "language_model.b"), tmp_path / "model.safetensors")
    assert find_tensors(tmp_path) == {"vision_tower.a": tmp_path / "model.safetensors"}


def test_with_an_index_only_shards_of_ours_are_looked_at(tmp_path: Path) -> None:
    weight_map = {
        "language_model.a": "1.safetensors",
        "vision_tower.b": "2.safetensors",
        "mm_projector.c": "2.safetensors",
    }
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    save_file(tensors("vision_tower.b", "mm_projector.c"), tmp_path / "2.safetensors")
    assert set(find_tensors(tmp_path)) == {"vision_tower.b", "mm_projector.c"}


def test_tensors_the_index_forgot_are_seen(tmp_path: Path) -> None:
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"vision_tower.a": "1.safetensors"}})
    save_file(tensors("vision_tower.a", "vision_tower.b"), tmp_path / "1.safetensors")
    assert set(find_tensors(tmp_path)) == {"vision_tower.a", "vision_tower.b"}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"vision_tower.a": "../elsewhere.safetensors"}}, "which is not a file name"),
        ({"weight_map": {"vision_tower.a": 3}}, "which is not a file name"),
    ],
)
def test_an_unsound_index_is_refused(tmp_path: Path, index: object, message: str) -> None:
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointMismatch, match=message):
        find_tensors(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", (10**9).to_bytes(8, "little") + b"{}"])
def test_a_broken_weight_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors is not a readable safetensors file"):
        find_tensors(tmp_path)


def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"vision_tower.a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors is not a readable safetensors file"):
        find_tensors(tmp_path)


def test_no_weight_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors is missing"):
        find_tensors(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path: Path) -> None:
    """Else which of the two is read would be a matter of file names."""
    weight_map = {"vision_tower.a": "1.safetensors", "vision_tower.b": "2.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    save_file(tensors("vision_tower.a"), tmp_path / "1.safetensors")
    save_file(tensors("vision_tower.a", "vision_tower.b"), tmp_path / "2.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"2\.safetensors holds vision_tower\.a too; the index places it in 1"):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    ("name", "read"), [("preprocessor_config.json", load_config), ("model.safetensors.index.json", find_tensors)]
)
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    write_json(tmp_path / "config.json", {"model_type": "kimi_k3"})
    save_file(tensors("vision_tower.a"), tmp_path / "model.safetensors")
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointMismatch, match=f"{name} is missing"):
        read(tmp_path)


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / "config.json", {"model_type": "kimi_k3"})
    assert load_config("~/model").source == str(tmp_path / "model")


@pytest.mark.parametrize("content", ["[" * 200_000, '{"model_type": ' * 100_000])
def test_json_that_is_too_deep_is_not_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointMismatch, match=r"config\.json is not JSON"):
        load_config(tmp_path)


def test_a_path_of_any_length_is_answered() -> None:
    with pytest.raises(CheckpointMismatch, match="cannot be read"):
        load_config("x" * 5000)


@pytest.mark.parametrize("eps", ["small", float("nan"), 0, 1])
def test_an_epsilon_that_is_none_is_refused(eps: float) -> None:
    with pytest.raises(SetupError, match="must be between 0 and 1"):
        load_config("demo:k3-tiny", rms_norm_eps=eps)
