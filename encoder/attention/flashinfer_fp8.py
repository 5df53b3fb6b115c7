"""FlashInfer's fa3 ragged prefill with q, k and v in 8 bits, for Hopper: faster on long segments, and far less exact.

Batches of shorter segments, where it gains nothing, are left to `flashinfer_ragged`. Plans borrow workspaces as there,
and for the same reasons.
"""

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from flashinfer import BatchPrefillWithRaggedKVCacheWrapper
from torch import Tensor

from encoder.attention.contract import Attend, TurningAttend
from encoder.attention.flashinfer_ragged import FlashInferAttention
from encoder.attention.fp8_heads import (
    FP8,
    QuantizedHeads,
    quantize_heads,
    turn_and_quantize_heads,
    turns_right,
)

FLOAT_WORKSPACE_BYTES = 2**20  # keys are not split, so next to nothing

FROM_PATCHES = 4000
"""Patches that a patch attends to, on average, from which 8 bits pay.

H200, 12 heads of 128, TFLOP/s of fa3 in bfloat16 and in 8 bits, in short bursts: 596 and 544 at 1656 patches, 640 and
718 at 5476, 640 and 800 at 10,764, 653 and 851 at 65,536. Quantising q, k and v takes 260 us of the 3.4 ms of 4 x
10,764.
"""


class _Workspace:
    def __init__(self, device: torch.device) -> None:
        floats = torch.empty(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(floats, "NHD", backend="fa3")
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # the schedule has left the pinned buffer
        self.used = torch.cuda.Event()  # type: ignore[no-untyped-call]  # the last layer has read the schedule


class _Attend:
    def __init__(self, workspace: _Workspace) -> None:
        self._workspace = workspace

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._run(quantize_heads(q, k, v))

    def _run(self, heads: QuantizedHeads) -> Tensor:
        out: Tensor = self._workspace.wrapper.run(*heads.values, *heads.scale)
        self._workspace.used.record()
        return out


class _TurningAttend(_Attend, TurningAttend):
    def turn(self, qkv: Tensor, rope: Tensor) -> Tensor:
        return self._run(turn_and_quantize_heads(qkv, rope))


class FlashInferFp8Attention:
    def __init__(self, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
        self._device, self._dtype = device, dtype
        self._num_heads, self._head_dim = num_heads, head_dim
        self._exact = FlashInferAttention(device, dtype, num_heads, head_dim)
        self._attend = _TurningAttend if turns_right(device, dtype, num_heads, head_dim) else _Attend
        self._free: list[_Workspace] = []

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        if not _pays(lengths):
            return self._exact.plan(lengths, cu_seqlens)
        workspace = self._free.pop() if self._free else _Workspace(self._device)
        workspace.copied.synchronize()
        torch.cuda.current_stream(self._device).wait_event(workspace.used)
        # Pinned, so that FlashInfer's own copies of it do not wait for the device.
        offsets = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32).pin_memory()
        workspace.wrapper.plan(
            offsets,
            offsets,
            self._num_heads,
            self._num_heads,
            self._head_dim,
            causal=False,
            q_data_type=FP8,
            kv_data_type=FP8,
            o_data_type=self._dtype,
            disable_split_kv=True,
        )
        workspace.copied.record()

        attend = self._attend(workspace)
        weakref.finalize(attend, self._free.append, workspace)  # the batch is done when nobody holds its plan
        return attend


def _pays(lengths: Sequence[int]) -> bool:
    mean = sum(n * n for n in lengths) / max(1, sum(lengths))
    return mean >= FROM_PATCHES
