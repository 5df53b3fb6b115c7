"""The real service as a process of its own: start it, wait until it is ready, read its metrics and its processor time.

Standard library only.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
READY_TIMEOUT_S = 420.0  # FlashInfer compiles its kernels when it is first used on a machine
STOP_TIMEOUT_S = 45.0  # above the service's own drain time
POLL_S = 0.05
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Samples = dict[str, float]
_SAMPLE = re.compile(r"^([a-z_]+(?:\{[^}]*\})?) ([^ ]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Running:
    """A service that is ready.

    Attributes:
        ready_s: from the start of the process to the first 200 of `/health/ready`.
        states: (seconds since the start, what `/health/ready` said) whenever that changed.
    """

    process: "subprocess.Popen[bytes]"
    port: int
    ready_s: float
    log: IO[bytes]
    states: list[tuple[float, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout_s: float = 30.0) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            content: bytes = answer.read()
            return content

    def info(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.get("/v1/info"))
        return document

    def metrics(self) -> Samples:
        """`name{label="value"}` -> value of every sample."""
        return {name: float(value) for name, value in _SAMPLE.findall(self.get("/metrics", 120.0).decode())}

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far: of the whole process, and of the thread that runs the event loop."""
        return {
            "process": _cpu_s(Path(f"/proc/{self.process.pid}/stat")),
            "event_loop": _cpu_s(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")),
        }

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208

    def log_text(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text(errors="replace")


@contextlib.contextmanager
def service(*flags: str, env: dict[str, str] | None = None) -> Iterator[Running]:
    """`moonvit-serve serve` on a free port, ready; told to stop at the end.

    Raises:
        RuntimeError: it did not become ready, with the end of its log.
    """
    port = free_port()
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), *flags]
    with tempfile.NamedTemporaryFile("w+b", suffix=".log") as log:
        begun = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **(env or {})})
        try:
            states = _wait_until_ready(process, port, begun, log.name)
            yield Running(process, port, states[-1][0], log, states)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, begun: float, log: str) -> list[tuple[float, str]]:
    states: list[tuple[float, str]] = [(0.0, "the process starts")]
    while True:
        state = _state(port)
        since_s = time.monotonic() - begun
        if state != states[-1][1]:
            states.append((since_s, state))
        if state == "ready":
            return states
        if process.poll() is not None or since_s > READY_TIMEOUT_S:
            end = "\n".join(Path(log).read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"the service is not ready after {since_s:.0f} s ({state}); the end of its log:\n{end}")
        time.sleep(POLL_S)


def _state(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
            return "ready"
    except urllib.error.HTTPError as error:
        try:
            return str(json.loads(error.read()).get("detail", error.code))
        except ValueError:
            return f"status {error.code}"
    except OSError:
        return "the process starts"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_listening(port: int, timeout_s: float = 60.0) -> None:
    """Raise `TimeoutError` if nothing listens there by then."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(POLL_S)
        else:
            return
    raise TimeoutError(f"nothing listens on port {port} after {timeout_s:g} s")


def _cpu_s(stat: Path) -> float:
    """User and system time of a process or thread, from its `stat` file."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def difference(before: Samples, after: Samples) -> Samples:
    """What counters and histograms gained between two scrapes."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def mean(gained: Samples, histogram: str, labels: str = "") -> float | None:
    """Mean of a histogram's observations in a difference of scrapes; None without any."""
    count = gained.get(f"{histogram}_count{labels}", 0.0)
    return gained[f"{histogram}_sum{labels}"] / count if count else None


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that `share` percent of them do not exceed."""
    return sorted(values)[max(0, -(-len(values) * share // 100) - 1)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
