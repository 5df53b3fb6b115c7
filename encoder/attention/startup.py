"""Put a backend into service: the first candidate that loads and passes its self-test."""

import logging
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Attention:
    """The backend in service.

    Attributes:
        configured: the name as given.
        name: of the backend selected.
        refused: why each other one was not chosen (`auto`), with those that failed their self-test.
        self_test: largest relative L2 error of a segment, for every backend that was tested; NaN if it gave one.
        backend: the one selected.
        for_equal: `sdpa`, where `auto` prefers it for short segments of equal length.
    """

    configured: str
    name: str
    refused: dict[str, str]
    self_test: dict[str, float]
    backend: AttentionBackend
    for_equal: AttentionBackend | None = None

    def choose(self, lengths: Sequence[int]) -> str:
        """Name of the backend that a batch of these lengths runs on."""
        return "sdpa" if self._prefers_sdpa(lengths) else self.name

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        """Prepare one batch, see `AttentionBackend.plan`."""
        chosen = self.for_equal if self.for_equal and self._prefers_sdpa(lengths) else self.backend
        return chosen.plan(lengths, cu_seqlens)

    def _prefers_sdpa(self, lengths: Sequence[int]) -> bool:
        return self.for_equal is not None and len(set(lengths)) == 1 and lengths[0] <= EQUAL_UP_TO_PATCHES


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
    refused, errors = dict(resolution.refused), {}

    def load(entry: Entry) -> AttentionBackend | None:
        try:
            backend, errors[entry.name] = load_and_test(entry, device, dtype, num_heads, head_dim)
        except UnfitError as failure:
            refused[entry.name] = str(failure)
            if failure.error is not None:
                errors[entry.name] = failure.error
            logger.warning("attention backend %s is out of service: %s", entry.name, failure)
            return None
        return backend

    for i, entry in enumerate(resolution.candidates):
        if backend := load(entry):
            later = {other.name: other for other in resolution.candidates[i + 1 :]}
            notes = dict.fromkeys(later, f"would run, but {entry.name} comes before it")
            for_equal = load(later["sdpa"]) if "sdpa" in later and _is_hopper(device) else None
            if for_equal:
                notes["sdpa"] = f"takes short segments of equal length, {entry.name} everything else"
            return Attention(resolution.configured, entry.name, notes | refused, errors, backend, for_equal)
    tried = {entry.name: refused[entry.name] for entry in resolution.candidates}
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
