"""Decide which queries of a prefill unit MOMO computes densely, and which sparsely.

The first `dense_layers` layers are dense. In the others, query blocks that begin below `dense_until_tokens`, and the
prompt's last one, attend to everything, as in dense prefill. All blocks between follow MOMO's Algorithm 1 and equation
2. Invariant: whether a query block is dense depends on its layer, its position and where the prompt ends. Where units
end changes no bit of sparse results on a GPU; dense results depend on it as much as those of dense prefill.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.methods.device_side import Site
from gpu.methods.momo.block_sparse import CONFIGS, block_sparse_attention
from gpu.methods.momo.query_sparse import query_sparse_attention
from gpu.methods.momo.settings import MomoSettings
from gpu.methods.momo.union import unite
from gpu.methods.prefill_side import PrefillSide
from gpu.model.architecture import ModelError


def make_prefill_side(settings: MomoSettings, site: Site, dense: PrefillSide) -> PrefillSide:
    """Make MOMO's prefill side.

    Raises ModelError if its kernels do not support the head size (a query block's rows must fit on chip), or if all
    layers of the model would be dense.
    """
    dim, layers = site.architecture.dim, site.architecture.num_layers
    if settings.dense_layers >= layers:
        raise ModelError(f"momo: dense_layers is {settings.dense_layers}; the model has {layers} layers: wanted fewer")
    if site.device.type == "cuda" and dim not in CONFIGS:
        served = ", ".join(map(str, CONFIGS))
        raise ModelError(f"momo: heads of {dim}; on a GPU served: {served}: take `prefill: momo` out of the profiles")
    return Momo(settings, dense)


class Momo(PrefillSide):
    """MOMO's prefill. It needs no state: what a unit needs of earlier ones is in their keys and values.

    dense: the side that computes dense rows.
    """

    def __init__(self, settings: MomoSettings, dense: PrefillSide) -> None:
        self.settings = settings
        self.dense = dense

    def first_own_token(self) -> int:
        return -(-self.settings.dense_until_tokens // self.settings.query_block) * self.settings.query_block

    def attend(self, query: PrefillQuery) -> Attended:
        """Attend for a unit. The result has no lse, since the output is not a softmax over a set (eq. 2).

        Raises ValueError if positions are not consecutive: windows and query blocks need consecutive queries.
        """
        size, begin = self.settings.query_block, query.begin
        if begin is None:
            raise ValueError("momo: positions are not consecutive; wanted consecutive ones, or dense prefill")
        end = begin + len(query.query)
        last_block = (query.num_prompt_tokens - 1) // size * size
        assert begin % size == 0, f"momo: a unit begins at {begin}; wanted a multiple of {size}"
        assert end % size == 0 or end == query.num_prompt_tokens, f"momo: a unit ends at {end} of a prompt"
        sparse_begin = min(max(begin, self.first_own_token()), end)
        sparse_end = max(sparse_begin, min(end, last_block))
        if query.layer < self.settings.dense_layers:
            sparse_begin = sparse_end = end
        outs = []
        for first, last, is_sparse in (
            (begin, sparse_begin, False),
            (sparse_begin, sparse_end, True),
            (sparse_end, end, False),
        ):
            if first == last:
                continue
            own = slice(first - begin, last - begin)
            if is_sparse:
                rows, keys, values = query.query[own], query.keys, query.values
                outs.append(sparse_attention(rows, keys, values, first, self.settings, query.scale))
                continue
            asked = replace(
                query,
                query=query.query[own],
                pre_rope_query=query.pre_rope_query[own],
                positions=query.positions[own],
                begin=first,
            )
            outs.append(self.dense.attend(asked).out)
        return Attended(outs[0] if len(outs) == 1 else torch.cat(outs), None)


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, begin: int, settings: MomoSettings, scale: float
) -> Tensor:
    """Attend with whole query blocks: `query [tokens, heads, dim]` at positions from `begin` on, a multiple of the
    query block.

    keys, values: `[kv_heads, context, dim]` (heads and tokens strided), context at least begin + tokens. Returns
    float32 `[tokens, heads, dim]` (on the CPU float64 of float64). There is no lse, since this is not a softmax over a
    set.
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
    """Add to each window of `gamma` queries the error of its first one (eq. 2), in place.

    out: `[tokens, heads, dim]`. dense_rows: `[tokens / gamma, heads, dim]`, the dense results of the first queries.
    """
    windows = out.unflatten(0, (-1, gamma))
    windows += (dense_rows - windows[:, 0])[:, None]
