"""A film worker's own process: one film at a time over a socket, until the service closes it or dies.

It runs libraries that are not memory-safe on hostile bytes. So it stands in an empty directory, may add only so much
address space, and hands over nothing but pixels and text.
"""

import ctypes
import os
import pickle
import resource
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import BinaryIO, Final

import torch

from app.decode.film import prepare_film
from app.decode.film_messages import MESSAGE_BYTES, READY, dump_bug, dump_done, dump_facts, dump_refusal, load_job
from app.decode.media import DecodeLimits, MediaOptions
from app.errors import LimitExceeded
from encoder import EncoderConfig, InputError, Segment

_PR_SET_PDEATHSIG: Final = 1


def main(descriptor: int, parent: int) -> None:
    """Serve films on the socket `descriptor`. The first message is the service's own: limits and configuration."""
    _die_with(parent)
    _stand_nowhere()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when to stop
    torch.set_num_threads(1)
    channel = socket.socket(fileno=descriptor)
    limits, config = pickle.loads(channel.recv(MESSAGE_BYTES))  # noqa: S301 - from the parent, never from a client
    _limit_memory(limits.film_worker_memory_bytes)
    channel.send(READY)
    _quiet()
    serve(channel, limits, config)


def serve(channel: socket.socket, limits: DecodeLimits, config: EncoderConfig) -> None:
    """Answer each job, a message with two memory files for film and result, until the other end closes."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
        if not message:
            return
        film, result = descriptors
        try:
            with os.fdopen(result, "wb", buffering=0) as output:
                answer = _answer(f"/proc/self/fd/{film}", load_job(message), limits, config, output)
        finally:
            os.close(film)
            os.ftruncate(2, 0)
        channel.send(answer)


def _answer(path: str, options: MediaOptions, limits: DecodeLimits, config: EncoderConfig, output: BinaryIO) -> bytes:
    def keep(segment: Segment) -> None:
        _write(output, memoryview(segment.pixel_values.numpy().data).cast("B"))

    try:
        facts = prepare_film(path, options, limits, config, keep)
        pixel_bytes = output.tell()
        _write(output, memoryview(dump_facts(facts)))
        return dump_done(pixel_bytes)
    except InputError as error:
        return dump_refusal(error)
    except (MemoryError, BlockingIOError):  # the second: no room for a thread's stack
        limit = limits.film_worker_memory_bytes
        return dump_refusal(LimitExceeded(f"film that needs too much memory to decode, limit {limit} bytes"))
    except Exception:
        return dump_bug(traceback.format_exc())


def _write(output: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[output.write(data) :]


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the service dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the service died before its film worker started")


def _stand_nowhere() -> None:
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


def _limit_memory(more_bytes: int) -> None:
    """Bound the address space to what the imports took, plus `more_bytes`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _quiet() -> None:
    """Codecs print what films make them print: keep it out of the service's log, in a file where it can be counted."""
    complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
    os.dup2(complaints, 1)
    os.dup2(complaints, 2)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
