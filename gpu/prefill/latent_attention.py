"""Attend to a prompt's rows of latents: keys and values are made of them in pieces, so that memory is bounded."""

import torch.nn.functional as F
from torch import Tensor

from gpu.attention.prefill_attention import default_kernel, past_attention, prefill_attention
from gpu.attention.prefill_query import Attended
from gpu.layers.latent import LatentLayers
from gpu.prefill.prefill_arrays import EXPANDED_TOKENS
from transfer.partial import merge


def attend_to_latents(latent: LatentLayers, layer: int, query: Tensor, rows: Tensor) -> Attended:
    """Attend with queries `[tokens, heads, query_dim]`, rotated, the last of a context, causally to all of its rows
    `[context, rank + rotated]`. out `[tokens, heads, value]`, lse float32 `[tokens, heads]`.
    """
    shape, past = latent.shape, len(rows) - len(query)
    query = F.pad(query, (0, max(0, shape.value - shape.query_dim)))
    kernel = default_kernel(query)
    merged = prefill_attention(query, *latent.expand(layer, rows[past:]), shape.scale, kernel)
    for begin in range(0, past, EXPANDED_TOKENS):
        keys, values = latent.expand(layer, rows[begin : min(begin + EXPANDED_TOKENS, past)])
        piece = merge(merged.partial(), past_attention(query, keys, values, shape.scale, kernel).partial())
        merged = Attended(piece.out, piece.lse)
    return Attended(merged.out[..., : shape.value], merged.lse)
