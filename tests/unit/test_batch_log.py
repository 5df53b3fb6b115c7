"""Batches in the log: each one for who debugs, a summary for who only operates, and every failure."""

import pytest
from structlog.testing import capture_logs

from app import batch_log
from app.batch_log import BatchLog
from app.batcher import Batcher
from app.tower import Pending, TowerLost
from encoder import PackedBatch
from tests.unit.test_batcher import CONFIG, marked, segment


class NamedTower:
    """Says which attention it took."""

    def submit(self, batch: PackedBatch) -> Pending:
        class Submitted:
            attention = "triton"

            def __call__(self):  # type: ignore[no-untyped-def]
                return marked(batch)

        return Submitted()


async def test_a_batch_is_one_line_with_all_there_is_to_say() -> None:
    with capture_logs() as lines:
        batcher = Batcher([NamedTower()], CONFIG, max_batch_patches=100, max_queued_patches=1000)
        await batcher.encode([segment(4, 4), segment(2, 4)])
        batcher.close()
    (line,) = [line for line in lines if line["event"] == "batch"]
    assert line["log_level"] == "debug"
    assert (line["tower"], line["patches"], line["segments"], line["attention"]) == (0, 24, 2, "triton")
    assert line["queue_ms"] >= 0
    assert line["ms"] >= 0
    assert [line["log_level"] for line in lines] == ["debug"]


def test_a_summary_comes_once_a_minute_and_counts_from_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(batch_log.time, "monotonic", lambda: now)
    log = BatchLog()

    def run(times: int) -> None:
        for _ in range(times):
            log.ran(tower=0, patches=10, segments=2, attention=None, queue_s=0.5, seconds=0.25)

    with capture_logs() as lines:
        run(3)
        now += 59
        run(1)
        now += 1
        log.failed(tower=0, segments=4, error=ValueError("x"), then="its halves are run")
        now += 60
        run(1)
        now += 3600  # nothing runs, nothing is said
    summaries = [line for line in lines if line["log_level"] == "info"]
    assert summaries == [
        {
            "event": "batches",
            "log_level": "info",
            "within_s": 60.0,
            "batches": 4,
            "patches": 40,
            "segments": 8,
            "device_s": 1.0,
            "failed": 1,
        },
        {
            "event": "batches",
            "log_level": "info",
            "within_s": 60.0,
            "batches": 1,
            "patches": 10,
            "segments": 2,
            "device_s": 0.25,
        },
    ]


@pytest.mark.parametrize(("error", "event"), [(ValueError("secret"), "failed"), (TowerLost("secret"), "was lost")])
def test_a_failure_is_a_warning_with_the_exceptions_name_alone(error: Exception, event: str) -> None:
    with capture_logs() as lines:
        BatchLog().failed(tower=1, segments=4, error=error, then="run again")
    assert lines == [
        {
            "event": f"batch of 4 segments {event}",
            "log_level": "warning",
            "tower": 1,
            "error": type(error).__name__,
            "then": "run again",
        }
    ]
