"""The test each backend must pass on the device before it serves: ragged random segments against the oracle."""

import logging
from itertools import accumulate

import torch

from encoder.attention.contract import AttentionBackend, Entry
from encoder.attention.reference import ReferenceAttention

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative L2 error of a segment against the float32 oracle on the same (already rounded) inputs.

Two roundings cannot be avoided, that of the probabilities and that of the output, each of relative size 2**-9 /
sqrt(3) = 1.1e-3 in bfloat16; every kernel measured on an H200 gave 1.9e-3 to 3.1e-3 there and 4e-4 or less in
float16. The limits are about four times that. For float32, kernels give 2e-7 to 2.5e-6 and TF32, which is refused,
about 5e-4. One foreign key among the 340 of the longest ragged segment adds 1/sqrt(340) = 5e-2.
"""

RAGGED = [4, 340, 96]  # a single 2x2 grid first; 340 is no multiple of any tile
EQUAL = [36, 36, 36]
LONG = [2052, 4, 616]  # what some backends run with another kernel; on a GPU only, it takes long on a CPU
LONGEST = [4500, 4, 616]  # what one backend runs in 8 bits


class UnfitError(Exception):
    """A backend that does not load, or is not exact enough; `error` is its relative error if there is one."""

    def __init__(self, reason: str, error: float | None) -> None:
        super().__init__(reason)
        self.error = error


def load_and_test(
    entry: Entry, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int
) -> tuple[AttentionBackend, float]:
    try:
        backend = entry.load(device, dtype, num_heads, head_dim)
        error = measure_error(backend, device=device, dtype=dtype, num_heads=num_heads, head_dim=head_dim)
    except Exception as cause:  # whatever a foreign library or a kernel compiler raises, the backend is unfit
        logger.debug("attention backend %s failed", entry.name, exc_info=True)
        raise UnfitError(f"failed to start: {type(cause).__name__}: {_first_line(cause)}", None) from cause
    tolerance = TOLERANCES[dtype] if entry.tolerance is None else entry.tolerance
    if not error <= tolerance:  # also true for NaN
        raise UnfitError(f"self-test: relative error {error:.2g}, allowed {tolerance:.0e} in {dtype}", error)
    return backend, error


def measure_error(
    backend: AttentionBackend, *, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int
) -> float:
    """Largest relative L2 error of a segment against the oracle, over ragged and equal segments of random numbers.

    q, k and v are strided views of one packed product, as the tower passes them.
    """
    generator = torch.Generator().manual_seed(0)
    batches = (RAGGED, EQUAL, LONG, LONGEST) if device.type == "cuda" else (RAGGED, EQUAL)
    oracle, errors = ReferenceAttention(), []
    for lengths in batches:
        # Twice unit variance in q gives scores of standard deviation 2: far from uniform, far from one-hot.
        packed = torch.randn(sum(lengths), 3, num_heads, head_dim, generator=generator, device="cpu")
        packed[:, 0] *= 2
        q, k, v = packed.to(device, dtype).unbind(1)
        cu_seqlens = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
        expected = oracle.plan(lengths, cu_seqlens)(q.float(), k.float(), v.float())
        got = backend.plan(lengths, cu_seqlens)(q, k, v)
        if got.shape != q.shape or got.dtype != dtype:
            raise ValueError(f"gave {tuple(got.shape)} in {got.dtype} for {tuple(q.shape)} in {dtype}")
        parts = zip(torch.split(got.float(), lengths), torch.split(expected, lengths), strict=True)
        errors += [((a - b).norm() / b.norm()) for a, b in parts]
    return float(torch.stack(errors).max())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")
