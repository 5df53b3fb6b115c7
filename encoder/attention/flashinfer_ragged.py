"""FlashInfer's ragged prefill, without a causal mask: its fa3 kernel on Hopper for long segments, fa2 otherwise.

FlashInfer plans a batch on the host: it fills a pinned buffer with a schedule and copies that to the device. Each plan
here borrows a workspace of its own, so planning the next batch cannot overwrite a copy in flight, nor a schedule
whose layers still run.
"""

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from flashinfer import BatchPrefillWithRaggedKVCacheWrapper
from torch import Tensor

from encoder.attention.contract import Attend

FLOAT_WORKSPACE_BYTES = 2**20
"""For partial results of split keys, which are switched off: an item's result must not depend on its neighbours."""

FA3_FROM_PATCHES = 384
"""Patches that a patch attends to, on average, from which fa3 beats fa2 on Hopper.

H200, 12 heads of 128 in bfloat16, TFLOP/s of fa2 and fa3: 284 and 270 at 256 patches, 216 and 230 at 400, 266 and 376
at 576, 375 and 533 at 1024.
"""


class _Workspace:
    """FlashInfer's wrapper with its buffers: 8 MiB of schedule on each side, good for 290,000 tiles of 128 patches."""

    def __init__(self, device: torch.device, kernel: str) -> None:
        floats = torch.empty(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(floats, "NHD", backend=kernel)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # the schedule has left the pinned buffer
        self.used = torch.cuda.Event()  # type: ignore[no-untyped-call]  # the last layer has read the schedule


class FlashInferAttention:
    def __init__(self, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
        self._device, self._dtype = device, dtype
        self._num_heads, self._head_dim = num_heads, head_dim
        self._is_hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._free: dict[str, list[_Workspace]] = {"fa2": [], "fa3": []}

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        if not lengths:
            return lambda q, k, v: torch.empty_like(q)
        kernel = self._choose_kernel(lengths)
        free = self._free[kernel]
        workspace = free.pop() if free else _Workspace(self._device, kernel)
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
            q_data_type=self._dtype,
            disable_split_kv=True,
        )
        workspace.copied.record()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = workspace.wrapper.run(q, k, v)
            workspace.used.record()
            return out

        weakref.finalize(attend, free.append, workspace)  # the batch is done when nobody holds its plan
        return attend

    def _choose_kernel(self, lengths: Sequence[int]) -> str:
        mean = sum(n * n for n in lengths) / sum(lengths)
        return "fa3" if self._is_hopper and mean >= FA3_FROM_PATCHES else "fa2"
