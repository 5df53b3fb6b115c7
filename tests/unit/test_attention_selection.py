"""Choosing an attention backend by name: every message, every predicate, and the order of `auto`."""

import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch

from encoder.attention import ALIASES, BACKENDS, Entry, Resolution, resolve, table
from encoder.attention.sdpa import SdpaAttention
from encoder.errors import NoUsableBackend, UnknownBackend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NAMES = "flashinfer, fa3, flashinfer_cudnn, flashinfer_fp8, fa4, triton, sdpa, reference"


def resolved(name, device=CPU, dtype=torch.float32, head_dim=128, family="kimi_k3", **other) -> Resolution:
    return resolve(name, device=device, dtype=dtype, head_dim=head_dim, family=family, **other)


@pytest.fixture
def compiled(monkeypatch):
    """As in production, where Triton is not interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def hopper(monkeypatch, compiled):
    """A machine with one H200 and every library of the table installed."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda module: ModuleSpec(module, None))
    monkeypatch.setattr(table, "_has_flash_attn_cute", lambda: True)


class TestUnknownNames:
    def test_says_which_family_and_what_there_is(self):
        with pytest.raises(UnknownBackend) as caught:
            resolved("xyzzy")
        assert str(caught.value).splitlines() == [
            "Unsupported Kimi-K3 vision attention backend: xyzzy",
            f"Choose auto or one of: {NAMES}.",
        ]
        assert isinstance(caught.value, ValueError)

    def test_other_family(self):
        with pytest.raises(UnknownBackend, match=r"^Unsupported Kimi-K2\.5 vision attention backend: xyzzy\n"):
            resolved("xyzzy", family="kimi_k25")

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("tritn", "triton"),
            ("SDPA", "sdpa"),
            (" sdpa ", "sdpa"),
            ("flash_infer", "flashinfer"),
            ("triton_atn", "triton"),
            ("flash_attn_2", "sdpa"),
            ("Auto", "auto"),
        ],
    )
    def test_suggests_the_nearest(self, name, nearest):
        with pytest.raises(UnknownBackend) as caught:
            resolved(name)
        first, second = str(caught.value).splitlines()
        assert first == f"Unsupported Kimi-K3 vision attention backend: {name}"
        assert second.endswith(f". Did you mean {nearest}?")

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("flash_attention_2", "Hugging Face's name for FlashAttention-2; the closest here is sdpa."),
            ("eager", "Hugging Face's name for attention in plain PyTorch; the closest here is reference."),
            ("torch_native", "SGLang's name for PyTorch's own attention; the closest here is sdpa."),
            ("ascend_attn", "SGLang's backend for Ascend NPUs; the closest here is sdpa."),
            ("aiter_attn", "SGLang's backend for AMD GPUs (AITER); the closest here is sdpa."),
            ("amx_attn", "SGLang's backend for CPUs with AMX; the closest here is sdpa."),
            ("xpu_attn", "SGLang's backend for Intel GPUs; the closest here is sdpa."),
        ],
    )
    def test_explains_names_of_other_stacks(self, name, hint):
        with pytest.raises(UnknownBackend) as caught:
            resolved(name)
        assert str(caught.value).splitlines() == [
            f"Unsupported Kimi-K3 vision attention backend: {name}",
            f"Choose auto or one of: {NAMES}.",
            f"{name} is {hint}",
        ]

    @pytest.mark.parametrize(
        ("name", "shown"), [("", "''"), ("  ", "'  '"), (None, "None"), (3, "3"), (["sdpa"], "['sdpa']")]
    )
    def test_not_a_name_at_all(self, name, shown):
        with pytest.raises(UnknownBackend) as caught:
            resolved(name)
        assert str(caught.value).splitlines()[0] == f"Unsupported Kimi-K3 vision attention backend: {shown}"


class TestKnownButUnusable:
    @pytest.mark.parametrize("name", ["flashinfer", "flashinfer_cudnn", "fa3", "fa4"])
    def test_on_a_cpu(self, name, compiled):
        with pytest.raises(NoUsableBackend) as caught:
            resolved(name)
        assert str(caught.value).splitlines() == [
            f"Attention backend {name} cannot run here (device cpu, float32, head size 128): "
            "needs an NVIDIA GPU, the device is cpu",
            "What would run: auto, sdpa, reference",
        ]
        assert isinstance(caught.value, ValueError)

    def test_triton_on_a_cpu(self, compiled):
        with pytest.raises(NoUsableBackend, match=r"here \(device cpu, .*\): compiles for GPUs only"):
            resolved("triton")

    def test_triton_on_a_cpu_under_the_interpreter(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert [entry.name for entry in resolved("triton").candidates] == ["triton"]
        automatic = resolved("auto")
        assert [entry.name for entry in automatic.candidates] == ["sdpa"]
        assert automatic.refused["triton"] == "runs here under Triton's interpreter only, which is slow"

    @pytest.mark.parametrize("name", ["auto", "sdpa", "triton", "reference"])
    def test_no_such_device(self, name, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(NoUsableBackend, match="PyTorch sees 1 CUDA devices, none of them is cuda:3"):
            resolved(name, device=torch.device("cuda", 3))

    def test_dtype(self):
        with pytest.raises(NoUsableBackend, match="computes in bfloat16 and float16 and float32, not in float64"):
            resolved("sdpa", dtype=torch.float64)

    @pytest.mark.parametrize(
        ("name", "head_dim", "reason"),
        [
            ("flashinfer", 72, "takes head sizes 64, 128 and 256, the model has 72"),
            ("flashinfer_fp8", 64, "takes head sizes 128, the model has 64"),
            ("flashinfer_cudnn", 132, "takes head sizes that are multiples of 8 up to 128, the model has 132"),
            ("fa3", 36, "takes head sizes that are multiples of 8 up to 256, the model has 36"),
            ("fa4", 192, "takes head sizes that are multiples of 8 up to 128, the model has 192"),
            ("triton", 320, "takes head sizes up to 256, the model has 320"),
        ],
    )
    def test_head_size(self, hopper, name, head_dim, reason):
        with pytest.raises(NoUsableBackend) as caught:
            resolved(name, GPU, torch.bfloat16, head_dim)
        assert f"(device cuda:0, bfloat16, head size {head_dim}): {reason}\n" in str(caught.value)

    @pytest.mark.parametrize("name", ["flashinfer", "flashinfer_cudnn", "fa3", "fa4"])
    def test_float32_on_a_gpu(self, hopper, name):
        with pytest.raises(NoUsableBackend, match="computes in bfloat16 and float16, not in float32"):
            resolved(name, GPU)

    @pytest.mark.parametrize(
        ("name", "distribution"),
        [
            ("flashinfer", "flashinfer-python"),
            ("flashinfer_cudnn", "flashinfer-python"),
            ("fa3", "flash-attn-3"),
            ("fa4", "flash-attn-4"),
            ("triton", "triton"),
        ],
    )
    def test_library_missing(self, hopper, monkeypatch, name, distribution):
        monkeypatch.setattr(table.importlib.util, "find_spec", lambda module: None)
        monkeypatch.setattr(table, "_has_flash_attn_cute", lambda: False)
        with pytest.raises(
            NoUsableBackend, match=rf": not installed: {distribution}\nWhat would run: auto, sdpa, reference"
        ):
            resolved(name, GPU, torch.bfloat16)

    @pytest.mark.parametrize(
        ("capability", "usable"),
        [
            ((7, 5), ["sdpa", "reference"]),
            ((8, 9), ["flashinfer", "flashinfer_cudnn", "triton", "sdpa", "reference"]),
            ((9, 0), NAMES.split(", ")),
            ((10, 3), ["flashinfer", "flashinfer_cudnn", "fa4", "triton", "sdpa", "reference"]),
        ],
    )
    def test_compute_capability(self, hopper, monkeypatch, capability, usable):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        reasons = {entry.name: entry.why_not(GPU, torch.bfloat16, 128) for entry in BACKENDS}
        assert [name for name, reason in reasons.items() if reason is None] == usable
        if capability == (10, 3):
            assert reasons["fa3"] == "needs compute capability 9.x, the device has 10.3"


class TestAuto:
    def test_on_a_cpu(self, compiled):
        resolution = resolved("auto")
        assert [entry.name for entry in resolution.candidates] == ["sdpa"]
        assert set(resolution.refused) == set(NAMES.split(", ")) - {"sdpa"}
        assert resolution.refused["reference"] == "the oracle: exact and slow, so it is taken by name only"

    def test_on_a_hopper_gpu(self, hopper):
        candidates = resolved("auto", GPU, torch.bfloat16).candidates
        assert [entry.name for entry in candidates] == [
            "flashinfer",
            "fa3",
            "flashinfer_cudnn",
            "fa4",
            "triton",
            "sdpa",
        ]

    def test_8_bits_are_taken_by_name_only(self, hopper):
        refused = resolved("auto", GPU, torch.bfloat16).refused
        assert refused["flashinfer_fp8"] == "rounds to 8 bits, so it is taken by name only"
        (by_name,) = resolved("flashinfer_fp8", GPU, torch.bfloat16).candidates
        assert by_name.name == "flashinfer_fp8"
        with pytest.raises(NoUsableBackend, match="computes in bfloat16, not in float16"):
            resolved("flashinfer_fp8", GPU, torch.float16)

    def test_head_size_72(self, hopper):
        resolution = resolved("auto", GPU, torch.bfloat16, 72)
        assert [entry.name for entry in resolution.candidates] == ["fa3", "flashinfer_cudnn", "fa4", "triton", "sdpa"]
        assert resolution.refused["flashinfer"] == "takes head sizes 64, 128 and 256, the model has 72"

    def test_nothing_runs(self):
        broken = Entry("broken", "", lambda device, dtype, head_dim: "no luck", lambda *_: SdpaAttention())
        with pytest.raises(NoUsableBackend) as caught:
            resolved("auto", backends=(broken,))
        assert str(caught.value).splitlines() == [
            "No attention backend can run here (device cpu, float32, head size 128):",
            "  broken: no luck",
        ]


def test_alias_keeps_the_configured_name(hopper):
    assert ALIASES == {"triton_attn": "triton"}
    resolution = resolved("triton_attn", GPU, torch.bfloat16)
    assert resolution.configured == "triton_attn"
    assert [entry.name for entry in resolution.candidates] == ["triton"]


def test_import_and_resolve_load_no_kernel_and_no_library():
    """`resolve` may look for libraries; only `start` may import the one that is chosen."""
    program = """
import sys, torch
from encoder.attention import resolve
resolve("auto", device=torch.device("cpu"), dtype=torch.float32, head_dim=128, family="kimi_k3")
foreign = ("triton", "flashinfer", "flash_attn", "flash_attn_interface", "cudnn", "encoder.attention.triton_varlen")
print([name for name in foreign if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
