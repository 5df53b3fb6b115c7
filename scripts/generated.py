"""Generated tables in Markdown files: each lies between `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def update(document: Path, render: Callable[[str], str], description: str | None) -> int:
    """Rewrite a document with its tables as they should be; with `--check` only say whether that would change it.

    Returns:
        The exit code: 1 if it is stale and was left so.
    """
    name = document.relative_to(ROOT)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help=f"only say whether {name} is up to date")
    check = parser.parse_args().check
    current = document.read_text(encoding="utf-8") if document.exists() else ""
    wanted = render(current)
    if wanted == current:
        return 0
    if check:
        print(f"{name} is out of date: make readme", file=sys.stderr)
        return 1
    document.write_text(wanted, encoding="utf-8")
    print(f"{name} is rewritten")
    return 0


def put(text: str, name: str, content: str) -> str:
    """The text with the table of that name replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"the document must have {begin} and {end} once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
