"""The application as in tests/http, and a check that a fault leaves nothing behind."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from app.decode.template_process import TemplateProcess
from tests.http.conftest import client, connect

__all__ = ["client", "connect"]

OURS = ("pack", "device", "store-disk", "resolve")  # names of the service's threads


@pytest.fixture(autouse=True)
def nothing_left(_lasting_template: TemplateProcess) -> Iterator[None]:
    """After every test, with its service closed: no thread, process or open file more than before."""
    if _lasting_template.process is None or _lasting_template.process.poll() is not None:
        _lasting_template._start()  # the tests' own, which would look like something left behind by the first
    before = (our_threads(), open_files(), child_processes())
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        gc.collect()
        threads, files, children = our_threads() - before[0], open_files() - before[1], child_processes() - before[2]
        if not threads and not files and not children:
            return
        time.sleep(0.02)
    pytest.fail(f"left behind: threads {threads}, files {files}, processes {children}")


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """What the service logs, kept instead of printed: formatting tracebacks for a terminal takes seconds."""
    with capture_logs() as events:
        yield events
        events.clear()  # exceptions among them hold the batch they came from


def our_threads() -> set[tuple[int | None, str]]:
    return {(thread.ident, thread.name) for thread in threading.enumerate() if thread.name.startswith(OURS)}


def open_files() -> set[str]:
    """Sockets and files, by what they lead to. Memory files are the workers', and go with the last to hold a batch."""
    return {target for target in targets() if target.startswith(("/tmp", "socket:"))}


def targets() -> list[str]:
    """What the open descriptors of this process lead to."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.append(str(link.readlink()))
    return found


def child_processes() -> set[int]:
    """All but the tracker that multiprocessing keeps until this process ends."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "multiprocessing.resource_tracker" not in " ".join(command_of(child))}


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has just ended
        return []
