"""How many towers, and where; and that all of them have the same weights."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.commands.flags import options
from app.device import resolve_device
from app.replicas import Towers
from app.replicas.devices import cpu_threads, tower_devices
from app.service import Service
from app.settings import InvalidSettings, Settings, load_settings
from encoder import SetupError, load_config
from tests.faulty_towers import MODEL, spec

WIDTH = load_config(MODEL).vision.text_hidden_size


def chosen(gpus: int, monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[str]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    made = load_settings(settings)
    return [str(device) for device in tower_devices(made, resolve_device(made.device))]


@pytest.mark.parametrize(
    ("gpus", "device", "asked", "expected"),
    [
        (0, "auto", "1", ["cpu"]),
        (0, "auto", "auto", ["cpu"]),
        (0, "cpu", "3", ["cpu", "cpu", "cpu"]),
        (8, "cpu", "auto", ["cpu"]),
        (1, "auto", "auto", ["cuda"]),
        (1, "cuda:0", "auto", ["cuda:0"]),
        (4, "auto", "1", ["cuda"]),
        (4, "auto", "2", ["cuda:0", "cuda:1"]),
        (4, "cuda", "auto", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, "cuda:2", "1", ["cuda:2"]),
    ],
)
def test_towers_are_placed(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, asked: str, expected: list[str]
) -> None:
    assert chosen(gpus, monkeypatch, device=device, data_parallel_size=asked) == expected


@pytest.mark.parametrize(
    ("gpus", "device", "asked", "message"),
    [
        (0, "cuda", "2", "0 GPUs visible to PyTorch"),
        (1, "auto", "2", "--data-parallel-size 2: 1 GPU visible"),
        (4, "cuda", "8", r"--data-parallel-size 8: 4 GPUs \(cuda:0 to cuda:3\) visible"),
        (4, "cuda:1", "2", "cuda:1: that is one GPU; use --device cuda"),
    ],
)
def test_more_than_is_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, asked: str, message: str
) -> None:
    with pytest.raises(InvalidSettings, match=message):
        chosen(gpus, monkeypatch, device=device, data_parallel_size=asked)


@pytest.mark.parametrize("asked", ["0", "65", "-1", "many", "1.5", ""])
def test_other_numbers_are_refused(asked: str) -> None:
    with pytest.raises(InvalidSettings, match="--data-parallel-size"):
        load_settings({"data_parallel_size": asked})


def test_the_option_is_offered() -> None:
    assert next(options(["data_parallel_size"])).default == "1"


def test_towers_on_the_cpu_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10)
    assert [cpu_threads(number) for number in (1, 3, 10, 64)] == [10, 3, 1, 1]


def test_the_command_that_asks_for_too_many_exits_2() -> None:
    command = [
        sys.executable,
        "-m",
        "app.cli",
        "serve",
        "--port",
        "0",
        "--device",
        "cuda",
        "--data-parallel-size",
        "64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--data-parallel-size 64: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_backend_is_found_before_any_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.replicas.tower.Process", lambda: pytest.fail("a process was started"))
    with pytest.raises(SetupError, match="sdpb"):
        Service(Settings(device="cpu", data_parallel_size=2, attention_backend="sdpb"))


@pytest.fixture
def two_towers(monkeypatch: pytest.MonkeyPatch) -> Towers:
    settings = Settings(model=MODEL, device="cpu", data_parallel_size=2, log_level="warning")
    return Towers(settings, torch.device("cpu"), torch.float32, WIDTH, stall_s=None)


def test_towers_with_different_weights_do_not_start(two_towers: Towers, tmp_path: Path) -> None:
    marker = tmp_path / "other"
    marker.touch()
    two_towers._workers[1].spec = spec(other_weights=str(marker))
    with pytest.raises(SetupError, match=r"different weights: cpu [0-9a-f]{12}, cpu [0-9a-f]{12}"):
        two_towers.start()
    two_towers.close()
    assert [status.state for status in two_towers.statuses] == ["stopped", "stopped"]


def test_one_tower_that_does_not_load_is_enough_not_to_start(two_towers: Towers) -> None:
    two_towers._workers[1].spec = replace(two_towers._workers[1].spec, model="/no/such/directory")
    assert [status.state for status in two_towers.statuses] == ["starting", "starting"]
    with pytest.raises(SetupError, match="/no/such/directory"):
        two_towers.start()
    two_towers.close()
    assert [status.pid for status in two_towers.statuses] == [None, None]
