"""Threads that decode pictures. `concurrent.futures` joins its own when the interpreter exits, so that one picture in
the hands of a slow codec would keep the service from ending; these are left behind.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final

from app.decode.media import Prepared
from app.errors import Draining

_Job = tuple["Future[Prepared]", Callable[[], Prepared]]
_STOP: Final = None


class PictureThreads:
    """`num_threads` threads and one queue."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._begun: dict[int, float] = {}  # thread's number -> when its job began
        self._lock = Lock()
        self._closed = False
        self._threads = [
            Thread(target=self._work, args=(number,), name=f"picture-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest job that still runs began; 0 if none runs."""
        with self._lock:
            return time.monotonic() - min(self._begun.values()) if self._begun else 0.0

    def submit(self, job: Callable[[], Prepared]) -> "Future[Prepared]":
        """Queue a job; cancelling its future before it begins drops it.

        Raises:
            Draining: closed.
        """
        future: Future[Prepared] = Future()
        with self._lock:
            if self._closed:
                raise Draining("shutting down")
            self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float) -> None:
        """Refuse what has not begun, and wait for the rest no longer than `timeout_s` seconds."""
        with self._lock:
            self._closed = True
            while waiting := self._next_waiting():
                waiting[0].set_exception(Draining("shutting down"))
            for _ in self._threads:
                self._jobs.put(_STOP)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _next_waiting(self) -> _Job | None:
        """The next job that can still be refused."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return None
            if job is not None and job[0].set_running_or_notify_cancel():
                return job

    def _work(self, number: int) -> None:
        while (found := self._jobs.get()) is not _STOP:
            self._run(number, *found)
            del found  # else its bytes stay until the next job

    def _run(self, number: int, future: "Future[Prepared]", job: Callable[[], Prepared]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        with self._lock:
            self._begun[number] = time.monotonic()
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                del self._begun[number]
