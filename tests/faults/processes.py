"""`moonvit-serve serve` as a process of its own, for what only a process can suffer."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

START_S = 90.0


class Running:
    """One service. log: where it writes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def signal(self, kind: signal.Signals) -> None:
        self.process.send_signal(kind)

    def exit_code(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def service(tmp_path: Path, *flags: str, **variables: str) -> Iterator[Running]:
    """Ready at the start of the block, killed at its end if it still runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    log = tmp_path / f"log-{port}"
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--model", "demo:k3-tiny", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONVIT_")} | variables
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=environment)
    found = Running(process, port, log)
    try:
        wait_until_ready(found)
        yield found
    finally:
        process.kill()
        process.wait()


def wait_until_ready(running: Running) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if running.process.poll() is not None:
            pytest.fail(f"the service ended with {running.process.returncode}: {running.log.read_text()[-2000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{running.url}/health/ready").status_code == 200:
                return
        time.sleep(0.05)
    pytest.fail("the service did not become ready")


def gone(processes: list[psutil.Process], timeout_s: float = 10.0) -> bool:
    """Whether all of them end by themselves in time."""
    _, alive = psutil.wait_procs(processes, timeout_s)
    return not alive
