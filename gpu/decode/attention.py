"""What attention of one decode step reads, and the exact method: every resident token of each context.

It refuses to know projections and sampling. Invariant: a method returns a partial over a stated set of tokens; `exact`
states all of `[0, context_lens)`. Bytes moved: the keys and values of those tokens, once for each KV head.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpu.cpu_device.attention import applies, paged_decode_attention_cpu
from gpu.kernels.paged_decode_attention import Workspace, paged_decode_attention
from transfer.partial import Partial


@dataclass(frozen=True, slots=True)
class DecodeQuery:
    """One layer's queries of a decode step, one a row, with the paged KV that already holds the rows' own tokens.

    layer: index; query, pre_rope_query: `[requests, heads, dim]`, rotated and not; key_pages, value_pages:
    `[num_pages, kv_heads, page_tokens, dim]`; page_table: int32 `[max_slots, max_pages]`; slots, context_lens: int32
    `[requests]`, slot -1 and context 0 in padding rows; scale: of the logits; workspace: scratch of the kernel.
    """

    layer: int
    query: Tensor
    pre_rope_query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    slots: Tensor
    context_lens: Tensor
    scale: float
    workspace: Workspace


DecodeAttention = Callable[[DecodeQuery], Partial]


def exact_decode_attention(request: DecodeQuery) -> Partial:
    """The partial over each row's whole context, out float32 `[requests, heads, dim]`."""
    if applies(request.query):
        return paged_decode_attention_cpu(
            request.query,
            request.key_pages,
            request.value_pages,
            request.page_table,
            request.slots,
            request.context_lens,
            request.scale,
        )
    return paged_decode_attention(
        request.query,
        request.key_pages,
        request.value_pages,
        request.page_table,
        request.slots,
        request.context_lens,
        request.scale,
        request.workspace,
    )
