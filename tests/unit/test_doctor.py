"""`moonvit-serve doctor`: what it prints, when it fails, and each check against a machine that is made up."""

import json
import os
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import trustme

from app.cli import main
from app.commands import check_access, check_device, check_host
from app.commands.doctor import diagnose
from app.commands.findings import Finding, GiB
from app.settings import Settings
from encoder import attention

KEY = "key-of-a-0123456789"


@pytest.fixture(autouse=True)
def _logging_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.configure_logging", lambda level, log_format: None)


def only(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


# ---- what is printed


def fine(settings: Settings) -> Iterator[Finding]:
    yield Finding("one", "ok", "all [bold]well[/]\nhere")
    yield Finding("two", "warning", "so so", "mend it")


def broken(settings: Settings) -> Iterator[Finding]:
    yield Finding("three", "problem", "not there", "install it")


def check_bad_luck(settings: Settings) -> Iterator[Finding]:
    yield Finding("four", "ok", "until here")
    raise RuntimeError("x" * 1000)


def test_a_line_each_and_0_without_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(Settings(), checks=[fine]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok       one           all [bold]well[/] here",
        "warning  two           so so -> mend it",
        "it would serve; 1 warnings",
    ]


def test_a_problem_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(Settings(), checks=[broken, fine]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "problem  three         not there -> install it"
    assert lines[-1] == "1 problems, 1 warnings"


def test_a_check_that_fails_is_a_problem_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(Settings(), checks=[check_bad_luck, fine], as_json=True) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["area"] for finding in found] == ["four", "bad luck", "one", "two"]
    assert found[1]["found"].startswith("could not be looked at: RuntimeError: xxx")
    assert len(found[1]["found"]) < 250


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(Settings(), checks=[broken], as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "findings": [{"area": "three", "level": "problem", "found": "not there", "advice": "install it"}],
    }


def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The real run: every area is spoken of, and what a demo model needs is here."""
    argv = ["--port", "0", "--store-bytes", "0", "--store-dir", str(tmp_path / "store"), "--device", "cpu"]
    code = main(["doctor", "--json", *argv, "--store-dir-bytes", "1048576", "--film-workers", "1"])
    found = json.loads(capsys.readouterr().out)["findings"]
    problems = [finding for finding in found if finding["level"] == "problem"]
    assert problems == []
    assert code == 0
    areas = {finding["area"] for finding in found}
    assert {"python", "model", "torch", "gpu", "attention", "pictures", "films", "sandbox", "open files"} <= areas
    assert {"memory files", "memory", "store", "port", "clock"} <= areas
    assert any(finding["found"].startswith("sdpa runs") for finding in found)
    assert not (tmp_path / "store").exists()  # it looks, and leaves nothing behind


def test_options_are_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--max-items", "0"]) == 2
    assert "--max-items" in capsys.readouterr().err
    assert main(["doctor", "--model", "/nowhere", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert "/nowhere is neither a checkpoint directory" in str([each for each in found if each["area"] == "model"])


# ---- GPU


class Gpu(NamedTuple):
    """A made-up GPU and driver."""

    capability: tuple[int, int] = (9, 0)
    free: int = 130 * GiB
    driver: tuple[int, int] | None = (13, 0)
    built: str | None = "13.0"


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.free, 140 * GiB))
    monkeypatch.setattr(torch.version, "cuda", gpu.built)
    monkeypatch.setattr(check_device, "driver_cuda", lambda: gpu.driver)
    monkeypatch.setattr(check_device, "nvidia_driver", lambda: "NVIDIA UNIX Open Kernel Module")


class TestGpu:
    @pytest.mark.parametrize(
        ("gpu", "levels", "said"),
        [
            (Gpu(), ["ok", "ok", "ok"], "cuda:0 H200, sm_90, 130.0 GiB of 140.0 GiB free"),
            (Gpu(free=10 * GiB), ["ok", "ok", "warning"], "another process holds its memory"),
            (Gpu(capability=(7, 5)), ["ok", "ok", "warning"], "no bfloat16 in hardware"),
            (Gpu(driver=(12, 8)), ["ok", "warning", "ok"], "CUDA 12.8 at most, torch was built for 13.0"),
            (Gpu(driver=(13, 0), built="12.8"), ["ok", "ok", "ok"], "CUDA up to 13.0"),
            (Gpu(driver=None), ["ok", "ok"], "H200"),
        ],
    )
    def test_one(self, gpu: Gpu, levels: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, gpu)
        found = list(check_device.check_gpu(Settings()))
        assert [finding.level for finding in found] == levels
        assert said in str(found)

    @pytest.mark.parametrize(
        ("device", "driver", "level", "said"),
        [
            ("auto", None, "warning", "the tower runs on the CPU"),
            ("cuda", None, "problem", "none, and --device is cuda"),
            ("auto", "NVIDIA UNIX", "problem", "torch does not see a GPU"),
        ],
    )
    def test_none(
        self, device: str, driver: str | None, level: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(check_device, "nvidia_driver", lambda: driver)
        _, finding = check_device.check_gpu(Settings(device=device))
        assert (finding.level, said in finding.found) == (level, True)

    def test_the_driver_speaks_for_itself(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "version"
        monkeypatch.setattr(check_device, "DRIVER", file)
        assert check_device.nvidia_driver() is None
        file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC\n")
        assert check_device.nvidia_driver() == "580.95.05"


class TestCompiler:
    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, Gpu())
        monkeypatch.setattr(check_device, "installed", lambda name: "3.6.0")

    @pytest.mark.usefixtures("gpu")
    @pytest.mark.parametrize(("right", "level"), [(True, "ok"), (False, "problem")])
    def test_runs_a_kernel(self, right: bool, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        monkeypatch.setattr("app.commands.tiny_kernel.compiles_and_runs", lambda device: right)
        assert only(check_device.check_compiler(Settings(device="cuda"))).level == level

    @pytest.mark.usefixtures("gpu")
    @pytest.mark.parametrize(("compiler", "advice"), [(None, "install a C compiler"), ("/usr/bin/gcc", "message")])
    def test_that_does_not_compile(self, compiler: str | None, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")

        def fail(device: torch.device) -> bool:
            raise RuntimeError("Failed to find C compiler.\nlong\nstory")

        monkeypatch.setattr("app.commands.tiny_kernel.compiles_and_runs", fail)
        monkeypatch.setattr(shutil, "which", lambda name: compiler)
        finding = only(check_device.check_compiler(Settings(device="cuda")))
        assert finding.level == "problem"
        assert finding.found == "3.6.0 does not compile: RuntimeError Failed to find C compiler."
        assert advice in finding.advice

    def test_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check_device, "installed", lambda name: None)
        assert only(check_device.check_compiler(Settings(device="cpu"))).level == "ok"
        pretend(monkeypatch, Gpu())
        assert only(check_device.check_compiler(Settings(device="cuda"))).level == "warning"

    def test_the_kernel_adds_one(self) -> None:
        """Under Triton's interpreter, where there is no GPU."""
        pytest.importorskip("triton")
        from app.commands.tiny_kernel import compiles_and_runs

        assert compiles_and_runs(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class TestAttention:
    def test_what_failed_its_test_is_a_warning_and_what_is_for_other_devices_is_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reports = [
            attention.describe.__globals__["Report"]("sdpa", "", None, 1e-7),
            attention.describe.__globals__["Report"]("triton", "", "wrong by 0.3", 0.3),
            attention.describe.__globals__["Report"]("fa3", "", "needs an NVIDIA GPU", None),
        ]
        monkeypatch.setattr(attention, "describe", lambda **_: reports)
        found = list(check_device.check_attention(Settings(device="cpu")))
        assert [finding.level for finding in found] == ["ok", "warning", "ok"]
        assert found[0].found.startswith("sdpa runs: 2 heads of 128, float32 on cpu, self-test error 1.0e-07")
        monkeypatch.setattr(attention, "describe", lambda **_: reports[1:])
        assert next(iter(check_device.check_attention(Settings(device="cpu")))).level == "problem"

    def test_a_name_that_cannot_run(self) -> None:
        finding = only(check_device.check_attention(Settings(device="cpu", attention_backend="flashinfer")))
        assert finding.level == "problem"
        assert "flashinfer cannot run here" in finding.found


# ---- the machine


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def allow(soft: int, hard: int) -> Finding:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
        return only(check_host.check_files(Settings(max_requests=512)))

    assert allow(1024, 1024).level == "ok"
    assert allow(resource.RLIM_INFINITY, resource.RLIM_INFINITY).level == "ok"
    assert allow(256, 4096).level == "ok"  # the service raises its own limit
    assert "LimitNOFILE" in allow(256, 256).advice


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        store_bytes=2 * GiB, max_inflight_bytes=2 * GiB, film_workers=2, film_worker_memory_bytes=4 * GiB
    )

    def with_memory(num_bytes: int | None) -> Finding:
        monkeypatch.setattr(check_host, "available_bytes", lambda: num_bytes)
        return only(check_host.check_memory(settings))

    assert [with_memory(n * GiB).level for n in (3, 5, 13)] == ["problem", "warning", "ok"]
    assert with_memory(None).level == "warning"
    monkeypatch.undo()
    available = check_host.available_bytes()
    assert available is not None
    assert 0 < available < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(iter(check_host.check_memory_files(Settings()))).level == "ok"

    def refuse(name: str, flags: int) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert next(iter(check_host.check_memory_files(Settings()))).level == "problem"


def test_pictures_and_films(monkeypatch: pytest.MonkeyPatch) -> None:
    import PIL.features

    monkeypatch.setattr(PIL.features, "check", lambda name: name != "avif")
    monkeypatch.setattr(check_host, "installed", lambda name: {"decord": "0.6.0", "av": "18"}.get(name))
    found = list(check_host.check_decoders(Settings()))
    assert [(finding.area, finding.level) for finding in found] == [
        ("pictures", "problem"),
        ("films", "ok"),
        ("films", "problem"),
    ]
    assert "without avif" in found[0].found
    assert "pip uninstall decord" in found[2].advice


def test_the_sandbox_says_which_layers_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"limits": "in force", "no_network": "not in force: Operation not permitted", "no_user": "not needed: x"}
    monkeypatch.setattr("app.decode.sandbox.describe", lambda: layers)
    assert [finding.level for finding in check_host.check_sandbox(Settings())] == ["ok", "warning", "ok"]


class TestStore:
    def test_nothing_is_said_without_one(self) -> None:
        assert list(check_host.check_store(Settings())) == []

    def test_a_directory(self, tmp_path: Path) -> None:
        def look(directory: Path, limit_bytes: int = 2**20) -> Finding:
            return only(check_host.check_store(Settings(store_dir=directory, store_dir_bytes=limit_bytes)))

        assert look(tmp_path).level == "ok"
        assert look(tmp_path / "not" / "yet").level == "ok"
        assert list(tmp_path.iterdir()) == []
        assert look(tmp_path, 2**60).level == "warning"
        (tmp_path / "file").touch()
        assert look(tmp_path / "file").level == "problem"
        assert look(Path("/proc/1")).level == "problem"

    def test_a_server_that_does_not_answer(self) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
            finding = only(check_host.check_store(Settings(store_url=f"redis://:secret@127.0.0.1:{port}/0")))
        assert finding.level == "problem"
        assert f"127.0.0.1:{port} does not answer" in finding.found
        assert "secret" not in str(finding)

    @pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
    def test_a_server_that_does(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
        with subprocess.Popen([*command], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert any("Ready to accept" in line or "ready to accept" in line for line in server.stdout)
                finding = only(check_host.check_store(Settings(store_url=f"unix://{path}")))
            finally:
                server.terminate()
        assert finding.level == "ok"


class TestNetwork:
    def test_a_port_in_use(self) -> None:
        with socket.socket() as used:
            used.bind(("127.0.0.1", 0))
            used.listen()
            port = used.getsockname()[1]
            assert only(check_host.check_port(Settings(port=port))).level == "problem"
        assert only(check_host.check_port(Settings(port=port))).level == "ok"

    def test_an_open_address_without_keys_and_tls(self, tmp_path: Path) -> None:
        def levels(**settings: Any) -> list[str]:
            return [finding.level for finding in check_host.check_port(Settings(port=0, **settings))]

        assert levels() == ["ok"]
        assert levels(host="0.0.0.0") == ["ok", "warning", "warning"]
        assert levels(host="0.0.0.0", api_key_file=tmp_path, ssl_certfile=tmp_path) == ["ok"]

    def test_a_collector(self) -> None:
        def level(endpoint: str | None) -> str | None:
            found = list(check_host.check_tracing(Settings(otlp_endpoint=endpoint)))
            return found[0].level if found else None

        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            port = listening.getsockname()[1]
            assert level(f"http://127.0.0.1:{port}") == "ok"
        assert level(f"http://127.0.0.1:{port}") == "warning"
        assert level("127.0.0.1:4318") == "problem"
        assert level(None) is None


class TestAccess:
    def test_keys(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.write_text(f"a:{KEY}\n")
        path.chmod(0o600)
        assert only(check_access.check_keys(Settings(api_key_file=path))) == Finding("keys", "ok", "1 keys")
        path.chmod(0o604)
        assert only(check_access.check_keys(Settings(api_key_file=path))).level == "warning"
        path.write_text("a:short\n")
        finding = only(check_access.check_keys(Settings(api_key_file=path)))
        assert (finding.level, "line 1" in finding.found, "short" in finding.found) == ("problem", True, False)
        assert list(check_access.check_keys(Settings())) == []

    @pytest.mark.parametrize(
        ("days", "level", "said"),
        [
            (100, "ok", "is good for 100 more days; clients need none"),
            (5, "warning", "is good for 5 more days"),
            (-5, "problem", "certificate has expired"),
        ],
    )
    def test_certificates(self, days: int, level: str, said: str, tmp_path: Path) -> None:
        ends = datetime.now(UTC) + timedelta(days=days, hours=1)
        leaf = trustme.CA().issue_cert("service.example", not_before=ends - timedelta(days=365), not_after=ends)
        both = tmp_path / "both.pem"
        leaf.private_key_and_cert_chain_pem.write_to_path(str(both))
        finding = only(check_access.check_certificate(Settings(ssl_certfile=both)))
        assert (finding.level, said in finding.found) == (level, True), finding

    def test_a_certificate_that_cannot_be_used(self, tmp_path: Path) -> None:
        assert only(check_access.check_certificate(Settings(ssl_certfile=tmp_path / "absent"))).level == "problem"
        assert list(check_access.check_certificate(Settings())) == []

    def test_clients_that_need_one_do_not_disturb_the_look(self, tmp_path: Path) -> None:
        ca, both = trustme.CA(), tmp_path / "both.pem"
        ca.issue_cert("service.example").private_key_and_cert_chain_pem.write_to_path(str(both))
        ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        settings = Settings(ssl_certfile=both, ssl_ca_certs=tmp_path / "ca.pem", ssl_require_client_cert=True)
        assert "clients need a certificate" in only(check_access.check_certificate(settings)).found
        assert ssl.OPENSSL_VERSION_INFO >= (1, 1, 1)


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __init__(self, state: int) -> None:
            self.adjtimex = lambda buffer: state

    levels = []
    for state in (0, 5, -1):
        monkeypatch.setattr(check_host.ctypes, "CDLL", lambda name, use_errno, state=state: Kernel(state))
        levels.append(only(check_host.check_clock(Settings())).level)
    assert levels == ["ok", "warning", "ok"]
