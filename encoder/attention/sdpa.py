"""PyTorch's own attention: one batched call for each run of equal neighbours, on any device.

Many short unequal segments on a GPU would be bound by launches; they go to PyTorch's ragged FlashAttention-2, where
this PyTorch has it.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.attention.contract import Attend

VARLEN_BELOW_PATCHES = 1024
"""Patches that a patch attends to, on average, below which unequal segments go to the ragged kernel.

H200, 12 heads of 128 in bfloat16: 64 unequal segments of 64 to 316 patches run at 4 TFLOP/s one by one and at 161 in
the ragged kernel, 12 of 144 to 4784 patches at 492 and 328.
"""


class SdpaAttention:
    """A run of equal segments is a view (B, n, H, Dh) of the packed tensors, so nothing is padded or masked.

    Args:
        has_varlen: PyTorch's ragged kernel exists here, for this device, dtype and head size.
    """

    def __init__(self, has_varlen: bool = False) -> None:
        self._has_varlen = has_varlen

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        runs = [(len(list(group)), n) for n, group in groupby(lengths)]
        if self._has_varlen and len(runs) > 1 and sum(n * n for n in lengths) < VARLEN_BELOW_PATCHES * sum(lengths):
            return _plan_varlen(max(lengths), cu_seqlens)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if len(runs) == 1:
                return _attend_run(q, k, v, *runs[0])
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            start = 0
            for batch, n in runs:
                run = slice(start, start + batch * n)
                out[run] = _attend_run(q[run], k[run], v[run], batch, n)
                start = run.stop
            return out

        return attend


def _attend_run(q: Tensor, k: Tensor, v: Tensor, batch: int, n: int) -> Tensor:
    """(B*n, H, Dh) each, B segments of n patches -> (B*n, H, Dh)."""
    q, k, v = (x.view(batch, n, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # (B, H, n, Dh)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def _plan_varlen(longest: int, cu_seqlens: Tensor) -> Attend:
    from torch.nn.attention import varlen

    call: Callable[..., Any] = varlen.varlen_attn  # gives the output alone unless asked for more
    return lambda q, k, v: call(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
