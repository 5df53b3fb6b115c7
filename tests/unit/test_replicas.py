"""Towers in processes of their own: the same numbers as in this one, and what happens when a process dies, fails or
hangs. All processes are real.
"""

import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.replicas import WorkerTower
from app.tower import Pending, TowerLost
from encoder import DeviceFailed, Engine, SetupError, pack
from encoder.preprocess import defer_image
from tests.faulty_towers import BUG, DEVICE_FAILS, ERRORS, EXITS, MODEL, WAITS, batch_of, spec

LONG = 60.0  # nothing here takes so long

OpenTower = Callable[..., WorkerTower]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The engine of this process, on as many threads as the workers have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Engine.load(MODEL)
    torch.set_num_threads(threads)


class Restarts:
    """The reasons that workers were replaced for, as they come."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._came = threading.Semaphore(0)

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._came.release()

    def wait(self) -> str:
        assert self._came.acquire(timeout=LONG)
        return self.reasons[-1]


@pytest.fixture
def restarts() -> Restarts:
    return Restarts()


@pytest.fixture
def open_tower(engine: Engine, restarts: Restarts) -> Iterator[OpenTower]:
    """`open_tower(no_load=..., stall_s=...)`: a loaded tower whose worker may be told to fail."""
    towers: list[WorkerTower] = []

    def build(stall_s: float | None = None, **rest: Any) -> WorkerTower:
        width = engine.config.vision.text_hidden_size
        towers.append(WorkerTower(spec(**rest), width, stall_s=stall_s, on_restart=restarts))
        towers[-1].start()
        towers[-1].wait_until_loaded()
        return towers[-1]

    yield build
    for tower in towers:
        tower.close()


@pytest.fixture(scope="module")
def tower(engine: Engine) -> Iterator[WorkerTower]:
    """One for all tests that do not end it."""
    tower = WorkerTower(spec(), engine.config.vision.text_hidden_size)
    tower.start()
    tower.wait_until_loaded()
    yield tower
    status = tower.status
    tower.close()
    assert (status.restarts, status.outstanding_patches) == (0, 0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_of(tower: WorkerTower) -> int:
    pid = tower.status.pid
    assert pid is not None
    return pid


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def works(tower: WorkerTower, engine: Engine) -> bool:
    """Whether it gives what this process's engine gives, waiting for its next process if there is none."""
    batch = batch_of(7, engine, seed=3)
    assert tower.wait_until_up(LONG)
    return torch.equal(tower.submit(batch)(), engine.run(batch))


def stop(tower: WorkerTower) -> int:
    """Stop the worker where it is, and wait until it stands."""
    pid = pid_of(tower)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    return pid


def test_a_worker_gives_the_bits_that_the_engine_of_this_process_gives(tower: WorkerTower, engine: Engine) -> None:
    facts = tower.facts
    assert facts is not None
    assert (facts.fingerprint, facts.weights_sha256) == (engine.fingerprint, engine.weights_sha256)
    assert facts.attention == engine.attention.name
    for number, rows in ((1, 4), (5, 2), (40, 6), (3, 60), (0, 2), (200, 4)):
        batch = batch_of(number, engine, seed=number, rows=rows)
        pending = tower.submit(batch)
        assert torch.equal(pending(), engine.run(batch)), f"{number} segments"
        assert getattr(pending, "attention", None) == engine.attention.name


def test_a_normalised_batch_too(tower: WorkerTower, engine: Engine) -> None:
    batch = batch_of(3, engine)
    batch = replace(batch, pixel_values=batch.pixel_values.float() / 255)
    assert torch.equal(tower.submit(batch)(), engine.run(batch))


def test_a_batch_of_pictures_that_are_not_patches_yet_too(tower: WorkerTower, engine: Engine) -> None:
    noise = np.random.default_rng(1)
    pictures = [noise.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in ((30, 50), (200, 333))]
    batch = pack([defer_image(picture, engine.config) for picture in pictures], engine.config)
    assert batch.staged is not None
    assert torch.equal(tower.submit(batch)(), engine.run(batch))


def test_results_keep_their_values_while_others_are_computed(tower: WorkerTower, engine: Engine) -> None:
    batches = [batch_of(4, engine, seed=seed) for seed in range(12)]
    pendings: list[Pending] = []
    kept = []
    for batch in batches:  # a third is let in once the first is answered, whether or not anybody has looked
        pendings.append(tower.submit(batch))
        if len(pendings) == 3:
            kept.append(pendings.pop(0)())
    kept += [pending() for pending in pendings]
    for batch, rows in zip(batches, kept, strict=True):
        assert torch.equal(rows, engine.run(batch))


def test_a_result_that_nobody_fetches_takes_no_memory_for_ever(tower: WorkerTower, engine: Engine) -> None:
    for seed in range(12):
        tower.submit(batch_of(2, engine, seed=seed))
    assert works(tower, engine)


@pytest.mark.parametrize("number", sorted(ERRORS))
def test_errors_of_the_engine_come_back_as_they_are(tower: WorkerTower, engine: Engine, number: int) -> None:
    expected = ERRORS[number]
    good, bad = tower.submit(batch_of(2, engine)), tower.submit(batch_of(number, engine))
    with pytest.raises(type(expected)) as caught:
        bad()
    assert str(caught.value) == str(expected)
    assert "faulty_towers.py" in "".join(caught.value.__notes__)
    assert torch.equal(good(), engine.run(batch_of(2, engine)))
    assert works(tower, engine)


def test_a_bug_in_the_worker_comes_back_with_its_traceback(tower: WorkerTower, engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="UnpicklableError in the worker") as caught:
        tower.submit(batch_of(BUG, engine))()
    assert "faulty_towers.py" in str(caught.value)
    assert works(tower, engine)


@pytest.mark.parametrize(("number", "reason"), [(DEVICE_FAILS, "device_failed"), (EXITS, "crashed")])
def test_a_worker_that_cannot_go_on_is_replaced(
    open_tower: OpenTower, engine: Engine, restarts: Restarts, number: int, reason: str
) -> None:
    tower = open_tower()
    pid = pid_of(tower)
    pending = tower.submit(batch_of(number, engine))
    with pytest.raises(TowerLost):
        pending()
    assert restarts.wait() == reason
    assert works(tower, engine)
    status = tower.status
    assert (status.state, status.restarts, status.outstanding_patches) == ("up", 1, 0)
    assert status.pid != pid
    assert not is_alive(pid)


def test_a_killed_worker_loses_all_it_had_at_once(open_tower: OpenTower, engine: Engine, restarts: Restarts) -> None:
    tower = open_tower()
    pid = stop(tower)
    batches = [batch_of(3, engine), batch_of(4, engine)]
    pendings = [tower.submit(batch) for batch in batches]
    assert tower.status.outstanding_patches == sum(sum(batch.lengths) for batch in batches)
    os.kill(pid, signal.SIGKILL)
    for pending in pendings:
        with pytest.raises(TowerLost):
            pending()
    with pytest.raises(TowerLost):  # at once: whoever has other towers does not wait for this one
        tower.submit(batches[0])
    assert restarts.wait() == "crashed"
    assert works(tower, engine)


def test_a_third_batch_waits_and_is_lost_with_the_others(open_tower: OpenTower, engine: Engine) -> None:
    tower = open_tower()
    pid = stop(tower)
    for seed in range(2):
        tower.submit(batch_of(2, engine, seed=seed))
    lost: list[BaseException] = []

    def submit_third() -> None:
        try:
            tower.submit(batch_of(2, engine))
        except TowerLost as error:
            lost.append(error)

    third = threading.Thread(target=submit_third)
    third.start()
    third.join(0.2)
    assert third.is_alive()
    os.kill(pid, signal.SIGKILL)
    third.join(LONG)
    assert len(lost) == 1


def test_a_worker_that_hangs_is_killed(open_tower: OpenTower, engine: Engine, restarts: Restarts) -> None:
    tower = open_tower(stall_s=0.3)
    assert works(tower, engine)
    pid = stop(tower)
    with pytest.raises(TowerLost):
        tower.submit(batch_of(3, engine))()
    assert restarts.wait() == "stalled"
    assert not is_alive(pid)
    assert works(tower, engine)


def test_an_idle_worker_is_never_taken_for_hanging(open_tower: OpenTower, engine: Engine, restarts: Restarts) -> None:
    tower = open_tower(stall_s=0.05)
    threading.Event().wait(0.3)  # six times the limit
    assert restarts.reasons == []
    assert tower.is_up


def test_a_worker_that_does_not_load_says_why(engine: Engine, tmp_path: Path) -> None:
    marker = tmp_path / "gone"
    marker.touch()
    tower = WorkerTower(spec(no_load=str(marker)), engine.config.vision.text_hidden_size)
    tower.start()
    with pytest.raises(SetupError, match="the checkpoint is gone"):
        tower.wait_until_loaded()
    tower.close()
    assert (tower.status.state, tower.status.pid, tower.status.restarts) == ("stopped", None, 0)


def test_a_worker_on_a_gpu_that_is_not_there_says_so(engine: Engine) -> None:
    tower = WorkerTower(spec(device="cuda:63"), engine.config.vision.text_hidden_size)
    tower.start()
    with pytest.raises(SetupError, match="cuda:63 is not there"):
        tower.wait_until_loaded()
    tower.close()


def test_a_worker_that_dies_while_it_loads_is_an_error_of_the_device(engine: Engine) -> None:
    tower = WorkerTower(spec(threads="many"), engine.config.vision.text_hidden_size)  # a bug, for PyTorch
    tower.start()
    with pytest.raises(DeviceFailed, match="ended before it was loaded"):
        tower.wait_until_loaded()
    tower.close()


def test_a_successor_is_tried_until_it_loads(
    open_tower: OpenTower, engine: Engine, restarts: Restarts, tmp_path: Path
) -> None:
    marker = tmp_path / "gone"
    tower = open_tower(no_load=str(marker))
    marker.touch()
    os.kill(pid_of(tower), signal.SIGKILL)
    assert [restarts.wait(), restarts.wait()] == ["crashed", "failed"]
    assert not tower.is_up
    assert tower.status.state == "restarting"
    with pytest.raises(TowerLost):
        tower.submit(batch_of(2, engine))
    marker.unlink()
    assert works(tower, engine)


def test_a_successor_with_other_weights_is_not_let_in(
    open_tower: OpenTower, engine: Engine, restarts: Restarts, tmp_path: Path
) -> None:
    """Embeddings are kept under the first one's fingerprint."""
    marker = tmp_path / "other"
    tower = open_tower(other_weights=str(marker))
    marker.touch()
    os.kill(pid_of(tower), signal.SIGKILL)
    assert [restarts.wait(), restarts.wait()] == ["crashed", "failed"]
    assert not tower.is_up
    marker.unlink()
    assert works(tower, engine)


def test_a_closed_tower_finishes_what_it_has_and_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    gc.collect()
    descriptors, threads = num_descriptors(), threading.active_count()
    marker = tmp_path / "go"
    tower = WorkerTower(spec(go=str(marker)), engine.config.vision.text_hidden_size)
    tower.start()
    tower.wait_until_loaded()
    pid = pid_of(tower)
    batches = [batch_of(WAITS, engine), batch_of(100, engine)]
    pendings = [tower.submit(batch) for batch in batches]
    process = tower._process
    assert process is not None
    tower.finish()
    with pytest.raises(subprocess.TimeoutExpired):
        process._popen.wait(0.5)
    marker.touch()
    tower.close()
    assert process.exit_code == 0
    for batch, pending in zip(batches, pendings, strict=True):
        assert torch.equal(pending(), engine.run(batch))
    assert not is_alive(pid)
    assert not tower.wait_until_up(LONG)
    with pytest.raises(TowerLost):
        tower.submit(batches[0])
    del pending, pendings, process, tower
    gc.collect()
    assert (num_descriptors(), threading.active_count()) == (descriptors, threads)


def test_a_tower_that_hangs_can_be_closed(
    open_tower: OpenTower, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.replicas.tower.STOP_TIMEOUT_S", 0.2)
    tower = open_tower()
    pid = stop(tower)
    pending = tower.submit(batch_of(2, engine))
    tower.close()
    assert not is_alive(pid)
    with pytest.raises(TowerLost):
        pending()
