"""What to do about something outside that fails: leave it alone for a while, say so once, try again with one call."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Outage:
    """Whether a disk or a server is worth a try. Event loop only.

    Args:
        what: for the log.
        first_s, longest_s: the pause after the first failure, doubled by every failed try up to the longest.
    """

    def __init__(
        self, what: str, *, first_s: float, longest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._pause_s = 0.0  # 0 while it works
        self._until_s = 0.0

    @property
    def over(self) -> bool:
        return not self._pause_s

    def allows(self) -> bool:
        """Whether to try now. While it fails, one caller after each pause is told yes."""
        if self.over:
            return True
        if self._clock() < self._until_s:
            return False
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        self._until_s = self._clock() + self._pause_s
        return True

    def failed(self, reason: str) -> None:
        if self.over:
            self._pause_s = self._first_s
            self._until_s = self._clock() + self._pause_s
            logger.warning("%s is off for a while: %s", self._what, reason)

    def worked(self) -> None:
        if not self.over:
            self._pause_s = 0.0
            logger.info("%s is back", self._what)
