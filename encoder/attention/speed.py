"""How fast and how exact backends are beside each other, on mixes of segments such as callers send.

The times are of attention alone, with q, k and v in place. One product of a query and a key, or of a weight and a
value, counts 2 FLOP.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from encoder.attention.contract import Attend, AttentionBackend
from encoder.attention.reference import ReferenceAttention

MIXES: dict[str, list[int]] = {  # name -> patches of each segment
    "64 x 256": [256] * 64,
    "16 x 1024": [1024] * 16,
    "16 x 1656": [1656] * 16,
    "4 x 4096": [4096] * 4,
    "8 x 5476": [5476] * 8,
    "4 x 10764": [10764] * 4,
    "1 x 16384": [16384],
    "12 mixed": [256, 576, 1024, 1024, 2304, 4096, 4096, 1600, 900, 400, 144, 4784],
    "64 mixed, short": [4 * n for n in range(16, 80)],
}
CPU_MIXES: dict[str, list[int]] = {  # a hundredth of the work
    "16 x 64": [64] * 16,
    "4 x 256": [256] * 4,
    "1 x 1024": [1024],
    "6 mixed": [16, 36, 64, 100, 256, 576],
}
WARM_UP_CALLS = 3
LEAD_CYCLES = 5_000_000  # clock cycles that the device waits, for the host to queue the calls meanwhile


@dataclass(frozen=True)
class Speed:
    """Of one backend on one mix.

    Attributes:
        ms: median of a call.
        tflops: 10**12 floating-point operations a second.
        error: relative L2 error of the whole result against the float32 reference.
    """

    ms: float
    tflops: float
    error: float


def compare(
    backends: Mapping[str, AttentionBackend],
    lengths: Sequence[int],
    *,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int = 3,
    calls: int = 8,
) -> dict[str, Speed]:
    """Run one mix on every backend; they take turns, so that a device that warms up is fair to all.

    Args:
        lengths: patches of each segment.
        rounds, calls: turns of each backend, and calls in a turn, on a GPU; a CPU makes one call a turn.
    """
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(sum(lengths), 3, num_heads, head_dim, generator=generator, device=device)
    q, k, v = packed.to(dtype).unbind(1)
    cu_seqlens = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
    plans = {name: backend.plan(lengths, cu_seqlens) for name, backend in backends.items()}
    expected = ReferenceAttention().plan(lengths, cu_seqlens)(q.float(), k.float(), v.float())
    errors = {name: float((plan(q, k, v).float() - expected).norm() / expected.norm()) for name, plan in plans.items()}
    measure = _on_gpu if device.type == "cuda" else _on_cpu
    times = measure(plans, (q, k, v), rounds, calls)
    tflop = 4 * sum(n * n for n in lengths) * num_heads * head_dim / 1e12
    return {name: Speed(times[name], 1e3 * tflop / times[name], errors[name]) for name in plans}


def _on_gpu(plans: Mapping[str, Attend], qkv: tuple[Tensor, ...], rounds: int, calls: int) -> dict[str, float]:
    """Median milliseconds of device events, with the host far enough ahead that no launch is waited for."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    for plan in plans.values():
        for _ in range(WARM_UP_CALLS):
            plan(*qkv)
    for _ in range(rounds):
        for name, plan in plans.items():
            events = [_event_pair() for _ in range(calls)]
            torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]
            for before, after in events:
                before.record()
                plan(*qkv)
                after.record()
            torch.cuda.synchronize()
            times[name] += [before.elapsed_time(after) for before, after in events]
    return {name: statistics.median(values) for name, values in times.items()}


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return before, after


def _on_cpu(plans: Mapping[str, Attend], qkv: tuple[Tensor, ...], rounds: int, calls: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            begun = time.perf_counter()
            plan(*qkv)
            times[name].append(1e3 * (time.perf_counter() - begun))
    return {name: statistics.median(values) for name, values in times.items()}
