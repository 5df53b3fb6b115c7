"""Put a backend into service: the first candidate that loads and passes its self-test."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.attention.contract import Attend, AttentionBackend, Entry
from encoder.attention.selection import Resolution, listed
from encoder.attention.selftest import UnfitError, load_and_test
from encoder.attention.table import BACKENDS
from encoder.errors import NoUsableBackend

logger = logging.getLogger(__name__)

EQUAL_UP_TO_PATCHES = 1024
"""Segments of one length up to this go to `sdpa` on Hopper if `auto` chooses: they are one batched call.

H200, bfloat16, TFLOP/s of sdpa and of the best other: 425 and 310 on 64 x 256 patches, 614 and 533 on 16 x 1024, 606
and 637 on 16 x 1656 (12 heads of 128); 243 and 185, 350 and 303, 338 and 334 (16 heads of 72). A single segment of 256
patches takes it 10 us, `flashinfer` 12; one of 1024, 19 and 22.
"""


class Attention:
    """The backends of one engine: the one in service, and those that would take its place. One thread at a time.

    Attributes:
        configured: the name as given.
        name: of the backend in service.
        refused: why each other one is not (`auto`), with those that failed: their self-test, or later in service.
        self_test: largest relative L2 error of a segment, for every backend that was tested; NaN if it gave one.
        for_equal: `sdpa`, where `auto` prefers it for short segments of equal length.
        out_of_service: those that served and failed -> why.
    """

    def __init__(self, bench: "Bench", first: str, for_equal: AttentionBackend | None) -> None:
        self.configured = bench.resolution.configured
        self.name = first
        self.self_test = bench.errors
        self.for_equal = for_equal
        self.out_of_service: dict[str, str] = {}
        self._bench = bench

    @property
    def refused(self) -> dict[str, str]:
        waiting = dict.fromkeys(self._bench.waiting(self.name), f"would run, but {self.name} comes before it")
        if self.for_equal:
            waiting["sdpa"] = f"takes short segments of equal length, {self.name} everything else"
        return waiting | self._bench.refused

    @property
    def backend(self) -> AttentionBackend:
        return self._bench.loaded[self.name]

    def choose(self, lengths: Sequence[int]) -> str:
        """Name of the backend that a batch of these lengths runs on."""
        return "sdpa" if self._prefers_sdpa(lengths) else self.name

    def rules(self) -> list[tuple[str, str]]:
        """(which batches, on which backend), the first that fits counts."""
        if self.for_equal:
            equal = f"segments of one length, up to {EQUAL_UP_TO_PATCHES} patches"
            return [(equal, "sdpa"), ("all others", self.name)]
        return [("all", self.name)]

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor, name: str | None = None) -> Attend:
        """Prepare one batch, see `AttentionBackend.plan`; on the backend of that name, if one of `others` is given."""
        if name is not None:
            return self._bench.loaded[name].plan(lengths, cu_seqlens)
        chosen = self.for_equal if self.for_equal and self._prefers_sdpa(lengths) else self.backend
        return chosen.plan(lengths, cu_seqlens)

    def others(self, failed: str) -> Iterator[str]:
        """Names of the backends that may run what `failed` could not, best first; each is loaded and tested when its
        turn comes. None where a backend was configured by name."""
        for entry in self._bench.resolution.candidates:
            if entry.name != failed and self._bench.load(entry):
                yield entry.name

    def take_out(self, failed: str, reason: str, successor: str) -> None:
        """`failed` serves no more, `successor` does."""
        logger.error("attention backend %s is out of service: %s; %s takes its place", failed, reason, successor)
        self.out_of_service[failed] = self._bench.refused[failed] = reason
        if failed == "sdpa":
            self.for_equal = None
        if failed == self.name:
            self.name = successor

    def _prefers_sdpa(self, lengths: Sequence[int]) -> bool:
        return self.for_equal is not None and len(set(lengths)) == 1 and lengths[0] <= EQUAL_UP_TO_PATCHES


class Bench:
    """Backends that may run here, each loaded and tested once, when it is first asked for."""

    def __init__(self, resolution: Resolution, test: Callable[[Entry], tuple[AttentionBackend, float]]) -> None:
        self.resolution = resolution
        self.refused = dict(resolution.refused)
        self.errors: dict[str, float] = {}
        self.loaded: dict[str, AttentionBackend] = {}
        self._test = test

    def load(self, entry: Entry) -> AttentionBackend | None:
        """None, logged, if it does not load, is not exact enough, or was refused before."""
        if entry.name in self.refused:
            return None
        if entry.name not in self.loaded:
            try:
                self.loaded[entry.name], self.errors[entry.name] = self._test(entry)
            except UnfitError as failure:
                self.refused[entry.name] = str(failure)
                if failure.error is not None:
                    self.errors[entry.name] = failure.error
                logger.warning("attention backend %s is out of service: %s", entry.name, failure)
                return None
        return self.loaded[entry.name]

    def waiting(self, name: str) -> list[str]:
        """Candidates besides `name` that nothing speaks against so far."""
        names = [entry.name for entry in self.resolution.candidates]
        return [other for other in names if other != name and other not in self.refused]


@dataclass(frozen=True)
class Report:
    """One row of the overview of backends; `error` is NaN or missing where the test could not give one."""

    name: str
    summary: str
    why_not: str | None
    error: float | None


def start(
    resolution: Resolution, *, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> Attention:
    """Take the first candidate that loads and passes its self-test.

    Raises:
        NoUsableBackend: the named backend failed, or every candidate did.
    """
    bench = Bench(resolution, lambda entry: load_and_test(entry, device, dtype, num_heads, head_dim))
    for i, entry in enumerate(resolution.candidates):
        if bench.load(entry):
            sdpa = next((later for later in resolution.candidates[i + 1 :] if later.name == "sdpa"), None)
            return Attention(bench, entry.name, bench.load(sdpa) if sdpa and _is_hopper(device) else None)
    tried = {entry.name: bench.refused[entry.name] for entry in resolution.candidates}
    raise NoUsableBackend(f"No attention backend passed its start-up test on {device}:\n{listed(tried)}")


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def describe(
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    backends: tuple[Entry, ...] = BACKENDS,
) -> list[Report]:
    """Try every backend of the table on the device: usable or not, and how exact."""
    reports = []
    for entry in backends:
        why_not, error = entry.why_not(device, dtype, head_dim), None
        if why_not is None:
            try:
                _, error = load_and_test(entry, device, dtype, num_heads, head_dim)
            except UnfitError as failure:
                why_not, error = str(failure), failure.error
        reports.append(Report(entry.name, entry.summary, why_not, error))
    return reports
