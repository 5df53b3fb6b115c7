"""Where the time of a start goes, from the command to the first 200 of `/health/ready`.

    python -m benchmarks.startup [--model demo:k3] [--starts 5] [--out FILE]

The whole start is that of the real command, as a probe sees it. Its parts are measured in fresh processes of their own,
one after the other as in a start; decoders start beside the weights there, so the parts may sum to more than the whole.
On a GPU the first start on a machine compiles kernels, and is shown apart.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, describe
from benchmarks.running import say, service

PARTS = ("import", "configuration", "weights", "attention self-test", "warm-up", "decoders")


def measure_parts(model: str, device: str, workers: int | None) -> dict[str, float]:
    """Seconds of each part, in this process, which has imported nothing of the service yet."""
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    import app.main  # noqa: F401
    from app.settings import load_settings

    mark("import")
    from app.device import compute_dtype, resolve_device
    from encoder import Engine, attention, load_config

    settings = load_settings({"model": model, "device": device})
    config = load_config(settings.model)
    target = resolve_device(settings.device)
    dtype = compute_dtype(settings.dtype, target)
    vision = config.vision
    resolution = attention.resolve(
        settings.attention_backend, device=target, dtype=dtype, head_dim=vision.head_dim, family=config.family
    )
    mark("configuration")
    begun = time.perf_counter()
    tested = {"num_heads": vision.num_heads, "head_dim": vision.head_dim, "device": target, "dtype": dtype}
    attention.start(resolution, **tested)
    test_s = time.perf_counter() - begun
    mark("attention self-test")
    engine = Engine.load(settings.model, device=target, dtype=dtype, attention_backend=settings.attention_backend)
    mark("weights")
    engine.warm_up()
    mark("warm-up")
    asyncio.run(start_decoders(config, workers))
    mark("decoders")
    taken = {name: end - marks[i][1] for i, (name, end) in enumerate(marks[1:])}
    # `Engine.load` tests the kernels too; the second time, libraries are loaded and kernels compiled.
    begun = time.perf_counter()
    attention.start(resolution, **tested)
    taken["weights"] -= time.perf_counter() - begun
    taken["attention self-test"] = test_s
    return {name: taken[name] for name in PARTS}


async def start_decoders(config: Any, workers: int | None) -> None:
    import os

    from app.decode import DecodeLimits, Decoder

    cores = workers or os.cpu_count() or 1
    decoder = Decoder(config, DecodeLimits(), picture_workers=cores, film_workers=min(cores, 8))
    await decoder.start()
    await decoder.close()


def parts_in_a_child(options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.startup", "--child", "--model", options.model]
    command += ["--device", options.device]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def whole(options: argparse.Namespace) -> tuple[float, float]:
    """Seconds from the command to the first answer of `/health/live`, and to the first 200 of `/health/ready`."""
    with service("--model", options.model, "--device", options.device, "--log-level", "warning") as running:
        answering = next((since for since, state in running.states[1:]), running.ready_s)
        return answering, running.ready_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:k3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--starts", type=int, default=5, help="after the first (default: 5)")
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_parts(options.model, options.device, None)))
        return
    first_answering, first_ready = whole(options)
    say(f"first start: ready after {first_ready:.1f} s")
    starts = [whole(options) for _ in range(options.starts)]
    parts = [parts_in_a_child(options) for _ in range(options.starts)]
    medians = {
        "port open": statistics.median(answering for answering, _ in starts),
        "ready": statistics.median(ready for _, ready in starts),
    }
    part_medians = {name: statistics.median(found[name] for found in parts) for name in PARTS}
    rows = [
        ["first start: port open", f"{first_answering:.2f}"],
        ["first start: ready", f"{first_ready:.2f}"],
        *([f"later starts: {name}", f"{seconds:.2f}"] for name, seconds in medians.items()),
        *([f"part: {name}", f"{seconds:.2f}"] for name, seconds in part_medians.items()),
    ]
    report = {
        "what": f"Start of the service with `{options.model}`, seconds from the command, median of {options.starts} "
        "starts after the first; the parts one after the other in fresh processes (decoders start beside the weights).",
        **describe("torch", "triton", "flashinfer-python", "fastapi", "av"),
        "model": options.model,
        "first": {"port_open_s": round(first_answering, 3), "ready_s": round(first_ready, 3)},
        "later_s": {name: round(seconds, 3) for name, seconds in medians.items()},
        "parts_s": {name: round(seconds, 3) for name, seconds in part_medians.items()},
        "table": {"columns": ["what", "seconds"], "rows": rows},
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, seconds in rows:
        print(f"  {name:32s}{seconds:>8s} s")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
