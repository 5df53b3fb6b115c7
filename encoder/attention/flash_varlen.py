"""FlashAttention-3 and FlashAttention-4 through their Python interfaces, which agree on the one call needed here."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from encoder.attention.contract import Attend


class FlashVarlenAttention:
    """Calls a `flash_attn_varlen_func` with the batch's own cu_seqlens; nothing is planned or copied."""

    def __init__(self, varlen: Callable[..., Any]) -> None:
        self._varlen = varlen

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        longest = max(lengths, default=0)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = self._varlen(
                q,
                k,
                v,
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                softmax_scale=q.shape[-1] ** -0.5,
                causal=False,
            )
            # Some releases give (output, log-sum-exp), some the output alone.
            out: Tensor = result[0] if isinstance(result, tuple) else result
            return out

        return attend


def flash_attention_3() -> FlashVarlenAttention:
    from flash_attn_interface import flash_attn_varlen_func

    return FlashVarlenAttention(flash_attn_varlen_func)


def flash_attention_4() -> FlashVarlenAttention:
    from flash_attn.cute import flash_attn_varlen_func

    return FlashVarlenAttention(flash_attn_varlen_func)
