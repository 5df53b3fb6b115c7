"""Attention over ragged segments: a table of interchangeable backends, the choice among them, and the test each must
pass before it serves. Importing this package imports no kernel and no library but torch."""

from encoder.attention.contract import Attend, AttentionBackend, Entry, TurningAttend
from encoder.attention.selection import Resolution, resolve
from encoder.attention.startup import Attention, Report, describe, start
from encoder.attention.table import ALIASES, BACKENDS

__all__ = [
    "ALIASES",
    "BACKENDS",
    "Attend",
    "Attention",
    "AttentionBackend",
    "Entry",
    "Report",
    "Resolution",
    "TurningAttend",
    "describe",
    "resolve",
    "start",
]
