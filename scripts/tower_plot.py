"""Draw docs/tower.svg from benchmarks/results/tower.json: how many times faster than SGLang's tower, by workload.

With `--check` nothing is written; the exit code is 1 if something would be.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from scripts.generated import ROOT, update

PLOT = ROOT / "docs" / "tower.svg"
RESULTS = ROOT / "benchmarks" / "results" / "tower.json"

# Pixels. Names stand left of the bars, times right of them.
WIDTH, LEFT, RIGHT = 800, 170, 190
TOP, ROW, BAR, BOTTOM = 64, 27, 17, 34
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
# Readable on white and on GitHub's dark background alike; the mean stands out by its shade.
STYLE = (
    f"text {{ font: 13px {FONT}; fill: #57606a }} .title {{ font-weight: 600; font-size: 15px; fill: #24292f }} "
    ".value { font-weight: 600; fill: #24292f } .bar { fill: #2f81b7 } .mean { fill: #1a5f8a } "
    ".grid { stroke: #d0d7de; stroke-width: 1 } .one { stroke: #57606a; stroke-width: 1.5 } "
    "@media (prefers-color-scheme: dark) { text { fill: #9198a1 } .title, .value { fill: #e6edf3 } "
    ".bar { fill: #4a9fd8 } .mean { fill: #8cc7ee } .grid { stroke: #3d444d } .one { stroke: #9198a1 } }"
)


class Row(NamedTuple):
    """One workload: milliseconds there and here."""

    name: str
    peer_ms: float
    ours_ms: float

    @property
    def ratio(self) -> float:
        return self.peer_ms / self.ours_ms


def rows_of(report: dict[str, Any]) -> list[Row]:
    return [
        Row(name, result["peer_ms"], result["median_ms"][result["best"]])
        for name, result in report["workloads"].items()
    ]


def plot(rows: Sequence[Row], device: str) -> str:
    """Horizontal bars on an axis where each line doubles; a bar that ends at 1 is as fast as SGLang's."""
    mean = statistics.geometric_mean(row.ratio for row in rows)
    last = max(1, math.ceil(math.log2(max(row.ratio for row in rows))))
    bottom = TOP + ROW * (len(rows) + 1)

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(ratio) / last

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" width="{WIDTH}" '
        f'height="{bottom + BOTTOM}" role="img">',
        f"<title>{escape(f'Times faster than SGLang, {device}; geometric mean {mean:.2f}')}</title>",
        f"<style>{STYLE}</style>",
        text(0, 20, f"Times faster than SGLang 0.5.23's own Kimi-K3 tower, one {device}, bfloat16", "title"),
        text(0, 42, "Pictures x side in pixels, one batch. Longer is better, each line doubles. Right: SGLang → here."),
    ]
    for power in range(last + 1):
        at = x(2**power)
        parts.append(
            f'<line class="{"grid" if power else "one"}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{bottom}"/>'
        )
        parts.append(text(at, bottom + 20, f"{2**power}x", anchor="middle"))
    for number, row in enumerate(rows):
        note = f"{digits(row.peer_ms)} → {digits(row.ours_ms)} ms"
        parts += bar(number, row.name, row.ratio, x(row.ratio), "bar", note)
    parts += bar(len(rows), "geometric mean", mean, x(mean), "mean", "")
    return "\n".join([*parts, "</svg>"]) + "\n"


def bar(number: int, name: str, ratio: float, end: float, kind: str, note: str) -> list[str]:
    """One row; a ratio below 1 is drawn from the line at 1 to the left."""
    top = TOP + ROW * number
    left, width = min(LEFT, end), max(abs(end - LEFT), 1.0)
    middle = top + BAR / 2 + 4.5
    return [
        text(LEFT - 12, middle, name, anchor="end"),
        f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2"/>',
        text(max(end, LEFT) + 6, middle, f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x", "value"),
        *([text(WIDTH, middle, note, anchor="end")] if note else []),
    ]


def digits(ms: float) -> str:
    """Three of them, or all before the point."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(content)}</text>'


def render(_: str) -> str:
    """The plot as it should be, whatever is there."""
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    return plot(rows_of(report), report["gpu"])


if __name__ == "__main__":
    sys.exit(update(PLOT, render, __doc__))
