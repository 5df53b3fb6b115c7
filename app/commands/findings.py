"""What `moonvit-serve doctor` says of one thing it looked at."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

Level = Literal["ok", "warning", "problem"]

GiB = 1024**3


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        level: ok; warning: it runs, but not as well or as safely as it could; problem: it does not run.
        found: what is there, without secrets.
        advice: what to do; empty where nothing is to be done.
    """

    area: str
    level: Level
    found: str
    advice: str = ""


def installed(distribution: str) -> str | None:
    """Its version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GiB:.1f} GiB"
