"""Results that are answered from where a tower left them: the copy a store keeps is made beside the answer."""

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


class Loans:
    """At most `most` results on loan. One comes back when nobody refers to its memory any more, whoever that was.

    Bounded because a tower's memory is scarce, pinned for copies from a GPU, and a client may read slowly.
    """

    def __init__(self, most: int) -> None:
        self._permits = deque([None] * most)  # given back from whichever thread drops the last reference

    def take(self, rows: Sequence[Tensor]) -> Tensor | None:
        """An item's rows as they are, (m, E); None where they must be copied.

        Only rows that are all of their memory are lent: part of a batch would keep the others' rows too, and blocks
        shared with a worker process, which has few, are always larger than what is in them.
        """
        if len(rows) != 1 or not rows[0].is_contiguous():
            return None
        only = rows[0]
        if not 0 < only.nbytes == only.untyped_storage().nbytes():
            return None
        try:
            self._permits.pop()
        except IndexError:
            return None
        # An object of its own for each loan: every tensor and view made of it keeps it, and nothing else does.
        array = only.view(torch.uint8).numpy()
        weakref.finalize(array, self._permits.append, None).atexit = False
        return torch.from_numpy(array).view(only.dtype)
