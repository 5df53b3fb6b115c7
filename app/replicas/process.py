"""One worker's process as the service sees it: started, spoken to over a socket, ended."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from app.replicas.messages import Message, receive, send


class Process:
    """A process, and the socket to it. The kernel ties its life to the thread that made it."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: no process, no descriptor, no memory.
        """
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sending = threading.Lock()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path)}
        with theirs, ExitStack() as on_failure:
            on_failure.callback(self._channel.close)
            self._popen = subprocess.Popen(  # noqa: S603 - nothing of a request is in its arguments
                [sys.executable, "-P", "-m", "app.replicas.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the service
            )
            on_failure.pop_all()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Negative if a signal ended it; None while it runs."""
        return self._popen.returncode

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """
        Raises:
            OSError: it is gone.
        """
        with self._sending:
            send(self._channel, message, descriptor)

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Its next message; None once it has closed its end.

        Raises:
            TimeoutError: none came in time.
        """
        received = receive(self._channel, timeout_s)
        return None if received is None else received[0]

    def finish(self) -> None:
        """Let it answer what it has, and exit; the socket gives its answers, then ends."""
        with self._sending:
            try:
                self._channel.shutdown(socket.SHUT_WR)
            except OSError:
                return  # it is gone

    def end(self, timeout_s: float) -> int:
        """Its exit code, negative if a signal ended it; killed if it has not exited in time."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        with self._sending:
            self._channel.close()
        return code

    def kill(self) -> None:
        self._popen.kill()
