"""What an attention backend is: the one call the tower makes, the plan behind it, and the row it has in the table."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v, each (L, H, Dh) -> (L, H, Dh) of the same dtype: softmax(q kᵀ / sqrt(Dh)) v inside each segment.

The inputs may be strided views of the packed qkv product; only their last dimension is contiguous.
"""


class TurningAttend(ABC):
    """An `Attend` that can rotate q and k on the way, which saves a pass over them."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Attend`, of q and k rotated already."""

    @abstractmethod
    def turn(self, qkv: Tensor, rope: Tensor) -> Tensor:
        """The same of the packed product (L, 3, H, Dh), heads side by side, and of `encoder.position.rope_table`."""


WhyNot = Callable[[torch.device, torch.dtype, int], str | None]
"""device, dtype, head_dim -> why the backend cannot run there, or None."""


class AttentionBackend(Protocol):
    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        """Prepare one batch; called once, its result serves every layer. Neither waits for the device.

        Work on a GPU goes to the current stream; a caller that plans on one stream and attends on another orders them.
        The backend's device is the current one.

        Args:
            lengths: patches of each of the N segments, as host integers; their sum is L.
            cu_seqlens: (N + 1,) int32 offsets 0..L on the device. A backend never reads it back.
        """
        ...


class Entry(NamedTuple):
    """One row of the table of backends.

    Attributes:
        summary: what it is, in a few words for the user.
        why_not: looks at the device's kind and capability and for installed libraries; runs nothing.
        load: (device, dtype, num_heads, head_dim) -> backend; its library and kernels are imported here.
        by_name_only: device -> why `auto` passes it by although it can run, or None.
        tolerance: largest relative error that the self-test allows; None is that of the dtype.
    """

    name: str
    summary: str
    why_not: WhyNot
    load: Callable[[torch.device, torch.dtype, int, int], AttentionBackend]
    by_name_only: Callable[[torch.device], str | None] = lambda device: None
    tolerance: float | None = None
