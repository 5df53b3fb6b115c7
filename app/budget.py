"""Bytes that may be held at a time, shared by everybody who holds some. Event loop only."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import Overloaded


class ByteBudget:
    """Counts what is held and refuses what would be too much together; nobody waits.

    A single holder may take more than the whole budget while nothing else is held: it never could, otherwise.

    Args:
        max_bytes: of all holders together.
        what: is held, for messages: "12 bytes of <what> are held".
    """

    def __init__(self, max_bytes: int, what: str) -> None:
        self._max_bytes = max_bytes
        self._what = what
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @contextmanager
    def hold(self) -> Iterator["Hold"]:
        """A share that grows as it is told to, and is given back at the end of the block."""
        share = Hold(self)
        try:
            yield share
        finally:
            self._held_bytes -= share.num_bytes

    def _check(self, share: "Hold", more: int) -> None:
        others = self._held_bytes - share.num_bytes
        if others and self._held_bytes + more > self._max_bytes:
            raise Overloaded(
                f"{self._held_bytes} bytes of {self._what} are held and this one has {more} more, "
                f"limit {self._max_bytes}"
            )


class Hold:
    """One holder's share of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def check(self, more: int) -> None:
        """Refuse early what could not be taken now. Takes nothing: what was only announced must not keep others out.

        Raises:
            Overloaded: so many more bytes would be too many together.
        """
        self._budget._check(self, more)

    def take(self, more: int) -> None:
        """Hold so many more bytes.

        Raises:
            Overloaded: that would be too many together; what is held stays.
        """
        self._budget._check(self, more)
        self._budget._held_bytes += more
        self.num_bytes += more
