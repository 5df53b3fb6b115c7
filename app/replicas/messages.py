"""What travels between the service and a tower's worker, besides batches and rows, which lie in shared memory.

One message a datagram. Both ends are processes of one service and trust each other, so the messages are pickles.
"""

import pickle
import select
import socket
import traceback
from typing import Any, Final, NamedTuple

from app.replicas.facts import TowerFacts

MESSAGE_BYTES: Final = 64 << 10  # longest message; a Unix socket takes it whole
_TEXT_CHARS: Final = 8000


class Share(NamedTuple):
    """To the worker, with a descriptor: a new block. Or none any more, without one."""

    block: int
    is_new: bool


class Work(NamedTuple):
    """To the worker: run the batch that is flat in one block and write its rows, (rows, width), into another."""

    job: int
    batch: int
    num_bytes: int
    result: int
    num_rows: int


class Up(NamedTuple):
    """From the worker: loaded and warmed up."""

    facts: TowerFacts


class Done(NamedTuple):
    """From the worker: the rows are there. `serving` and `out_of_service` are the tower's at this moment."""

    job: int
    attention: str
    serving: str
    out_of_service: dict[str, str]


class Failed(NamedTuple):
    """From the worker: a batch failed, or with no job, the worker did not load."""

    job: int | None
    error: Exception


class Broken(NamedTuple):
    """From the worker, its last: the device is unusable."""

    text: str


Message = Any
"""A `TowerSpec` (the first to a worker), or one of the above."""


def send(channel: socket.socket, message: Message, descriptor: int | None = None) -> None:
    """
    Raises:
        OSError: the other end is gone.
    """
    data = pickle.dumps(message)
    if descriptor is None:
        channel.send(data)
    else:
        socket.send_fds(channel, [data], [descriptor])


def receive(channel: socket.socket, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
    """The next message and the descriptors that came with it; None once the other end is closed.

    Raises:
        TimeoutError: none came in time.
    """
    if timeout_s is not None:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            raise TimeoutError
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
    except OSError:
        return None
    return (pickle.loads(data), descriptors) if data else None  # noqa: S301 - from the other half of this service


def text_of(error: BaseException) -> str:
    """Its traceback, bounded."""
    return "".join(traceback.format_exception(error))[-_TEXT_CHARS:]


def portable(error: Exception) -> Exception:
    """The exception as it can cross: as it is, where pickle takes it, with its traceback as a note."""
    trace = text_of(error)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(f"in the worker:\n{trace}")
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - our own
    except Exception:
        data = b""
    if not data or len(data) > MESSAGE_BYTES // 2:
        return RuntimeError(f"{type(error).__name__} in the worker:\n{trace}")
    return error
