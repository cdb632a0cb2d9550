"""A decoder with random weights on the CPU for tests of the compiled step: pages of NaN, and its plain oracle."""

import numpy as np
import torch

from gpu.kv.pool import KvPool, PoolShape
from gpu.layers.decoder import Decoder
from gpu.model.architecture import Architecture
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.paged_decode_attention import paged_decode_attention_reference
from gpu.operations.kv.kv_rows import codes_of, dim_of, has_codes, read_codes, scales_of, write_rows
from gpu.operations.kv.rope_kv_write import rope_kv_write_reference
from gpu.operations.kv.row_places import RowPlaces
from gpu.operations.rms_norm import rms_norm_reference
from gpu.operations.swiglu import swiglu_reference
from gpu.page_layout import KvFormat
from gpu.weights.drawing import random_weights
from tests.gpu.poison import poison_pool

CPU = torch.device("cpu")
PAGE_TOKENS = 16


def cpu_decoder(
    shape: Architecture, dtype: torch.dtype, num_pages: int, max_slots: int, max_pages: int, kv: KvFormat | None = None
) -> Decoder:
    """Slots share no page; all pages are NaN. `num_pages` is at least `max_slots * max_pages`, or tables stay zero."""
    weights = random_weights(shape, 3, dtype, CPU, lambda fraction: None)
    generator = torch.Generator().manual_seed(7)
    for layer in weights.layers:
        layer.attention_norm.uniform_(0.5, 1.5, generator=generator)
        layer.mlp_norm.uniform_(0.5, 1.5, generator=generator)
    pool = KvPool(shape, PoolShape(num_pages, (), PAGE_TOKENS, max_slots, max_pages * PAGE_TOKENS, dtype, kv=kv), CPU)
    poison_pool(pool)
    if num_pages >= max_slots * max_pages:
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))
        pool.page_table.copy_(order[: max_slots * max_pages].view(max_slots, max_pages))
    return Decoder(shape, weights, pool, max_pages * PAGE_TOKENS)


def fill_contexts(decoder: Decoder, slots: np.ndarray, positions: np.ndarray) -> None:
    """Random keys and values before each row's position."""
    pool, generator = decoder.pool, torch.Generator().manual_seed(9)
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        tokens = torch.arange(position if slot >= 0 else 0)
        page_ids, offsets = pool.page_table[slot, tokens // PAGE_TOKENS].long(), tokens % PAGE_TOKENS
        for pages in (*pool.key_pages, *pool.value_pages):
            drawn = torch.randn(pages.shape[1], len(tokens), dim_of(pages), generator=generator).to(pool.dtype)
            write_rows(drawn, page_ids, offsets, pages)


def _wide(pages: torch.Tensor) -> torch.Tensor:
    """Pages `[.., dim]` in float64, of codes too."""
    return read_codes(codes_of(pages), scales_of(pages), torch.float64) if has_codes(pages) else pages.double()


def _rounded(rows: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Rows in float64 as pages of that dtype hold them; those that are read from such pages already stay."""
    if stored != torch.int8:
        return rows.to(stored).double()
    scales = (rows.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (rows / scales + 0.5).floor() * scales


def reference_logits(decoder: Decoder, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> torch.Tensor:
    """The step in plain torch, float64, on copies of the pages that have the pages' rounding: `[rows, vocab]`.

    Rows in codes are read exactly; the step's own are rounded to codes from their float64 numbers.
    """
    shape, weights, pool = decoder.architecture, decoder.weights, decoder.pool
    slots_there, positions_there = torch.from_numpy(slots), torch.from_numpy(positions)
    lens = torch.where(slots_there >= 0, positions_there + 1, 0).to(torch.int32)
    hidden = weights.embedding.double()[torch.from_numpy(token_ids)]
    for index, layer in enumerate(weights.layers):
        qkv = rms_norm_reference(hidden, layer.attention_norm.double(), shape.rms_norm_eps) @ layer.qkv.double().t()
        stored = pool.key_pages[index], pool.value_pages[index]
        keys, values = (_wide(pages) for pages in stored)
        query = rope_kv_write_reference(
            qkv,
            RowPlaces(decoder.cos.double(), decoder.sin.double(), positions_there, positions_there, slots_there),
            pool.page_table, keys, values, shape.num_heads,
        )  # fmt: skip
        keys, values = (_rounded(pages, stored[0].dtype) for pages in (keys, values))
        attended = paged_decode_attention_reference(
            PagedReads(query, keys, values, pool.page_table, slots_there, lens, decoder.scale)
        ).near.out.view(len(slots), -1)
        hidden = hidden + attended @ layer.output.double().t()
        normed = rms_norm_reference(hidden, layer.mlp_norm.double(), shape.rms_norm_eps)
        hidden = hidden + swiglu_reference(normed @ layer.gate_up.double().t()) @ layer.down.double().t()
    normed = rms_norm_reference(hidden, weights.final_norm.double(), shape.rms_norm_eps)
    return normed @ weights.logits.double().t()
