"""Write the generated tables of docs/performance.md: what of `benchmarks/results/*.json` is not in README.md.

With `--check` nothing is written; the exit code is 1 if something would be.
"""

import sys

from scripts.generated import ROOT, put, update
from scripts.readme_tables import RESULTS
from scripts.results_tables import IN_README, numbers_tables

DOCUMENT = ROOT / "docs" / "performance.md"


def render(text: str) -> str:
    """docs/performance.md with its tables as they should be."""
    return put(text, "numbers", numbers_tables(RESULTS, lambda name: name not in IN_README))


if __name__ == "__main__":
    sys.exit(update(DOCUMENT, render, __doc__))
