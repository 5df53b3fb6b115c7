"""Fuzzing for as long as there is time: `python -m tests.fuzz --minutes 60`, or `make fuzz`.

Two thirds of the time for broken media through the whole service, one for the request parsers under atheris. Writes
what was done to benchmarks/results/fuzz.json, inputs that went wrong to .run/fuzz/, and ends with 1 if there are any.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
from typing import Any

from app.logs import configure_logging
from benchmarks.machine import RESULTS, ROOT, describe
from tests.fuzz.media import TOO_LONG_S, Report, fuzz
from tests.fuzz.parsers import PARSERS

FOUND = ROOT / ".run" / "fuzz"
PACKAGES = ("pillow", "av", "decord2", "atheris", "python-multipart", "orjson", "pydantic")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    args = parser.parse_args()
    configure_logging("error", "json")
    FOUND.mkdir(parents=True, exist_ok=True)
    media = asyncio.run(fuzz(args.minutes * 40, args.seed))
    parsers = fuzz_parsers(args.minutes * 20, args.seed)
    report = {
        **describe(*PACKAGES),
        "command": f"python -m tests.fuzz --minutes {args.minutes:g} --seed {args.seed}",
        **shown(summary(media), parsers),
        "media": summary(media),
        "parsers": parsers,
    }
    (RESULTS / "fuzz.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"media": report["media"], "parsers": parsers}, indent=2))
    for number, (what, data) in enumerate(media.wrong):
        print(f"WRONG: {what}", file=sys.stderr)
        (FOUND / f"media-{args.seed}-{number}").write_bytes(bytes.fromhex(data))
    return 1 if media.wrong or parsers["exit_code"] else 0


def summary(report: Report) -> dict[str, Any]:
    return {
        "seconds": round(report.seconds),
        "inputs": dict(report.inputs),
        "answers": dict(sorted(report.codes.items())),
        "wrong": len(report.wrong),
        "longest_s": round(report.longest_s, 2),
        "worker_restarts": report.restarts,
        "rss_mb": {"first": report.rss_mb_first, "last": report.rss_mb_last},
    }


def shown(media: dict[str, Any], parsers: dict[str, Any]) -> dict[str, Any]:
    """The report's sentence and table for a reader."""

    def row(kind: str) -> list[str]:
        encoded, all_of_kind = media["answers"].get(f"{kind} ok", 0), media["inputs"].get(kind, 0)
        wrong = media["wrong"] if kind == "image" else "as above"
        return [f"broken {kind}s", f"{all_of_kind:,}", f"{encoded:,}", f"{all_of_kind - encoded:,}", str(wrong)]

    return {
        "what": f"broken media through the service for {media['seconds']} s, and bytes through its request parsers for "
        f"{parsers['seconds']} s; wrong would be another answer than encoded or refused, one after more than "
        f"{TOO_LONG_S:g} s, or a sound file that is encoded otherwise in between",
        "table": {
            "columns": ["input", "sent", "encoded", "refused", "wrong"],
            "rows": [
                row("image"),
                row("video"),
                ["bytes to parsers", f"{parsers['inputs']:,}", "", "", str(int(bool(parsers["exit_code"])))],
            ],
        },
    }


def fuzz_parsers(seconds: float, seed: int) -> dict[str, Any]:
    """atheris in a process of its own, which an input that kills it does not take along."""
    arguments = [f"-max_total_time={seconds:.0f}", f"-seed={seed}", f"-artifact_prefix={FOUND}/parsers-"]
    command = [sys.executable, "-m", "tests.fuzz.coverage_guided", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=ROOT)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    figures = {name: int(value) for name, value in re.findall(r"stat::(\w+):\s*(\d+)", done.stderr)}
    return {
        "seconds": round(seconds),
        "parsers": sorted(PARSERS),
        "inputs": figures.get("number_of_executed_units", 0),
        "new_paths": figures.get("new_units_added", 0),
        "exit_code": done.returncode,
    }


if __name__ == "__main__":
    sys.exit(main())
