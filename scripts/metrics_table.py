"""Write the table of series in docs/metrics.md from their declarations. With `--check` only say whether it is stale."""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase

from app.metrics import Metrics, ReadCounter
from scripts.readme_tables import table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- series:begin -->", "<!-- series:end -->"


class Series(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether docs/metrics.md is up to date")
    check = parser.parse_args().check
    current = DOCUMENT.read_text(encoding="utf-8")
    wanted = render(current)
    if wanted == current:
        return 0
    if check:
        print("docs/metrics.md is out of date: make readme", file=sys.stderr)
        return 1
    DOCUMENT.write_text(wanted, encoding="utf-8")
    print("docs/metrics.md is rewritten")
    return 0


def render(text: str) -> str:
    """docs/metrics.md with its table as it should be."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"docs/metrics.md must have {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    rows = [(f"`{s.name}`", s.kind, ", ".join(f"`{label}`" for label in s.labels), s.meaning) for s in series()]
    return f"{before}{BEGIN}\n{table(('series', 'type', 'labels', 'meaning'), rows)}\n{END}{rest.split(END)[1]}"


def series() -> list[Series]:
    """Every series of ours, in the order of declaration."""
    found = []
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase | ReadCounter):
            (family,) = metric.describe()
            labels = metric.labelnames if isinstance(metric, ReadCounter) else metric._labelnames
            name = family.name + ("_total" if family.type == "counter" else "")
            found.append(Series(name, family.type, tuple(labels), family.documentation))
    return found


if __name__ == "__main__":
    sys.exit(main())
