"""Backends beside each other: what is measured, and how `moonvit-serve backends --bench` shows it."""

import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from app.cli import main
from encoder.attention import Attend, Entry, speed
from encoder.attention.reference import ReferenceAttention
from encoder.attention.sdpa import SdpaAttention
from encoder.attention.speed import CPU_MIXES, MIXES, compare

CPU = torch.device("cpu")


class Halved:
    """Right up to a factor."""

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        attend = ReferenceAttention().plan(lengths, cu_seqlens)
        return lambda q, k, v: attend(q, k, v) / 2


class Counting(Halved):
    def __init__(self) -> None:
        self.lengths: list[list[int]] = []
        self.calls = 0

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        self.lengths.append(list(lengths))
        assert cu_seqlens.tolist() == [0, 4, 16]
        attend = super().plan(lengths, cu_seqlens)

        def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.calls += 1
            return attend(q, k, v)

        return counted


def test_speed_and_error_of_each_backend() -> None:
    backends = {"sdpa": SdpaAttention(), "halved": Halved()}
    found = compare(backends, [4, 12], num_heads=2, head_dim=8, device=CPU, dtype=torch.float32)
    assert list(found) == ["sdpa", "halved"]
    assert found["sdpa"].error < 1e-5
    assert found["halved"].error == pytest.approx(0.5)
    for each in found.values():
        assert each.tflops * each.ms / 1e3 == pytest.approx(4 * (16 + 144) * 2 * 8 / 1e12)


def test_a_backend_plans_once_and_takes_its_turns() -> None:
    backend = Counting()
    compare({"it": backend}, [4, 12], num_heads=2, head_dim=8, device=CPU, dtype=torch.float32, rounds=5)
    assert backend.lengths == [[4, 12]]
    assert backend.calls == 1 + 5  # one for its error


def test_mixes_on_a_cpu_are_a_hundredth_of_the_work() -> None:
    def work(mixes: dict[str, list[int]]) -> int:
        return sum(n * n for lengths in mixes.values() for n in lengths)

    assert work(CPU_MIXES) < work(MIXES) / 100


class TestCommand:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.commands.backends.CPU_MIXES", {"2 x 16": [16, 16], "2 mixed": [4, 24]})

    def test_bench_adds_a_table_of_mixes(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["backends", "--device", "cpu", "--bench"]) == 0
        lines = capsys.readouterr().out.splitlines()
        first = next(i for i, line in enumerate(lines) if line.strip().startswith("2 x 16"))
        shown = {tuple(line.split()[-5:-3]) for line in lines[first:] if len(line.split()) > 5}
        assert ("sdpa", "*") in shown
        assert any(line.strip().startswith("reference ") for line in lines[first:])
        assert "what --attention-backend auto takes for that mix" in lines[-1]

    def test_json_has_the_same(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["backends", "--device", "cpu", "--bench", "--json", "--attention-backend", "reference"]
        assert main(argv) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["device"], document["dtype"], document["configured"]) == ("cpu", "float32", "reference")
        assert document["taken"] == "reference"
        rows = {row["name"]: row for row in document["backends"]}
        assert rows["sdpa"]["why_not"] is None
        assert 0 < rows["sdpa"]["self_test_error"] < 1e-5
        assert "NVIDIA" in rows["flashinfer"]["why_not"]
        assert [(mix["segments"], mix["patches"]) for mix in document["mixes"]] == [
            ("2 x 16", [16, 16]),
            ("2 mixed", [4, 24]),
        ]
        for mix in document["mixes"]:
            assert mix["taken"] == "reference"
            assert set(mix["results"]) == {"sdpa", "reference"}
            assert all(result["ms"] > 0 and result["error"] < 1e-5 for result in mix["results"].values())

    def test_without_bench_nothing_is_measured(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(speed, "compare", None)
        monkeypatch.setattr("app.commands.backends.compare", None)
        assert main(["backends", "--device", "cpu", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["mixes"] == []

    def test_a_backend_that_fails_its_test_is_not_measured(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = Entry("wrong", "half of it", lambda *_: None, lambda *_: Halved())
        right = Entry("right", "all of it", lambda *_: None, lambda *_: ReferenceAttention())
        table = (wrong, right)
        monkeypatch.setattr("app.commands.backends.BACKENDS", table)
        for name in ("resolve", "describe"):
            ours = getattr(__import__("app.commands.backends", fromlist=[name]), name)
            monkeypatch.setattr(f"app.commands.backends.{name}", lambda *a, f=ours, **k: f(*a, backends=table, **k))
        assert main(["backends", "--device", "cpu", "--bench", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["taken"] == "right"
        assert "self-test" in document["backends"][0]["why_not"]
        assert [set(mix["results"]) for mix in document["mixes"]] == [{"right"}, {"right"}]
