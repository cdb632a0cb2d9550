"""Attend by FlashAttention 3, where its wheel `fa3-fwd` is installed and has kernels for the card.

The wheel comes with `pip install '.[cuda]'`, and nothing needs it. It has kernels for bf16 on cards of compute
capability 8 and 9, and none for windows. Its causal mask is aligned to the lower right, and it groups query heads
itself, as FlashAttention 2 does. Whether it is faster is measured when an engine starts (`gpu.prefill.choice`).
"""

import logging
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gpu.attention.prefill_query import Attended

log = logging.getLogger(__name__)

CAPABILITIES = (8, 9)  # major numbers; on another card a launch would end the process
MOST_DIM, DIM_MULTIPLE = 256, 8


def has_flash3(query: Tensor) -> bool:
    """Return whether FlashAttention 3 takes queries like this one, `[..., dim]`: on CUDA, in bf16, with a head size
    and on a card that it serves.
    """
    dim = query.shape[-1]
    if not (query.is_cuda and query.dtype == torch.bfloat16 and dim % DIM_MULTIPLE == 0 and dim <= MOST_DIM):
        return False
    return torch.cuda.get_device_capability(query.device)[0] in CAPABILITIES and _load() is not None


@cache
def _load() -> Any:
    """Return the wheel's forward pass, or None, with a line in the log where it is there and cannot be loaded."""
    try:
        import_module("fa3_fwd._C")  # registers the operator
        return torch.ops.fa3_fwd.fwd
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "fa3_fwd":
            return None
        log.warning("flash3 event=not_loaded reason=%r", (str(error).splitlines() or [type(error).__name__])[0])
        return None


def flash3_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Attended:
    """Attend with queries `[tokens, heads, dim]` to keys and values `[kv_heads, context, dim]`; where `has_flash3`.

    The last axis is contiguous. Returns out `[tokens, heads, dim]` and lse float32 `[tokens, heads]`.
    """
    out, lse, *_ = _load()(
        query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], softmax_scale=scale, is_causal=is_causal,
        num_splits=1,
    )  # fmt: skip
    return Attended(out[0], lse[0].transpose(0, 1))


def packed_flash3_attention(
    query: Tensor, key: Tensor, value: Tensor, query_begins: Tensor, key_begins: Tensor, most_queries: int,
    most_keys: int, scale: float,
) -> Attended:  # fmt: skip
    """Attend causally with packed prompts, each to itself; where `has_flash3`.

    query: `[tokens, heads, dim]`. key, value: `[context tokens of all prompts, kv_heads, dim]`. query_begins,
    key_begins: int32 `[prompts + 1]`, on the device. Returns as `flash3_attention` does.
    """
    out, lse, *_ = _load()(
        query, key, value, cu_seqlens_q=query_begins, cu_seqlens_k=key_begins, max_seqlen_q=most_queries,
        max_seqlen_k=most_keys, softmax_scale=scale, is_causal=True, num_splits=1,
    )  # fmt: skip
    return Attended(out, lse.transpose(0, 1))
