"""A worker's own process: one picture or film at a time over a socket, until the service closes it or dies.

It runs libraries that are not memory-safe on hostile bytes. So it gives up what it can before the first (`sandbox`),
and hands over nothing but pixels and text.
"""

import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from app.decode import sandbox
from app.decode.facts import Facts, dump_facts, facts_of
from app.decode.film import prepare_film
from app.decode.memory_files import write_all
from app.decode.messages import (
    MESSAGE_BYTES,
    Introduction,
    Job,
    Result,
    dump_bug,
    dump_ready,
    dump_refusal,
    dump_result,
    load_job,
)
from app.decode.picture import prepare_picture
from app.errors import LimitExceeded
from encoder import InputError, Segment


def main(channel: socket.socket, parent: int) -> None:
    """Serve items on the socket. The first message is the service's own: an `Introduction`, and the input file.

    Args:
        parent: process whose end ends this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when to stop
    sandbox.die_with(parent)
    message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
    if not message:
        return
    (media,) = descriptors
    introduction: Introduction = pickle.loads(message)  # noqa: S301 - from the service, never from a client
    stand_nowhere()
    _quiet()
    layers = sandbox.enter(introduction.duty.bounds, parent)
    sys.meta_path.insert(0, _late_imports)
    channel.send(dump_ready(layers))
    serve(channel, media, introduction)


class _LateImports:
    """Refuses and remembers imports: without files they would fail, and look like a fault of the item."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        self.names.append(name)
        raise ModuleNotFoundError(f"{name} is imported too late: the template must do it", name=name)


_late_imports: Final = _LateImports()


def serve(channel: socket.socket, media: int, introduction: Introduction) -> None:
    """Answer each job, a message with a memory file for its result, until the other end closes."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
        if not message:
            return
        (result,) = descriptors
        sandbox.limit_cpu(introduction.duty.cpu_s)
        try:
            answer = _answer(load_job(message), media, result, introduction)
            if _late_imports.names:
                answer = dump_bug(f"imported too late, by a worker: {', '.join(_late_imports.names)}")
        finally:
            os.close(result)
            os.ftruncate(2, 0)
        channel.send(answer)


def _answer(job: Job, media: int, result: int, introduction: Introduction) -> bytes:
    pixel_bytes = 0

    def keep(segment: Segment) -> None:
        nonlocal pixel_bytes
        pixels = segment.pixel_values.numpy() if segment.picture is None else segment.picture.pixels
        pixel_bytes = write_all(result, pixels.data, pixel_bytes)

    try:
        facts = _prepare(job, media, introduction, keep)
        facts_bytes = write_all(result, dump_facts(facts), pixel_bytes) - pixel_bytes
        return dump_result(Result(pixel_bytes, facts_bytes))
    except InputError as error:
        return dump_refusal(error)
    except (MemoryError, BlockingIOError):  # the second: no room for a thread's stack
        noun, limit = introduction.duty.noun, introduction.duty.bounds.memory_bytes
        return dump_refusal(LimitExceeded(f"{noun} that needs too much memory to decode, limit {limit} bytes"))
    except Exception:
        return dump_bug(traceback.format_exc())


def _prepare(job: Job, media: int, introduction: Introduction, keep: Callable[[Segment], None]) -> Facts:
    limits, config = introduction.limits, introduction.config
    if introduction.duty.kind == "video":
        return prepare_film(f"/proc/self/fd/{media}", job.options, limits, config, keep)
    data = os.pread(media, job.num_bytes, 0)
    prepared = prepare_picture(data, job.format, job.options, limits, config, defer=job.defer)
    keep(prepared.segments[0])
    return facts_of(prepared)


def stand_nowhere() -> None:
    """Make an empty directory the current one and delete it: relative names lead nowhere, and none is left behind.

    Where no directory can be made, stand among this process's own descriptors: only numbers, and nothing to write.
    """
    try:
        directory = tempfile.mkdtemp()
    except OSError:
        os.chdir("/proc/self/fdinfo")
        return
    os.chdir(directory)
    Path(directory).rmdir()


def _quiet() -> None:
    """Codecs print what media make them print: keep it out of the service's log, in a file where it can be counted."""
    complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
    os.dup2(complaints, 1)
    os.dup2(complaints, 2)
    os.close(complaints)
