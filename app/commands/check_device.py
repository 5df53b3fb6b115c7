"""`doctor`: the GPU, what was built for it, and which attention would run."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from app.commands.findings import Finding, Level, gib, installed
from app.device import compute_dtype, dtype_name, resolve_device
from app.settings import Settings
from encoder import EncoderError, attention, load_config

LOW_FREE_SHARE = 0.5
DRIVER = Path("/proc/driver/nvidia/version")


def check_model(settings: Settings) -> Iterator[Finding]:
    try:
        config = load_config(settings.model, rms_norm_eps=settings.rms_norm_eps)
    except EncoderError as error:
        yield Finding("model", "problem", str(error), "give --model a checkpoint directory or a demo model")
        return
    if config.is_demo:
        yield Finding(
            "model",
            "warning",
            f"{config.source}: made-up weights, what they encode means nothing",
            "for trying out only",
        )
    else:
        yield Finding("model", "ok", f"{config.source}: {config.family}")


def check_gpu(settings: Settings) -> Iterator[Finding]:
    yield Finding("torch", "ok", f"{torch.__version__}, built for {built_for()}")
    wanted = settings.device
    if not torch.cuda.is_available():
        driver = nvidia_driver()
        if driver is not None:
            yield Finding("gpu", "problem", f"{driver}; torch does not see a GPU", why_unseen())
        elif wanted.startswith("cuda"):
            yield Finding("gpu", "problem", f"none, and --device is {wanted}", "install the driver, or --device cpu")
        else:
            yield Finding("gpu", "warning", "none: the tower runs on the CPU, slowly", "for trying out only")
        return
    can, need = driver_cuda(), torch.version.cuda
    if can and need and tuple(map(int, need.split("."))) > can:
        text = f"CUDA {can[0]}.{can[1]} at most, torch was built for {need}"
        yield Finding("driver", "warning", text, "a newer driver, or a torch built for an older CUDA")
    elif can:
        yield Finding("driver", "ok", f"{nvidia_driver() or 'NVIDIA'}, CUDA up to {can[0]}.{can[1]}")
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _gpu(index: int) -> Finding:
    device = torch.device("cuda", index)
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    text = f"{device} {torch.cuda.get_device_name(device)}, sm_{major}{minor}, {gib(free)} of {gib(total)} free"
    if major < 8:
        return Finding("gpu", "warning", text, "before sm_80 there is no bfloat16 in hardware: --dtype float16")
    if free < LOW_FREE_SHARE * total:
        return Finding("gpu", "warning", text, "another process holds its memory: nvidia-smi shows which")
    return Finding("gpu", "ok", text)


def built_for() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "ROCm" if torch.version.hip else "CPUs"


def nvidia_driver() -> str | None:
    """What the kernel module says of itself; None where there is none."""
    try:
        words = DRIVER.read_text().splitlines()[0].split("  ")
    except (OSError, IndexError):
        return None
    return " ".join(words[1:2] or ["driver"]).strip() or "driver"


def why_unseen() -> str:
    if not torch.version.cuda:
        return "this torch is built for CPUs: install one for CUDA"
    return "CUDA_VISIBLE_DEVICES, the container's --gpus, and the driver's version (nvidia-smi)"


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except OSError:
        return None
    return number.value // 1000, number.value % 1000 // 10


def check_compiler(settings: Settings) -> Iterator[Finding]:
    """Triton compiles the attention kernel and the fused steps on first use, with the C compiler's help."""
    found = installed("triton")
    on_gpu = resolve_device(settings.device).type == "cuda" and torch.cuda.is_available()
    if found is None:
        advice = "pip install 'moonvit-serve[gpu]'"
        yield Finding("triton", "warning" if on_gpu else "ok", "not installed", advice if on_gpu else "")
        return
    if not on_gpu:
        yield Finding("triton", "ok", f"{found}; nothing to compile for without a GPU")
        return
    try:
        from app.commands.tiny_kernel import compiles_and_runs

        right = compiles_and_runs(resolve_device(settings.device))
    except Exception as error:  # Triton raises whatever its many parts raise
        compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
        advice = "install a C compiler (gcc) and Python's headers" if compiler is None else "see its own message"
        first_line = (str(error).splitlines() or [""])[0][:200]
        yield Finding("triton", "problem", f"{found} does not compile: {type(error).__name__} {first_line}", advice)
        return
    if right:
        yield Finding("triton", "ok", f"{found} compiles and runs")
    else:
        yield Finding("triton", "problem", f"{found} computes 1 + 1 wrongly", "another version of triton or the driver")


def check_libraries(settings: Settings) -> Iterator[Finding]:
    on_gpu = resolve_device(settings.device).type == "cuda"
    missing: Level = "warning" if on_gpu else "ok"
    advice = "pip install 'moonvit-serve[gpu]'; auto takes the next backend until then" if on_gpu else ""
    found = installed("flashinfer-python")
    if found is None:
        yield Finding("flashinfer", missing, "not installed", advice)
    else:
        compiled = next((f", {name} {installed(name)}" for name in ("flashinfer-cubin",) if installed(name)), "")
        yield Finding("flashinfer", "ok", f"{found}{compiled}")
    cudnn: Any = torch.backends.cudnn
    number: int | None = cudnn.version() if cudnn.is_available() else None
    frontend = installed("nvidia-cudnn-frontend")
    text = f"cuDNN {number or 'not in this torch'}, frontend {frontend or 'not installed'}"
    complete = number is not None and frontend is not None
    yield Finding("cudnn", "ok" if complete else missing, text, "" if complete else advice)


def check_attention(settings: Settings) -> Iterator[Finding]:
    """The start-up self-test of every backend, as `moonvit-serve backends` shows it."""
    config = load_config(settings.model, rms_norm_eps=settings.rms_norm_eps)
    device = resolve_device(settings.device)
    dtype = compute_dtype(settings.dtype, device)
    heads, head_dim = config.vision.num_heads, config.vision.head_dim
    shape = f"{heads} heads of {head_dim}, {dtype_name(dtype)} on {device}"
    try:
        resolution = attention.resolve(
            settings.attention_backend, device=device, dtype=dtype, head_dim=head_dim, family=config.family
        )
    except EncoderError as error:
        yield Finding("attention", "problem", str(error), "--attention-backend auto")
        return
    reports = attention.describe(device=device, dtype=dtype, num_heads=heads, head_dim=head_dim)
    usable = {report.name: report.error for report in reports if report.why_not is None}
    chosen = next((entry.name for entry in resolution.candidates if entry.name in usable), None)
    if chosen is None:
        yield Finding("attention", "problem", f"no backend passes its self-test: {shape}", "--attention-backend auto")
    else:
        yield Finding("attention", "ok", f"{chosen} runs: {shape}, self-test error {usable[chosen] or 0:.1e}")
    for report in reports:
        if report.why_not is not None:
            # A backend that was made for another device is no news; one that fails its test is.
            level: Level = "ok" if report.error is None else "warning"
            yield Finding("attention", level, f"{report.name} does not: {report.why_not}")
