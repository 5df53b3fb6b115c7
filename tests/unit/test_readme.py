import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.settings import Settings
from scripts import performance_tables
from scripts.readme_tables import options_table, render
from scripts.results_tables import NUMBERS, numbers_tables
from scripts.tower_plot import LEFT, PLOT, RIGHT, WIDTH, Row, plot
from scripts.tower_plot import render as render_plot

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_generated_tables_are_up_to_date() -> None:
    assert render(README) == README, "run: make readme"
    performance = performance_tables.DOCUMENT.read_text(encoding="utf-8")
    assert performance_tables.render(performance) == performance, "run: make readme"


def test_render_replaces_only_what_lies_between_the_markers() -> None:
    text = "a\n<!-- options:begin -->\nold\n<!-- options:end -->\nb\n<!-- numbers:begin --><!-- numbers:end -->\nc\n"
    wanted = render(text)
    assert wanted.startswith("a\n<!-- options:begin -->\n| flag |")
    assert "old" not in wanted
    assert wanted.endswith("\n<!-- numbers:end -->\nc\n")


def test_render_refuses_a_readme_without_markers() -> None:
    with pytest.raises(SystemExit, match="options:begin"):
        render("nothing here")


def test_the_options_table_has_every_option() -> None:
    lines = options_table().splitlines()[2:]
    assert len(lines) == len(Settings.model_fields)
    assert lines[1] == ("| `--port` INT | `MOONVIT_PORT` | 8000 | port to listen on; 0 takes a free one |")


def test_results_files_become_tables(tmp_path: Path) -> None:
    assert numbers_tables(tmp_path) == "None measured yet: `make bench`."
    batch = {
        "patches": 1536,
        "median_s": {"ours": 2.0, "transformers": 3.0},
        "ratio": 1.5,
        "max_abs_difference": 2e-6,
    }
    report = {
        "model": "demo:k25",
        "processor": "Abacus",
        "cores": 2,
        "torch_threads": 1,
        "versions": {"torch": "2.13.0"},
        "batches": {"one | two": batch},
    }
    (tmp_path / "tower_cpu.json").write_text(json.dumps(report))
    text, table = numbers_tables(tmp_path).split("\n\n")
    assert text.endswith("Abacus, 2 cores, 1 threads, torch 2.13.0.")
    assert table.splitlines()[2] == "| one \\| two | 1536 | 2.00 s | 3.00 s | 1.50 | 2.0e-06 |"


def test_a_report_may_bring_its_own_table(tmp_path: Path) -> None:
    report = {
        "what": "seconds of something.",
        "gpu": "Abacus 2000",
        "processor": "Abacus",
        "cores": 2,
        "torch_threads": 1,
        "versions": {"torch": "2.13.0"},
        "table": {"columns": ["a", "b"], "rows": [["1", "2"]]},
    }
    (tmp_path / "anything.json").write_text(json.dumps(report))
    text, table = numbers_tables(tmp_path).split("\n\n")
    assert text == "Seconds of something. one Abacus 2000, Abacus, 2 cores, 1 threads, torch 2.13.0."
    assert table == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_every_results_file_is_shown() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert path.stem in NUMBERS or {"what", "table"} <= json.loads(path.read_text(encoding="utf-8")).keys(), path


def test_the_plot_is_up_to_date() -> None:
    assert render_plot("") == PLOT.read_text(encoding="utf-8"), "run: make readme"


def test_bars_end_where_their_ratios_are() -> None:
    svg = plot([Row("twice", 30.0, 15.0), Row("a < b", 80.0, 10.0), Row("half", 5.0, 10.0)], "Abacus & Co")
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own
    bars = [rect.attrib for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    third = (WIDTH - LEFT - RIGHT) / 3  # the axis goes to 8, three doublings
    assert [float(bar["x"]) - LEFT for bar in bars] == pytest.approx([0, 0, -third, 0], abs=0.1)
    assert [float(bar["width"]) for bar in bars] == pytest.approx([third, 3 * third, third, third], abs=0.1)
    words = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"2.00x", "8.00x", "0.50x", "a < b", "geometric mean", "30 → 15 ms"} <= set(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    code = re.findall(r"`(make [^`]+)`", text) + re.findall(r"^(make .+)$", text, re.MULTILINE)
    named = {
        word for command in code for word in command.partition("#")[0].split()[1:] if re.fullmatch(r"[a-z-]+", word)
    }
    assert named <= TARGETS
    assert document.name != "README.md" or {"run", "test", "bench"} <= named


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_target_is_listed_by_help() -> None:
    described = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert described == TARGETS
