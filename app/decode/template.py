"""The process that workers are copies of: it imports everything once and forks, so that a worker is there in
milliseconds and shares the memory of what was imported.

It never sees a client's bytes and has one thread, so that forking is safe. Workers are its children; it tells the
service when one ends, and how.
"""

import ctypes
import gc
import importlib
import os
import pkgutil
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Final, NoReturn

import av
import decord  # noqa: F401 - a worker reads no files, so this and what Pillow imports late must be here
import PIL.Image
import torch
from PIL import (
    AvifImagePlugin,
    ImageChops,  # noqa: F401
    ImageCms,  # noqa: F401
    ImageColor,  # noqa: F401
    ImageMath,  # noqa: F401
    ImageMode,  # noqa: F401
    ImageOps,  # noqa: F401
    ImagePalette,  # noqa: F401
    ImageSequence,  # noqa: F401
    MpoImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
)

from app.decode import sandbox, worker
from app.decode.jpeg_turbo import agrees_with_pillow
from app.decode.messages import PID, STATUS

_M_TRIM_THRESHOLD: Final = -1  # malloc.h
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BLOCK_BYTES: Final = 16 << 20


def main(descriptor: int, service: int) -> None:
    """Fork a worker for each message on the socket `descriptor`, until the other end closes.

    A message brings two sockets: the worker's channel, and a line on which its process is named and its end told.
    """
    sandbox.die_with(service)
    worker.stand_nowhere()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _keep_memory()
    for module in pkgutil.walk_packages(av.__path__, "av."):
        importlib.import_module(module.name)
    PIL.Image.preinit()
    _rehearse_failing()
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # there is a worker for each core, and it may not start threads
    if not agrees_with_pillow():  # known here once for all workers
        print("simplejpeg and Pillow decode differently: Pillow decodes all JPEGs", file=sys.stderr)  # noqa: T201
    gc.collect()
    gc.freeze()  # what the collector does not touch stays shared
    if (num_threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        print(f"decoders are forked from a process of {num_threads} threads", file=sys.stderr)  # noqa: T201
    _serve(socket.socket(fileno=descriptor))


def _keep_memory() -> None:
    """Let workers keep the memory of a usual picture: given back and fetched again, it costs 4 ms at 1024x1024."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BLOCK_BYTES)


def _rehearse_failing() -> None:
    """What prints a traceback imports its parts when it prints the first."""
    try:
        raise LookupError
    except LookupError:
        traceback.format_exc()


def _serve(control: socket.socket) -> None:
    lines: dict[int, tuple[int, socket.socket]] = {}  # process descriptor -> (pid, line to the service)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                pid, line = lines.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                _tell_end(pid, line)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not message:
                return
            channel, line = (socket.socket(fileno=each) for each in descriptors)
            pid = _fork(control, channel, [line, *(each for _, each in lines.values())], list(lines))
            channel.close()
            if not pid:
                line.close()
                continue
            process = os.pidfd_open(pid)
            lines[process] = (pid, line)
            poll.register(process, select.POLLIN)
            _tell_start(pid, process, line)


def _fork(control: socket.socket, channel: socket.socket, sockets: list[socket.socket], processes: list[int]) -> int:
    """Its process number; 0 if the system has no room for it."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return 0
    if pid == 0:
        _be_worker(channel, parent, [control, *sockets], processes)
    return pid


def _be_worker(channel: socket.socket, parent: int, sockets: list[socket.socket], processes: list[int]) -> NoReturn:
    status = 1
    try:
        for each in sockets:
            each.close()
        for process in processes:
            os.close(process)
        worker.main(channel, parent)
        status = 0
    except OSError:  # the service has closed the channel
        pass
    finally:
        os._exit(status)


def _tell_start(pid: int, process: int, line: socket.socket) -> None:
    try:
        socket.send_fds(line, [PID.pack(pid)], [process])
    except OSError:  # the service has given up waiting
        os.kill(pid, signal.SIGKILL)  # not waited for yet, so the number is still its own


def _tell_end(pid: int, line: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    with line:
        try:
            line.send(STATUS.pack(os.waitstatus_to_exitcode(status)))
        except OSError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
