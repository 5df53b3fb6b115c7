"""The oracle: attention as the formula says it, in float32, one segment after the other."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from encoder.attention.contract import Attend

SCORE_BYTES = 64 * 2**20
"""Most bytes of scores alive at once; longer segments are cut into runs of queries."""


class ReferenceAttention:
    """Meant to be read and compared with, not to be fast."""

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        segments = list(lengths)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(*(torch.split(x, segments) for x in (q, k, v)), strict=True)
            outputs = [_attend_one_segment(*part) for part in parts]
            return torch.cat(outputs).to(q.dtype) if outputs else torch.empty_like(q)

        return attend


def _attend_one_segment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(n, H, Dh) each -> (n, H, Dh) float32."""
    n, num_heads, head_dim = q.shape
    keys = k.float().permute(1, 2, 0)  # (H, Dh, n)
    values = v.float().transpose(0, 1)  # (H, n, Dh)
    num_queries = max(1, SCORE_BYTES // (4 * num_heads * n))
    outputs = []
    for queries in torch.split(q.float().transpose(0, 1), num_queries, dim=1):
        scores = queries @ keys / math.sqrt(head_dim)
        outputs.append(scores.softmax(dim=-1) @ values)
    return torch.cat(outputs, dim=1).transpose(0, 1)
