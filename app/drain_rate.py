"""How fast work is done, measured: `Retry-After` and the end of a running batch are computed from it."""

_KEPT = 0.8  # of what was measured before, with each new measurement: the last few batches decide


class DrainRate:
    """Amount per second, over the last few measurements weighted by how long they took.

    Weighted, because a thumbnail that is mostly overhead says little about how long a full batch will take.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = _KEPT * self._amount + amount
        self._seconds = _KEPT * self._seconds + max(seconds, 1e-6)

    @property
    def per_s(self) -> float:
        """0 where nothing has been measured yet."""
        return self._amount / self._seconds if self._seconds else 0.0

    def seconds(self, amount: float, unknown_s: float = 1.0) -> float:
        """Time that so much takes; `unknown_s` where nothing has been measured yet."""
        return amount / self.per_s if self.per_s else unknown_s
