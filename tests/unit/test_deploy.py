"""Alerts, dashboard and runbook: they speak of series that exist, and of each other."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.metrics_table import series

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
RULES: dict[str, Any] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
NAMES = [alert["alert"] for alert in ALERTS]
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def known() -> set[str]:
    """Every name a query may use."""
    names = set()
    for metric in series():
        names |= (
            {metric.name + end for end in ("_bucket", "_sum", "_count")}
            if metric.kind == "histogram"
            else {metric.name}
        )
    return names


@pytest.mark.parametrize(
    "path", ["deploy/prometheus/alerts.yml", "deploy/prometheus/alerts_test.yml", "deploy/grafana/dashboard.json"]
)
def test_only_series_that_exist_are_asked_for(path: str) -> None:
    asked = set(re.findall(r"moonvit_\w+", (ROOT / path).read_text(encoding="utf-8")))
    assert len(asked) > 10
    assert asked <= known()


@pytest.mark.parametrize("document", ["runbook.md", "metrics.md"])
def test_only_series_that_exist_are_written_about(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    assert set(re.findall(r"moonvit_\w+", text)) <= known() | {metric.name for metric in series()}


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_every_alert_says_how_bad_it_is_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert alert.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"


def test_the_runbook_has_one_complete_section_per_alert_in_their_order() -> None:
    sections = re.split(r"^### ", RUNBOOK, flags=re.MULTILINE)[1:]
    assert [section.partition("\n")[0] for section in sections] == NAMES
    for section in sections:
        assert re.findall(r"^\*\*(.+?)\*\*", section, re.MULTILINE) == ["Means", "Look at", "Do"]


def test_the_runbook_names_options_that_exist() -> None:
    options = set(re.findall(r"`(--[a-z-]+)", RUNBOOK))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(options) > 10
    assert [option for option in options if f"`{option}`" not in readme] == []


def test_the_runbook_names_panels_that_exist() -> None:
    titles = {panel["title"] for panel in PANELS}
    assert set(re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", RUNBOOK)) <= titles


def test_every_alert_is_seen_to_fire() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == set(NAMES)
    assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == set(NAMES)


@promtool
@pytest.mark.parametrize(
    "command",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_ids_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_ask_the_chosen_source_about_the_chosen_replicas() -> None:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            selectors = re.findall(r"(?:moonvit|process)_\w+(\{[^}]*\})?", target["expr"])
            assert selectors
            assert all('job="$job", instance=~"$instance"' in selector for selector in selectors), target["expr"]


def test_every_series_is_on_the_dashboard() -> None:
    shown = "".join(target["expr"] for panel in PANELS for target in panel.get("targets", ()))
    assert [metric.name for metric in series() if metric.name not in shown] == []
