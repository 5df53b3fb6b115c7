"""A real Prometheus scrapes the real service; every query of the dashboard and every alert's is then put to it."""

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.http.conftest import png
from tests.http.test_encode import image
from tests.http.test_socket import free_port, running

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRAPE_S = 1
RATE_S = 15  # what a dashboard's $__rate_interval is here
# What a service whose cache is in memory only, and that asks for no keys, does not have.
MAY_BE_EMPTY = re.compile("moonvit_(cache_(tier_|writes|dropped_writes)|key_|unauthorized_)")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus and promtool are not installed (Debian: apt-get install prometheus)",
    ),
]


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with running("--film-workers", "1") as (_, url):
        yield url


@pytest.fixture(scope="module")
def prometheus(service: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Prometheus with our configuration, faster, that has scraped the service before, during and after
    requests."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    times = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    config["global"] = dict.fromkeys(times, f"{SCRAPE_S}s")
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [service.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://{address}"
        wait_for(f"{url}/-/ready", folder / "log")
        until(url, "moonvit_ready == 1")
        for _ in range(4):
            send_a_mix(service)
            time.sleep(SCRAPE_S)
        until(url, 'moonvit_requests_total{code="ok"} == 8')
        yield url
    finally:
        process.terminate()
        process.wait(30)


def send_a_mix(service: str) -> None:
    with httpx.Client(base_url=service, timeout=60) as client:
        film = (ROOT / "samples" / "clip.mp4").read_bytes()
        parts = [image(png(1)), image(b"no picture")]
        statuses = [
            client.post("/v1/encode", content=png(1, 280, 280), headers={"content-type": "image/png"}).status_code,
            client.post("/v1/encode", content=film, headers={"content-type": "video/mp4"}).status_code,
            client.post("/v1/encode", json={"input": parts}).status_code,
            client.post("/v1/encode", content=b"{", headers={"content-type": "application/json"}).status_code,
        ]
    assert statuses == [200, 200, 200, 400]


def wait_for(url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail(f"Prometheus did not start: {log.read_text()}")


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer}"
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def until(prometheus: str, expression: str) -> None:
    deadline = time.monotonic() + 60
    while not query(prometheus, expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        time.sleep(0.2)


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel's title, query), with the dashboard's variables filled in."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    values = {"$__rate_interval": f"{RATE_S}s", "$job": "moonvit", "$instance": ".+"}
    found = []
    targets = [(panel["title"], target) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    targets += [(note["name"], note) for note in dashboard["annotations"]["list"]]
    for title, target in targets:
        expression = target["expr"]
        for name, value in values.items():
            expression = expression.replace(name, value)
        found.append((title, expression))
    return found


def test_every_query_of_the_dashboard_has_an_answer(prometheus: str) -> None:
    queries = dashboard_queries()
    assert len(queries) > 40
    empty = [(title, text) for title, text in queries if not query(prometheus, text) and not MAY_BE_EMPTY.search(text)]
    assert [title for title, _ in empty] == ["Starts"]  # nothing has restarted


def test_the_dashboards_numbers_are_those_of_what_was_sent(prometheus: str) -> None:
    def value(expression: str) -> float:
        (found,) = query(prometheus, expression)
        return float(found["value"][1])

    assert value('sum(moonvit_requests_total{code="partial"})') == 4
    assert value('sum(moonvit_requests_total{code="invalid_request"})') == 4
    assert value('moonvit_items_total{kind="video", code="ok"}') == 4
    assert value("sum(moonvit_attention_batches_total)") == value('sum(moonvit_batches_total{outcome="ok"})')
    assert value('moonvit_stage_duration_seconds_count{stage="deliver"}') == 12


def test_no_alert_is_in_error_and_none_is_raised_by_a_healthy_service(prometheus: str) -> None:
    groups = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 10
    assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_promtool_finds_nothing_wrong_with_the_text(service: str) -> None:
    text = httpx.get(f"{service}/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
