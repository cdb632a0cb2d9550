"""What the launches of decode attention read, work in, and give."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class PagedReads(NamedTuple):
    """Queries and the pages that they read.

    query: `[requests, heads, dim]`, after RoPE; key_pages, value_pages: `[num_pages, kv_heads, page_tokens, dim]`, the
    query's dtype, or of codes (`kv_rows`); page_table: int32 `[max_slots, max_pages]`, by cell; slots, context_lens (in
    cells): int32 `[requests]`; slot -1 or context 0 is padding and gives empty partials.
    """

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    slots: Tensor
    context_lens: Tensor
    scale: float


class Given(NamedTuple):
    """Buffers for partials. out: float32 `[parts, requests, heads, dim]`; lse: float32 and covered: int32 or None,
    `[parts, requests, heads]`.
    """

    out: Tensor
    lse: Tensor
    covered: Tensor | None


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of decode attention. Scratch: out float32 `[rows, heads, dim]`, lse float32 `[rows, heads]`, log
    base 2. On CPU both are empty.

    Without bounds a launch uses the first requests * splits rows; with bounds it takes all as `[places, group, dim]`.
    parts: 2 where there is room for far beside near.
    """

    out: Tensor
    lse: Tensor
    parts: int
    max_requests: int
    max_context_tokens: int
    num_sms: int
