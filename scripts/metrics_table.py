"""Write the table of series in docs/metrics.md from their declarations. With `--check` only say whether it is stale."""

import sys
from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase

from app.metrics import Metrics, ReadCounter
from scripts.generated import ROOT, put, table, update

DOCUMENT = ROOT / "docs" / "metrics.md"


class Series(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def render(text: str) -> str:
    """docs/metrics.md with its table as it should be."""
    rows = [(f"`{s.name}`", s.kind, ", ".join(f"`{label}`" for label in s.labels), s.meaning) for s in series()]
    return put(text, "series", table(("series", "type", "labels", "meaning"), rows))


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
    sys.exit(update(DOCUMENT, render, __doc__))
