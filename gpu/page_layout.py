"""Lay pages out in the arena of KV memory, and count how many bytes a row takes.

The arena is cut into blocks, each with the bytes of a page of every layer. A block is either one **resident page** of
all layers, or it holds several **dense pages**, each of the dense layers alone: the other layers' rows of those tokens
are in host memory. So both kinds use the same memory. In a block the dense layers come first. A layer's view of the
arena begins at its own first page, and a page's id is its index in every such view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transfer.arrays import ArraySpec

KvFormat = Literal["bfloat16", "float32", "fp8", "int8"]
"""Of rows in pages: the dtype that computes, or codes of 8 bits with a scale each (`kv_rows`)."""

CODE_FORMATS = ("fp8", "int8")
SCALE_BYTES = 4
LATENT_SCALES = 2  # of a row of latents in codes: of the latent, and of what is rotated


def row_array(kv: str, dim: int, is_latent: bool = False) -> ArraySpec:
    """Return a key or a value of one KV head, or a row of latents, in pages of a KvFormat or of another dtype; codes
    have their scales behind them.
    """
    stored = "uint8" if kv == "fp8" else kv
    scales = LATENT_SCALES if is_latent else 1
    return ArraySpec((dim + scales * SCALE_BYTES * (kv in CODE_FORMATS),), stored)


def row_bytes(kv: KvFormat, dim: int, is_latent: bool = False) -> int:
    """Return the bytes of a key or a value of one KV head, or of a row of latents."""
    return row_array(kv, dim, is_latent).num_bytes


def page_array(num_heads: int, num_tokens: int, row: ArraySpec) -> ArraySpec:
    """Return the keys of a page, `[kv_heads, tokens, row]`; values have the same. row: see `row_array`."""
    return row.times(num_heads, num_tokens)


def page_table(num_slots: int, num_pages: int) -> ArraySpec:
    """Return the table of the pages of all slots, `[slots, pages]`."""
    return ArraySpec((num_slots, num_pages), "int32")


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How an arena of KV memory is cut into pages. num_pages: blocks, each of which may be one resident page;
    num_dense_layers: of `num_layers`, or 0.
    """

    num_layers: int
    num_dense_layers: int
    num_pages: int

    @property
    def dense_per_block(self) -> int:
        """Return how many dense pages a block holds; 0: they need no storage."""
        return self.num_layers // self.num_dense_layers if self.num_dense_layers else 0

    @property
    def num_ids(self) -> int:
        """Return the upper bound (exclusive) of the ids of both kinds of pages."""
        last = max(0, self.dense_per_block - 1) * self.num_dense_layers
        return (last + 1) * self.num_pages

    def blocks_for(self, num_dense_pages: int) -> int:
        """Return how many blocks hold `num_dense_pages` dense pages."""
        return -(-num_dense_pages // self.dense_per_block) if self.dense_per_block else 0

    def dense_pages(self, blocks: Sequence[int], begin: int, end: int) -> list[int]:
        """Return ids of the dense pages `[begin, end)` of a row of blocks; 0 for each where they need no storage."""
        per_block, stride = self.dense_per_block, self.num_dense_layers * self.num_pages
        if not per_block:
            return [0] * (end - begin)
        return [blocks[index // per_block] + index % per_block * stride for index in range(begin, end)]
