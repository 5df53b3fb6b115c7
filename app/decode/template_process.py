"""The template of all workers as the service sees it: a process that is asked for copies of itself."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

_KEPT_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # no key or token reaches a worker
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class TemplateProcess:
    """Started with the first worker, and again whenever it is gone; its end is the end of all its workers.

    The kernel ties its life to the calling thread, which must be the one that runs the event loop.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, channel: socket.socket, line: socket.socket) -> None:
        """Ask for a worker on these sockets; returns at once. If there will be none, both are closed.

        Raises:
            OSError: no process, no descriptor, no memory.
        """
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self._control is not None  # noqa: S101 - for the type checker
        socket.send_fds(self._control, [b"f"], [channel.fileno(), line.fileno()])

    def close(self) -> None:
        """End it, and with it every worker that is left."""
        if self._control is not None:
            self._control.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path)}
        environment |= dict.fromkeys(_ONE_THREAD, "1") | {"CUDA_VISIBLE_DEVICES": ""}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ExitStack() as on_failure:
            on_failure.callback(self._control.close)
            self.process = subprocess.Popen(  # noqa: S603 - nothing of a request is in its arguments
                [sys.executable, "-P", "-m", "app.decode.template", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the service
            )
            on_failure.pop_all()
