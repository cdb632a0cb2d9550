"""Find rows of indexed tokens in resident pages, by cell through a slot's page table, and read them there."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.indexed.ring import Index, Layout
from gpu.operations.kv import kv_rows
from gpu.operations.kv.kv_rows import floats_of, kind_of, read_cells, widen

CENTRE_TOKENS = 1_024  # the centre of a resident run is the mean key of so many tokens

_PLAIN = tl.constexpr(kv_rows.PLAIN)


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's pages.

    keys, values: `[num_pages, kv_heads, page_tokens, ..]`, see `kv_rows`. table: int32 `[slots, max_pages]`, by cell.
    first_cell: the cell of a run's first token.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    first_cell: int


def page_arguments(
    pages: Pages | None, page_slots: Tensor | None, unused: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[int, int], dict[str, int | bool]]:
    """Return a kernel's arguments for rows in pages: tensors, the table's stride with the first cell, and constants.

    pages: of the layer; None: no ring has any, and the kernel gets `unused` in their place. page_slots: of the step.
    """
    if pages is None:
        return unused, (0, 0), {"PAGED": False, "PAGE_TOKENS": 1, "KIND": 0}
    assert page_slots is not None, "indexed: pages, but no slots that they belong to"
    constants = {"PAGED": True, "PAGE_TOKENS": pages.keys.shape[2], "KIND": kind_of(pages.keys)}
    return (page_slots, pages.keys, pages.values, pages.table), (pages.table.stride(0), pages.first_cell), constants


def read_pages(rows: Tensor, pages: Pages, slot: int, tokens: Tensor, kv_heads: Tensor | int) -> Tensor:
    """Return rows of a slot's tokens as float32. rows: `pages.keys` or `pages.values`.

    tokens, kv_heads: int64, broadcast.
    """
    cells, page_tokens = pages.first_cell + tokens, rows.shape[2]
    page_ids = pages.table[slot, cells // page_tokens].long()
    return read_cells(rows, page_ids, kv_heads, cells % page_tokens, torch.float32)


def centre_pages(index: Index, ring: int, slot: int, num_tokens: int, pages: Pages, layout: Layout) -> None:
    """Set a ring's centre in one layer: the mean key of tokens that are spread evenly over its first `num_tokens`."""
    device, count = index.centres.device, min(num_tokens, CENTRE_TOKENS)
    tokens = torch.arange(count, device=device) * num_tokens // count
    heads = torch.arange(layout.kv_heads, device=device)
    keys = read_pages(pages.keys, pages, slot, tokens[:, None], heads)
    index.centres[ring * layout.kv_heads : (ring + 1) * layout.kv_heads] = keys.mean(0)


@triton.jit
def page_rows(
    pages, table, cell, is_there, kv_head, KV_HEADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load the rows of cells, `[cells, WIDE]`, 0 behind DIM, in the pages' dtype, or as float32 if they are codes.

    table: pointer to the slot's page table.
    """
    column = tl.arange(0, WIDE)[None, :]
    inside = is_there[:, None] & (column < DIM)
    page = tl.load(table + cell // PAGE_TOKENS, mask=is_there, other=0).to(tl.int64)
    place, offset = page * KV_HEADS + kv_head, cell % PAGE_TOKENS
    if KIND == _PLAIN:
        row = tl.load(pages + (place * PAGE_TOKENS + offset)[:, None] * DIM + column, mask=inside, other=0.0)
    else:
        at = pages + place[:, None] * (PAGE_TOKENS * (DIM + 4)) + offset[:, None] * DIM + column
        codes = tl.load(at, mask=inside, other=0)
        word = place * (PAGE_TOKENS * (DIM + 4) // 4) + PAGE_TOKENS * DIM // 4 + offset
        scale = tl.load(floats_of(pages) + word, mask=is_there, other=0.0)
        row = widen(codes, tl.float32, KIND) * scale[:, None]
    return row
