"""Contexts of a tier whose answers name the keys that they are made of.

All layers but the last, the naming ones, hold the same keys and are asked by the same queries. A token's value is zero
but in layer `token // DIM`, and there but in channel `token % DIM`: so each number of their answers is the weight of
one token, and one that was not drawn has exactly 0, however small the weights of others are. The last layer has keys of
its own and plain values. Layers are the oracle's sets: NAMING (all of them) and PLAIN.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from cpu.cpu_tier import CpuTier
from cpu.decode_step import AttentionCounts
from tests.cpu.sampling_oracle import Answer, Stored, attend, simhash
from transfer.copies import PASSED
from transfer.exchange import ExchangeSlot, new_slot
from transfer.host_tier import ContextRead, LayerRows, Reservation
from transfer.reading import Reading
from transfer.slabs import PageSource
from transfer.slot_shape import SlotShape
from transfer.tier_shape import TierShape

KV_HEADS, GROUP, DIM = 2, 2, 64  # where a test says nothing else
HEADS = KV_HEADS * GROUP
NAMING, PLAIN = 0, 1
MAX_ROWS = 4
STEPS = 127  # of an int8 row's scale
MEAN = 0.5  # of keys, in each channel
BLOCK = 16  # tokens of a run, that are excluded together


@dataclass(frozen=True)
class Row:
    """What a row asks for: the first `tokens` of a context, for the heads that are `wanted`, or None for all of them,
    but `excluded` blocks: bool `[kv_heads, blocks]`, or None for none of them; those behind the last are not.
    """

    context_id: int | None
    tokens: int
    wanted: tuple[bool, ...] | None = None
    excluded: np.ndarray | None = None

    def covered(self, shape: TierShape) -> np.ndarray:
        """Bool `[heads, tokens]`."""
        wanted = (True,) * shape.num_heads if self.wanted is None else self.wanted
        covered = np.repeat(np.array(wanted)[:, None], self.tokens, axis=1)
        if self.excluded is not None:
            group = shape.num_heads // shape.num_kv_heads
            dropped = self.excluded.repeat(group, axis=0).repeat(BLOCK, axis=1)[:, : self.tokens]
            covered[:, : dropped.shape[1]] &= ~dropped
        return covered


def new_naming_tier(rows: str, bits: int, tables: int, naming_layers: int,
                    heads: tuple[int, int, int] = (HEADS, KV_HEADS, DIM)) -> CpuTier:  # fmt: skip
    """It names the first `naming_layers * dim` tokens of a context. heads: query and KV heads, and the dimension of
    each. Fresh memory is NaN.
    """
    shape = TierShape(tuple(range(naming_layers + 1)), *heads, rows, bits, tables)
    poisoned = PageSource(lambda num_bytes: np.full(num_bytes, 0xFF, np.uint8), None, None)
    return CpuTier(shape, torch.float32, 2**32, 1, poisoned)


@contextmanager
def new_witness(setting: tuple[str, int, int], tokens: int) -> Iterator["Witness"]:
    """Of a tier with this setting (rows, bits, tables), which names so many tokens."""
    tier = new_naming_tier(*setting, -(-tokens // DIM))
    with Witness(tier, 1) as witness:
        yield witness
    tier.shutdown()
    assert tier.stats().bytes_held == 0


class Witness:
    """Offloads into a tier and remembers what it stored; asks, and reads the answers."""

    def __init__(self, tier: CpuTier, seed: int) -> None:
        self.tier, self.rng = tier, np.random.default_rng(seed)
        shape = tier.shape
        self.heads, self.kv_heads, self.dim = shape.num_heads, shape.num_kv_heads, shape.dim
        self.group = self.heads // self.kv_heads
        self.bits, self.naming = shape.bits_per_table, len(shape.layers) - 1
        self.planes = self.rng.standard_normal((shape.num_tables, self.bits, self.dim))
        self.sizes = np.exp2(self.rng.integers(-1, 3, (self.kv_heads, self.dim)))  # of the values that name
        self.queries = (1.5 * self.rng.standard_normal((2, MAX_ROWS, self.heads, self.dim))).astype(np.float32)
        self.stored: dict[int, Stored] = {}

    def __enter__(self) -> "Witness":
        return self

    def __exit__(self, *error: object) -> None:
        for context_id in list(self.stored):
            self.close(context_id)

    def open(self, context_id: int) -> None:
        self.tier.open(context_id, Reading.SAMPLE)
        nothing = np.zeros((2, self.kv_heads, 0, self.dim))
        self.stored[context_id] = Stored(
            nothing, nothing, np.zeros((2, self.kv_heads, 0, len(self.planes)), int), nothing[0]
        )

    def fork(self, source_id: int, context_id: int, num_tokens: int) -> None:
        self.tier.fork(source_id, context_id, num_tokens, Reading.SAMPLE)
        self.stored[context_id] = self.stored[source_id].first(num_tokens)

    def close(self, context_id: int) -> None:
        self.tier.close(context_id)
        del self.stored[context_id]

    def keys(self, tokens: int) -> np.ndarray:
        """About a common mean: half of them a dozen clusters, some of which lie about queries of the first row; half of
        them even directions, but one in fifty nearly parallel to such a query.
        """
        near = self.queries[:, 0].astype(np.float64).reshape(2, self.kv_heads, self.group, self.dim)
        near /= np.linalg.norm(near, axis=-1, keepdims=True)
        clusters = max(12, self.group + 4)
        others = self.rng.standard_normal((2, self.kv_heads, clusters - self.group, self.dim))
        middles = np.concatenate([6 * near, others], axis=2)
        chosen = self.rng.integers(0, clusters, (2, self.kv_heads, tokens, 1))
        keys = 0.8 * self.rng.standard_normal((2, self.kv_heads, tokens, self.dim))
        keys[:, :, : tokens // 2] += np.take_along_axis(middles, chosen, axis=2)[:, :, : tokens // 2]
        for place in range(tokens // 2, tokens, 50):
            keys[:, :, place] = 8 * near[:, :, place % self.group] + 0.1 * keys[:, :, place]
        return keys + MEAN

    def offload(self, context_id: int, tokens: int) -> None:
        begin = first = self.stored[context_id].tokens
        keys = self.keys(tokens)  # [sets, kv_heads, tokens, dim]
        values = self.rng.standard_normal(keys.shape[1:])
        for one in self.tier.reserve(context_id, tokens):
            assert one.begin == begin
            begin = one.end
            own = slice(one.begin - first, one.end - first)
            self.stored[context_id] = self.stored[context_id].join(self._send(one, keys[:, :, own], values[:, own]))
        assert begin == first + tokens

    def _send(self, reservation: Reservation, keys: np.ndarray, values: np.ndarray) -> Stored:
        layers, is_new = [reservation.layer(layer) for layer in range(self.naming + 1)], not reservation.has_centre
        parts = [
            self._store_keys(same, keys[part], is_new) for part, same in ((NAMING, layers[:-1]), (PLAIN, layers[-1:]))
        ]
        for layer, rows in enumerate(layers[:-1]):
            if is_new and rows.value_scale is not None:
                rows.value_scale.copy_(torch.from_numpy(self.sizes / STEPS))
            rows.values.zero_()
            first, last = layer * self.dim, layer * self.dim + self.dim
            for token in range(max(reservation.begin, first), min(reservation.end, last)):
                size = STEPS if rows.value_scale is not None else torch.from_numpy(self.sizes[:, token % self.dim])
                rows.values[:, token - reservation.begin, token % self.dim] = size
        rows = layers[-1]
        if is_new and rows.value_scale is not None:
            rows.value_scale.copy_(torch.from_numpy(np.abs(values).max(1) / STEPS))
        scale = None if rows.value_scale is None else rows.value_scale.double()[:, None]
        rows.values.copy_(_rounded(values, scale))
        self.tier.fill(reservation, range(self.naming + 1), PASSED)
        return Stored(*(np.stack(arrays) for arrays in zip(*parts, strict=True)), _widened(rows.values, scale))

    def _store_keys(self, layers: list[LayerRows], keys: np.ndarray, is_new: bool) -> tuple[np.ndarray, ...]:
        """The same keys in several layers; what they are kept as: keys, centre and codes of `Stored`."""
        first = layers[0]
        if is_new:
            centre = keys.mean(1).astype(np.float32)
            for rows in layers:
                rows.centre.copy_(torch.from_numpy(centre))
                if rows.key_scale is not None:
                    rows.key_scale.copy_(torch.from_numpy(np.abs(keys - centre[:, None]).max((1, 2)) / STEPS))
        centre = first.centre.double().numpy()[:, None]
        scale = None if first.key_scale is None else first.key_scale.double()[:, None, None]
        stored = _rounded(keys - centre, scale)
        codes = simhash(stored.double().numpy(), self.planes)
        down = torch.from_numpy(np.ascontiguousarray(codes.transpose(0, 2, 1).astype(np.uint16)))
        for rows in layers:
            rows.keys.copy_(stored)
            rows.codes.copy_(down)
        return _widened(stored, scale), np.broadcast_to(centre, keys.shape), codes

    def attend(self, rows: Sequence[Row]) -> tuple[list[Answer], AttentionCounts]:
        """The answers, without what they read; and what was counted for all of them."""
        before, count = self.tier.stats().attention, len(rows)
        slot = self._new_slot(rows)
        attention = self.tier.attention([ContextRead(row.context_id, row.tokens) for row in rows])
        outs, lses, covered = [], [], []
        for layer in range(self.naming + 1):
            queries = self.queries[NAMING if layer < self.naming else PLAIN, :count]
            slot.advance(count)
            slot.out.fill_(torch.nan)
            slot.lse.fill_(torch.nan)
            slot.covered.fill_(-1)
            slot.queries[:count] = torch.from_numpy(queries)
            slot.codes[:count] = torch.from_numpy(self.codes_of(queries).astype(np.uint16))
            slot.flags[:count] = slot.stamp
            attention.run(layer, slot)
            assert int(slot.answered) == slot.stamp
            outs.append(slot.out[:count].double().numpy())
            lses.append(slot.lse[:count].double().numpy())
            covered.append(slot.covered[:count].numpy().copy())
        assert all(np.array_equal(lse, lses[0]) for lse in lses[:-1]), "the same keys and queries give the same lse"
        assert all(np.array_equal(counts, covered[0]) for counts in covered), "a layer covers what another does"
        after = self.tier.stats().attention
        counted = {name: getattr(after, name) - getattr(before, name) for name in AttentionCounts.__slots__}
        return [self._read(row, place, outs, lses, covered[0]) for place, row in enumerate(rows)], AttentionCounts(
            **counted
        )

    def _new_slot(self, rows: Sequence[Row]) -> ExchangeSlot:
        """With room for the longest row's bits, if there are any."""
        blocks = max((row.excluded.shape[1] for row in rows if row.excluded is not None), default=0)
        shape = SlotShape(self.heads, self.dim, len(self.planes), "float32", self.kv_heads, blocks, is_counted=True)
        slot = new_slot(MAX_ROWS, shape, torch.device("cpu"))
        for place, row in enumerate(rows):
            if row.wanted is not None:
                slot.wanted[place] = torch.tensor(row.wanted)
            if row.excluded is not None:
                for kv_head, block in np.argwhere(row.excluded):
                    slot.excluded[place, kv_head, block // 32] |= -(2**31) if block % 32 == 31 else 1 << block % 32
        return slot

    def _read(
        self, row: Row, place: int, outs: list[np.ndarray], lses: list[np.ndarray], covered: np.ndarray
    ) -> Answer:
        named = np.concatenate([out[place] / np.repeat(self.sizes, self.group, axis=0) for out in outs[:-1]], axis=1)
        assert not named[:, row.tokens :].any(), "a token that was not asked for was drawn"
        lse = np.stack([lses[0][place], lses[-1][place]])
        nothing = np.zeros(0)
        return Answer(named[None, :, : row.tokens], lse, outs[-1][place][None], covered[place], nothing, nothing)

    def expect(self, row: Row, place: int, exact: np.ndarray) -> Answer:
        """The oracle's answer; exact: bool `[tokens]`, those that are read whoever asks."""
        queries = self.queries[:, place].astype(np.float64)
        empty = Stored(*(rows[..., :0, :] for rows in vars(next(iter(self.stored.values()))).values()))
        stored = empty if row.context_id is None else self.stored[row.context_id].first(row.tokens)
        return attend(
            stored, queries, self.codes_of(self.queries[:, place]), exact, row.covered(self.tier.shape), self.bits
        )

    def codes_of(self, queries: np.ndarray) -> np.ndarray:
        return simhash(queries.astype(np.float64), self.planes)


def _rounded(rows: np.ndarray, scale: torch.Tensor | None) -> torch.Tensor:
    """To what the tier keeps: bf16, or steps of a scale."""
    if scale is None:
        return torch.from_numpy(rows).bfloat16()
    return (torch.from_numpy(rows) / scale).round().clamp(-STEPS, STEPS).to(torch.int8)


def _widened(stored: torch.Tensor, scale: torch.Tensor | None) -> np.ndarray:
    return (stored.double() if scale is None else stored.double() * scale).numpy()
