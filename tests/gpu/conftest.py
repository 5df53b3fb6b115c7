"""Leaves a record of a run: `GPU_TEST_RECORD=FILE` says where."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.machine import describe

_START_S = time.monotonic()
_outcomes: Counter[str] = Counter()
_reasons: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes["error" if report.failed and report.when != "call" else report.outcome] += 1
    if report.skipped and isinstance(report.longrepr, tuple):
        _reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("GPU_TEST_RECORD")
    if not path or not _outcomes:
        return
    machine = describe("torch", "triton", "flashinfer-python", "nvidia-cudnn-frontend", "pillow")
    rows = [[outcome, str(number)] for outcome, number in sorted(_outcomes.items())]
    record = {
        "what": "outcomes of the tests that need a GPU (`make gpu-test`)",
        "table": {"columns": ["outcome", "tests"], "rows": rows},
        **machine,
        "command": "python -m pytest -m gpu tests/gpu",
        "seconds": round(time.monotonic() - _START_S, 1),
        "skipped": dict(sorted(_reasons.items())),
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
