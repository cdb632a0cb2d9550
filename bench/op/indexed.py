"""Time the parts of a decode step that attends through an index: scores, choice, chosen rows, and the whole of a layer.

Rows are in one range of pinned memory, which all layers share; each layer has its own index. A whole layer is also
timed with rows in resident pages, which each sequence has for itself, beside attention that reads all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.benchmark_rows import require
from bench.op.frame import COLD_BYTES, SEED, Asked, Call, Case, Work, relative_error
from gpu.methods.indexed.attending import NUM_COUNTS, attend_chosen, join_parts
from gpu.methods.indexed.building import copy_pieces, index_tokens
from gpu.methods.indexed.choosing import choose_tokens, give_slots, set_bits
from gpu.methods.indexed.estimating import estimate_rest
from gpu.methods.indexed.host_rows import widen_rows
from gpu.methods.indexed.layer_step import new_aside, read_scored
from gpu.methods.indexed.page_rows import Pages
from gpu.methods.indexed.ring import EMPTY, Index, new_index, new_layout, new_work
from gpu.methods.indexed.scoring import RingStep, score_tokens
from gpu.methods.indexed.settings import IndexedSettings
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.paged_decode_attention import paged_decode_attention, workspace_for
from gpu.operations.host_rows.int4_rows import store_int4
from transfer.partial import Partial
from transfer.places import COLUMNS
from transfer.tier_shape import Rows, int4_row_bytes

STAGES = ("score", "choose", "slots", "estimate", "attend", "fetch", "join", "layer", "layer-kept", "resident")
PAGE_TOKENS = 16
NEW_SHARE = 0.4  # share of chosen rows that were in no slot a step before: SmolLM2 on novels (docs/methods/indexed.md)
MOST_ERROR = 5e-2  # relative error of an output that reads every token in bf16


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Keys or values `[kv_heads, tokens, dim]` as host memory holds them, and the same restored in bfloat16.

    scales: float32 of int8 rows, `[kv_heads, 1]` of keys and `[kv_heads, dim]` of values; else 0.
    """

    stored: Tensor
    scales: Tensor
    whole: Tensor

    @property
    def row_bytes(self) -> int:
        return self.stored.shape[2] * self.stored.itemsize


def store_rows(rows: Tensor, kind: Rows, is_value: bool) -> StoredRows:
    """Store rows `[kv_heads, tokens, dim]` in a format of the host tier, in pinned memory if the device is a GPU."""
    kv_heads, tokens, dim = rows.shape
    scales = torch.zeros(kv_heads, dim if is_value else 1)
    if kind == "int8":
        largest = rows.abs().amax(1) if is_value else rows.abs().amax((1, 2))[:, None]
        scale = largest.float() / 127
        stored, scales = (rows / scale[:, None]).round().to(torch.int8), scale.cpu()
    elif kind == "int4":
        stored = torch.empty(kv_heads, tokens, int4_row_bytes(dim), dtype=torch.uint8, device=rows.device)
        store_int4(rows, None, stored)
    else:
        stored = rows.bfloat16()
    stored = stored.cpu()
    whole = widen_rows(stored.view(torch.uint8).flatten(0, 1), dim, kind).view(kv_heads, tokens, dim)
    if kind == "int8":
        whole *= scales[:, None]
    if rows.is_cuda:
        stored, scales = stored.pin_memory(), scales.pin_memory()
    return StoredRows(stored, scales, whole.bfloat16())


class Stand:
    """Indexes of some layers over one range of random rows, and the buffers of a step of `batch` equal sequences."""

    def __init__(self, asked: Asked, batch: int, settings: IndexedSettings, rows: Rows, num_layers: int) -> None:
        shape, device = replace(asked.shape, max_context_tokens=asked.tokens), asked.device
        self.batch, self.tokens, self.shape, self.settings = batch, asked.tokens, shape, settings
        generator = torch.Generator(device).manual_seed(SEED)
        index = new_index(settings, shape, num_layers, batch, asked.dtype, device)
        self.layout = new_layout(settings, shape, rows, device)
        self.work = new_work(settings, shape, batch, device)
        self.aside = new_aside(device)
        own = torch.empty(2, shape.num_kv_heads, asked.tokens, shape.dim, dtype=torch.bfloat16, device=device)
        own.normal_(generator=generator)
        self.rows = [store_rows(one, rows, is_value) for one, is_value in zip(own, (False, True), strict=True)]
        self.centre = torch.zeros(shape.num_kv_heads, shape.dim)
        if device.type == "cuda":
            self.centre = self.centre.pin_memory()
        table = [0, asked.tokens]
        for one in self.rows:
            table += [one.stored.data_ptr(), asked.tokens * one.row_bytes, one.row_bytes]
        table += [self.centre.data_ptr(), *(one.scales.data_ptr() if rows == "int8" else 0 for one in self.rows)]
        assert len(table) == COLUMNS, "bench: a column for each field of a piece"
        index.lies[:, :, :, 0] = torch.tensor(np.array(table, np.int64), device=device)
        for ring in range(batch):
            copy_pieces(index, ring, 1, self.layout)
            index_tokens(index, ring, 0, asked.tokens, self.layout)
        self.index, self.layers = index, [index.layer(layer) for layer in range(num_layers)]
        options = {"dtype": torch.int32, "device": device}
        budget = settings.count_chosen(asked.tokens)
        self.rings = torch.arange(batch, **options)
        budgets = torch.full((batch * shape.num_kv_heads,), budget, **options)
        self.step = RingStep(self.rings, self.rings, torch.full_like(budgets, asked.tokens), budgets)
        self.query = torch.empty(batch, shape.num_heads, shape.dim, dtype=asked.dtype, device=device)
        self.query.normal_(generator=generator)
        self.resident_lse = torch.full((batch, shape.num_heads), -1e9, device=device)
        self.wanted = torch.ones(batch, shape.num_heads, dtype=torch.uint8, device=device)
        self.counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device)

    def score(self, layer: Index) -> None:
        score_tokens(self.query, self.resident_lse, layer, self.work, self.step, self.layout)

    def choose(self, layer: Index) -> None:
        choose_tokens(layer, self.work, self.step, self.layout)

    def slots(self, layer: Index) -> None:
        give_slots(layer, self.work, self.step, self.layout)

    def estimate(self, layer: Index) -> None:
        estimate_rest(layer, self.work, self.step, self.layout)

    def attend(self, layer: Index) -> None:
        self.work.fresh.zero_()
        attend_chosen(self.query, layer, self.work, self.step, self.layout, self.counts)

    def fetch(self, layer: Index) -> None:
        self.work.fresh.fill_(1)
        attend_chosen(self.query, layer, self.work, self.step, self.layout, self.counts)

    def join(self, layer: Index) -> Partial:
        shape = (self.batch, self.shape.num_heads, self.shape.dim)
        return join_parts(self.work, self.rings, self.wanted, self.step, self.layout, shape, self.counts)

    def layer(self, layer: Index) -> Partial:
        """Attend in one layer while no row is in a slot."""
        layer.ids.fill_(EMPTY)
        layer.held.zero_()
        return self._step(layer, self.step)

    def again(self, layer: Index) -> Partial:
        """Attend in one layer with the slots that the last step left."""
        return self._step(layer, self.step)

    def keep_most(self) -> None:
        """Keep the slots of the last step for `layer_kept`, without those of NEW_SHARE of the tokens."""
        is_new = torch.rand(self.index.ids.shape, device=self.query.device) < NEW_SHARE
        self._kept_ids = torch.where(is_new, EMPTY, self.index.ids)
        held, num_words = self.index.held, self.index.held.shape[2]
        own = self._kept_ids.flatten(0, 1)
        words = [set_bits(ids[ids != EMPTY].long(), num_words) for ids in own]
        self._kept_held = torch.stack(words).view_as(held)

    def fill_pages(self) -> None:
        """Copy the rows into pages of each sequence."""
        device, count = self.query.device, -(-self.tokens // PAGE_TOKENS)
        pages = []
        for rows in self.rows:
            padded = pad(rows.whole.to(device, self.query.dtype), (0, 0, 0, count * PAGE_TOKENS - self.tokens))
            own = padded.unflatten(1, (count, PAGE_TOKENS)).transpose(0, 1)
            pages.append(own.repeat(self.batch, 1, 1, 1))
        table = torch.arange(self.batch * count, dtype=torch.int32, device=device).view(self.batch, count)
        self.pages = Pages(pages[0], pages[1], table, 0)
        self._in_pages = replace(self.step, page_slots=self.rings)
        shape = self.shape
        self._workspace = workspace_for(
            self.batch, shape.num_heads, shape.num_kv_heads, shape.dim, count * PAGE_TOKENS, device
        )

    def resident(self, layer: Index) -> Partial:
        """Attend in one layer to rows in pages."""
        return self._step(layer, self._in_pages, self.pages)

    def full(self) -> Partial:
        """Attend to all rows in pages."""
        pages, lengths = self.pages, torch.full_like(self.rings, self.tokens)
        asked = PagedReads(self.query, pages.keys, pages.values, pages.table, self.rings, lengths, self.shape.dim**-0.5)
        return paged_decode_attention(asked, self._workspace).near

    def layer_kept(self, layer: Index) -> Partial:
        """Attend in one layer while most chosen rows are in slots."""
        place = next(number for number, one in enumerate(self.layers) if one is layer)
        layer.ids.copy_(self._kept_ids[place])
        layer.held.copy_(self._kept_held[place])
        return self._step(layer, self.step)

    def _step(self, layer: Index, step: RingStep, pages: Pages | None = None) -> Partial:
        self.score(layer)
        read_scored(self.query, layer, self.work, step, self.layout, self.counts, pages, self.aside)
        return self.join(layer)

    def exact(self) -> Tensor:
        """Return full attention over all rows, float64 `[batch, heads, dim]`."""
        keys, values = (one.whole.to(self.query.device).double() for one in self.rows)
        own = self.query.double().view(self.batch, self.shape.num_kv_heads, self.shape.group, -1)
        weights = (torch.einsum("bkgd,ktd->bkgt", own, keys) * self.shape.dim**-0.5).softmax(-1)
        return torch.einsum("bkgt,ktd->bkgd", weights, values).flatten(1, 2)


def indexed_cases(asked: Asked) -> Iterator[Case]:
    """Yield the parts of a layer's step, by batch.

    The floor of a whole layer is its rows over the link: all chosen ones (`layer`), or the share of new ones
    (`layer-kept`). The device's own reads take less time. There is no peer, since no other code attends this way. In
    pages (`resident`) the floor is that of the index and the chosen rows, and the peer reads all rows.
    """
    settings, rows = _settings_of(asked)
    for batch in asked.batches:
        token_bytes = asked.shape.dim * settings.key_bits // 8 + 2
        index_bytes = batch * asked.shape.num_kv_heads * asked.tokens * token_bytes
        layers = 1 + COLD_BYTES // index_bytes if asked.device.type == "cuda" else 1
        stand = Stand(asked, batch, settings, rows, layers)
        check = partial(_check_everything, asked, settings, rows)
        for layer in stand.layers:
            stand.layer(layer)
        stand.keep_most()
        if "resident" in asked.choose(STAGES):
            stand.fill_pages()
        for stage in asked.choose(STAGES):
            yield _case(stand, stage, asked, check)


def _settings_of(asked: Asked) -> tuple[IndexedSettings, Rows]:
    """Return the settings and the format of rows that the options name. Raises ValueError for others."""
    kind, share = asked.own.get("rows", "bfloat16"), asked.own.get("share", str(IndexedSettings().budget_share))
    rows: Rows | None = next((one for one in get_args(Rows) if one == kind), None)
    if rows is None:
        raise ValueError(f"--rows: got {kind}; wanted one of {', '.join(get_args(Rows))}")
    bits = asked.own.get("bits", "4,2")
    try:
        key_bits, value_bits = map(int, bits.split(","))
        given = {"key_bits": key_bits, "value_bits": value_bits, "budget_share": float(share)}
        return IndexedSettings.model_validate(given), rows
    except ValueError:  # pydantic's, too
        raise ValueError(
            f"--bits, --share: got {bits} and {share}; wanted bits of keys (2, 3, 4 or 8) and of values (2 or 4), as "
            "4,2, and a share above 0 and at most 1"
        ) from None


def _case(stand: Stand, stage: str, asked: Asked, check: Call) -> Case:
    shape, tokens, is_cuda = stand.shape, stand.tokens, asked.device.type == "cuda"
    places = stand.batch * shape.num_kv_heads
    index_bytes = places * tokens * (shape.dim * stand.settings.key_bits // 8 + 2)
    logit_bytes = 2 * stand.batch * shape.num_heads * tokens
    value_bytes = places * tokens * (shape.dim * stand.settings.value_bits // 8 + 2) + logit_bytes
    num_rows = places * int(stand.step.budgets[0])
    row_bytes, link_bytes = num_rows * 2 * shape.dim * 2, num_rows * sum(one.row_bytes for one in stand.rows)
    moved = {"score": index_bytes, "choose": logit_bytes, "slots": 0, "estimate": value_bytes, "attend": row_bytes,
             "fetch": link_bytes, "join": 0, "layer": link_bytes, "layer-kept": round(NEW_SHARE * link_bytes),
             "resident": index_bytes + value_bytes + row_bytes}  # fmt: skip
    over_link = is_cuda and stage in ("fetch", "layer", "layer-kept")
    call = getattr(stand, stage.replace("-", "_"))
    told = {"rows": stand.layout.rows, "key_bits": stand.settings.key_bits, "value_bits": stand.settings.value_bits}
    peer_name, peer = None, None
    if stage == "resident":
        peer_name, peer = "attention to all rows in pages", stand.full
    elif stage == "layer" and not is_cuda:
        peer_name, peer = "products of queries and rows alone", stand.exact
    return Case(
        f"indexed, {stage}",
        f"{stand.batch} x {tokens:,}, {shape.num_heads}/{shape.num_kv_heads} heads, {stand.layout.rows}",
        Work(moved[stage], "host_to_device_gb_s" if over_link else asked.stream), check=check,
        run=lambda: [call(layer) for layer in stand.layers], times=len(stand.layers),
        peer_name=peer_name, peer=peer,
        config={"stage": stage, "batch": stand.batch, "tokens": tokens, "budget": int(stand.step.budgets[0]), **told},
    )  # fmt: skip


def _check_everything(asked: Asked, settings: IndexedSettings, rows: Rows) -> None:
    """Compare attention with a budget of every token with full attention in float64."""
    few = replace(asked, tokens=min(asked.tokens, 512))
    stand = Stand(few, 1, settings.model_copy(update={"budget_share": 1.0}), rows, 1)
    error = relative_error(stand.layer(stand.layers[0]).out, stand.exact())
    require(error < MOST_ERROR, f"indexed: a budget of everything is {error:.1e} from full attention")
    stand.fill_pages()
    error = relative_error(stand.resident(stand.layers[0]).out, stand.exact())
    require(error < MOST_ERROR, f"indexed: a budget of everything in pages is {error:.1e} from full attention")
