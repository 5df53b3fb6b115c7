"""One film worker as the service sees it: a process, and the socket to it."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from app.decode.film_messages import MESSAGE_BYTES, READY
from app.decode.media import DecodeLimits
from encoder import EncoderConfig

_START_TIMEOUT_S: Final = 120.0  # imports torch, on a busy machine
_DEATH_TIMEOUT_S: Final = 1.0  # between the end of a socket and that of its process
_KEPT_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # no key or token reaches a worker


class WorkerDied(Exception):
    """The process went away instead of answering.

    Attributes:
        was_killed: somebody else ended it by SIGKILL, as the kernel does when memory runs out: not this film's fault.
    """

    def __init__(self, *, was_killed: bool = False) -> None:
        super().__init__()
        self.was_killed = was_killed


class WorkerProcess:
    """One process and the socket to it."""

    def __init__(self) -> None:
        """Start it. The kernel ties its life to the calling thread, which must be the one that runs the event loop."""
        self.num_jobs = 0
        self._ended = False
        self._asking = asyncio.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path)}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with theirs, ExitStack() as on_failure:
            on_failure.callback(self._channel.close)
            self.process = subprocess.Popen(  # noqa: S603 - nothing of a request is in its arguments
                [sys.executable, "-P", "-m", "app.decode.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the service
            )
            on_failure.pop_all()

    async def introduce(self, limits: DecodeLimits, config: EncoderConfig) -> None:
        """Hand over what stays the same for all films, and wait until it is ready for the first."""
        async with asyncio.timeout(_START_TIMEOUT_S):
            if await self._ask(pickle.dumps((limits, config)), []) != READY:
                raise WorkerDied

    async def ask(self, job: bytes, film: int, result: int) -> bytes:
        self.num_jobs += 1
        return await self._ask(job, [film, result])

    async def _ask(self, message: bytes, descriptors: list[int]) -> bytes:
        async with self._asking:
            try:
                socket.send_fds(self._channel, [message], descriptors)
                answer = await asyncio.get_running_loop().sock_recv(self._channel, MESSAGE_BYTES)
            except OSError as error:
                raise await self._death() from error
        if not answer:
            raise await self._death()
        return answer

    async def _death(self) -> WorkerDied:
        try:
            status = await asyncio.to_thread(self.process.wait, _DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it only closed its socket
            return WorkerDied()
        return WorkerDied(was_killed=status == -signal.SIGKILL and not self._ended)

    async def end(self) -> None:
        """Kill it and wait until it is gone and whoever waited for its answer knows."""
        self._ended = True
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        async with self._asking:
            self._channel.close()
