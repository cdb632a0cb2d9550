"""Define the tensors that a sequence with an index holds on the device, and a step's scratch memory.

A **place** is a KV head of a ring: ring * kv_heads + kv_head. Tokens are counted from the first token of the offloaded
run, or, for a resident run, from the first token behind the sink.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gpu.methods.indexed import SPLIT_TOKENS, most_pages, page_arrays, ring_arrays, work_arrays
from gpu.methods.indexed.codes import make_rotation
from gpu.methods.indexed.settings import IndexedSettings
from gpu.model.architecture import Architecture
from transfer.allocation import allocate_all
from transfer.tier_shape import Rows

EMPTY = -1
BEHIND_ALL = 2**62
"""Where unused pieces behind a run's last one begin, so that a token's piece is found by binary search."""


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a layer, or of several layers, with one axis in front.

    codes, value_codes: uint8 `[pages, kv_heads, SPLIT_TOKENS, dim * bits / 8]`, rotated keys and values. Byte b of a
        token has dimensions b, b + width, ... Keys in 3 bits have `dim / 4` bytes of the lower two bits, and `dim / 8`
        bytes of the highest bits behind them, each for two of the former.
    scales, value_scales: float16 `[pages, kv_heads, SPLIT_TOKENS]`; a value's is negative if its block has a centre.
    value_centres: bfloat16 `[pages, kv_heads, blocks, dim]`, subtracted from rotated values, or 0.
    table: int32 `[rings, pages of the longest context]`, the pages of each ring.
    centres: float32 `[places, dim]`, subtracted from keys before they are rotated.
    ids: int32 `[places, slots]`, tokens in slots, or EMPTY. held: int32 `[places, words]`, a bit for each of these
        tokens.
    lies: int64 `[rings, COLUMNS, pieces]`, `transfer.places` of each ring's run.
    piece_centres: float32 `[rings, pieces, kv_heads, dim]`; for int8 rows also piece_key_scales `[rings, pieces,
        kv_heads]` and piece_value_scales `[rings, pieces, kv_heads, dim]`; copied from host memory.
    keys, values: `[places, slots, dim]`, restored rows in slots.
    """

    codes: Tensor
    scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    value_centres: Tensor
    table: Tensor
    centres: Tensor
    ids: Tensor
    held: Tensor
    lies: Tensor
    piece_centres: Tensor
    piece_key_scales: Tensor
    piece_value_scales: Tensor
    keys: Tensor
    values: Tensor

    def layer(self, place: int) -> "Index":
        return Index(*(getattr(self, each.name)[place] for each in fields(Index)))

    def rows_of(self, pages: Tensor, place: int, num_tokens: int) -> Tensor:
        """Return what one layer's pages hold for a place's first tokens, `[tokens, ...]`, in order.

        pages: one of the layer's arrays of `[pages, kv_heads, tokens, ...]`, or of blocks of tokens.
        """
        ring, kv_head = divmod(place, pages.shape[1])
        own = pages[self.table[ring].long(), kv_head]
        return own.flatten(0, 1)[: -(-num_tokens * pages.shape[2] // SPLIT_TOKENS)]

    def cells_of(self, place: int, tokens: Tensor, kv_heads: int) -> tuple[Tensor, int, Tensor]:
        """Return the indices of a place's tokens in one layer's pages: pages, KV head, and tokens within
        pages, int64.
        """
        ring, kv_head = divmod(place, kv_heads)
        return self.table[ring, tokens // SPLIT_TOKENS].long(), kv_head, tokens % SPLIT_TOKENS


@dataclass(frozen=True, slots=True)
class Work:
    """Scratch memory of one layer's step, by place.

    rotated: float16 `[places, group, dim]`, queries over sqrt(dim), rotated as the index is.
    shift: float32 `[places, group]`, products of the queries with the centre.
    logits: float16 `[places, tokens, group]`, estimated, without the centre's term.
    split_lse: float32 `[places, splits, group]`, over all tokens of a split.
    total_lse: float32 `[places, group]`, over all splits and resident tokens.
    bins: int16 `[places, tokens]`, of tokens' scores; histogram: int32 `[places, BINS]`.
    chosen: int32 `[places, words]`, a bit for each chosen token.
    coming: int32 `[places, tokens]`, chosen tokens without a slot, from each split's first token on.
    num_coming, coming_before: int32 `[places, splits]`, how many of these a split has, and how many earlier splits
        have.
    rest_out, rest_mass: float32 `[places, splits, group(, dim)]`, relative to total_lse; rest_out is rotated.
    rest_square: float32 `[places, splits, group]`, of the estimate's error, see `reporting`.
    fresh: uint8 `[places, slots]`, slots whose rows are fetched in this step.
    read_out, read_lse: float32 `[places, reads, group(, dim)]`, partials over chosen tokens.
    """

    rotated: Tensor
    shift: Tensor
    logits: Tensor
    split_lse: Tensor
    total_lse: Tensor
    bins: Tensor
    histogram: Tensor
    chosen: Tensor
    coming: Tensor
    num_coming: Tensor
    coming_before: Tensor
    rest_out: Tensor
    rest_mass: Tensor
    rest_square: Tensor
    fresh: Tensor
    read_out: Tensor
    read_lse: Tensor


def new_index(
    settings: IndexedSettings,
    shape: Architecture,
    num_layers: int,
    num_rings: int,
    dtype: torch.dtype,
    device: torch.device,
    num_pages: int | None = None,
) -> Index:
    """Return empty indexes of so many layers and rings. dtype: of rows in slots.

    num_pages: pages that the rings share; None: each ring has its own, enough for the longest context.
    """
    own_pages = most_pages(shape)
    slots = settings.num_slots(shape.max_context_tokens)
    rows = (num_layers, num_rings * shape.num_kv_heads, slots, shape.dim)
    index = Index(
        **allocate_all(page_arrays(settings, shape, num_layers, num_pages or num_rings * own_pages), device),
        **allocate_all(ring_arrays(settings, shape, num_layers, num_rings), device),
        keys=torch.zeros(rows, dtype=dtype, device=device),
        values=torch.zeros(rows, dtype=dtype, device=device),
    )
    index.ids.fill_(EMPTY)
    index.lies[:, :, 0].fill_(BEHIND_ALL)
    if num_pages is None:
        index.table[:] = torch.arange(num_rings * own_pages, device=device).view(num_rings, own_pages)
    return index


def new_work(settings: IndexedSettings, shape: Architecture, num_rings: int, device: torch.device) -> Work:
    """Return the scratch memory of one layer's step, which all layers use in turn."""
    return Work(**allocate_all(work_arrays(settings, shape, num_rings), device))


@dataclass(frozen=True, slots=True)
class Layout:
    """How an index is written.

    rotation: float32 `[dim, dim]`, orthogonal. key_bits, value_bits: see the settings. rows: how host rows are stored.
    """

    rotation: Tensor
    key_bits: int
    value_bits: int
    kv_heads: int
    rows: Rows


def new_layout(settings: IndexedSettings, shape: Architecture, rows: Rows, device: torch.device) -> Layout:
    """Return how an index with these settings is written, with its rotation on the device."""
    rotation = make_rotation(shape.dim, device)
    return Layout(rotation, settings.key_bits, settings.value_bits, shape.num_kv_heads, rows)
