"""What a result file says about where it was made."""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def describe(*packages: str) -> dict[str, Any]:
    """Processor, threads, versions of Python and the packages, command and commit (None outside a repository)."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": _commit(),
    }


def _module() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    command = ["git", "-C", str(RESULTS.parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
