"""A backend that fails in service: the next one answers and stays, never a wrong number."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from encoder import Engine, NonFiniteResult, Segment, pack
from encoder.attention import Attend, Attention, Entry, resolve, start
from encoder.attention.sdpa import SdpaAttention

CPU = torch.device("cpu")
TROUBLE = 24  # patches of a segment on which the faulty backends fail; none of the self-test has so many


@pytest.fixture(scope="module")
def sound() -> Engine:
    return Engine.load("demo:k3-tiny")


class FailsInService:
    """Passes its self-test, and fails on batches that hold a segment of `TROUBLE` patches."""

    def __init__(self, fail: Callable[[Tensor], Tensor]) -> None:
        self.fail = fail

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        attend = SdpaAttention().plan(lengths, cu_seqlens)
        if TROUBLE not in lengths:
            return attend
        return lambda q, k, v: self.fail(attend(q, k, v))


def nan(out: Tensor) -> Tensor:
    out[5, 0, 0] = math.nan
    return out


def crash(out: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this shape")


def entry(name: str, fail: Callable[[Tensor], Tensor] | None = None) -> Entry:
    return Entry(
        name, "", lambda device, dtype, head_dim: None, lambda *_: FailsInService(fail) if fail else SdpaAttention()
    )


def attention(engine: Engine, *backends: Entry, name: str = "auto") -> Attention:
    vision = engine.config.vision
    resolution = resolve(
        name, device=CPU, dtype=engine.dtype, head_dim=vision.head_dim, family="kimi_k3", backends=backends
    )
    return start(resolution, num_heads=vision.num_heads, head_dim=vision.head_dim, device=CPU, dtype=engine.dtype)


def segment(*grid: int) -> Segment:
    generator = torch.Generator().manual_seed(math.prod(grid))
    return Segment(torch.randint(0, 256, (math.prod(grid), 3, 14, 14), generator=generator, dtype=torch.uint8), grid)


BATCH = [segment(1, 2, 4), segment(1, 4, 6)]


@pytest.mark.parametrize(("fail", "reason"), [(nan, "gave values that are not finite"), (crash, "raised RuntimeError")])
def test_the_next_backend_answers_and_stays(sound, fail, reason, caplog):
    engine = replace(sound, attention=attention(sound, entry("faulty", fail), entry("next"), entry("last")))
    assert engine.attention_for([8]) == "faulty"
    for got, want in zip(engine.encode(BATCH), sound.encode(BATCH), strict=True):
        assert torch.equal(got, want)
    assert engine.attention.name == engine.attention_for([8]) == "next"
    assert engine.attention.out_of_service == {"faulty": reason}
    assert engine.attention.refused == {"faulty": reason, "last": "would run, but next comes before it"}
    assert f"attention backend faulty is out of service: {reason}; next takes its place" in caplog.text
    assert torch.equal(engine.encode(BATCH)[1], sound.encode(BATCH)[1])


def test_backends_that_fail_as_well_are_passed_by(sound):
    engine = replace(sound, attention=attention(sound, entry("a", nan), entry("b", crash), entry("c", nan), entry("d")))
    assert torch.equal(engine.encode(BATCH)[1], sound.encode(BATCH)[1])
    assert engine.attention.name == "d"
    assert list(engine.attention.out_of_service) == ["a"]  # the others were not in service


@pytest.mark.parametrize("name", ["auto", "a"])
def test_where_no_backend_gives_finite_numbers_the_batch_fails_and_all_stay(sound, name):
    engine = replace(sound, attention=attention(sound, entry("a", nan), entry("b", nan), name=name))
    tried = "a, b" if name == "auto" else "a"
    with pytest.raises(NonFiniteResult, match=rf"batch of 2 segments, 32 patches.*\(attention {tried}; float32\)"):
        engine.encode(BATCH)
    assert engine.attention.name == "a"
    assert engine.attention.out_of_service == {}
    assert torch.equal(engine.encode(BATCH[:1])[0], sound.encode(BATCH[:1])[0])


def test_what_no_backend_can_run_is_raised_as_it_came(sound):
    engine = replace(sound, attention=attention(sound, entry("a", crash), entry("b", crash)))
    with pytest.raises(RuntimeError, match="no kernel for this shape"):
        engine.encode(BATCH)
    assert engine.attention.name == "a"


def test_the_backend_for_equal_segments_is_taken_out_alone(sound, monkeypatch):
    monkeypatch.setattr("encoder.attention.startup._is_hopper", lambda device: True)
    engine = replace(sound, attention=attention(sound, entry("main"), entry("sdpa", nan)))
    assert engine.attention_for([TROUBLE, TROUBLE]) == "sdpa"
    engine.encode([segment(1, 4, 6), segment(1, 2, 12)])
    assert engine.attention_for([TROUBLE, TROUBLE]) == engine.attention.name == "main"
    assert list(engine.attention.out_of_service) == ["sdpa"]


def test_a_later_backend_that_fails_its_self_test_is_not_used(sound):
    def spoilt(*_: object) -> FailsInService:
        backend = FailsInService(nan)
        backend.plan = lambda lengths, cu_seqlens: lambda q, k, v: torch.zeros_like(q)  # type: ignore[method-assign]
        return backend

    zeros = Entry("zeros", "", lambda device, dtype, head_dim: None, spoilt)
    engine = replace(sound, attention=attention(sound, entry("a", nan), zeros, entry("b")))
    assert torch.equal(engine.encode(BATCH)[1], sound.encode(BATCH)[1])
    assert engine.attention.name == "b"
    assert engine.attention.refused["zeros"].startswith("self-test: relative error")


class Transfers:
    """To and from a device that is the host; what comes back was made in inference mode, as on a GPU."""

    def upload(self, host: Tensor) -> Tensor:
        return host

    def download(self, *tensors: Tensor, out: Tensor | None = None) -> Callable[[], list[Tensor]]:
        return lambda: [tensor.clone() for tensor in tensors]


def test_who_waits_for_a_submitted_batch_gets_the_successors_numbers(sound):
    engine = replace(sound, attention=attention(sound, entry("a", nan), entry("b")), transfers=Transfers())
    batch = pack(BATCH, engine.config)
    wait = engine.submit(batch)
    assert engine.attention.name == "a"  # nobody has looked at the numbers yet
    assert torch.equal(wait(), sound.run(batch))
    assert engine.attention.out_of_service == {"a": "gave values that are not finite"}
