"""Loading order, batches, and what becomes of the device's errors."""

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from encoder import (
    DeviceFailed,
    DeviceOutOfMemory,
    Engine,
    InvalidSegment,
    NonFiniteResult,
    NoUsableBackend,
    Segment,
    SetupError,
    UnknownBackend,
    pack,
    split,
)
from encoder.engine import fingerprint

SPECS = ["demo:k3-tiny", "demo:k25-tiny"]


@pytest.fixture(scope="module", params=SPECS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine.load(request.param)


@pytest.fixture(scope="module")
def k3() -> Engine:
    return Engine.load("demo:k3-tiny")


def segment(t: int, h: int, w: int, seed: int = 0) -> Segment:
    generator = torch.Generator().manual_seed(seed)
    return Segment(torch.randint(0, 256, (t * h * w, 3, 14, 14), generator=generator, dtype=torch.uint8), (t, h, w))


class Broken(nn.Module):
    """A model that raises, or returns something fixed."""

    def __init__(self, outcome: Exception | Tensor) -> None:
        super().__init__()
        self.outcome = outcome

    def forward(self, pixel_values: Tensor, grids: Sequence[object], attend: Callable[..., Tensor]) -> Tensor:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_demo_weights_are_pinned() -> None:
    hashes = {spec: Engine.load(spec).weights_sha256 for spec in SPECS}
    assert hashes == {
        "demo:k3-tiny": "56eba37c63fd00a05fdbc422f084b76e7e312f0ff8289f0073d05b8b16a6ad0f",
        "demo:k25-tiny": "fda007367bcfbfaa54eb9a8b209ef433e9aadf201878ccd4cfb123f6d0a9e43a",
    }


def test_defaults_on_a_cpu(engine: Engine) -> None:
    assert engine.device == torch.device("cpu")
    assert engine.dtype == torch.float32
    assert engine.attention.configured == "auto"


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_by_name_or_as_torch_has_it(dtype: str | torch.dtype) -> None:
    engine = Engine.load("demo:k3-tiny", dtype=dtype)
    (embedding,) = engine.encode([segment(1, 4, 4)])
    assert embedding.dtype == engine.dtype == torch.bfloat16


def test_one_output_a_segment_in_order(engine: Engine) -> None:
    segments = [segment(1, 4, 6), segment(4, 8, 8, seed=1), segment(1, 2, 2, seed=2)]
    outputs = engine.encode(segments)
    assert [tuple(output.shape) for output in outputs] == [(6, 256), (16, 256), (1, 256)]


def test_alone_as_in_company(engine: Engine) -> None:
    segments = [segment(1, 4, 6), segment(4, 8, 8, seed=1), segment(1, 2, 2, seed=2), segment(3, 2, 30, seed=3)]
    together = engine.encode(segments)
    for one, in_company in zip(segments, together, strict=True):
        (alone,) = engine.encode([one])
        assert (alone - in_company).abs().max().item() <= 1e-5


def test_embeddings_depend_on_the_picture(engine: Engine) -> None:
    first, second = engine.encode([segment(1, 4, 4, seed=0), segment(1, 4, 4, seed=1)])
    assert (first - second).norm() > 0.1 * first.norm()


def test_no_segments_give_no_embeddings(engine: Engine) -> None:
    assert engine.encode([]) == []
    empty = engine.run(pack([], engine.config))
    assert (tuple(empty.shape), empty.dtype) == ((0, 256), torch.float32)


def test_run_and_split_are_encode(engine: Engine) -> None:
    batch = pack([segment(1, 4, 6), segment(2, 2, 4)], engine.config)
    embeddings = engine.run(batch)
    assert embeddings.shape == (8, 256)
    assert [len(part) for part in split(embeddings, batch)] == [6, 2]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((1, 3, 4), "height of 3 patches, must be a multiple of 2"),
        ((5, 2, 2), "5 frames"),
        ((1, 2, 514), "width of 514"),
    ],
)
def test_illegal_grids_are_refused_by_position(k3: Engine, grid: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InvalidSegment, match=rf"segments\[1\].*{message}"):
        k3.encode([segment(1, 2, 2), segment(*grid)])


def test_warm_up_runs(engine: Engine) -> None:
    engine.warm_up()


def test_rms_norm_epsilon_changes_result_and_fingerprint(k3: Engine) -> None:
    other = Engine.load("demo:k3-tiny", rms_norm_eps=2**-7)
    (a,), (b,) = k3.encode([segment(1, 4, 4)]), other.encode([segment(1, 4, 4)])
    assert 1e-4 < ((a - b).norm() / a.norm()).item() < 0.1
    assert other.weights_sha256 == k3.weights_sha256
    assert other.fingerprint != k3.fingerprint


def test_fingerprint_tells_models_and_dtypes_apart(k3: Engine) -> None:
    fingerprints = {
        fingerprint(config, sha, dtype)
        for config in (k3.config, Engine.load("demo:k25-tiny").config)
        for sha in ("00", "01")
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(fingerprints) == 8
    assert k3.fingerprint == fingerprint(k3.config, k3.weights_sha256, torch.float32)
    assert re.fullmatch("[0-9a-f]{64}", k3.fingerprint)


def test_fingerprint_ignores_where_the_model_came_from(k3: Engine) -> None:
    moved = replace(k3.config, source="/elsewhere", is_demo=False)
    assert fingerprint(moved, "00", k3.dtype) == fingerprint(k3.config, "00", k3.dtype)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "gpu"}, SetupError, "device 'gpu' is not one; examples: cpu, cuda"),
        ({"device": "meta"}, SetupError, "only cpu and cuda are supported"),
        ({"device": "cuda:99"}, SetupError, "device cuda:99 is not there"),
        ({"device": "cuda:99", "attention_backend": "sdpa"}, SetupError, "device cuda:99 is not there"),
        ({"dtype": "int8"}, SetupError, "dtype 'int8': allowed are bfloat16, float16, float32"),
        ({"dtype": torch.float64}, SetupError, "allowed are"),
        ({"attention_backend": "torch_native"}, UnknownBackend, "Unsupported Kimi-K3 vision attention backend"),
        ({"attention_backend": "fa3"}, NoUsableBackend, "fa3"),
    ],
)
def test_bad_options_are_refused_before_weights_are_read(
    options: dict[str, object], error: type[SetupError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder.engine.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(error, match=re.escape(message)):
        Engine.load("demo:k3-tiny", **options)


def test_a_result_that_is_not_finite_is_never_returned(k3: Engine) -> None:
    for value in (float("nan"), float("inf")):
        broken = replace(k3, model=Broken(torch.tensor([[0.0, value]])))
        with pytest.raises(NonFiniteResult, match=r"batch of 1 segments, 4 patches.*attention sdpa; float32"):
            broken.encode([segment(1, 2, 2)])


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), DeviceOutOfMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), DeviceOutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), DeviceOutOfMemory),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceFailed),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), DeviceFailed),
        (torch.AcceleratorError("CUDA error: unspecified launch failure", 719), DeviceFailed),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:30],
)
def test_device_errors_become_ours(k3: Engine, raised: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected) as error:
        replace(k3, model=Broken(raised)).encode([segment(1, 2, 2)])
    assert error.value.__cause__ is raised
    assert "CU" not in str(error.value)  # the library's own text is for the log


def test_other_errors_pass_through(k3: Engine) -> None:
    with pytest.raises(RuntimeError, match="size mismatch") as error:
        replace(k3, model=Broken(RuntimeError("size mismatch"))).encode([segment(1, 2, 2)])
    assert type(error.value) is RuntimeError


def test_loading_says_that_demo_weights_are_demo_weights(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="encoder.engine"):
        Engine.load("demo:k25-tiny")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "encoder.engine"]
    assert line == "loaded demo:k25-tiny (demo weights: embeddings mean nothing) on cpu in float32, attention sdpa"


def test_on_a_cpu_the_host_result_is_the_result(engine: Engine) -> None:
    batch = pack([segment(1, 4, 6), segment(2, 2, 4)], engine.config)
    assert torch.equal(engine.run_to_host(batch), engine.run(batch))
    assert torch.equal(engine.submit(batch)(), engine.run(batch))
    assert tuple(engine.run_to_host(pack([], engine.config)).shape) == (0, 256)


def test_a_failed_computation_lets_go_of_its_memory(k3: Engine) -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Full(nn.Module):
        def forward(self, pixel_values: Tensor, grids: Sequence[object], attend: Callable[..., Tensor]) -> Tensor:
            activation = torch.zeros(8)
            kept.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    with pytest.raises(DeviceOutOfMemory) as error:
        replace(k3, model=Full()).encode([segment(1, 2, 2)])
    assert error.value.__cause__ is not None
    assert kept[0]() is None


def test_graphs_are_for_gpus() -> None:
    engine = Engine.load("demo:k3-tiny", cuda_graphs=True)
    assert engine.graphs is None
    assert engine.attention_for([256]) == "sdpa"


def test_what_encode_gives_is_ordinary_tensors(k3: Engine) -> None:
    """Not views of a batch, nor tensors that autograd refuses."""
    segments = [Segment(torch.zeros((4 * n, 3, 14, 14), dtype=torch.uint8), (1, 2, 2 * n)) for n in (1, 2)]
    first, second = k3.encode(segments)
    for tensor in (first, second):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.is_inference()
        tensor.mul_(2)
    weight = torch.ones_like(first, requires_grad=True)
    (first * weight).sum().backward()
    assert weight.grad is not None


def test_a_callers_autocast_changes_nothing(k3: Engine) -> None:
    segment = Segment(torch.arange(4 * 3 * 14 * 14, dtype=torch.int32).view(4, 3, 14, 14).to(torch.uint8), (1, 2, 2))
    (exact,) = k3.encode([segment])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (inside,) = k3.encode(iter([segment]))
    assert inside.dtype == torch.float32
    assert torch.equal(inside, exact)


def test_a_default_device_of_the_callers_changes_nothing() -> None:
    previous = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        engine = Engine.load("demo:k3-tiny")
        (rows,) = engine.encode([Segment(torch.zeros((4, 3, 14, 14), dtype=torch.uint8, device="cpu"), (1, 2, 2))])
    finally:
        torch.set_default_device(previous)
    assert rows.device.type == "cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spec", ["demo:k3-tiny", "demo:k25-tiny"])
def test_every_dtype_works_from_the_first_request_and_is_what_it_says(spec: str, dtype: str) -> None:  # M40
    engine = Engine.load(spec, dtype=dtype)
    assert engine.dtype == getattr(torch, dtype)
    assert {weight.dtype for weight in engine.model.parameters()} == {engine.dtype}
    (rows,) = engine.encode([Segment(torch.zeros((4, 3, 14, 14)), (1, 2, 2))])
    assert rows.dtype == engine.dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_black_white_and_noise_of_forty_sizes_are_finite(dtype: str) -> None:  # M39
    engine = Engine.load("demo:k3-tiny", dtype=dtype)
    noise = torch.Generator().manual_seed(0)
    segments = []
    for i in range(40):
        grid = (1 + i % 4, 2 * (1 + i % 5), 2 * (1 + i % 9))
        shape = (grid[0] * grid[1] * grid[2], 3, 14, 14)
        segments += [
            Segment(torch.zeros(shape, dtype=torch.uint8), grid),
            Segment(torch.full(shape, 255, dtype=torch.uint8), grid),
            Segment(torch.randint(0, 256, shape, generator=noise, dtype=torch.uint8), grid),
        ]
    assert all(bool(rows.isfinite().all()) for rows in engine.encode(segments))
