"""Peak host memory of loading full-size weights, against the size of the finished weights.

Each load runs in a process of its own; its peak is the kernel's high-water mark of resident memory (VmHWM), which
counts mapped file pages too. What the same process holds before it loads (Python, PyTorch) is taken off. Run
`python -m benchmarks.load_memory`; it writes an exported copy of the model to a temporary directory (0.9 GB).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, describe

MODEL = "demo:k3"
MIB = 2**20


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(source: str, dtype: str) -> dict[str, Any]:
    """Load in this process, whose baseline includes the imports."""
    from encoder import Engine

    Engine.load("demo:k3-tiny", dtype=dtype)  # libraries and attention kernels are loaded now
    before = resident_bytes("VmRSS")
    start = time.perf_counter()
    engine = Engine.load(source, dtype=dtype)
    seconds = time.perf_counter() - start
    weights = sum(tensor.nbytes for tensor in engine.model.state_dict().values())
    peak = resident_bytes("VmHWM") - before
    return {
        "weights_mib": weights / MIB,
        "peak_mib": peak / MIB,
        "peak_per_weights": peak / weights,
        "baseline_mib": before / MIB,
        "load_s": seconds,
        "weights_sha256": engine.weights_sha256,
    }


def measure_in_a_child(source: str, dtype: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load_memory", "--child", source, dtype]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, metavar=("SOURCE", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(*arguments.child)))
        return
    from encoder.export import export_checkpoint

    loads = {}
    with tempfile.TemporaryDirectory() as scratch:
        exported = export_checkpoint(MODEL, Path(scratch) / "exported")
        for label, source in ((MODEL, MODEL), (f"{MODEL}, exported", str(exported))):
            for dtype in ("bfloat16", "float32"):
                loads[f"{label}, {dtype}"] = measure_in_a_child(source, dtype)
    print(f"{'load':<28}{'weights':>13}{'peak':>13}{'peak/weights':>14}{'time':>8}")
    for label, result in loads.items():
        print(
            f"{label:<28}{result['weights_mib']:>9.0f} MiB{result['peak_mib']:>9.0f} MiB"
            f"{result['peak_per_weights']:>14.2f}{result['load_s']:>7.1f}s"
        )
    report = {
        "what": "peak resident memory above the baseline of the same process, weights stored in bfloat16",
        **describe("torch", "safetensors", "numpy"),
        "loads": loads,
    }
    (RESULTS / "load_memory.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
