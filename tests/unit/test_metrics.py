"""The series: their names, their labels, their text, and the table of them in docs/metrics.md."""

import asyncio
import time

import pytest
from prometheus_client.metrics import MetricWrapperBase

from app.counting import count_item, count_unwanted, observe_decoding
from app.decode import Prepared
from app.errors import CorruptMedia, DeadlineExceeded, Draining, Overloaded
from app.loop_lag import watch_event_loop
from app.metrics import DROP_REASONS, STAGES, Metrics, ReadCounter
from app.problems import PROBLEMS
from encoder import DeviceFailed
from scripts.metrics_table import DOCUMENT, render, series
from tests.scrape import nonzero, samples_of

CODES = {problem.code for problem in PROBLEMS.values()}


def samples(metrics: Metrics) -> dict[str, float]:
    return samples_of(metrics.exposition("")[0].decode())


def test_services_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.patches.inc(5)
    assert samples(one)["moonvit_patches_total"] == 5
    assert samples(other)["moonvit_patches_total"] == 0


def test_names_say_whose_they_are_and_what_they_count() -> None:
    for metric in series():
        assert metric.name.startswith("moonvit_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert len(metric.meaning) > 10
        assert metric.meaning.endswith(".")


def test_every_series_is_found_by_the_table() -> None:
    metrics = Metrics()
    declared = {name for family in metrics.registry.collect() for name in [family.name] if name.startswith("moonvit_")}
    assert {metric.name.removesuffix("_total") for metric in series()} == declared
    assert len(declared) == sum(isinstance(value, MetricWrapperBase | ReadCounter) for value in vars(metrics).values())


def test_outcomes_are_counted_from_zero_so_that_the_first_one_shows_as_an_increase() -> None:
    found = samples(Metrics(CODES))
    for code in (*CODES, "ok"):
        assert found[f'moonvit_requests_total{{code="{code}"}}'] == 0
        assert found[f'moonvit_items_total{{code="{code}",kind="video"}}'] == 0
    for reason in DROP_REASONS:
        assert found[f'moonvit_drops_total{{reason="{reason}"}}'] == 0
    for stage in STAGES:
        assert found[f'moonvit_stage_duration_seconds_count{{stage="{stage}"}}'] == 0


def test_a_service_has_some_hundred_series_however_long_it_runs() -> None:
    metrics = Metrics(CODES)
    before = len(samples(metrics))
    for error in (CorruptMedia("x" * n) for n in range(100)):
        count_item(metrics, "image", error)
        count_item(metrics, None, ValueError(str(error)))
    assert len(samples(metrics)) == before < 500


def test_openmetrics_is_for_those_who_ask() -> None:
    metrics = Metrics()
    plain, plain_type = metrics.exposition("text/html, */*")
    assert plain_type.startswith("text/plain; version=0.0.4")
    assert not plain.endswith(b"# EOF\n")
    text, text_type = metrics.exposition("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert text_type.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")
    assert b"_created" not in plain + text


def test_the_process_is_measured_too() -> None:
    found = samples(Metrics())
    assert found["process_open_fds"] > 2
    assert found["process_start_time_seconds"] < time.time()


def test_a_part_that_keeps_its_own_numbers_is_read_at_each_scrape() -> None:
    metrics = Metrics()
    assert not [name for name in samples(metrics) if name.startswith("moonvit_cache_hits")]  # there is no cache
    numbers = {"hits": 3, "disk": 1}
    metrics.cache_hits.set_function(lambda: numbers["hits"])
    metrics.cache_evictions.set_function(lambda: numbers["disk"], "disk")
    assert samples(metrics)["moonvit_cache_hits_total"] == 3
    numbers["hits"] += 1
    found = samples(metrics)
    assert found["moonvit_cache_hits_total"] == 4
    assert nonzero(found, "moonvit_cache_evictions_total") == {'{tier="disk"}': 1}


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (None, "ok", None),
        (CorruptMedia("x"), "corrupt_media", None),
        (DeviceFailed("x"), "device_failed", None),
        (ZeroDivisionError(), "internal", None),
        (DeadlineExceeded("x"), "deadline_exceeded", "deadline"),
        (Draining("x"), "draining", "shutdown"),
        (Overloaded("x"), "overloaded", "overload"),
    ],
)
def test_an_item_is_counted_once_and_as_a_drop_where_it_was_given_up(
    error: Exception | None, code: str, reason: str | None
) -> None:
    metrics = Metrics(CODES)
    count_item(metrics, "image", error)
    found = samples(metrics)
    assert nonzero(found, "moonvit_items_total") == {f'{{code="{code}",kind="image"}}': 1}
    assert nonzero(found, "moonvit_drops_total") == ({f'{{reason="{reason}"}}': 1} if reason else {})


@pytest.mark.parametrize(("sibling_failed", "reason"), [(True, "sibling_failed"), (False, "client_left")])
def test_items_nobody_wants_are_drops(sibling_failed: bool, reason: str) -> None:
    metrics = Metrics()
    count_unwanted(metrics, ["video", None, "video"], sibling_failed=sibling_failed)
    found = samples(metrics)
    assert nonzero(found, "moonvit_items_total") == {
        '{code="dropped",kind="video"}': 2,
        '{code="dropped",kind="unknown"}': 1,
    }
    assert nonzero(found, "moonvit_drops_total") == {f'{{reason="{reason}"}}': 3}


def test_waiting_for_a_decoder_is_what_decoding_does_not_explain() -> None:
    metrics = Metrics()
    prepared = Prepared("image", [], (1, 1), (1, 1), None, None, None, decode_s=0.25, preprocess_s=0.5)
    observe_decoding(metrics, prepared, total_s=1.0)
    sums = nonzero(samples(metrics), "moonvit_stage_duration_seconds_sum")
    assert sums == {'{stage="decode_wait"}': 0.25, '{stage="decode"}': 0.25, '{stage="preprocess"}': 0.5}


async def test_a_held_event_loop_shows() -> None:
    metrics = Metrics()
    watch = asyncio.create_task(watch_event_loop(metrics.event_loop_lag_seconds))
    await asyncio.sleep(0.01)
    time.sleep(0.4)  # noqa: ASYNC251 - the fault that is to be seen
    await asyncio.sleep(0.01)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    found = samples(metrics)
    assert found["moonvit_event_loop_lag_seconds_count"] >= 1
    assert found["moonvit_event_loop_lag_seconds_sum"] > 0.25


def test_the_table_of_series_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert render(text) == text, "run: make readme"


def test_the_table_has_a_row_for_every_series() -> None:
    rows = [
        line for line in render(DOCUMENT.read_text(encoding="utf-8")).splitlines() if line.startswith("| `moonvit_")
    ]
    assert [row.split("`")[1] for row in rows] == [metric.name for metric in series()]
    (stages,) = [row for row in rows if "stage_duration" in row]
    assert "| histogram | `stage` |" in stages
