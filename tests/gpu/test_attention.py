"""Every backend that can run on this GPU, on ragged segments. Libraries that are missing skip with their reason."""

import math

import pytest
import torch

from encoder.attention import BACKENDS, AttentionBackend, Entry, describe, resolve, start
from encoder.attention.selftest import TOLERANCES
from tests.ragged import attend, exact, packed_qkv, plain, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles its kernels on first use
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda", 0)
RAGGED = [4, 300, 65, 1, 2052, 576]
NUM_HEADS = 3
loaded: dict[tuple[str, torch.dtype, int], AttentionBackend] = {}


def load(entry: Entry, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> AttentionBackend:
    """Each once in a session: loading may compile."""
    if reason := entry.why_not(GPU, dtype, head_dim):
        pytest.skip(f"{entry.name}: {reason}")
    key = (entry.name, dtype, head_dim)
    if key not in loaded:
        loaded[key] = entry.load(GPU, dtype, NUM_HEADS, head_dim)
    return loaded[key]


# What is coarser on purpose has a tolerance of its own and tests of its own, in test_fp8.py.
@pytest.fixture(params=[entry for entry in BACKENDS if entry.tolerance is None], ids=lambda entry: entry.name)
def entry(request):
    return request.param


@pytest.mark.parametrize("lengths", [RAGGED, [256] * 5, [4], [16384, 4], [64, 64, 400, 400, 4]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_error_at_most_twice_that_of_plain_torch(entry, head_dim, dtype, lengths):
    backend = load(entry, dtype, head_dim)
    q, k, v = packed_qkv(lengths, NUM_HEADS, head_dim, dtype, GPU)
    expected = exact(lengths, q, k, v)
    out = attend(backend, lengths, q, k, v)
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert relative_error(out, expected) <= 2 * relative_error(plain(lengths, q, k, v), expected)


@pytest.mark.parametrize("head_dim", [32, 72, 128, 256])
def test_float32(entry, head_dim):
    backend = load(entry, torch.float32, head_dim)
    q, k, v = packed_qkv(RAGGED, NUM_HEADS, head_dim, torch.float32, GPU)
    assert relative_error(attend(backend, RAGGED, q, k, v), exact(RAGGED, q, k, v)) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_segments_do_not_see_each_other(entry, head_dim):
    backend = load(entry, head_dim=head_dim)
    q, k, v = packed_qkv(RAGGED, NUM_HEADS, head_dim, torch.bfloat16, GPU)
    before = attend(backend, RAGGED, q, k, v)
    changed = slice(304, 369)
    for x in (q, k, v):
        x[changed] = 100
    after = attend(backend, RAGGED, q, k, v)
    assert torch.equal(after[:304], before[:304])
    assert torch.equal(after[369:], before[369:])
    assert not torch.equal(after[changed], before[changed])


def test_contiguous_inputs(entry):
    backend = load(entry)
    q, k, v = packed_qkv(RAGGED, NUM_HEADS, 128, torch.bfloat16, GPU)
    from_copies = attend(backend, RAGGED, q.contiguous(), k.contiguous(), v.contiguous())
    assert relative_error(from_copies, attend(backend, RAGGED, q, k, v)) < 1e-3


@pytest.mark.parametrize("length", [256, 1024])
def test_offsets_beyond_int32(entry, length):
    """Half a million patches of 3 x 12 x 128 channels: the last segment begins after 2**31 elements."""
    if entry.name == "reference":
        pytest.skip("reference: not made for speed")
    if reason := entry.why_not(GPU, torch.bfloat16, 128):
        pytest.skip(f"{entry.name}: {reason}")
    backend = entry.load(GPU, torch.bfloat16, 12, 128)
    lengths = [length] * (480_000 // length) + [length + 4]
    packed = torch.empty(sum(lengths), 3, 12, 128, dtype=torch.bfloat16, device=GPU).normal_()
    assert packed.numel() > 2**31
    q, k, v = packed.unbind(1)
    last = slice(-length - 4, None)
    expected = exact([length + 4], q[last], k[last], v[last])
    assert relative_error(attend(backend, lengths, q, k, v)[last], expected) < TOLERANCES[torch.bfloat16]


def test_planning_ahead_leaves_earlier_plans_alone(entry):
    """Many batches are planned while the device is busy, and run in turns on two streams."""
    backend = load(entry)
    batches = [[256 + 4 * i, 4, 1200 - 8 * i] for i in range(6)]
    inputs = [packed_qkv(lengths, NUM_HEADS, 128, torch.bfloat16, GPU) for lengths in batches]
    expected = [exact(lengths, *qkv) for lengths, qkv in zip(batches, inputs, strict=True)]
    attend(backend, batches[0], *inputs[0])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        plans = []
        for lengths in batches:
            cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=GPU)
            plans.append(backend.plan(lengths, cu_seqlens))
        torch.cuda.synchronize()
        outputs = []
        for i in range(len(batches)):
            with torch.cuda.stream(streams[i % 2]):
                outputs.append(plans[i](*inputs[i]))
        del plans
        torch.cuda.synchronize()
        for out, want in zip(outputs, expected, strict=True):
            assert relative_error(out, want) < TOLERANCES[torch.bfloat16]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_neither_planning_nor_attending_waits_for_the_device(entry):
    if entry.name == "reference":
        pytest.skip("reference: not made for speed")
    backend = load(entry)
    q, k, v = packed_qkv(RAGGED, NUM_HEADS, 128, torch.bfloat16, GPU)
    cu_seqlens = torch.tensor([0, *torch.tensor(RAGGED).cumsum(0).tolist()], dtype=torch.int32, device=GPU)
    attend(backend, RAGGED, q, k, v)
    try:
        torch.cuda.set_sync_debug_mode("error")
        layer = backend.plan(RAGGED, cu_seqlens)
        for _ in range(3):
            layer(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("num_heads", "head_dim", "family"), [(12, 128, "kimi_k3"), (16, 72, "kimi_k25")])
def test_auto_starts(num_heads, head_dim, family):
    where = {"device": GPU, "dtype": torch.bfloat16, "head_dim": head_dim}
    attention = start(resolve("auto", family=family, **where), num_heads=num_heads, **where)
    assert attention.self_test[attention.name] <= TOLERANCES[torch.bfloat16]
    assert not any(reason.startswith(("self-test", "failed")) for reason in attention.refused.values())


@pytest.mark.parametrize(("num_heads", "head_dim"), [(12, 128), (16, 72)])
def test_every_usable_backend_passes_its_self_test(num_heads, head_dim):
    reports = describe(device=GPU, dtype=torch.bfloat16, num_heads=num_heads, head_dim=head_dim)
    usable = {report.name: report.error for report in reports if report.why_not is None}
    assert {"triton", "sdpa", "reference"} <= set(usable)
    assert all(error is not None and not math.isnan(error) for error in usable.values())
    assert not any(report.why_not and report.why_not.startswith("failed") for report in reports)
