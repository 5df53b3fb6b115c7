"""Start the service in the background and wait until it is ready, or stop it: what `make run` and `make stop` do.

Standard library only. One service per checkout: its process id, address and log are kept in `.run/`.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / ".run"
STATE = RUN / "service.json"  # {"pid", "url"}
LOG = RUN / "service.log"
LOG_LINES_SHOWN = 25
POLL_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start_parser = commands.add_parser("start", help="start in the background, wait until ready")
    start_parser.add_argument("--host", default="127.0.0.1")
    start_parser.add_argument("--port", type=int, default=8000)
    start_parser.add_argument("--model", default="demo:k3-tiny")
    start_parser.add_argument("--ready-timeout-s", type=float, default=30.0)
    commands.add_parser("stop", help="stop what `start` started")
    args = parser.parse_args()
    if args.command == "stop":
        print("The service is stopped." if stop() else "No service of this checkout is running.")
        return 0
    return start(args.host, args.port, args.model, args.ready_timeout_s)


def start(host: str, port: int, model: str, ready_timeout_s: float) -> int:
    """Start one service and wait for `/health/ready`; 0 when it answers, 1 with the end of its log when not."""
    if stop():
        print("The service was running already: restarting it, so that it runs the code that is here now.")
    if not port_is_free(host, port):
        print(
            f"Port {port} is in use by another program. Choose another one: make run PORT={port + 1}", file=sys.stderr
        )
        return 1
    RUN.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "app.cli", "serve", "--host", host, "--port", str(port), "--model", model]
    with LOG.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://{host}:{port}"
    STATE.write_text(json.dumps({"pid": process.pid, "url": url}))
    began = time.monotonic()
    reason = wait_until_ready(process, url, began + ready_timeout_s)
    if reason is None:
        print(f"The service is ready at {url} after {time.monotonic() - began:.1f} s (log: {LOG.relative_to(ROOT)}).")
        return 0
    print(f"The service did not become ready: {reason}. The end of {LOG}:", file=sys.stderr)
    for line in LOG.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]:
        print(f"  {line}", file=sys.stderr)
    stop()
    return 1


def wait_until_ready(process: "subprocess.Popen[bytes]", url: str, deadline: float) -> str | None:
    """Poll `/health/ready`; None once it answers 200, else why it never did."""
    note = Progress()
    while time.monotonic() < deadline:
        if process.poll() is not None:
            note.end()
            return f"it exited with code {process.returncode}"
        state = readiness(url)
        if state is None:
            note.end()
            return None
        note.show(state)
        time.sleep(POLL_S)
    note.end()
    return "it took too long"


def readiness(url: str) -> str | None:
    """None when ready, else what the service says it is doing."""
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
            return None
    except urllib.error.HTTPError as error:
        try:
            return str(json.loads(error.read()).get("detail", "starting"))
        except ValueError:
            return f"status {error.code}"
    except OSError:
        return "loading Python and torch"


class Progress:
    """One line that counts seconds on a terminal; elsewhere one line per state."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.tty = sys.stderr.isatty()
        self.last = ""

    def show(self, state: str) -> None:
        if self.tty:
            line = f"Waiting for the service, {time.monotonic() - self.began:4.1f} s: {state}"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif state != self.last:
            print(f"Waiting for the service: {state}", file=sys.stderr, flush=True)
        self.last = state

    def end(self) -> None:
        if self.tty and self.last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def stop() -> bool:
    """Ask the recorded service to drain and leave (SIGTERM), end it after 40 s; False where none was running."""
    pid = recorded_pid()
    STATE.unlink(missing_ok=True)
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 40  # above the service's own drain time of 30 s
    while is_our_service(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(POLL_S)
    return True


def recorded_pid() -> int | None:
    """Process id from `.run/`, if that process still is our service (ids are reused, so its command line is read)."""
    try:
        pid = int(json.loads(STATE.read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None
    return pid if is_our_service(pid) else None


def is_our_service(pid: int) -> bool:
    proc = Path(f"/proc/{pid}")
    try:
        if Path("/proc/self").exists():
            # A zombie, which only our own caller could still reap, has an empty command line.
            return b"app.cli\0serve" in (proc / "cmdline").read_bytes()
        shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return "app.cli serve" in shown.stdout
    except OSError:
        return False


def port_is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server will: without this a port of connections that have just closed would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
