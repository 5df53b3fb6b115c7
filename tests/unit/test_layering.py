"""Who may import whom. `from x import y` counts as `x.y` where that is a module, lazy imports count as well."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# encoder module -> the modules of ours that it may import; docs/architecture.md has the same table
ENCODER: dict[str, set[str]] = {
    "errors": set(),
    "families": set(),
    "config": {"errors", "families"},
    "grid": {"config", "errors"},
    "resample": {"config"},
    "picture": {"config", "errors", "grid", "resample"},
    "device_pixels_staging": {"picture", "resample"},
    "device_pixels_plain": {"config", "device_pixels_staging", "resample"},
    "segments": {"config", "device_pixels_plain", "device_pixels_staging", "errors", "grid", "picture"},
    "preprocess": {"config", "errors", "grid", "picture", "resample", "segments"},
    "device_pixels_kernels": {"device_pixels_staging", "resample"},
    "device_pixels": {
        "config",
        "device_pixels_kernels",
        "device_pixels_staging",
        "errors",
        "preprocess",
        "resample",
        "segments",
    },
    "position": {"config", "grid"},
    "ops": {"config", "grid", "position", "segments"},
    "fused_kernels": set(),
    "launch": set(),
    "fused": {"config", "fused_kernels", "grid", "launch", "ops"},
    "fusion": {"config", "errors", "fp8", "fused", "grid", "ops", "position", "quantization"},
    "model": {"attention", "config", "grid", "ops", "position"},
    "quantization": {"errors", "model", "ops"},
    "fp8_kernels": set(),
    "fp8_gemm": {"launch", "ops", "quantization"},
    "fp8": {"fp8_gemm", "fp8_kernels", "launch", "ops", "quantization"},
    "demo": {"config", "errors", "families"},
    "checkpoint": {"config", "demo", "errors"},
    "weights": {"checkpoint", "config", "demo", "errors", "model"},
    "export": {"checkpoint", "config", "demo", "errors", "families", "weights"},
    "device": {"errors"},
    "transfers": set(),
    "graphs": {"attention", "attention.triton_varlen", "model"},
    "engine": {
        "attention",
        "checkpoint",
        "config",
        "device",
        "device_pixels",
        "device_pixels_plain",
        "errors",
        "fusion",
        "graphs",
        "grid",
        "model",
        "quantization",
        "segments",
        "transfers",
        "weights",
    },
    "capacity": {"engine", "grid", "segments"},
    "attention": {"attention.contract", "attention.selection", "attention.startup", "attention.table"},
    "attention.contract": set(),
    "attention.selection": {"attention.contract", "attention.table", "errors"},
    "attention.speed": {"attention.contract", "attention.reference"},
    "attention.selftest": {"attention.contract", "attention.reference"},
    "attention.startup": {
        "attention.contract",
        "attention.selection",
        "attention.selftest",
        "attention.table",
        "errors",
    },
    "attention.table": {
        "attention.contract",
        "attention.flashinfer_fp8",
        "attention.triton_varlen",
    },  # and every other backend, see below
    "attention.triton_varlen": {"attention.contract", "attention.triton_kernel", "launch"},
    "attention.triton_kernel": set(),
    "attention.flashinfer_fp8": {"attention.contract", "attention.flashinfer_ragged", "attention.fp8_heads"},
    "attention.fp8_heads": {"attention.fp8_kernel", "launch"},
    "attention.fp8_kernel": set(),
}
WEB = {"fastapi", "starlette", "uvicorn"}
WEB_FILES = {"app.main", "app.routes", "app.boundary", "app.responses", "app.openapi", "app.protocol", "app.control"}
NOT_IN_ENCODER = WEB | {
    "app",
    "httpcore",
    "httpx",
    "orjson",
    "prometheus_client",
    "pydantic",
    "pydantic_settings",
    "rich",
    "structlog",
}
DECODERS = {"PIL", "av", "decord"}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of ours."""
    found = {}
    for path in sorted([*ROOT.glob("app/**/*.py"), *ROOT.glob("encoder/**/*.py")]):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(module: str) -> set[str]:
    """Dotted names of the modules that `module` imports anywhere in its file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            base = node.module or ""
            inner = {f"{base}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= inner or {base}
    return found


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


ENCODER_MODULES = [name for name in MODULES if name.startswith("encoder.")]
APP_MODULES = [name for name in MODULES if name.partition(".")[0] == "app"]
# The rest of encoder.attention: one backend a file.
BACKENDS = {
    name.removeprefix("encoder.")
    for name in ENCODER_MODULES
    if name.startswith("encoder.attention.") and name.removeprefix("encoder.") not in ENCODER
}
ENCODER["attention.table"] |= BACKENDS
ENCODER |= {name: {"attention.contract", "errors"} for name in BACKENDS}  # strangers to each other


def test_both_packages_were_found() -> None:
    assert {"encoder.engine", "encoder.attention.sdpa"} <= set(ENCODER_MODULES)
    assert {"app.cli", "app.pipeline", "app.decode.film"} <= set(APP_MODULES)


@pytest.mark.parametrize("module", ["encoder", *ENCODER_MODULES])
def test_encoder_knows_neither_the_service_nor_the_web(module: str) -> None:
    assert not top(imports(module)) & NOT_IN_ENCODER


def test_every_encoder_module_is_in_the_table() -> None:
    assert {f"encoder.{name}" for name in ENCODER} == set(ENCODER_MODULES)
    assert {"attention.reference", "attention.sdpa"} <= BACKENDS


@pytest.mark.parametrize("module", sorted(ENCODER))
def test_encoder_modules_import_what_the_table_says(module: str) -> None:
    ours = {name.removeprefix("encoder.") for name in imports(f"encoder.{module}") if name.startswith("encoder.")}
    assert ours <= ENCODER[module]


@pytest.mark.parametrize("module", ENCODER_MODULES)
def test_encoder_reads_no_environment(module: str) -> None:
    source = MODULES[module].read_text(encoding="utf-8")
    # Triton's own switch decides whether its kernels can run on a CPU at all.
    allowed = 1 if module == "encoder.attention.table" else 0
    assert source.count("environ") + source.count("getenv") == allowed


@pytest.mark.parametrize("module", [name for name in APP_MODULES if name != "app.cli"])
def test_only_the_command_line_imports_main(module: str) -> None:
    assert "app.main" not in imports(module)
    assert module.startswith("app.commands") or not {n for n in imports(module) if n.startswith("app.c")} & {
        "app.cli",
        "app.commands",
    }


@pytest.mark.parametrize("module", [name for name in APP_MODULES if name not in WEB_FILES])
def test_http_frameworks_stay_in_a_few_files(module: str) -> None:
    assert not top(imports(module)) & WEB


def test_series_are_declared_in_one_file() -> None:
    users = {name for name in APP_MODULES if "prometheus_client" in top(imports(name))}
    assert users == {"app.metrics", "app.loop_lag"}  # the second is handed its histogram
    assert not {name for name in imports("app.metrics") if top({name}) <= {"app", "encoder"}}


@pytest.mark.parametrize("module", [name for name in APP_MODULES if not name.startswith("app.decode")])
def test_media_libraries_stay_in_decode(module: str) -> None:
    assert not top(imports(module)) & DECODERS


@pytest.mark.parametrize("module", [name for name in APP_MODULES if name.startswith("app.decode")])
def test_decode_knows_nothing_of_requests(module: str) -> None:
    ours = {name for name in imports(module) if top({name}) == {"app"}}
    assert {name for name in ours if not name.startswith("app.decode")} <= {"app.errors"}


def test_only_settings_read_our_variables() -> None:
    readers = {name for name in APP_MODULES if "environ" in MODULES[name].read_text(encoding="utf-8")}
    # The pools pass variables on to their processes.
    assert readers == {"app.settings", "app.decode.template_process", "app.replicas.process"}


def test_importing_encoder_loads_no_web_framework_and_no_kernel() -> None:
    script = "import sys, json, encoder; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "encoder.engine" in loaded
    assert not top(loaded) & (NOT_IN_ENCODER | {"flashinfer", "flash_attn", "triton", "transformers", "av", "decord"})
    assert {name for name in loaded if name.startswith("encoder.attention.")} == {
        "encoder.attention.contract",
        "encoder.attention.reference",  # this one and the next need torch alone, so the table imports them at once
        "encoder.attention.sdpa",
        "encoder.attention.selection",
        "encoder.attention.selftest",
        "encoder.attention.startup",
        "encoder.attention.table",
    }
