"""Rows, hash tables and pieces for tests of host attention, and its oracle in float64 numpy.

The oracle is written from paper (2410.16179) eq. (10) and (11) over the stored rows and raw codes: it shares nothing
with the kernels but the table of pieces.
"""

from dataclasses import dataclass, field

import numpy as np

from cpu.pieces import EXACT, SAMPLED, new_pieces
from cpu.tables import build_tables
from tests.int4_reference import pack, unpack
from transfer.host_memory import STRIPE_TOKENS, num_offsets

ROW_TYPES = {"bf16": np.uint16, "int8": np.int8, "int4": np.uint8, "float32": np.float32}


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Float32 to bf16 bits, towards zero."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Rows:
    """A segment of one layer. keys, values: as stored, inside buffers of NaN or noise; codes: before tables."""

    keys: np.ndarray
    values: np.ndarray
    codes: np.ndarray
    entries: np.ndarray
    offsets: np.ndarray
    centre: np.ndarray
    key_scale: np.ndarray
    value_scale: np.ndarray

    def real_keys(self) -> np.ndarray:
        """Float64 `[kv_heads, tokens, dim]`, without the centre."""
        return self._real(self.keys) * self.key_scale[:, None, None].astype(np.float64)

    def real_values(self) -> np.ndarray:
        return self._real(self.values) * self.value_scale[:, None].astype(np.float64)

    def _real(self, rows: np.ndarray) -> np.ndarray:
        if rows.dtype == np.uint8:
            return unpack(rows, self.centre.shape[-1])
        return (from_bf16(rows) if rows.dtype == np.uint16 else rows).astype(np.float64)


def make_rows(
    generator: np.random.Generator, kind: str, kv_heads: int, tokens: int, dim: int, bits: int, tables: int
) -> Rows:
    """Gaussian rows with room to spare between heads; codes are random, with runs of equal ones."""
    room = tokens + 7
    if kind == "int8":
        keys, values = (generator.integers(-127, 128, (kv_heads, room, dim)).astype(np.int8) for _ in range(2))
        key_scale = generator.uniform(0.01, 0.02, kv_heads).astype(np.float32)
        value_scale = generator.uniform(0.01, 0.02, (kv_heads, dim)).astype(np.float32)
    else:
        keys, values = (generator.standard_normal((kv_heads, room, dim)).astype(np.float32) for _ in range(2))
        keys[:, tokens:], values[:, tokens:] = np.nan, np.nan
        if kind == "bf16":
            keys, values = to_bf16(keys), to_bf16(values)
        elif kind == "int4":
            keys, values = pack(keys), pack(values)
            keys[:, tokens:], values[:, tokens:] = 0xFF, 0xFF  # scales and offsets that are NaN
        key_scale, value_scale = np.ones(kv_heads, np.float32), np.ones((kv_heads, dim), np.float32)
    codes = generator.integers(0, 1 << bits, (kv_heads, tables, tokens)).astype(np.uint16)
    codes[:, :, : tokens // 4] = codes[:, :, :1]
    entries, offsets = codes.copy(), np.full((kv_heads, tables, num_offsets(bits, tokens)), -1, np.int32)
    for head in range(kv_heads):
        build_tables(entries[head], offsets[head], bits, 0, tables, 1)
    centre = generator.standard_normal((kv_heads, dim)).astype(np.float32)
    return Rows(keys[:, :tokens], values[:, :tokens], codes, entries, offsets, centre, key_scale, value_scale)


@dataclass
class Context:
    """A request's pieces: (rows, mode, begin, end)."""

    pieces: list[tuple[Rows, int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Mask:
    """What is asked. wanted: uint8 `[requests, heads]`; excluded: int32 `[requests, kv_heads, words]`, a bit for 16
    tokens of a run each.
    """

    wanted: np.ndarray
    excluded: np.ndarray

    def covered(self, request: int, head: int, begin: int, end: int) -> np.ndarray:
        """Bool, of tokens `begin .. end` of the request's run."""
        bits = self.excluded[request, head * self.excluded.shape[1] // self.wanted.shape[1]]
        is_excluded = np.unpackbits(bits.view(np.uint8), bitorder="little").repeat(16)[begin:end] > 0
        is_excluded = np.pad(is_excluded, (0, end - begin - len(is_excluded)))
        return ~is_excluded & (self.wanted[request, head] > 0)


def make_mask(generator: np.random.Generator, requests: int, heads: int, kv_heads: int, words: int) -> Mask:
    """A quarter of the heads asks nothing; three in ten blocks are excluded."""
    wanted = (generator.random((requests, heads)) < 0.75).astype(np.uint8)
    excluded = generator.random((requests, kv_heads, words, 32)) < 0.3
    return Mask(wanted, np.packbits(excluded, axis=-1, bitorder="little").view(np.int32)[..., 0])


def all_of(requests: int, heads: int) -> Mask:
    return Mask(np.ones((requests, heads), np.uint8), np.zeros((requests, 1, 0), np.int32))


def table_of(contexts: list[Context]) -> np.ndarray:
    """Of runs that are the pieces, one behind the other."""
    table = new_pieces(sum(len(context.pieces) for context in contexts))
    index = 0
    for request, context in enumerate(contexts):
        run = 0
        for rows, mode, begin, end in context.pieces:
            piece = table[index]
            index += 1
            piece["run_begin"], run = run, run + end - begin
            piece["request"], piece["mode"], piece["begin"], piece["end"] = request, mode, begin, end
            piece["tokens"] = rows.keys.shape[1]
            piece["keys"], piece["values"] = rows.keys.ctypes.data, rows.values.ctypes.data
            piece["key_head_bytes"], piece["key_row_bytes"] = rows.keys.strides[:2]
            piece["value_head_bytes"], piece["value_row_bytes"] = rows.values.strides[:2]
            piece["centre"] = rows.centre.ctypes.data
            if rows.keys.dtype == np.int8:
                piece["key_scale"], piece["value_scale"] = rows.key_scale.ctypes.data, rows.value_scale.ctypes.data
            if mode == SAMPLED:
                piece["entries"], piece["offsets"] = rows.entries.ctypes.data, rows.offsets.ctypes.data
                piece["entry_head_bytes"], piece["entry_table_bytes"] = rows.entries.strides[:2]
                piece["offset_head_bytes"], piece["offset_table_bytes"] = rows.offsets.strides[:2]
    return table


def attention_oracle(
    contexts: list[Context], queries: np.ndarray, codes: np.ndarray, bits: int, tables: int, scale: float,
    mask: Mask | None = None,
) -> tuple[np.ndarray, np.ndarray, int]:  # fmt: skip
    """(out float64 `[requests, heads, dim]`, lse, keys read); queries: float64, codes: `[requests, heads, tables]`."""
    requests, heads, dim = queries.shape
    mask = mask or all_of(requests, heads)
    out, lse, read = np.zeros((requests, heads, dim)), np.full((requests, heads), -np.inf), 0
    for request, context in enumerate(contexts):
        for head in range(heads):
            logits, values, run = [], [], 0
            for rows, mode, begin, end in context.pieces:
                group, at, run = heads // len(rows.keys), run, run + end - begin
                covered = mask.covered(request, head, at, run)
                query, kv_head = queries[request, head], head // group
                keys = rows.real_keys()[kv_head, begin:end]
                weight = np.where(covered, 0.0, -np.inf)
                if mode == SAMPLED:
                    same = rows.codes[kv_head, :, begin:end] == codes[request, head][:, None]
                    cosine = keys @ query / np.linalg.norm(keys, axis=1) / np.linalg.norm(query)
                    p = (1 - np.arccos(cosine) / np.pi) ** bits
                    u = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
                    sampled = (same.sum(0) >= 2) & covered
                    weight = np.where(sampled, -np.log(u), -np.inf)
                    read += int(sampled.sum())
                elif head % group == 0:
                    read += np.any([mask.covered(request, head + one, at, run) for one in range(group)], axis=0).sum()
                logits.append((keys + rows.centre[kv_head]) @ query * scale + weight)
                values.append(rows.real_values()[kv_head, begin:end])
            if not logits:
                continue
            every = np.concatenate(logits)
            top = every.max(initial=-np.inf)
            if top > -np.inf:
                mass = np.exp(every - top)
                lse[request, head] = top + np.log(mass.sum())
                out[request, head] = mass @ np.concatenate(values) / mass.sum()
    return out, lse, read


def covered_oracle(contexts: list[Context], mask: Mask) -> np.ndarray:
    """Tokens covered, int `[requests, heads]`."""
    runs = [sum(end - begin for _, _, begin, end in context.pieces) for context in contexts]
    heads = range(mask.wanted.shape[1])
    return np.array([[mask.covered(request, head, 0, run).sum() for head in heads] for request, run in enumerate(runs)])


def reads_oracle(contexts: list[Context], codes: np.ndarray, tables: int, mask: Mask) -> tuple[int, int]:
    """(keys scored, of all heads; bytes of the index read): an exact piece's every key by each head, a sampled one's
    ids in two buckets or more; a uint16 for each entry of the buckets that are looked at, whole stripes of a segment,
    and an int32 for each border of such a stripe; nothing for heads that are not wanted. codes: `[requests, heads,
    tables]`.
    """
    keys = index = 0
    for request, context in enumerate(contexts):
        run = 0
        for rows, mode, begin, end in context.pieces:
            group, at, run = codes.shape[1] // len(rows.keys), run, run + end - begin
            for head in np.flatnonzero(mask.wanted[request]):
                covered = mask.covered(request, head, at, run)
                if mode == EXACT:
                    keys += int(covered.sum())
                    continue
                same = rows.codes[head // group] == codes[request, head][:, None]
                keys += int(((same[:, begin:end].sum(0) >= 2) & covered).sum())
                first, last = begin // STRIPE_TOKENS, -(-end // STRIPE_TOKENS)
                looked_at = same[:, first * STRIPE_TOKENS : last * STRIPE_TOKENS]
                index += 2 * int(looked_at.sum()) + 4 * tables * (last - first + 1)
    return keys, index


__all__ = [
    "EXACT", "ROW_TYPES", "SAMPLED", "Context", "Mask", "Rows", "all_of", "attention_oracle", "covered_oracle",
    "make_mask", "make_rows", "reads_oracle", "table_of", "to_bf16",
]  # fmt: skip
