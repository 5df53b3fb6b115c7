"""Exported directories: complete, readable by safetensors itself, and never written over something."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder import CheckpointMismatch, Engine, SetupError, load_config
from encoder.demo import demo_tensor
from encoder.export import export_checkpoint


@pytest.mark.parametrize("spec", ["demo:k3-tiny", "demo:k25-tiny"])
def test_a_demo_model_loads_back_as_itself(spec: str, tmp_path: Path) -> None:
    directory = export_checkpoint(spec, tmp_path / "out")
    demo, exported = Engine.load(spec), Engine.load(directory)
    assert exported.weights_sha256 == demo.weights_sha256
    assert exported.fingerprint == demo.fingerprint
    assert exported.config.media == demo.config.media
    assert exported.config.is_demo  # a directory of demo weights goes on saying so
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]


def test_safetensors_itself_reads_the_file(tmp_path: Path) -> None:
    directory = export_checkpoint("demo:k3-tiny", tmp_path / "out")
    tensors = load_file(directory / "model.safetensors")
    assert len(tensors) == 6 + 6 * 3  # outside the blocks, and in each of three blocks
    name = "vision_tower.encoder.blocks.2.mlp.fc1.weight"
    assert torch.equal(tensors[name], demo_tensor("demo:k3-tiny", name, (128, 256)))


def test_a_checkpoint_of_mixed_dtypes_is_exported_as_stored(tmp_path: Path) -> None:
    source = export_checkpoint("demo:k25-tiny", tmp_path / "source")
    tensors = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["mm_projector.pre_norm.weight"] = tensors["mm_projector.pre_norm.weight"].float()
    save_file(tensors | {"language_model.x": torch.zeros(1)}, source / "model.safetensors")
    (source / "preprocessor_config.json").unlink()
    copy = export_checkpoint(source, tmp_path / "copy")
    written = load_file(copy / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(written[name].dtype == tensors[name].dtype for name in tensors)
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert load_config(copy).media == load_config("demo:k25-tiny").media


def test_progress_ends_at_the_size_of_the_weights(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    export_checkpoint("demo:k3-tiny", tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    size = sum(t.nbytes for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(SetupError, match="exists and is not an empty directory"):
            export_checkpoint("demo:k3-tiny", target)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        assert load_config(export_checkpoint("demo:k3-tiny", target)).family == "kimi_k3"


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint("demo:k3-tiny", tmp_path / "out", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot write .*file/out: "):
        export_checkpoint("demo:k3-tiny", tmp_path / "file" / "out")


def test_a_bad_source_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch):
        export_checkpoint("demo:k9", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_config_names_the_family_and_only_what_differs(tmp_path: Path) -> None:
    directory = export_checkpoint("demo:k25-tiny", tmp_path / "out")
    assert json.loads((directory / "config.json").read_text())["model_type"] == "kimi_k25"
    media = json.loads((directory / "preprocessor_config.json").read_text())["media_proc_cfg"]
    assert media["in_patch_limit"] == 16384
