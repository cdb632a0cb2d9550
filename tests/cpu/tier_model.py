"""A device and a model to hold the host tier against: rows that are offloaded, kept as plain lists, attended densely.

The device writes rows as a real one does: centred, rounded, with codes by random hyperplanes, and, where a test wants
it, late. The oracle is float64 softmax attention over the rows as they were stored.
"""

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from cpu.cpu_tier import CpuTier
from tests.int4_reference import pack, unpack
from transfer.copies import PASSED
from transfer.exchange import RELEASED, new_slot
from transfer.host_tier import ContextRead, LayerRows
from transfer.slabs import PageSource
from transfer.slot_shape import SlotShape
from transfer.tier_shape import TierShape

LAYERS, KV_HEADS, GROUP, DIM = 2, 1, 2, 64
HEADS = KV_HEADS * GROUP
POISON = 0xFF  # in every byte: NaN in bf16 and float32
MAX_ROWS = 8


def tier_shape(rows="bfloat16", bits=1, tables=64):
    """With 1 bit and 64 tables every key near a right angle shares two buckets: all are sampled, with u = 1."""
    return TierShape(tuple(range(3, 3 + LAYERS)), HEADS, KV_HEADS, DIM, rows, bits, tables)


def poisoned_pages(num_bytes):
    return np.full(num_bytes, POISON, np.uint8)


def new_tier(shape, limit_bytes=2**30, source=PageSource(poisoned_pages, None, None), threads=1, is_adaptive=False):
    return CpuTier(shape, torch.float32, limit_bytes, threads, source, None, is_adaptive)


@dataclass
class Late:
    """Rows that are written when `arrive` is called, or when somebody waits for them after `delay_s`."""

    write: object
    arrived: threading.Event = field(default_factory=threading.Event)

    def arrive(self):
        self.write()
        self.arrived.set()

    def synchronize(self):
        assert self.arrived.wait(20), "the test never let the rows arrive"


class Device:
    """Offloads into a tier, and its own record of what it offloaded: per context float64 keys and values by layer."""

    def __init__(self, tier: CpuTier, seed: int) -> None:
        self.tier, shape = tier, tier.shape
        self.rng = np.random.default_rng(seed)
        self.normals = np.random.default_rng(5).standard_normal((DIM, max(shape.num_tables, 1) * shape.bits_per_table))
        self.keys, self.values = {}, {}  # id -> [layers, kv_heads, tokens, dim]

    def open(self, context_id, reading, *offloads):
        """Open a context, and offload these numbers of tokens one after another."""
        self.tier.open(context_id, reading)
        self.keys[context_id] = self.values[context_id] = np.zeros((LAYERS, KV_HEADS, 0, DIM))
        for num_tokens in offloads:
            self.offload(context_id, num_tokens)

    def fork(self, source_id, context_id, num_tokens, reading):
        self.tier.fork(source_id, context_id, num_tokens, reading)
        self.keys[context_id] = self.keys[source_id][:, :, :num_tokens]
        self.values[context_id] = self.values[source_id][:, :, :num_tokens]

    def close(self, context_id):
        self.tier.close(context_id)
        del self.keys[context_id], self.values[context_id]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for context_id in list(self.keys):
            self.close(context_id)

    def tokens(self, context_id):
        return self.keys[context_id].shape[2]

    def offload(self, context_id, num_tokens):
        for late in self.offload_late(context_id, num_tokens, PASSED):
            assert late is PASSED

    def offload_late(self, context_id, num_tokens, done=None):
        """The fills' `Late`s, in order; with `done` the rows are written at once."""
        shape = (LAYERS, KV_HEADS, num_tokens, DIM)
        keys, values = self.rng.standard_normal(shape) + 0.7, self.rng.standard_normal(shape)
        reservations = self.tier.reserve(context_id, num_tokens)
        first, stored, lates = self.tokens(context_id), [], []
        assert [one.begin for one in reservations] == [first, *(one.end for one in reservations[:-1])]
        assert reservations[-1].end == first + num_tokens
        for one in reservations:
            own = slice(one.begin - first, one.end - first)
            layers = [
                self._send(one, layer, keys[layer][:, own], values[layer][:, own], done, lates)
                for layer in range(LAYERS)
            ]
            stored.append([np.stack(arrays) for arrays in zip(*layers, strict=True)])
        for record, part in ((self.keys, 0), (self.values, 1)):
            record[context_id] = np.concatenate([record[context_id], *(arrays[part] for arrays in stored)], axis=2)
        return lates

    def attend(self, context_ids, late_s=0.0, asks=LAYERS, cuts=None, slot=None):
        """Answers of all layers: out `[layers, rows, heads, dim]`, lse `[layers, rows, heads]`, and the queries.

        late_s: from the call for an answer to its host request; asks: layers that are asked, the others never; cuts:
        tokens that are asked for, of each context; slot: to ask in.
        """
        rows = len(context_ids)
        slot, queries = slot or self._new_slot(), self._queries(rows)
        attention = self.tier.attention(self._asks(context_ids, cuts))
        out, lse = [], []
        for layer in range(LAYERS):
            slot.advance(rows)
            self._put(slot, queries[layer])
            ask = threading.Timer(late_s, slot.flags[:rows].fill_, [slot.stamp])
            if layer < asks:
                ask.start() if late_s else ask.function(*ask.args)
            attention.run(layer, slot)
            assert int(slot.answered) == slot.stamp
            out.append(slot.out[:rows].numpy().copy())
            lse.append(slot.lse[:rows].numpy().copy())
        return np.stack(out), np.stack(lse), queries

    def attend_by_itself(self, parts, asks=LAYERS):
        """As `attend`, for several batches in one step, whose devices ask for a layer when they have the one before:
        (out, lse) of each part. asks: layers that the last part asks for.
        """
        slots, results, devices = [], [], []
        for number, context_ids in enumerate(parts):
            slot, queries = self._new_slot(), self._queries(len(context_ids))
            slot.advance(len(context_ids))
            shape = queries.shape
            result = np.full(shape, np.nan, np.float32), np.full(shape[:-1], np.nan, np.float32)
            count = asks if number == len(parts) - 1 else LAYERS
            devices.append(threading.Thread(target=self._go_on, args=(slot, slot.stamp, queries[:count], result)))
            slots.append(slot)
            results.append(result)
        attentions = [self.tier.attention(self._asks(context_ids)) for context_ids in parts]
        for device in devices:
            device.start()
        try:
            self.tier.answer(list(zip(attentions, slots, strict=True)))
            assert [int(slot.answered) for slot in slots] == [slot.stamp for slot in slots]
        finally:
            for slot in slots:
                slot.release()
            for device in devices:
                device.join(20)
        return results

    def _go_on(self, slot, stamp, queries, result):
        rows = queries.shape[1]
        for layer, query in enumerate(queries):
            self._put(slot, query)
            slot.flags[:rows] = stamp + layer
            while int(slot.answered) not in (stamp + layer, RELEASED):
                time.sleep(0)
            result[0][layer], result[1][layer] = slot.out[:rows].numpy(), slot.lse[:rows].numpy()

    def _asks(self, context_ids, cuts=None):
        """For all of each context, or its first tokens."""
        if cuts is None:
            cuts = [sum(tokens for tokens, _ in self.tier.runs(context_id)) for context_id in context_ids]
        return [ContextRead(*ask) for ask in zip(context_ids, cuts, strict=True)]

    def _new_slot(self):
        slot = new_slot(MAX_ROWS, SlotShape(HEADS, DIM, self.tier.shape.num_tables, "float32"), torch.device("cpu"))
        slot.out.fill_(torch.nan)
        slot.lse.fill_(torch.nan)
        return slot

    def _queries(self, rows):
        return np.random.default_rng(7).standard_normal((LAYERS, rows, HEADS, DIM)).astype(np.float32) * 1.5

    def _put(self, slot, query):
        slot.queries[: len(query)] = torch.from_numpy(query)
        if slot.codes is not None:
            slot.codes[: len(query)] = torch.from_numpy(self._codes(query))

    def expect(self, context_ids, queries, cuts=None):
        """Softmax attention over all rows of each context, or its first, float64: out and lse as of `attend`."""
        out, lse = np.zeros(queries.shape), np.full(queries.shape[:-1], -np.inf)
        for row, context_id in enumerate(context_ids):
            end = None if cuts is None else cuts[row]
            keys, values = (
                np.repeat(store[context_id], GROUP, axis=1)[:, :, :end] for store in (self.keys, self.values)
            )
            if keys.shape[2] == 0:
                continue
            logits = np.einsum("lhd,lhtd->lht", queries[:, row].astype(np.float64), keys) / np.sqrt(DIM)
            top = logits.max(-1, keepdims=True)
            weights = np.exp(logits - top)
            lse[:, row] = np.log(weights.sum(-1)) + top[..., 0]
            out[:, row] = np.einsum("lht,lhtd->lhd", weights / weights.sum(-1, keepdims=True), values)
        return out, lse

    def _codes(self, rows):
        """uint16 `[..., tables]` of rows `[..., dim]`."""
        shape = self.tier.shape
        bits = (rows.astype(np.float64) @ self.normals > 0).reshape(*rows.shape[:-1], -1, shape.bits_per_table)
        return (bits << np.arange(shape.bits_per_table)).sum(-1).astype(np.uint16)

    def _send(self, reservation, layer, keys, values, done, lates):
        """Float64 keys and values as the tier keeps them; the rows themselves go when they go."""
        rows = reservation.layer(layer)
        if not reservation.has_centre:
            _write_middles(rows, keys, values)
        centre, scales = rows.centre.double(), (1.0, 1.0)
        centred, plain = torch.from_numpy(keys) - centre[:, None], torch.from_numpy(values)
        if self.tier.shape.rows == "int4":
            stored, kept = (torch.from_numpy(pack(x.numpy())) for x in (centred, plain))
        elif rows.key_scale is None:
            stored, kept = centred.bfloat16(), plain.bfloat16()
        else:
            scales = (rows.key_scale.double()[:, None, None], rows.value_scale.double()[:, None])
            stored, kept = ((x / scale).round().clamp(-127, 127).to(torch.int8) for x, scale in zip(
                (centred, plain), scales, strict=True))  # fmt: skip
        meant = [self._unscaled(one) for one in (stored, kept)]

        def write():
            rows.keys.copy_(stored)
            rows.values.copy_(kept)
            if rows.codes is not None:
                rows.codes.copy_(torch.from_numpy(self._codes(meant[0].numpy()).transpose(0, 2, 1).copy()))

        late = done or Late(write)
        if late is PASSED:
            write()
        lates.append(late)
        self.tier.fill(reservation, [layer], late)
        return (meant[0] * scales[0] + centre[:, None]).numpy(), (meant[1] * scales[1]).numpy()

    def _unscaled(self, stored):
        return torch.from_numpy(unpack(stored.numpy(), DIM)) if stored.dtype == torch.uint8 else stored.double()


def _write_middles(rows: LayerRows, keys, values):
    rows.centre.copy_(torch.from_numpy(keys.mean(1)))
    if rows.key_scale is not None:
        centred = keys - rows.centre.double().numpy()[:, None]
        rows.key_scale.copy_(torch.from_numpy(np.abs(centred).max((1, 2)) / 127))
        rows.value_scale.copy_(torch.from_numpy(np.abs(values).max(1) / 127))
