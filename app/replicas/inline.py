"""`EngineTower`: the engine of this process as a tower. It says of itself what a worker's tower does."""

import os
import threading
from collections.abc import Callable

from torch import Tensor

from app.replicas.facts import TowerFacts, TowerStatus
from app.tower import Pending
from encoder import Engine, PackedBatch


class EngineTower:
    """A loaded engine.

    Attributes:
        takes_pinned: its batches are to be packed into pinned memory.

    Args:
        on_batch: called with the attention backend of every batch.
    """

    def __init__(self, engine: Engine, on_batch: Callable[[str], None] = lambda backend: None) -> None:
        self.facts = TowerFacts.of(engine)
        self._engine = engine
        self._on_batch = on_batch
        self.takes_pinned = engine.transfers is not None
        self._outstanding = 0
        self._counting = threading.Lock()

    @property
    def status(self) -> TowerStatus:
        return TowerStatus(
            device=str(self._engine.device),
            state="up",
            pid=os.getpid(),
            restarts=0,
            outstanding_patches=self._outstanding,
            attention=self._engine.attention.name,
            out_of_service=dict(self._engine.attention.out_of_service),
        )

    def submit(self, batch: PackedBatch) -> Pending:
        """See `Tower`."""
        patches = sum(batch.lengths)
        attention = self._engine.attention_for(batch.lengths)
        self._count(patches)
        try:
            result = self._engine.submit(batch)
        except BaseException:
            self._count(-patches)
            raise
        self._on_batch(attention)
        return _Answer(result, attention, done=lambda: self._count(-patches))

    def _count(self, patches: int) -> None:
        with self._counting:
            self._outstanding += patches


class _Answer:
    """The `Pending` of a batch; `attention` is the backend it runs on."""

    def __init__(self, result: Pending, attention: str, done: Callable[[], None]) -> None:
        self.attention = attention
        self._result = result
        self._done = done

    def __call__(self) -> Tensor:
        try:
            return self._result()
        finally:
            self._done()
