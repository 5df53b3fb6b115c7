"""Write the generated tables of README.md: the options, and the measured numbers of `benchmarks/results/*.json`.

With `--check` nothing is written; the exit code is 1 if something would be.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from app.commands.flags import options
from scripts.generated import ROOT, put, table, update

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def render(text: str) -> str:
    """README.md with every generated table as it should be."""
    return put(put(text, "options", options_table()), "numbers", numbers_tables(RESULTS))


def options_table() -> str:
    rows = [
        (f"`{o.flag}`" + (f" {o.value}" if o.value else ""), f"`{o.variable}`", o.default or "", o.description)
        for o in options()
    ]
    return table(("flag", "variable", "default", "meaning"), rows)


def numbers_tables(results: Path) -> str:
    """What each results file that is there has to say, the tower first."""
    parts = [
        part
        for name, tables in NUMBERS.items()
        if (results / f"{name}.json").exists()
        for part in tables(json.loads((results / f"{name}.json").read_text(encoding="utf-8")))
    ]
    return "\n\n".join(parts) or "None measured yet: `make bench`."


def tower_cpu(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Tower and projector of `{report['model']}` in float32 on a CPU, beside the transformers library's own port "
        f"of the model with the same weights, inputs and threads. {machine(report)}"
    )
    rows = [
        (
            name,
            result["patches"],
            f"{result['median_s']['ours']:.2f} s",
            f"{result['median_s']['transformers']:.2f} s",
            f"{result['ratio']:.2f}",
            f"{result['max_abs_difference']:.1e}",
        )
        for name, result in report["batches"].items()
    ]
    yield table(("batch", "patches", "here", "transformers", "times faster", "largest difference"), rows)


def load_memory(report: dict[str, Any]) -> Iterator[str]:
    yield f"Memory while full-size weights are loaded, above what the process held before. {machine(report)}"
    rows = [
        (
            name,
            f"{result['weights_mib']:.0f} MiB",
            f"{result['peak_mib']:.0f} MiB",
            f"{result['peak_per_weights']:.2f}",
            f"{result['load_s']:.1f} s",
        )
        for name, result in report["loads"].items()
    ]
    yield table(("load", "weights", "peak", "peak / weights", "time"), rows)


def tower(report: dict[str, Any]) -> Iterator[str]:
    results = report["workloads"].values()
    ratio = statistics.geometric_mean(result["peer_ms"] / result["median_ms"][result["best"]] for result in results)
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    yield (
        f"Tower and projector of `{report['model']}` in bfloat16 on one {report['gpu']} ({versions}), median "
        "milliseconds of a call whose pixels lie on the device. *Plain* runs the steps between the matrix products in "
        "PyTorch, *fused* in this project's kernels, in turns in the same run; *graph* is fused, as a CUDA graph. "
        "SGLang 0.5.23 is its own K3 tower with its defaults, measured on the same kind of machine on another day; "
        f"geometric mean of the ratios {ratio:.2f}. The product is a square bfloat16 one of 8192, which sustained "
        f"{report['product_tflops']['before']:.0f} TFLOP/s for 3 s in the same run."
    )
    rows = [
        (
            name,
            result["patches"],
            result["attention"],
            *(f"{result['median_ms'][title]:.2f}" if title in result["median_ms"] else "" for title in TOWER_VERSIONS),
            f"{result['tflops']:.0f}",
            f"{100 * result['share_of_product']:.0f} %",
            f"{result['peer_ms']:.1f}",
            f"{result['peer_per_ours']:.2f}",
        )
        for name, result in report["workloads"].items()
    ]
    columns = (
        "workload",
        "patches",
        "attention",
        *TOWER_VERSIONS,
        "TFLOP/s",
        "of the product",
        "SGLang",
        "SGLang / here",
    )
    yield table(columns, rows)


def attention(report: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    yield (
        f"Attention alone in bfloat16, TFLOP/s, on one {report['gpu']} ({versions}). The columns are the backends that "
        "ran there, and PyTorch's own varlen kernel."
    )
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["results"]))
    rows = [
        (
            row["model"],
            row["segments"],
            *(f"{row['results'][name]['tflops']:.0f}" if name in row["results"] else "" for name in names),
        )
        for row in report["rows"]
    ]
    yield table(("model", "segments x patches", *names), rows)


TOWER_VERSIONS = ("plain", "fused", "graph")

NUMBERS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "tower": tower,
    "tower_cpu": tower_cpu,
    "load_memory": load_memory,
    "attention": attention,
}


def machine(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{report['processor']}, {report['cores']} cores, {report['torch_threads']} threads, {versions}."


if __name__ == "__main__":
    sys.exit(update(README, render, __doc__))
