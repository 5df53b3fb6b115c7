"""One worker as the service sees it: a process, the socket to it, and the files that items cross in."""

import asyncio
import os
import pickle
import select
import signal
import socket
from contextlib import ExitStack, suppress
from typing import Final

from app.decode.facts import BadAnswer
from app.decode.memory_files import InputFile, ResultFile, ResultFiles
from app.decode.messages import MESSAGE_BYTES, PID, STATUS, Introduction, load_ready
from app.decode.template_process import TemplateProcess

_START_TIMEOUT_S: Final = 120.0  # the first one's template imports torch, on a busy machine
_DEATH_TIMEOUT_S: Final = 1.0  # between the end of a socket and that of its process


class WorkerDied(Exception):
    """The process went away instead of answering.

    Attributes:
        status: minus a signal's number, or an exit code; None if it is not known.
        was_killed: somebody else ended it by SIGKILL, as the kernel does when memory runs out: not this item's fault.
    """

    def __init__(self, status: int | None = None, *, was_killed: bool = False) -> None:
        super().__init__()
        self.status = status
        self.was_killed = was_killed


class WorkerProcess:
    """One process, from the template's fork to its end."""

    def __init__(self, template: TemplateProcess) -> None:
        """Ask for it. Raises `OSError` if there is no room for it."""
        self.num_jobs = 0
        self.pid: int | None = None
        self.input = InputFile()
        self.results = ResultFiles()
        self._process: int | None = None  # its descriptor: unlike a number, it cannot come to mean another one
        self._ended = False
        self._asking = asyncio.Lock()
        with ExitStack() as on_failure:
            on_failure.callback(self.input.close)
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.callback(self._channel.close)
            with theirs:
                self._line, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                on_failure.callback(self._line.close)
                with other_end:
                    template.fork(theirs, other_end)
            on_failure.pop_all()
        self._channel.setblocking(False)
        self._line.setblocking(False)

    async def introduce(self, introduction: Introduction) -> dict[str, str]:
        """Hand over what stays the same for all items and wait until it is ready; returns its sandbox's layers."""
        async with asyncio.timeout(_START_TIMEOUT_S):
            async with self._asking:  # nobody closes the line while it is waited for
                await _until_readable(self._line)
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._line, PID.size, 1)
                except OSError as error:
                    raise WorkerDied from error
                if not message:
                    raise WorkerDied
                (self._process,), (self.pid,) = descriptors, PID.unpack(message)
            try:
                return load_ready(await self._ask(pickle.dumps(introduction), self.input.descriptor))
            except BadAnswer as error:
                raise WorkerDied from error

    @property
    def is_alive(self) -> bool:
        if self._process is None:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    async def ask(self, job: bytes, data: bytes, result: ResultFile) -> bytes:
        """Its answer to a job on `data`, once the result is written."""
        self.num_jobs += 1
        await self.input.fill(data)
        answer = await self._ask(job, result.descriptor)
        self.input.shrink()
        return answer

    async def _ask(self, message: bytes, descriptor: int) -> bytes:
        async with self._asking:
            try:
                socket.send_fds(self._channel, [message], [descriptor])
                answer = await asyncio.get_running_loop().sock_recv(self._channel, MESSAGE_BYTES)
            except OSError as error:
                raise await self._death() from error
        if not answer:
            raise await self._death()
        return answer

    async def _death(self) -> WorkerDied:
        try:
            async with asyncio.timeout(_DEATH_TIMEOUT_S):
                status = await self._status()
        except TimeoutError:  # it only closed its socket
            return WorkerDied()
        # Without a status its template is gone, and the kernel ended the worker with it: not what the item did either.
        return WorkerDied(status, was_killed=status in (None, -signal.SIGKILL) and not self._ended)

    async def _status(self) -> int | None:
        """How it ended, once it has; None if its template ended too."""
        try:
            said = await asyncio.get_running_loop().sock_recv(self._line, STATUS.size)
        except OSError:
            return None
        return STATUS.unpack(said)[0] if len(said) == STATUS.size else None

    async def end(self) -> None:
        """Kill it and wait until it is gone and whoever waited for its answer knows."""
        self._ended = True
        if self._channel.fileno() < 0:
            return
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            another = os.dup(self._process)  # an event loop has one reader for each number
            try:
                await _until_readable(another)
            finally:
                os.close(another)
        else:  # not yet there: it will find its channel closed, and who waits for it the line
            self._channel.shutdown(socket.SHUT_RDWR)
            self._line.shutdown(socket.SHUT_RDWR)
        async with self._asking:
            if self._channel.fileno() < 0:
                return
            self._channel.close()
            self._line.close()
            self.input.close()
            if self._process is not None:
                os.close(self._process)
                self._process = None


async def _until_readable(file: socket.socket | int) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    descriptor = file if isinstance(file, int) else file.fileno()
    loop.add_reader(descriptor, _resolve, readable)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
