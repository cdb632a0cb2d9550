"""Contexts of a tier whose answers name the keys that they are made of.

All layers but the last, the naming ones, hold the same keys and are asked by the same queries. A token's value is zero
but in layer `token // DIM`, and there but in channel `token % DIM`: so each number of their answers is the weight of
one token, and one that was not drawn has exactly 0, however small the weights of others are. The last layer has keys of
its own and plain values. Layers are the oracle's sets: NAMING (all of them) and PLAIN.
"""

import numpy as np
import torch

from cpu.tier import CpuTier
from tests.cpu.sampling_oracle import Answer, Stored, attend, simhash
from transfer.copies import PASSED
from transfer.exchange import new_slot
from transfer.slabs import PageSource
from transfer.tier import LayerRows, Reservation, TierShape

KV_HEADS, GROUP, DIM = 2, 2, 64
HEADS = KV_HEADS * GROUP
NAMING, PLAIN = 0, 1
MAX_ROWS = 4
STEPS = 127  # of an int8 row's scale
MEAN = 0.5  # of keys, in each channel


def new_naming_tier(rows: str, bits: int, tables: int, naming_layers: int) -> CpuTier:
    """It names the first `naming_layers * DIM` tokens of a context. Fresh memory is NaN."""
    shape = TierShape(tuple(range(naming_layers + 1)), HEADS, KV_HEADS, DIM, rows, bits, tables)
    poisoned = PageSource(lambda num_bytes: np.full(num_bytes, 0xFF, np.uint8), None, None)
    return CpuTier(shape, torch.float32, 2**32, 1, poisoned)


class Witness:
    """Deposits into a tier and remembers what it stored; asks, and reads the answers."""

    def __init__(self, tier: CpuTier, seed: int) -> None:
        self.tier, self.rng = tier, np.random.default_rng(seed)
        self.bits, self.naming = tier.shape.bits_per_table, len(tier.shape.layers) - 1
        self.planes = self.rng.standard_normal((tier.shape.num_tables, self.bits, DIM))
        self.sizes = np.exp2(self.rng.integers(-1, 3, (KV_HEADS, DIM)))  # of the values that name
        self.queries = (1.5 * self.rng.standard_normal((2, MAX_ROWS, HEADS, DIM))).astype(np.float32)
        self.stored: dict[int, Stored] = {}

    def __enter__(self) -> "Witness":
        return self

    def __exit__(self, *error: object) -> None:
        for context_id in list(self.stored):
            self.close(context_id)

    def open(self, context_id: int) -> None:
        self.tier.open(context_id, True)
        nothing = np.zeros((2, KV_HEADS, 0, DIM))
        self.stored[context_id] = Stored(
            nothing, nothing, np.zeros((2, KV_HEADS, 0, len(self.planes)), int), nothing[0]
        )

    def fork(self, source_id: int, context_id: int, num_tokens: int) -> None:
        self.tier.fork(source_id, context_id, num_tokens, True)
        self.stored[context_id] = self.stored[source_id].first(num_tokens)

    def close(self, context_id: int) -> None:
        self.tier.close(context_id)
        del self.stored[context_id]

    def keys(self, tokens: int) -> np.ndarray:
        """About a common mean: half of them a dozen clusters, some of which lie about queries of the first row; half of
        them even directions, but one in fifty nearly parallel to such a query.
        """
        near = self.queries[:, 0].astype(np.float64).reshape(2, KV_HEADS, GROUP, DIM)
        near /= np.linalg.norm(near, axis=-1, keepdims=True)
        middles = np.concatenate([6 * near, self.rng.standard_normal((2, KV_HEADS, 12 - GROUP, DIM))], axis=2)
        chosen = self.rng.integers(0, 12, (2, KV_HEADS, tokens, 1))
        keys = 0.8 * self.rng.standard_normal((2, KV_HEADS, tokens, DIM))
        keys[:, :, : tokens // 2] += np.take_along_axis(middles, chosen, axis=2)[:, :, : tokens // 2]
        for place in range(tokens // 2, tokens, 50):
            keys[:, :, place] = 8 * near[:, :, place % GROUP] + 0.1 * keys[:, :, place]
        return keys + MEAN

    def deposit(self, context_id: int, tokens: int) -> None:
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
            for token in range(max(reservation.begin, layer * DIM), min(reservation.end, layer * DIM + DIM)):
                size = STEPS if rows.value_scale is not None else torch.from_numpy(self.sizes[:, token % DIM])
                rows.values[:, token - reservation.begin, token % DIM] = size
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

    def attend(self, context_ids: list[int]) -> tuple[list[Answer], int]:
        """The answers, row i asking context i, without `rows`; and the keys that were read for all of them."""
        before, rows = self.tier.stats().attention.rows_read, len(context_ids)
        slot = new_slot(MAX_ROWS, HEADS, DIM, len(self.planes), torch.float32, torch.device("cpu"))
        attention = self.tier.attention(context_ids)
        outs, lses = [], []
        for layer in range(self.naming + 1):
            queries = self.queries[NAMING if layer < self.naming else PLAIN, :rows]
            slot.advance(rows)
            slot.out.fill_(torch.nan)
            slot.lse.fill_(torch.nan)
            slot.queries[:rows] = torch.from_numpy(queries)
            slot.codes[:rows] = torch.from_numpy(self.codes_of(queries).astype(np.uint16))
            slot.flags[:rows] = slot.stamp
            attention.run(layer, slot)
            outs.append(slot.out[:rows].double().numpy())
            lses.append(slot.lse[:rows].double().numpy())
        assert all(np.array_equal(lse, lses[0]) for lse in lses[:-1]), "the same keys and queries give the same lse"
        read = self.tier.stats().attention.rows_read - before
        return [self._read(context_id, row, outs, lses) for row, context_id in enumerate(context_ids)], read

    def _read(self, context_id: int, row: int, outs: list[np.ndarray], lses: list[np.ndarray]) -> Answer:
        tokens = self.stored[context_id].tokens
        named = np.concatenate([out[row] / np.repeat(self.sizes, GROUP, axis=0) for out in outs[:-1]], axis=1)
        assert not named[:, tokens:].any(), "a token that the context does not have was drawn"
        lse = np.stack([lses[0][row], lses[-1][row]])
        return Answer(named[None, :, :tokens], lse, outs[-1][row][None], np.zeros(0))

    def expect(self, context_id: int, row: int, exact: np.ndarray) -> Answer:
        """The oracle's answer; exact: bool `[tokens]`, those that are read whoever asks."""
        queries = self.queries[:, row].astype(np.float64)
        return attend(self.stored[context_id], queries, self.codes_of(self.queries[:, row]), exact, self.bits)

    def codes_of(self, queries: np.ndarray) -> np.ndarray:
        return simhash(queries.astype(np.float64), self.planes)


def _rounded(rows: np.ndarray, scale: torch.Tensor | None) -> torch.Tensor:
    """To what the tier keeps: bf16, or steps of a scale."""
    if scale is None:
        return torch.from_numpy(rows).bfloat16()
    return (torch.from_numpy(rows) / scale).round().clamp(-STEPS, STEPS).to(torch.int8)


def _widened(stored: torch.Tensor, scale: torch.Tensor | None) -> np.ndarray:
    return (stored.double() if scale is None else stored.double() * scale).numpy()
