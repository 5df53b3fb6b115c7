"""Attention backends on one GPU: throughput and error on ragged batches, as a table and as JSON.

    python -m benchmarks.attention [--backends triton,sdpa] [--out benchmarks/results/attention.json]

`moonvit-serve backends --bench` is the same for one model on the machine at hand; here PyTorch's own varlen kernel is
beside them, for both families' head sizes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import RESULTS, describe
from encoder.attention import BACKENDS, Attend, AttentionBackend
from encoder.attention.speed import MIXES, compare

MODELS = {"kimi_k3": (12, 128), "kimi_k25": (16, 72)}  # heads, head size
TORCH_VARLEN = "torch varlen"
PACKAGES = ("torch", "triton", "flashinfer-python", "nvidia-cudnn-frontend", "flash-attn-3", "flash-attn-4")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backends", help="comma-separated names (default: all that can run, but reference)")
    arguments.add_argument("--out", type=Path, default=RESULTS / "attention.json")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py needs a CUDA device: PyTorch sees none")
    names = options.backends.split(",") if options.backends else None
    rows = [row for model in MODELS for row in benchmark(model, names)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {**describe(*PACKAGES), "cuda": torch.version.cuda, "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {options.out}")


def benchmark(model: str, names: list[str] | None) -> list[dict[str, Any]]:
    num_heads, head_dim = MODELS[model]
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    backends: dict[str, AttentionBackend] = {}
    print(f"\n{model}: {num_heads} heads of {head_dim}, bfloat16; TFLOP/s (relative error)")
    for entry in BACKENDS:
        reason = entry.why_not(device, dtype, head_dim)
        if reason:
            print(f"  {entry.name}: {reason}")
        elif entry.name in names if names else entry.name != "reference":
            backends[entry.name] = entry.load(device, dtype, num_heads, head_dim)
    backends[TORCH_VARLEN] = TorchVarlen()
    print(f"  {'segments':16s}" + "".join(f"{name:>22s}" for name in backends))
    rows = []
    for title, lengths in MIXES.items():
        speeds = compare(backends, lengths, num_heads=num_heads, head_dim=head_dim, device=device, dtype=dtype)
        print(f"  {title:16s}" + "".join(f"{each.tflops:12.0f} ({each.error:.1e})" for each in speeds.values()))
        results = {
            name: {"ms": round(each.ms, 4), "tflops": round(each.tflops, 1), "relative_error": round(each.error, 7)}
            for name, each in speeds.items()
        }
        tflop = 4 * sum(n * n for n in lengths) * num_heads * head_dim / 1e12
        rows.append({"model": model, "segments": title, "tflop": round(tflop, 4), "results": results})
    return rows


class TorchVarlen:
    """FlashAttention-2 as PyTorch ships it: the yardstick for `triton`."""

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        from torch.nn.attention.varlen import varlen_attn

        longest = max(lengths)
        return lambda q, k, v: varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


if __name__ == "__main__":
    main()
