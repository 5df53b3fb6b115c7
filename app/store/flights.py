"""Single flight: callers that want the same thing at the same time share one computation of it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from app.errors import Draining

T = TypeVar("T")


@dataclass(eq=False)
class _Flight(Generic[T]):
    task: "asyncio.Task[T]"
    waiters: int = 0


class Flights(Generic[T]):
    """Computations under way, by key. A computation belongs to all who wait for it and ends with the last of them;
    nothing of it is remembered once it is done, least of all an error. Event loop only.
    """

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}
        self._tasks: set[asyncio.Task[T]] = set()  # the loop alone would not keep a cancelled one alive
        self._closed = False

    def __contains__(self, key: str) -> bool:
        return key in self._flights

    async def join(self, key: str, compute: Callable[[], Awaitable[T]]) -> T:
        """Wait for the computation of `key`, starting it if there is none.

        Cancelling one waiter leaves the others alone; when the last one is gone, the computation is cancelled, and
        whoever comes then starts another. So `compute` should know no deadline of its own: each waiter has one.

        Raises:
            Draining: closed.
            What `compute` raised, to all who wait.
        """
        if self._closed:
            raise Draining("the service is shutting down")
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = self._start(key, compute)
        flight.waiters += 1
        try:
            # Unlike `await task`, this is cancelled with the waiter alone, and never by the task.
            await asyncio.wait({flight.task})
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._forget(key, flight.task)
                flight.task.cancel()
        if flight.task.cancelled():
            if self._closed:
                raise Draining("the service is shutting down")
            raise RuntimeError("a shared computation was cancelled from within")
        return flight.task.result()

    async def close(self) -> None:
        """Cancel everything, and wait until it is over; who waits gets `Draining`."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: str, compute: Callable[[], Awaitable[T]]) -> _Flight[T]:
        async def run() -> T:
            return await compute()

        def finished(task: "asyncio.Task[T]") -> None:
            self._tasks.discard(task)
            self._forget(key, task)
            if not task.cancelled():
                task.exception()  # seen, even where every waiter left before it

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(finished)
        return _Flight(task)

    def _forget(self, key: str, task: "asyncio.Task[T]") -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
