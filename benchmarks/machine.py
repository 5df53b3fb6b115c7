"""What a result file says about where it was made."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROOT = RESULTS.parent.parent
# For machines that get a copy of the tree without its history. Not MOONVIT_*: the service refuses unknown ones.
COMMIT_VARIABLE = "BENCHMARK_COMMIT"
MEASURED = ("app", "encoder", "benchmarks/*.py")


def describe(*packages: str) -> dict[str, Any]:
    """Processor, GPU (None where there is none), threads, versions of Python and of those packages that are installed,
    command and commit."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in installed(*packages)},
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": commit(),
    }


def installed(*packages: str) -> list[str]:
    present = []
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            continue
        present.append(package)
    return present


def commit() -> str | None:
    """Hash of the commit, with `+changes` where measured files differ from it; None outside a repository."""
    told = os.environ.get(COMMIT_VARIABLE)
    if told:
        return told
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", *MEASURED])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+changes" if changes.strip() else "")


def _module() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
