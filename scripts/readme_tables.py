"""Write the generated tables of README.md: the options, and the first numbers of `benchmarks/results/*.json`.

With `--check` nothing is written; the exit code is 1 if something would be.
"""

import sys

from app.commands.flags import options
from scripts.generated import ROOT, put, table, update
from scripts.results_tables import IN_README, numbers_tables

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def render(text: str) -> str:
    """README.md with every generated table as it should be."""
    return put(put(text, "options", options_table()), "numbers", numbers_tables(RESULTS, IN_README.__contains__))


def options_table() -> str:
    rows = [
        (f"`{o.flag}`" + (f" {o.value}" if o.value else ""), f"`{o.variable}`", o.default or "", o.description)
        for o in options()
    ]
    return table(("flag", "variable", "default", "meaning"), rows)


if __name__ == "__main__":
    sys.exit(update(README, render, __doc__))
