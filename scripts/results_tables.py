"""What each file of `benchmarks/results` has to say, as a paragraph and a table in Markdown."""

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.generated import table


def numbers_tables(results: Path, chosen: Callable[[str], bool] = lambda name: True) -> str:
    """What each chosen results file that is there has to say, the tower first; files not named here come last."""
    there = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}
    ordered = {name: there[name] for name in [*NUMBERS, *there] if name in there and chosen(name)}
    parts = [part for name, report in ordered.items() for part in NUMBERS.get(name, own_table)(report)]
    return "\n\n".join(parts) or "None measured yet: `make bench`."


def own_table(report: dict[str, Any]) -> Iterator[str]:
    """A report that brings its sentence and its table along: `what`, and `table` with `columns` and `rows`. Nothing
    without them."""
    if "what" not in report or "table" not in report:
        return
    what = report["what"].rstrip(".")
    yield f"{what[0].upper()}{what[1:]}. {machine(report)}"
    yield table(report["table"]["columns"], report["table"]["rows"])


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


def service(report: dict[str, Any]) -> Iterator[str]:
    load, lone, alone = report["load"], report["lone"], report["tower_alone"]
    picture, latency, batches = report["picture"], load["latency_ms"], load["batches"]
    side_px = picture["side_px"]
    yield (
        f"The running service with `{report['model']}` in {report['dtype']}: {load['clients']} clients over loopback, "
        f"each sending the next of {picture['different']} different JPEGs of {side_px} x {side_px} pixels "
        f"({picture['mean_bytes'] / 1e3:.0f} kB) when it has the last one's safetensors answer "
        f"({load['answer_bytes'] / 1e6:.1f} MB); nothing is cached, measured for {load['seconds']:.0f} s. "
        f"{machine(report)}"
    )
    parts = lone["parts_ms"]
    rows = [
        ("pictures/s, patches/s", f"{load['pictures_per_s']:.1f}, {load['patches_per_s']:,.0f}"),
        ("answers", f"{load['answer_mb_per_s']:,.0f} MB/s"),
        ("latency p50, p95, p99", f"{latency['p50']:.0f}, {latency['p95']:.0f}, {latency['p99']:.0f} ms"),
        ("failed requests", f"{sum(load['failures'].values())} beside {load['pictures']} good ones"),
        ("tower alone on the same batches", f"{alone['patches_per_s']:,.0f} patches/s"),
        ("service / tower alone", f"{report['share_of_tower']:.2f}"),
        ("batches", f"{batches['mean_segments']} pictures, device busy {batches['device_busy_share']:.0%}"),
        ("mean ms of a stage", ", ".join(f"{name} {ms:.1f}" for name, ms in load["stages_ms"].items())),
        (
            "processor",
            f"{load['service_cores']['process']:.1f} cores, event loop {load['service_cores']['event_loop']:.2f}",
        ),
        ("one client alone, p50", f"{lone['p50_ms']:.1f} ms"),
        ("its forward pass, its decoding", f"{parts['forward']:.1f} ms, {parts['decode']:.1f} ms"),
        ("decoder alone", f"{report['decode']['pictures_per_s']:.0f} pictures/s"),
        *(
            (f"loopback alone, {name}", f"{found['answer_mb_per_s']:,.0f} MB/s")
            for name, found in report["loopback"].items()
        ),
    ]
    yield table(("what", "measured"), rows)


def fp8(report: dict[str, Any]) -> Iterator[str]:
    if "table" in report:
        yield from own_table(report)
        if "errors" in report:
            yield fp8_errors(report["errors"])
        return
    yield (
        f"The tower of `{report['model']}` with parts of it in 8 bits, median milliseconds of a call; the versions "
        f"take turns. {machine(report)}"
    )
    results = report["workloads"]
    titles = list(dict.fromkeys(title for result in results.values() for title in result["median_ms"]))
    rows = [
        (
            name,
            result["patches"],
            *(f"{result['median_ms'][title]:.2f}" if title in result["median_ms"] else "" for title in titles),
            f"{max(result['bf16_over'].values()):.2f}",
        )
        for name, result in results.items()
    ]
    yield table(("workload", "patches", *titles, "times faster"), rows)


def fp8_errors(errors: dict[str, dict[str, Any]]) -> str:
    def percent(name: str) -> str:
        found = errors[name]
        blocks = found["after_blocks"]
        first, last, result = (f"{100 * share:.1f} %" for share in (blocks[0], blocks[-1], found["result"]))
        return f"{first} after the first block, {last} after the last, {result} in the embeddings"

    return (
        "What that costs, as relative L2 error of the mixed batch against float32 with exact attention: products in 8 "
        f"bits are off by {percent('products')}; bfloat16 by {percent('bf16')}. Made-up weights; measure yours."
    )


def preprocess(report: dict[str, Any]) -> Iterator[str]:
    if "table" in report:
        yield from own_table(report)
        return
    yield (
        "Decoded pictures to patches on the device, median milliseconds: resized on one core of the CPU and copied, or "
        f"copied and resized on the GPU, to the same bits. {machine(report)}"
    )
    rows = [
        (
            name,
            f"{found['ms']['cpu']:.2f}",
            f"{found['ms']['gpu']:.2f}",
            f"{found['ms']['cpu'] / found['ms']['gpu']:.1f}",
            f"{found['bytes']['cpu'] / 1e6:.1f}, {found['bytes']['gpu'] / 1e6:.1f}",
        )
        for name, found in report["cases"].items()
    ]
    yield table(("pictures", "CPU", "GPU", "times faster", "MB copied: CPU, GPU"), rows)


def fairness(report: dict[str, Any]) -> Iterator[str]:
    if "table" in report:
        yield from own_table(report)
        return
    film, pace = report["film"], report["pictures_per_s"]
    yield (
        f"How long single pictures ({report['picture_patches']} patches, {pace:g} a second) wait in milliseconds while "
        f"another caller encodes a film of {film['patches']:,} patches; device {report['device']}. {machine(report)}"
    )
    rows = [
        (
            {"turns": "callers take turns (the service)", "arrival_order": "plain order of arrival"}.get(name, name),
            *(f"{found[share]:.0f}" for share in ("p50", "p95", "p99", "max")),
            f"{found['film_s']:.2f} s",
        )
        for name, found in report["waits_ms"].items()
    ]
    yield table(("order", "p50", "p95", "p99", "most", "the film takes"), rows)


def overload(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Overload: `{report['model']}`, offered {report['offered_per_s']:.0f} pictures/s whatever happens, every "
        f"answer compared with the right one. {machine(report)}"
    )
    rows = [
        (
            title,
            f"{part['good_per_s']:.1f}",
            f"{part['latency_ms']['p50']:.0f}, {part['latency_ms']['p99']:.0f}",
            outcomes(part["outcomes"]),
        )
        for title, part in (
            ("capacity before", report["capacity"]),
            ("overload", report["overload"]),
            ("capacity after", report["capacity_after"]),
        )
    ]
    yield table(("phase", "good answers/s", "p50, p99 ms", "requests"), rows)


def soak(report: dict[str, Any]) -> Iterator[str]:
    minutes = report["minutes"]
    first, last = minutes[0], minutes[-1]
    faults = sorted({minute["fault"] for minute in minutes if minute["fault"]})
    yield (
        f"Soak: {len(minutes)} minutes of mixed pictures, films and bad media on `{report['model']}` with every tier "
        f"of the store on and {len(faults)} kinds of fault, one a minute ({'; '.join(faults)}). Requests: "
        f"{outcomes(report['outcomes'])}. Resident memory {first['resident_mb']} MB in the first minute and "
        f"{last['resident_mb']} in the last, descriptors {first['descriptors']} and {last['descriptors']}. "
        f"{machine(report)}"
    )


def outcomes(counts: dict[str, int]) -> str:
    """How often each thing became of a request, in words."""
    words = {"exact": "right", "close": "right within rounding", "refused": "bad media refused as such"}
    told = (
        (words.get(name, f"answered {name}" if name.isdecimal() else name), count) for name, count in counts.items()
    )
    return ", ".join(f"{count} {words}" for words, count in told)


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

IN_README = {"tower", "service", "fp8", "load", "soak"}  # docs/performance.md has the others

NUMBERS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "tower": tower,
    "service": service,
    "fp8": fp8,
    "load": overload,
    "soak": soak,
    "preprocess": preprocess,
    "fairness": fairness,
    "tower_cpu": tower_cpu,
    "load_memory": load_memory,
    "attention": attention,
}


def machine(report: dict[str, Any]) -> str:
    gpu = f"one {report['gpu']}, " if report.get("gpu") else ""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    return f"{gpu}{report['processor']}, {report['cores']} cores, {report['torch_threads']} threads, {versions}."
