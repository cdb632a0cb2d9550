"""Define the arguments, scratch memory and results of decode attention launches."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class PagedReads(NamedTuple):
    """Queries and the pages that they read.

    query: `[requests, heads, dim]`, after RoPE. key_pages, value_pages: `[num_pages, kv_heads, page_tokens, dim]`, in
    the query's dtype, or in codes (`kv_rows`). page_table: int32 `[max_slots, max_pages]`, by cell. slots, context_lens
    (in cells): int32 `[requests]`; slot -1 or context length 0 is padding and gives an empty partial.
    """

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    slots: Tensor
    context_lens: Tensor
    scale: float


class Given(NamedTuple):
    """Buffers that a launch writes partials to.

    out: float32 `[parts, requests, heads, dim]`. lse: float32 `[parts, requests, heads]`. covered: int32 of that shape,
    or None.
    """

    out: Tensor
    lse: Tensor
    covered: Tensor | None


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of decode attention.

    out: float32 `[rows, heads, dim]`; lse: float32 `[rows, heads]`, log base 2. On the CPU both are empty. Without
    bounds a launch uses the first requests * splits rows; with bounds it uses all as `[places, group, dim]`. parts: 2
    if there is room for far beside near.
    """

    out: Tensor
    lse: Tensor
    parts: int
    max_requests: int
    max_context_tokens: int
    num_sms: int
