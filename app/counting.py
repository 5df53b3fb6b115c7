"""What became of items and how long their stages took, as the metrics count it."""

from collections.abc import Iterable

from app.decode import Kind, Prepared
from app.metrics import Metrics
from app.problems import problem_type

# Codes of items that were given up, unlike those that were done and refused.
_DROP_REASONS = {"deadline_exceeded": "deadline", "draining": "shutdown", "overloaded": "overload"}


def count_item(metrics: Metrics, kind: Kind | None, error: Exception | None = None) -> None:
    """One item has ended, well or with an error of its own."""
    code = "ok" if error is None else problem_type(error).code
    metrics.items.labels(kind or "unknown", code).inc()
    if code in _DROP_REASONS:
        metrics.drops.labels(_DROP_REASONS[code]).inc()


def count_unwanted(metrics: Metrics, kinds: Iterable[Kind | None], *, sibling_failed: bool) -> None:
    """Items not done when their request ended: its client left, or one of them failed it as a whole."""
    for kind in kinds:
        metrics.items.labels(kind or "unknown", "dropped").inc()
        metrics.drops.labels("sibling_failed" if sibling_failed else "client_left").inc()


def observe_decoding(metrics: Metrics, prepared: Prepared, total_s: float) -> None:
    """What one item's decoding took: waiting for a decoder (all that is not the other two), decoding, preprocessing."""
    waited_s = max(0.0, total_s - prepared.decode_s - prepared.preprocess_s)
    metrics.stage_seconds.labels("decode_wait").observe(waited_s)
    metrics.stage_seconds.labels("decode").observe(prepared.decode_s)
    metrics.stage_seconds.labels("preprocess").observe(prepared.preprocess_s)
