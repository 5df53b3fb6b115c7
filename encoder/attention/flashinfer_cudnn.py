"""cuDNN's fused attention through FlashInfer, for ragged batches.

cuDNN builds a plan for each (number of segments, longest segment); both are rounded up, with empty segments at the
end, so that few plans are built. It addresses segments by element offsets.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache
from torch import Tensor

from encoder.attention.contract import Attend

WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation


class CudnnAttention:
    def __init__(self, device: torch.device, num_heads: int, head_dim: int) -> None:
        self._device = device
        self._width = num_heads * head_dim
        self._scale = 1 / math.sqrt(head_dim)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        if not lengths:
            return lambda q, k, v: torch.empty_like(q)
        padded = [*lengths, *[0] * (_round_up(len(lengths), 8) - len(lengths))]
        longest = _round_up(max(lengths), 128)
        offsets = list(accumulate(padded, initial=0))
        rows = [3 * self._width * n for n in offsets], [self._width * n for n in offsets]
        in_offsets, out_offsets = (self._stage(each, torch.int64) for each in rows)
        sizes = self._stage(padded, torch.int32)
        call: Any = cudnn_batch_prefill_with_kv_cache

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.stride(0) != 3 * self._width:
                # The cached plans and the offsets are made for views of the packed product.
                q, k, v = torch.stack((q, k, v), dim=1).unbind(1)
            out: Tensor = call(
                q,
                k,
                v,
                self._scale,
                self._workspace,
                max_token_per_sequence=longest,
                max_sequence_kv=longest,
                actual_seq_lens_q=sizes,
                actual_seq_lens_kv=sizes,
                causal=False,
                return_lse=False,
                batch_offsets_q=in_offsets,
                batch_offsets_k=in_offsets,
                batch_offsets_v=in_offsets,
                batch_offsets_o=out_offsets,
            )[0]
            return out

        return attend

    def _stage(self, numbers: list[int], dtype: torch.dtype) -> Tensor:
        """(n, 1, 1, 1) on the device; PyTorch reuses the pinned block only after the copy."""
        return torch.tensor(numbers, dtype=dtype).view(-1, 1, 1, 1).pin_memory().to(self._device, non_blocking=True)


def _round_up(number: int, least: int) -> int:
    """To a power of two, at least `least`."""
    return max(least, 1 << (number - 1).bit_length())
