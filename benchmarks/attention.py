"""Attention backends on one GPU: throughput and error on ragged batches, as a table and as JSON.

    python benchmarks/attention.py [--backends triton,sdpa] [--out benchmarks/results/attention.json]

Each time is the median of device events over rounds in which the backends take turns, with the host far enough ahead
that no launch is waited for. One product of a query and a key, or of a weight and a value, counts 2 FLOP.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from encoder.attention import BACKENDS, Attend
from encoder.attention.reference import ReferenceAttention

MODELS = {"kimi_k3": (12, 128), "kimi_k25": (16, 72)}  # heads, head size
SEGMENTS = {
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
ROUNDS, CALLS = 3, 8
TORCH_VARLEN = "torch varlen"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backends", help="comma-separated names (default: all that can run, but reference)")
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention.json")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py needs a CUDA device: PyTorch sees none")
    names = options.backends.split(",") if options.backends else None
    rows = [row for model in MODELS for row in benchmark(model, names)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")
    print(f"\nwritten to {options.out}")


def benchmark(model: str, names: list[str] | None) -> list[dict[str, Any]]:
    num_heads, head_dim = MODELS[model]
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    backends = {}
    print(f"\n{model}: {num_heads} heads of {head_dim}, bfloat16; TFLOP/s (relative error)")
    for entry in BACKENDS:
        reason = entry.why_not(device, dtype, head_dim)
        if reason:
            print(f"  {entry.name}: {reason}")
        elif entry.name in names if names else entry.name != "reference":
            backends[entry.name] = entry.load(device, dtype, num_heads, head_dim)
    columns = [*backends, TORCH_VARLEN]
    print(f"  {'segments':16s}" + "".join(f"{name:>22s}" for name in columns))
    rows = []
    for title, lengths in SEGMENTS.items():
        q, k, v = random_qkv(lengths, num_heads, head_dim, dtype, device)
        cu_seqlens = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
        plans = {name: backend.plan(lengths, cu_seqlens) for name, backend in backends.items()}
        plans[TORCH_VARLEN] = torch_varlen(lengths, cu_seqlens)
        expected = ReferenceAttention().plan(lengths, cu_seqlens)(q.float(), k.float(), v.float())
        tflop = 4 * sum(n * n for n in lengths) * num_heads * head_dim / 1e12
        times = measure(plans, (q, k, v))
        results = {
            name: {
                "ms": round(times[name], 4),
                "tflops": round(1e3 * tflop / times[name], 1),
                "relative_error": round(float((plan(q, k, v).float() - expected).norm() / expected.norm()), 7),
            }
            for name, plan in plans.items()
        }
        print(f"  {title:16s}" + "".join(f"{r['tflops']:12.0f} ({r['relative_error']:.1e})" for r in results.values()))
        rows.append({"model": model, "segments": title, "tflop": round(tflop, 4), "results": results})
    return rows


def random_qkv(
    lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(sum(lengths), 3, num_heads, head_dim, generator=generator, device=device)
    return packed.to(dtype).unbind(1)


def torch_varlen(lengths: list[int], cu_seqlens: Tensor) -> Attend:
    """FlashAttention-2 as PyTorch ships it: the yardstick for `triton`."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(lengths)
    return lambda q, k, v: varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


def measure(plans: dict[str, Attend], qkv: tuple[Tensor, ...]) -> dict[str, float]:
    """Median milliseconds of a layer for each plan."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    for plan in plans.values():
        for _ in range(3):
            plan(*qkv)
    for _ in range(ROUNDS):
        for name, plan in plans.items():
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
            torch.cuda._sleep(5_000_000)  # clock cycles: the host queues all calls meanwhile
            for before, after in events:
                before.record()
                plan(*qkv)
                after.record()
            torch.cuda.synchronize()
            times[name] += [before.elapsed_time(after) for before, after in events]
    return {name: statistics.median(values) for name, values in times.items()}


def environment() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for distribution in ("triton", "flashinfer-python", "nvidia-cudnn-frontend", "flash-attn-3", "flash-attn-4"):
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[distribution] = None
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": versions,
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "command": " ".join(["python", *sys.argv]),
    }


if __name__ == "__main__":
    main()
