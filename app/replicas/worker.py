"""A tower's own process: loads a model, then runs batches out of shared memory until the service closes the socket.

The main thread receives and submits, a second one waits for results and answers, so that on a GPU the copies of one
batch run beside the computation of another.
"""

import ctypes
import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, Final

import torch

from app.logs import configure_logging
from app.memory import keep_memory_flat
from app.replicas.facts import TowerFacts, TowerSpec
from app.replicas.flat import restore
from app.replicas.messages import Broken, Done, Failed, Share, Up, Work, portable, receive, send, text_of
from app.tower import Pending
from encoder import DeviceFailed, EncoderError, Engine

logger = logging.getLogger(__name__)

EXIT_DEVICE_FAILED: Final = 70
EXIT_NOT_LOADED: Final = 2
_PR_SET_PDEATHSIG: Final = 1


def main(descriptor: int, parent: int) -> int:
    """Serve on the socket `descriptor`; the exit code. The first message says what to load."""
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # the service decides when to stop
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    first = receive(channel)
    if first is None:
        return 0
    spec: TowerSpec = first[0]
    configure_logging(spec.log_level, spec.log_format)
    keep_memory_flat()
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    try:
        _settle_on(torch.device(spec.device))
        engine = spec.load()
        facts = TowerFacts.of(engine)  # runs a batch, which may be too much for the device
    except EncoderError as error:
        send(channel, Failed(None, portable(error)))
        return EXIT_NOT_LOADED
    send(channel, Up(facts))
    return Server(channel, engine).serve()


class Server:
    """Answers batches on a loaded engine."""

    def __init__(self, channel: socket.socket, engine: Engine) -> None:
        self._channel = channel
        self._engine = engine
        self._width = engine.config.vision.text_hidden_size
        self._memory = SharedMemory(is_gpu=engine.device.type == "cuda")
        self._submitted: queue.SimpleQueue[tuple[int, str, Pending] | None] = queue.SimpleQueue()

    def serve(self) -> int:
        """Until the other end closes; what was submitted is answered first."""
        answers = threading.Thread(target=self._answer_forever, name="answers")
        answers.start()
        try:
            while (received := receive(self._channel)) is not None:
                message, descriptors = received
                if isinstance(message, Share):
                    if message.is_new:
                        self._memory.add(message.block, descriptors[0])
                    else:
                        self._memory.remove(message.block)
                else:
                    self._submit(message)
        finally:
            self._submitted.put(None)
            answers.join()
        return 0

    def _submit(self, work: Work) -> None:
        attention = self._engine.attention.name
        try:
            batch = restore(self._memory[work.batch][: work.num_bytes])
            out = self._rows(work)
            attention = self._engine.attention_for(batch.lengths)
            pending: Pending = self._engine.submit(batch, out)
        except Exception as error:
            pending = _raising(error)
        self._submitted.put((work.job, attention, pending))

    def _rows(self, work: Work) -> torch.Tensor:
        """(rows, width) at the start of the result's block."""
        shape = (work.num_rows, self._width)
        count = work.num_rows * self._width
        if not count:
            return torch.empty(shape, dtype=self._engine.dtype)
        return torch.frombuffer(self._memory[work.result], dtype=self._engine.dtype, count=count).view(shape)

    def _answer_forever(self) -> None:
        _settle_on(self._engine.device)
        while (submitted := self._submitted.get()) is not None:
            job, attention, pending = submitted
            message: Done | Failed | Broken
            try:
                pending()
                serving = self._engine.attention
                message = Done(job, attention, serving.name, dict(serving.out_of_service))
            except DeviceFailed as error:
                message = Broken(text_of(error))
            except Exception as error:
                message = Failed(job, portable(error))
            try:
                send(self._channel, message)
            except OSError:
                os._exit(0)  # the service is gone
            if isinstance(message, Broken):
                os._exit(EXIT_DEVICE_FAILED)  # without a farewell to a device that may not answer any more
            del submitted, pending


def _raising(error: Exception) -> Pending:
    def wait() -> torch.Tensor:
        raise error

    return wait


class SharedMemory:
    """The service's blocks in this process; for a GPU their pages are pinned, so that it copies from and to them.

    Where they cannot be, they work all the same, by way of PyTorch's own pinned memory.
    """

    def __init__(self, *, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._blocks: dict[int, mmap.mmap] = {}
        self._pinned: dict[int, int] = {}  # block -> address

    def __getitem__(self, number: int) -> memoryview:
        return memoryview(self._blocks[number])

    def add(self, number: int, descriptor: int) -> None:
        """Map a new block and close its descriptor."""
        try:
            memory = self._blocks[number] = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        if self._is_gpu:
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            status = int(_runtime().cudaHostRegister(address, len(memory), 0))
            if status == 0:
                self._pinned[number] = address
            else:
                logger.warning("%d bytes of shared memory cannot be pinned (CUDA error %d)", len(memory), status)
                _forget_error()

    def remove(self, number: int) -> None:
        """The service has answers to all that used it. The mapping goes with the last tensor in it."""
        if number in self._pinned:
            _runtime().cudaHostUnregister(self._pinned.pop(number))
        del self._blocks[number]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """PyTorch takes the error of an earlier call for that of the next kernel; let one without a purpose have it."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _settle_on(device: torch.device) -> None:
    """Make it this thread's current device: whatever is not told which, would open the first GPU too."""
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():  # else the engine says so
        torch.cuda.set_device(device.index or 0)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of the service that started it dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the service died before its worker started")


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(code)  # taking everything down in order would take seconds, for nobody
