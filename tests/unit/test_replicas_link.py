"""A batch that could not be handed over leaves its place to the next."""

import errno
from typing import Any

import pytest
import torch

from app.replicas.facts import TowerFacts
from app.replicas.link import BATCHES_IN_FLIGHT, Link
from app.replicas.messages import Work
from app.replicas.towers import Towers
from app.settings import Settings
from encoder import Grid, PackedBatch

BATCH = PackedBatch(torch.zeros(4, 3, 14, 14, dtype=torch.uint8), [Grid(1, 2, 2)], [1])


class Process:
    """The service's end of a worker that does not answer."""

    pid = 1

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.sent: list[Any] = []

    def send(self, message: Any, descriptor: int | None = None) -> None:
        if self.error is not None and isinstance(message, Work):
            raise self.error
        self.sent.append(message)


@pytest.mark.timeout(30)
def test_what_could_not_be_sent_takes_no_place() -> None:
    process = Process()
    link = Link(process, 8, torch.float32, lambda backend: None)  # type: ignore[arg-type]
    process.error = OSError(errno.ENOBUFS, "no buffer space")
    for _ in range(BATCHES_IN_FLIGHT + 1):
        with pytest.raises(OSError, match="no buffer space"):
            link.submit(BATCH)
    assert link.outstanding_patches == 0
    process.error = None
    link.submit(BATCH)
    assert link.outstanding_patches == 4
    assert sum(isinstance(message, Work) for message in process.sent) == 1


def facts(fits: int | None, defers: bool) -> TowerFacts:
    return TowerFacts(
        pid=1,
        device="cuda:0",
        device_name="a GPU",
        dtype="bfloat16",
        fingerprint="f",
        weights_sha256="w",
        attention="sdpa",
        patches_that_fit=fits,
        defers_preprocessing=defers,
    )


class Loaded:
    def __init__(self, facts: TowerFacts) -> None:
        self._facts = facts

    def start(self) -> None: ...

    def wait_until_loaded(self) -> TowerFacts:
        return self._facts


@pytest.mark.parametrize(
    ("towers", "expected"),
    [
        ([(70_000, True), (30_000, True)], (30_000, True)),
        ([(70_000, True), (70_000, False)], (70_000, False)),
        ([(None, False), (None, False)], (None, False)),
    ],
)
def test_the_service_goes_by_what_all_towers_can_do(
    towers: list[tuple[int | None, bool]], expected: tuple[int | None, bool]
) -> None:
    made = Towers(
        Settings(device="cpu", data_parallel_size=2), torch.device("cpu"), torch.float32, width=8, stall_s=None
    )
    made._workers = [Loaded(facts(*each)) for each in towers]  # type: ignore[assignment,misc]
    found = made.start()
    assert (found.patches_that_fit, found.defers_preprocessing) == expected
