"""A small index over rows that lie in host memory as the host tier keeps them, and float64 oracles of its steps."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpu.methods.indexed import most_pages
from gpu.methods.indexed.attending import NUM_COUNTS, join_parts
from gpu.methods.indexed.building import copy_pieces, index_pages, index_tokens, index_tokens_reference
from gpu.methods.indexed.layer_step import new_aside, read_scored, spare_heads, spare_shares
from gpu.methods.indexed.page_rows import Pages, centre_pages
from gpu.methods.indexed.ring import BEHIND_ALL, Index, Layout, Work, new_index, new_layout, new_work
from gpu.methods.indexed.scoring import RingStep, score_tokens
from gpu.methods.indexed.settings import IndexedSettings
from gpu.operations.arguments import INTERPRETED
from gpu.operations.kv.kv_rows import read_cells, width_of, write_rows
from tests.gpu.kernel_oracles import wide
from tests.gpu.poison import poison
from tests.int4_reference import pack, unpack
from transfer import places
from transfer.partial import Partial
from transfer.places import COLUMNS
from transfer.tier_shape import Rows

KV_HEADS, NUM_RINGS, NUM_LAYERS = 2, 2, 2
PAGE_TOKENS, NUM_SLOTS, PAGE_SLOT, SINK = 16, 3, 2, 16


@dataclass(frozen=True)
class Shape:
    """As much of an architecture as an index asks for."""

    dim: int
    group: int
    num_kv_heads: int = KV_HEADS
    max_context_tokens: int = 4096


@dataclass
class Run:
    """Rows of one layer's run in host memory, in pieces. keys, values: float64 `[kv_heads, tokens, dim]`, restored."""

    keys: np.ndarray
    values: np.ndarray
    table: np.ndarray
    alive: list[torch.Tensor]


def make_run(draw: np.random.Generator, dim: int, lengths: list[int], rows: Rows, pinned: bool) -> Run:
    """Return a run in pieces of these lengths, whose keys have another centre in each."""
    table = np.zeros((COLUMNS, len(lengths)), np.int64)
    keys, values, alive = [], [], []
    begin = 0
    for piece, length in enumerate(lengths):
        centre = torch.tensor(draw.normal(size=(KV_HEADS, dim)) * (1 + piece), dtype=torch.float32)
        own = [torch.tensor(draw.normal(size=(KV_HEADS, length, dim)), dtype=torch.float32) for _ in range(2)]
        key_scale = torch.tensor(draw.uniform(0.01, 0.03, KV_HEADS), dtype=torch.float32)
        value_scale = torch.tensor(draw.uniform(0.01, 0.03, (KV_HEADS, dim)), dtype=torch.float32)
        if rows == "int8":
            stored = [
                (own[0] / key_scale[:, None, None]).round().clamp(-127, 127).to(torch.int8),
                (own[1] / value_scale[:, None]).round().clamp(-127, 127).to(torch.int8),
            ]
            whole = [stored[0].float() * key_scale[:, None, None], stored[1].float() * value_scale[:, None]]
        elif rows == "int4":
            stored = [torch.from_numpy(pack(one.numpy())) for one in own]
            whole = [torch.from_numpy(unpack(one.numpy(), dim)).float() for one in stored]
        else:
            stored = [one.bfloat16() for one in own]
            whole = [one.float() for one in stored]
        kept = [one.pin_memory() if pinned else one for one in (*stored, centre, key_scale, value_scale)]
        alive += kept
        row = stored[0].shape[-1] * stored[0].itemsize
        table[:, piece] = [
            begin, begin + length, kept[0].data_ptr(), length * row, row, kept[1].data_ptr(), length * row, row,
            kept[2].data_ptr(), *(one.data_ptr() if rows == "int8" else 0 for one in kept[3:]),
        ]  # fmt: skip
        keys.append(whole[0] + centre[:, None])
        values.append(whole[1])
        begin += length
    return Run(torch.cat(keys, 1).double().numpy(), torch.cat(values, 1).double().numpy(), table, alive)


@dataclass
class Stand:
    """Two layers, of which the runs of ring 1 are indexed; the other ring is NaN, or nonsense."""

    settings: IndexedSettings
    shape: Any
    index: Index
    work: Work
    layout: Layout
    runs: list[Run]
    counts: torch.Tensor
    pages: list[Pages] = field(default_factory=list)

    def step(self, query: torch.Tensor, resident_lse: torch.Tensor, num_tokens: int, budget: int,
             wanted: torch.Tensor | None = None, layer: int = 1) -> Partial:  # fmt: skip
        """Attend with a row that has ring 1, behind one that has none."""
        device = query.device
        rows = torch.tensor([-1, 1, -1], dtype=torch.int32, device=device)
        held = torch.tensor([0, 1, 0], dtype=torch.int32, device=device)
        tokens = torch.tensor([0, 0, num_tokens, num_tokens], dtype=torch.int32, device=device)
        budgets = torch.tensor([0, 0, budget, budget], dtype=torch.int32, device=device)
        page_slots = torch.tensor([-1, PAGE_SLOT], dtype=torch.int32, device=device)
        step = RingStep(rows, held, tokens, budgets, page_slots if self.pages else None)
        if wanted is not None:
            step, resident_lse = spare_heads(step, wanted, self.layout), spare_shares(resident_lse, wanted)
        own = self.index.layer(layer)
        pages, aside = self.pages[layer] if self.pages else None, new_aside(device)
        score_tokens(query, resident_lse, own, self.work, step, self.layout)
        read_scored(query, own, self.work, step, self.layout, self.counts, pages, aside)
        rings = torch.tensor([-1, 1], dtype=torch.int32, device=device)
        if wanted is None:
            wanted = torch.ones(query.shape[:2], dtype=torch.uint8, device=device)
        return join_parts(self.work, rings, wanted, step, self.layout, tuple(query.shape), self.counts)

    def rows(self, name: str, layer: int, place: int, count: int) -> torch.Tensor:
        """Return what the index has of a place's first tokens, in order: one of its arrays in pages."""
        own = self.index.layer(layer)
        return own.rows_of(getattr(own, name), place, count)

    def chosen(self, layer: int = 1) -> list[list[int]]:
        """Return the tokens in slots of ring 1, ascending, by KV head."""
        ids = self.index.ids[layer, KV_HEADS:].cpu().numpy()
        return [sorted(own[own >= 0].tolist()) for own in ids]


def make_stand(
    dim: int, group: int, lengths: list[int], device: str, *, key_bits: int = 4, value_bits: int = 2,
    rows: Rows = "bfloat16", dtype: torch.dtype = torch.float32, indexed: int | None = None,
    stored: torch.dtype | None = None, builds: bool = True,
) -> Stand:  # fmt: skip
    """Return an index of the first `indexed` tokens, or all, of runs in pieces of these lengths. stored: the runs lie
    in pages of this dtype; None: in host memory. builds: whether the test is of building an index, too; else the
    interpreter is spared it, which takes most of its time.
    """
    settings = IndexedSettings(
        key_bits=key_bits, value_bits=value_bits, budget_share=1.0, budget_tokens=256, least_tokens=16
    )
    shape: Any = Shape(dim, group)
    draw, on = np.random.default_rng(7), torch.device(device)
    index = new_index(settings, shape, NUM_LAYERS, NUM_RINGS, dtype, on, 2 * NUM_RINGS * most_pages(shape))
    order = np.random.default_rng(5).permutation(index.codes.shape[1])[: index.table[0].numel()]
    index.table[:] = torch.from_numpy(order.reshape(NUM_RINGS, -1)).to(on)
    work = new_work(settings, shape, NUM_RINGS, on)
    for one in (index.scales, index.value_scales, index.value_centres, index.keys, index.values, *vars_of(work)):
        if one.is_floating_point():
            one.fill_(torch.nan)
    layout = new_layout(settings, shape, rows, on)
    runs = [make_run(draw, dim, lengths, rows, on.type == "cuda") for _ in range(NUM_LAYERS)]
    counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=on)
    if stored is not None:
        pages = [put_in_pages(run, draw, dtype, stored, on) for run in runs]
        for layer, own in enumerate(pages):
            centre_pages(index.layer(layer), 1, PAGE_SLOT, sum(lengths), own, layout)
        index_pages(index, 1, PAGE_SLOT, 0, sum(lengths) if indexed is None else indexed, pages, layout)
        return Stand(settings, shape, index, work, layout, runs, counts, pages)
    table = np.zeros((NUM_LAYERS, COLUMNS, index.lies.shape[3]), np.int64)
    table[:, places.RUN_BEGIN] = BEHIND_ALL
    table[:, :, : len(lengths)] = np.stack([run.table for run in runs])
    index.lies[:, 1] = torch.from_numpy(table).to(on)
    copy_pieces(index, 1, len(lengths), layout)
    index.centres[:, KV_HEADS:] = index.piece_centres[:, 1, 0]
    build = index_tokens_reference if INTERPRETED and not builds else index_tokens
    build(index, 1, 0, sum(lengths) if indexed is None else indexed, layout)
    return Stand(settings, shape, index, work, layout, runs, counts)


def put_in_pages(run: Run, draw: np.random.Generator, dtype: torch.dtype, stored: torch.dtype, on: Any) -> Pages:
    """Return pages that are NaN, or nonsense, but for a run's rows in slot PAGE_SLOT; the run becomes what they say."""
    num_tokens, dim = run.keys.shape[1:]
    num_pages = 2 * (-(-(SINK + num_tokens) // PAGE_TOKENS))
    table = torch.zeros(NUM_SLOTS, num_pages, dtype=torch.int32, device=on)
    table[PAGE_SLOT] = torch.tensor(draw.permutation(num_pages), dtype=torch.int32)
    cells = SINK + torch.arange(num_tokens, device=on)
    page_ids, offsets = table[PAGE_SLOT, cells // PAGE_TOKENS].long(), cells % PAGE_TOKENS
    held = []
    for name in ("keys", "values"):
        pages = torch.zeros(num_pages, KV_HEADS, PAGE_TOKENS, width_of(stored, dim), dtype=stored, device=on)
        poison(pages)
        write_rows(torch.tensor(getattr(run, name), dtype=dtype, device=on), page_ids, offsets, pages)
        rows = read_cells(pages, page_ids, torch.arange(KV_HEADS, device=on)[:, None], offsets, torch.float32)
        setattr(run, name, wide(rows))
        held.append(pages)
    return Pages(*held, table, SINK)


def vars_of(work: Work) -> list[torch.Tensor]:
    return [getattr(work, name) for name in Work.__slots__]
