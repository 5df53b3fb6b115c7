"""The start-up self-test: faulty backends are refused, `auto` takes the next, and what was found is recorded."""

import logging
import math

import pytest
import torch

from encoder.attention import BACKENDS, Attention, Entry, describe, resolve, start, startup
from encoder.attention.sdpa import SdpaAttention
from encoder.errors import NoUsableBackend

CPU = torch.device("cpu")


def started(name: str, backends: tuple[Entry, ...] = BACKENDS, dtype=torch.float32, head_dim: int = 32) -> Attention:
    where = {"device": CPU, "dtype": dtype, "head_dim": head_dim}
    return start(resolve(name, family="kimi_k3", backends=backends, **where), num_heads=2, **where)


class Faulty:
    """sdpa with its output spoilt."""

    def __init__(self, spoil):
        self.spoil = spoil

    def plan(self, lengths, cu_seqlens):
        attend = SdpaAttention().plan(lengths, cu_seqlens)
        return lambda q, k, v: self.spoil(attend(q, k, v), lengths, v)


def spoil_nan(out, lengths, v):
    out[-1, 0, 0] = math.nan
    return out


def spoil_scale(out, lengths, v):
    return out * (1 + 3e-5)


def spoil_smallest_segment(out, lengths, v):
    """Right everywhere but in the 2x2 grid."""
    if 4 in lengths:
        start = sum(lengths[: lengths.index(4)])
        out[start : start + 4] = v[start : start + 4].mean(0)
    return out


def spoil_shape(out, lengths, v):
    return out.flatten(1)


def spoil_dtype(out, lengths, v):
    return out.double()


def spoil_crash(out, lengths, v):
    raise RuntimeError("no kernel image is available\nmore lines")


def faulty(spoil, name="faulty") -> Entry:
    return Entry(name, "", lambda device, dtype, head_dim: None, lambda *_: Faulty(spoil))


SOUND = Entry("sound", "", lambda device, dtype, head_dim: None, lambda *_: SdpaAttention())
FAULTS = [
    (spoil_nan, "self-test: relative error nan, allowed 1e-05 in torch.float32"),
    (spoil_scale, "self-test: relative error 3e-05, allowed 1e-05 in torch.float32"),
    (spoil_smallest_segment, "self-test: relative error 0."),
    (spoil_shape, "failed to start: ValueError: gave (440, 64) in torch.float32 for (440, 2, 32) in torch.float32"),
    (spoil_dtype, "failed to start: ValueError: gave (440, 2, 32) in torch.float64 for"),
    (spoil_crash, "failed to start: RuntimeError: no kernel image is available"),
]


class TestSelfTest:
    @pytest.mark.parametrize(("spoil", "reason"), FAULTS)
    def test_named_and_faulty_is_refused(self, spoil, reason):
        with pytest.raises(NoUsableBackend) as caught:
            started("faulty", (faulty(spoil),))
        first, second = str(caught.value).splitlines()
        assert first == "No attention backend passed its start-up test on cpu:"
        assert second.startswith(f"  faulty: {reason}")

    @pytest.mark.parametrize(("spoil", "reason"), FAULTS)
    def test_auto_takes_the_next_and_says_so(self, spoil, reason, caplog):
        with caplog.at_level(logging.WARNING):
            attention = started("auto", (faulty(spoil), SOUND))
        assert attention.name == "sound"
        assert attention.configured == "auto"
        assert attention.refused["faulty"].startswith(reason)
        assert f"attention backend faulty is out of service: {reason}" in caplog.text

    def test_errors_are_recorded(self):
        attention = started("auto", (faulty(spoil_scale), faulty(spoil_nan, "nan"), SOUND))
        assert attention.self_test["faulty"] == pytest.approx(3e-5, rel=0.1)
        assert math.isnan(attention.self_test["nan"])
        assert 0 < attention.self_test["sound"] < 1e-6

    def test_every_candidate_fails(self):
        backends = (faulty(spoil_nan), faulty(spoil_crash, "crash"))
        with pytest.raises(NoUsableBackend, match=r"(?s)  faulty: self-test.*\n  crash: failed to start"):
            started("auto", backends)

    def test_those_after_the_first_are_not_tried(self):
        attention = started("auto", (SOUND, faulty(spoil_crash)))
        assert attention.refused == {"faulty": "would run, but sound comes before it"}
        assert list(attention.self_test) == ["sound"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_real_ones_pass(self, dtype):
        for name in ("sdpa", "reference", "triton"):
            attention = started(name, dtype=dtype, head_dim=72)
            assert attention.name == name
            assert attention.refused == {}

    def test_planning_goes_to_the_backend(self):
        attention = started("sdpa")
        v = torch.arange(6.0).view(3, 1, 2)
        out = attention.plan([1, 2], torch.tensor([0, 1, 3], dtype=torch.int32))(torch.zeros_like(v), v, v)
        torch.testing.assert_close(out.view(3, 2), torch.tensor([[0.0, 1], [3, 4], [3, 4]]))

    def test_on_hopper_auto_gives_short_equal_segments_to_sdpa(self, monkeypatch):
        monkeypatch.setattr(startup, "_is_hopper", lambda device: True)
        sdpa = next(entry for entry in BACKENDS if entry.name == "sdpa")
        attention = started("auto", (SOUND, sdpa))
        assert attention.name == "sound"
        assert attention.refused == {"sdpa": "takes short segments of equal length, sound everything else"}
        assert set(attention.self_test) == {"sound", "sdpa"}
        assert attention.rules() == [("segments of one length, up to 1024 patches", "sdpa"), ("all others", "sound")]
        batches = [[256, 256], [1024] * 9, [256], [1028, 1028], [1028], [256, 260], []]
        assert [attention.choose(lengths) for lengths in batches] == ["sdpa"] * 3 + ["sound"] * 4
        planned = []
        monkeypatch.setattr(attention.backend, "plan", lambda lengths, cu_seqlens: planned.append(lengths))
        for lengths in batches:
            attention.plan(lengths, torch.empty(0))
        assert planned == batches[3:]

    def test_a_faulty_sdpa_takes_no_batch(self, monkeypatch):
        monkeypatch.setattr(startup, "_is_hopper", lambda device: True)
        attention = started("auto", (SOUND, faulty(spoil_nan, "sdpa")))
        assert attention.choose([256, 256]) == "sound"
        assert attention.refused["sdpa"].startswith("self-test: relative error nan")

    def test_elsewhere_one_backend_takes_every_batch(self):
        attention = started("sdpa")
        assert attention.choose([256, 256]) == "sdpa"
        assert attention.for_equal is None

    def test_leaves_the_global_random_state_alone(self):
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        started("sdpa")
        assert torch.equal(torch.rand(1), expected)


def test_describe_lists_every_backend(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backends = (*BACKENDS, faulty(spoil_scale), faulty(spoil_crash, "crash"))
    reports = describe(device=CPU, dtype=torch.float32, num_heads=2, head_dim=32, backends=backends)
    rows = {report.name: report for report in reports}
    assert list(rows) == [entry.name for entry in backends]
    assert rows["sdpa"].why_not is None
    assert rows["sdpa"].error < 1e-6
    assert rows["reference"].error == 0
    assert rows["fa3"].why_not == "needs an NVIDIA GPU, the device is cpu"
    assert rows["fa3"].error is None
    assert rows["faulty"].error == pytest.approx(3e-5, rel=0.1)
    assert rows["faulty"].why_not.startswith("self-test: ")
    assert rows["crash"].why_not == "failed to start: RuntimeError: no kernel image is available"
