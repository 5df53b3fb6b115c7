"""What batches leave in the log: each at level debug, and at level info a summary once a minute while there are any."""

import threading
import time
from typing import Any

import structlog

from app.tower import TowerLost

logger = structlog.get_logger("moonvit.batch")

SUMMARY_EVERY_S = 60.0


class BatchLog:
    """Shared by the threads of all towers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._summed_since_s = time.monotonic()
        self._sums: dict[str, Any] = {}

    def ran(
        self, *, tower: int, patches: int, segments: int, attention: str | None, queue_s: float, seconds: float
    ) -> None:
        """One batch has come back.

        Args:
            queue_s: wait of the segment that waited longest.
            seconds: on the device.
        """
        logger.debug(
            "batch",
            tower=tower,
            patches=patches,
            segments=segments,
            attention=attention,
            queue_ms=round(1000 * queue_s, 3),
            ms=round(1000 * seconds, 3),
        )
        self._sum(batches=1, patches=patches, segments=segments, device_s=seconds)

    def failed(self, *, tower: int, segments: int, error: Exception, then: str) -> None:
        """One batch has not."""
        logger.warning(
            f"batch of {segments} segments {'was lost' if isinstance(error, TowerLost) else 'failed'}",
            tower=tower,
            error=type(error).__name__,
            then=then,
        )
        self._sum(failed=1)

    def _sum(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount
            now = time.monotonic()
            if now - self._summed_since_s < SUMMARY_EVERY_S:
                return
            sums, self._sums = self._sums, {}
            seconds, self._summed_since_s = now - self._summed_since_s, now
        sums["device_s"] = round(sums.get("device_s", 0.0), 3)
        logger.info("batches", within_s=round(seconds, 1), **sums)
