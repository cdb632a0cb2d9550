"""MOMO's prefill: query-sparse attention, the union of what it chose, block-sparse attention, and the delta correction.

MOMO, Algorithm 1 and equation 2. Grids of windows and query blocks are of absolute positions. Invariant: what a query
of a sparse query block gets depends on its own query block and on the keys and values up to it, never on which query
blocks are computed together nor on what comes behind.
"""

from torch import Tensor

from gpu.methods.momo.block_sparse import block_sparse_attention
from gpu.methods.momo.query_sparse import query_sparse_attention
from gpu.methods.momo.settings import MomoSettings
from gpu.methods.momo.union import unite


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, begin: int, settings: MomoSettings, scale: float
) -> Tensor:
    """Attend whole query blocks: `query [tokens, heads, dim]` at positions from `begin`, a multiple of the query block,
    on; keys, values `[kv_heads, context, dim]` (heads and tokens strided), context at least begin + tokens.

    float32 `[tokens, heads, dim]` (on the CPU float64 of float64): no softmax over a set, so no lse comes with it.
    """
    size, block = settings.query_block, settings.key_block
    end = begin + len(query)
    keys, values = keys[:, :end], values[:, :end]
    sparse = query_sparse_attention(query, keys, values, begin, settings.gamma, block, settings.k, scale)
    lists = unite(sparse, begin // block, size // settings.gamma, size // block, settings.k_trim)
    out = block_sparse_attention(query, keys, values, begin, size, block, lists, scale).out
    correct(out, sparse.out, settings.gamma)
    return out


def correct(out: Tensor, dense_rows: Tensor, gamma: int) -> None:
    """Add to each window of `gamma` queries what its first one lacks (eq. 2), in place: `out [tokens, heads, dim]`,
    `dense_rows [tokens / gamma, heads, dim]`.
    """
    windows = out.unflatten(0, (-1, gamma))
    windows += (dense_rows - windows[:, 0])[:, None]
