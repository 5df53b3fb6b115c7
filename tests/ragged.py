"""Ragged attention inputs for the tests of the backends, and what to compare their outputs with."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.attention import AttentionBackend


def packed_qkv(
    lengths: Sequence[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (L, H, Dh) of random numbers, strided views of one packed product; q has twice the unit deviation."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    packed = torch.randn(sum(lengths), 3, num_heads, head_dim, generator=generator)
    packed[:, 0] *= 2
    q, k, v = packed.to(device, dtype).unbind(1)
    return q, k, v


def attend(backend: AttentionBackend, lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu_seqlens = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=q.device)
    return backend.plan(lengths, cu_seqlens)(q, k, v)


def exact(lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(Dh)) v segment by segment, in float64."""
    outputs = []
    for qs, ks, vs in zip(*_by_segment(lengths, q.double(), k.double(), v.double()), strict=True):
        scores = qs @ ks.transpose(1, 2) / q.shape[-1] ** 0.5
        outputs.append(scores.softmax(-1) @ vs)
    return torch.cat(outputs, dim=1).transpose(0, 1)


def plain(lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What PyTorch gives in the inputs' own dtype, one segment at a time."""
    parts = zip(*_by_segment(lengths, q, k, v), strict=True)
    outputs = [F.scaled_dot_product_attention(*(x[None] for x in part))[0] for part in parts]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _by_segment(lengths: Sequence[int], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """(L, H, Dh) each -> for each the list of its (H, n, Dh)."""
    return [x.transpose(0, 1).split(list(lengths), dim=1) for x in tensors]


def relative_error(got: Tensor, expected: Tensor) -> float:
    difference = got.double() - expected.double()
    return float(difference.norm() / expected.double().norm())
