"""`moonvit-serve backends`: which attention backends work here, how exact they are, and with `--bench` how fast."""

import json
import math
from dataclasses import asdict, dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.device import compute_dtype, dtype_name, resolve_device
from app.settings import Settings
from encoder import load_config
from encoder.attention import BACKENDS, Attention, Entry, Report, describe, resolve, start
from encoder.attention.speed import CPU_MIXES, MIXES, Speed, compare


@dataclass(frozen=True)
class Place:
    """Where backends are tried: a model's heads, on a device, in a dtype."""

    num_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.num_heads} heads of {self.head_dim}, {dtype_name(self.dtype)} on {self.device}"


@dataclass(frozen=True)
class Row:
    """One mix of segments: how fast each backend is on it, and which the configured one takes for it."""

    mix: str
    lengths: list[int]
    taken: str
    speeds: dict[str, Speed]


def show_backends(settings: Settings, *, bench: bool = False, as_json: bool = False) -> int:
    """Print a row per attention backend: usable here or why not, and its error in the start-up self-test; with `bench`
    a second table with a row per mix of segments."""
    config = load_config(settings.model, rms_norm_eps=settings.rms_norm_eps)
    device = resolve_device(settings.device)
    place = Place(config.vision.num_heads, config.vision.head_dim, device, compute_dtype(settings.dtype, device))
    resolution = resolve(
        settings.attention_backend,
        device=device,
        dtype=place.dtype,
        head_dim=place.head_dim,
        family=config.family,
    )
    reports = describe(**vars(place))
    usable = {report.name for report in reports if report.why_not is None}
    chosen = next((entry.name for entry in resolution.candidates if entry.name in usable), None)
    rows = measure(start(resolution, **vars(place)), usable, place) if bench and chosen else []
    if as_json:
        print(json.dumps(document(settings, place, reports, chosen, rows), indent=1))  # noqa: T201
        return 0
    console = Console()
    console.print(escape(f"{settings.model}: {place}"))
    console.print(overview(reports, chosen))
    console.print(
        f"* what --attention-backend {settings.attention_backend} takes" if chosen else "None passed its test."
    )
    if rows:
        console.print(speeds(rows))
        console.print(f"* what --attention-backend {settings.attention_backend} takes for that mix, graphs apart")
    return 0


def measure(attention: Attention, usable: set[str], place: Place) -> list[Row]:
    """Every backend that is worth it on every mix."""
    on_gpu = place.device.type == "cuda"
    backends = {
        entry.name: entry.load(place.device, place.dtype, place.num_heads, place.head_dim)
        for entry in BACKENDS
        if entry.name in usable and (entry.name == attention.name or _is_worth_it(entry, place.device))
    }
    with torch.inference_mode():
        return [
            Row(mix, lengths, attention.choose(lengths), compare(backends, lengths, **vars(place)))
            for mix, lengths in (MIXES if on_gpu else CPU_MIXES).items()
        ]


def _is_worth_it(entry: Entry, device: torch.device) -> bool:
    """Not what would take minutes: the oracle on large mixes, and kernels under an interpreter."""
    if entry.name == "reference":
        return device.type == "cpu"
    return device.type == "cuda" or not entry.by_name_only(device)


def overview(reports: list[Report], chosen: str | None) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("backend", no_wrap=True)
    table.add_column("usable here", overflow="fold")
    table.add_column("self-test error", justify="right")
    table.add_column("what it is", overflow="fold")
    for report in reports:
        why = "yes" if report.why_not is None else f"no: {report.why_not}"
        error = "" if report.error is None else f"{report.error:.1e}"
        name = f"{report.name} *" if report.name == chosen else report.name
        table.add_row(*map(escape, (name, why, error, report.summary)))
    return table


def speeds(rows: list[Row]) -> Table:
    table = Table(title="attention alone", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("segments x patches", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for column in ("ms", "TFLOP/s", "error"):
        table.add_column(column, justify="right")
    for row in rows:
        fastest_first = sorted(row.speeds.items(), key=lambda item: item[1].ms)
        for place, (name, speed) in enumerate(fastest_first):
            last = place == len(fastest_first) - 1
            table.add_row(
                "" if place else row.mix,
                escape(f"{name} *" if name == row.taken else name),
                f"{speed.ms:.3f}",
                f"{speed.tflops:.3g}",
                f"{speed.error:.1e}",
                end_section=last,
            )
    return table


def document(
    settings: Settings, place: Place, reports: list[Report], chosen: str | None, rows: list[Row]
) -> dict[str, object]:
    """Everything the tables show, as JSON; errors that are not numbers are null."""
    return {
        "model": settings.model,
        "device": torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else str(place.device),
        "dtype": dtype_name(place.dtype),
        "num_heads": place.num_heads,
        "head_dim": place.head_dim,
        "configured": settings.attention_backend,
        "taken": chosen,
        "backends": [
            {
                "name": report.name,
                "summary": report.summary,
                "why_not": report.why_not,
                "self_test_error": report.error if report.error is not None and math.isfinite(report.error) else None,
            }
            for report in reports
        ],
        "mixes": [
            {
                "segments": row.mix,
                "patches": row.lengths,
                "taken": row.taken,
                "results": {name: asdict(speed) for name, speed in row.speeds.items()},
            }
            for row in rows
        ],
    }
