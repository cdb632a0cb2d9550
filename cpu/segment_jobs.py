"""Build tables from codes, and copy rows of segments into another segment, in the background.

A table is built once, in place, when all its codes have landed. Copies read rows that have landed, and recover codes
from tables that are built already.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cpu.builder import PIECE_TOKENS, Pace
from cpu.segment import Segment, TableState
from cpu.tables import build_tables, codes_from_tables


@dataclass(frozen=True, slots=True)
class Source:
    """Tokens `[begin, end)` of a segment to be copied."""

    segment: Segment
    begin: int
    end: int


def build_layer(segment: Segment, layer: int, pace: Pace) -> Iterator[None]:
    """Build one layer's tables of a sealed segment."""
    tokens, bits = segment.sealed_tokens, segment.shape.bits_per_table
    assert tokens is not None, "tables: of a sealed segment"
    entries, offsets = segment.codes(layer)[:, :, :tokens], segment.offsets(layer)
    for head in range(segment.shape.num_kv_heads):
        begin = 0
        while begin < segment.shape.num_tables:
            step = max(1, pace.piece_tokens // tokens)
            end = min(begin + step, segment.shape.num_tables)
            build_tables(entries[head], offsets[head], bits, begin, end, 1)
            begin = end
            yield


def copy_layer(sources: Sequence[Source], target: Segment, layer: int) -> Iterator[None]:
    """Copy one layer of the sources' rows and codes, one after another, into the target, from its first token on."""
    target.wait_for_memory(layer)
    at = 0
    for source in sources:
        yield from _copy_rows(source, target, layer, at)
        if target.has_codes:
            yield from _copy_codes(source, target, layer, at)
        at += source.end - source.begin


def _copy_rows(source: Source, target: Segment, layer: int, at: int) -> Iterator[None]:
    step = max(1, PIECE_TOKENS // target.shape.dim)
    pairs = [(source.segment.keys(layer), target.keys(layer)), (source.segment.values(layer), target.values(layer))]
    for head in range(target.shape.num_kv_heads):
        for begin in range(source.begin, source.end, step):
            end = min(begin + step, source.end)
            for old, new in pairs:
                first = at + begin - source.begin
                np.copyto(new[head, first : first + end - begin], old[head, begin:end])
            yield


def _copy_codes(source: Source, target: Segment, layer: int, at: int) -> Iterator[None]:
    segment, num_tokens = source.segment, source.end - source.begin
    step = max(1, PIECE_TOKENS // (segment.sealed_tokens or num_tokens))
    old, new = segment.codes(layer), target.codes(layer)[:, :, at : at + num_tokens]
    for head in range(target.shape.num_kv_heads):
        for begin in range(0, target.shape.num_tables, step):
            tables = slice(begin, min(begin + step, target.shape.num_tables))
            if segment.tables[layer] is TableState.BUILT:
                codes = _undone(segment, layer, head, tables)
            else:
                codes = old[head, tables]
            np.copyto(new[head, tables], codes[:, source.begin : source.end])
            yield


def _undone(segment: Segment, layer: int, head: int, tables: slice) -> np.ndarray:
    """Return the codes that tables were built from, uint16 `[tables, tokens]`, in new memory."""
    entries = segment.codes(layer)[head, tables, : segment.sealed_tokens]
    codes = np.empty(entries.shape, np.uint16)
    codes_from_tables(entries, segment.offsets(layer)[head, tables], segment.shape.bits_per_table, 0, len(codes), codes)
    return codes
