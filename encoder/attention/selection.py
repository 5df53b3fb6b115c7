"""From a configured name to the backends that may run here. Looks at names and predicates only, so it can refuse a
misspelt name before weights are read or a device is touched."""

import difflib
from dataclasses import dataclass

import torch

from encoder.attention.contract import Entry
from encoder.attention.table import ALIASES, BACKENDS, FOREIGN
from encoder.errors import NoUsableBackend, UnknownBackend

AUTO = "auto"
FAMILY_TITLES = {"kimi_k3": "Kimi-K3", "kimi_k25": "Kimi-K2.5"}


@dataclass(frozen=True)
class Resolution:
    """What may run.

    Attributes:
        configured: the name as given.
        candidates: first choice first; a single one if it was named.
        refused: the others with the reason (`auto` only).
    """

    configured: str
    candidates: tuple[Entry, ...]
    refused: dict[str, str]


def resolve(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    family: str,
    backends: tuple[Entry, ...] = BACKENDS,
) -> Resolution:
    """Check a configured backend name against the table.

    Args:
        family: of the model being loaded, named in the message.
        backends: the table; another one only in tests.
    Raises:
        UnknownBackend: the name is neither `auto`, nor in the table, nor an alias.
        NoUsableBackend: it is known but cannot run here, or nothing can.
    """
    if name == AUTO:
        return _resolve_auto(device, dtype, head_dim, backends)
    table = {entry.name: entry for entry in backends}
    entry = table.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    usable = [other.name for other in backends if other.why_not(device, dtype, head_dim) is None]
    if entry is None:
        by_itself = [each for each in usable if not table[each].by_name_only(device)]
        raise UnknownBackend(_unknown(name, family, table, by_itself))
    if reason := entry.why_not(device, dtype, head_dim):
        raise NoUsableBackend(
            f"Attention backend {entry.name} cannot run {_here(device, dtype, head_dim)}: {reason}\n"
            f"What would run: {', '.join([AUTO, *usable]) if usable else 'nothing'}"
        )
    return Resolution(configured=name, candidates=(entry,), refused={})


def _resolve_auto(device: torch.device, dtype: torch.dtype, head_dim: int, backends: tuple[Entry, ...]) -> Resolution:
    reasons = {e.name: e.why_not(device, dtype, head_dim) or e.by_name_only(device) for e in backends}
    refused = {name: reason for name, reason in reasons.items() if reason}
    candidates = tuple(entry for entry in backends if entry.name not in refused)
    if not candidates:
        raise NoUsableBackend(f"No attention backend can run {_here(device, dtype, head_dim)}:\n{listed(refused)}")
    return Resolution(configured=AUTO, candidates=candidates, refused=refused)


def listed(reasons: dict[str, str]) -> str:
    """One indented line a backend."""
    return "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())


def _here(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return f"here (device {device}, {str(dtype).removeprefix('torch.')}, head size {head_dim})"


def _unknown(name: object, family: str, table: dict[str, Entry], usable: list[str]) -> str:
    shown = name if isinstance(name, str) and name.strip() and name.isprintable() else repr(name)
    lines = [
        f"Unsupported {FAMILY_TITLES.get(family, family)} vision attention backend: {shown[:80]}",
        f"Choose {AUTO} or one of: {', '.join(table)}.",
    ]
    if isinstance(name, str):
        words = [AUTO, *table, *ALIASES, *FOREIGN]
        if name in FOREIGN:
            lines.append(f"{name} is {FOREIGN[name][0]}; the closest here is {_ours(name, usable)}.")
        elif near := difflib.get_close_matches(name.strip().lower()[:80], words, n=1, cutoff=0.7):
            lines[-1] += f" Did you mean {_ours(near[0], usable)}?"
    return "\n".join(lines)


def _ours(name: str, usable: list[str]) -> str:
    """Our name for another stack's: of several, the first that would run here."""
    closest = FOREIGN[name][1] if name in FOREIGN else (ALIASES.get(name, name),)
    return next((ours for ours in closest if ours in usable), closest[0])
