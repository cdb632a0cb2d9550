"""Choose which rings and layers predict their next blocks after a step: layers take turns, by ring and cell.

Invariants: the steps in which a layer's blocks are chosen follow from its turn and the cell alone. A score is reused
only if it was made `predict_every` steps before, no step is missing since, and the number of blocks is the same. The
last cells of rings without a row in this step are not written, since the other lane may assign such a ring meanwhile.
On a GPU all choices of a step are made in one launch, with a program for each ring.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.attention.step_rows import StepRows
from gpu.methods.predicted.settings import PredictedSettings
from gpu.operations.arguments import check, runs_on_triton
from gpu.predictor.predict import EDGE_BLOCKS
from transfer.tier_shape import BLOCK_TOKENS

NEVER = -2  # the last cell of a ring that has none: no cell follows it

_BLOCK, _EDGE = tl.constexpr(BLOCK_TOKENS), tl.constexpr(EDGE_BLOCKS)


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of the next blocks, by place.

    is_in: bool `[places]`, whether the place chooses in this step. stale, widths, oldest: int32 `[places]`, see
    `predict_blocks`. limits: int32 `[places]`, the number of blocks that are only in host memory.
    """

    is_in: Tensor
    stale: Tensor
    widths: Tensor
    oldest: Tensor
    limits: Tensor


@dataclass(frozen=True, slots=True)
class RingRows:
    """The rings of a step's rows.

    rings: int32 `[rows]`, -1: none. wanted: uint8 `[rows, heads]`, whether the head asks the host.
    """

    rings: Tensor
    wanted: Tensor


@triton.jit
def _turns_kernel(
    slots, ring_of_slot, samples, cells, skips, last_cells, begins, rings, wanted, is_in, widths, stale, oldest, limits,
    num_rows, num_slots, num_rings, heads, kv_heads, every, history, local_tokens, first_block, blocks,
    ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Find the turns of one ring. The program behind the last ring writes `rings` and `wanted` of all rows."""
    ring, row = tl.program_id(0), tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    own = tl.load(ring_of_slot + tl.where(slot < 0, num_slots - 1, slot), mask=inside, other=-1)
    if ring == num_rings:
        tl.store(rings + row, own, mask=inside)
        head = tl.arange(0, HEADS)[None, :]
        is_wanted = ((own < 0) | (tl.load(samples) != 0)).to(tl.uint8)
        to = wanted + row[:, None] * heads + head
        tl.store(to, tl.zeros([ROWS, HEADS], tl.uint8) + is_wanted[:, None], mask=inside[:, None] & (head < heads))
        return
    is_mine = inside & (own == ring)
    cell = tl.max(tl.where(is_mine, tl.load(cells + row, mask=is_mine, other=-1), -1), 0)
    skip_begin = tl.load(skips + row, mask=is_mine, other=0)
    skip_end = tl.load(skips + num_rows + row, mask=is_mine, other=0)
    limit = tl.max((skip_end - skip_begin) // _BLOCK, 0)
    begin = tl.where(tl.load(last_cells + ring) == cell - 1, tl.load(begins + ring), cell)
    if cell >= 0:
        tl.store(last_cells + ring, cell)
        tl.store(begins + ring, begin)
    turn = tl.arange(0, EVERY)[:, None]
    kv_head = tl.arange(0, KV_HEADS)[None, :]
    is_turn = (cell >= 0) & ((cell + turn) % every == 0)
    before, width = (cell + 2 - every - local_tokens) // _BLOCK, (cell + 2 - local_tokens) // _BLOCK
    known = width - first_block - tl.where(before == width, 0, _EDGE)
    known = tl.where(begin <= cell - every, tl.minimum(tl.maximum(known, 0), blocks), 0)
    width = tl.minimum(tl.maximum(width - first_block, 0), blocks)
    place = ring * kv_heads + kv_head
    to = turn * (num_rings * kv_heads) + place
    is_there = (turn < every) & (kv_head < kv_heads)
    tl.store(is_in + to, tl.zeros([EVERY, KV_HEADS], tl.uint8) + is_turn.to(tl.uint8), mask=is_there)
    tl.store(
        widths + to, tl.zeros([EVERY, KV_HEADS], tl.int32) + tl.where(is_turn, width, -1).to(tl.int32), mask=is_there
    )
    of_place = tl.arange(0, KV_HEADS)
    is_place, at = of_place < kv_heads, ring * kv_heads + of_place
    nothing = tl.zeros([KV_HEADS], tl.int32)
    tl.store(stale + at, nothing + known.to(tl.int32), mask=is_place)
    window = history + every  # rows of a history
    tl.store(oldest + at, nothing + ((cell + 1 + every) % window).to(tl.int32), mask=is_place)
    tl.store(limits + at, nothing + limit, mask=is_place)


class Turns:
    """Decides which places predict blocks in a step, and keeps what the decision needs.

    last_cells, begins: int64 `[rings + 1]`: each ring's last cell, and the first cell of the unbroken sequence up to
    it. The last entry is for rows without a ring. A history has `history` rows that are read, and one more for each
    step between predictions.
    """

    def __init__(
        self, settings: PredictedSettings, num_rings: int, kv_heads: int, first_block: int, blocks: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._settings, self._num_rings, self._kv_heads = settings, num_rings, kv_heads
        self._first_block, self._blocks = first_block, blocks
        self.last_cells = torch.full((num_rings + 1,), NEVER, dtype=torch.int64, device=device)
        self.begins = self.last_cells.clone()

    def of_rows(
        self, rows: StepRows, ring_of_slot: Tensor, samples: Tensor, heads: int
    ) -> tuple[RingRows, list[Choice]]:  # fmt: skip
        """Return the rings of a step's rows, and a choice for each turn, to be made after the rows' cells;
        asynchronous.

        ring_of_slot: int32 `[max_running + 1]`, -1: none. samples: bool `[1]`, whether rows with a ring ask the host as
        well. Raises ValueError for another shape or dtype.
        """
        op, device = "turns", self.last_cells.device
        check(op, "ring_of_slot", ring_of_slot, (len(ring_of_slot),), torch.int32, device)
        check(op, "samples", samples, (1,), torch.bool, device)
        if not runs_on_triton(self.last_cells):
            own = find_rings(rows, ring_of_slot, samples, heads)
            return own, self.choices(*self._by_ring(rows, own.rings))
        every, places = self._settings.predict_every, self._num_rings * self._kv_heads
        own = RingRows(
            torch.empty(rows.num_rows, dtype=torch.int32, device=device),
            torch.empty(rows.num_rows, heads, dtype=torch.uint8, device=device),
        )
        is_in = torch.empty(every, places, dtype=torch.bool, device=device)
        widths, numbers = (torch.empty(size, places, dtype=torch.int32, device=device) for size in (every, 3))
        _turns_kernel[(self._num_rings + 1,)](
            rows.slots, ring_of_slot, samples, rows.positions, rows.skips, self.last_cells, self.begins, own.rings,
            own.wanted, is_in, widths, *numbers, rows.num_rows, len(ring_of_slot), self._num_rings, heads,
            self._kv_heads, every, self._settings.history, self._settings.local_tokens, self._first_block, self._blocks,
            ROWS=triton.next_power_of_2(rows.num_rows), HEADS=triton.next_power_of_2(heads),
            KV_HEADS=triton.next_power_of_2(self._kv_heads), EVERY=triton.next_power_of_2(every), num_warps=4,
        )  # fmt: skip
        stale, oldest, limits = numbers
        in_turn = zip(is_in.unbind(), widths.unbind(), strict=True)
        return own, [Choice(one, stale, width, oldest, limits) for one, width in in_turn]

    def _by_ring(self, rows: StepRows, rings: Tensor) -> tuple[Tensor, Tensor]:
        """Return each ring's cell, -1: none, and its number of blocks in host memory, int64 `[rings]`."""
        num_rings = self._num_rings
        to = torch.where(rings >= 0, rings, num_rings).long()  # rows without a ring share the last entry
        cells = torch.full((num_rings + 1,), -1, dtype=torch.int64, device=rings.device)
        cells.index_copy_(0, to, rows.positions)
        limits = torch.zeros(num_rings + 1, dtype=torch.int64, device=rings.device)
        limits.index_copy_(0, to, ((rows.skips[1] - rows.skips[0]) // BLOCK_TOKENS).long())
        return cells[:num_rings], limits[:num_rings]

    def choices(self, cells: Tensor, limits: Tensor) -> list[Choice]:
        """Compute `of_rows` in plain torch. cells: int64 `[rings]`, -1: none.

        limits: int64 `[rings]`, the number of blocks that are only in host memory.
        """
        every = self._settings.predict_every
        begins = torch.where(self.last_cells[:-1] == cells - 1, self.begins[:-1], cells)
        self._note_cells(cells, begins)
        is_kept = begins <= cells - every  # no step is missing since this turn's last prediction
        turns = torch.arange(every, device=cells.device)[:, None]
        return self._of_turns((cells >= 0) & ((cells + turns) % every == 0), is_kept, cells, limits)

    def choice_now(self, cells: Tensor, limits: Tensor) -> Choice:
        """Return a choice for all rings with a cell, in whatever turn they are, to be made before the next step."""
        self._note_cells(cells, cells + 1)  # no turn may reuse the scores that are made now
        (choice,) = self._of_turns((cells >= 0)[None], torch.zeros_like(cells, dtype=torch.bool), cells, limits)
        return choice

    def _note_cells(self, cells: Tensor, begins: Tensor) -> None:
        to = torch.where(cells >= 0, torch.arange(self._num_rings, device=cells.device), self._num_rings)
        self.last_cells.index_copy_(0, to, cells)
        self.begins.index_copy_(0, to, begins)

    def _of_turns(self, is_in: Tensor, is_kept: Tensor, cells: Tensor, limits: Tensor) -> list[Choice]:
        """Return a choice for each turn.

        is_in: bool `[turns, rings]`. is_kept: bool `[rings]`, whether the scores of `predict_every` steps ago can be
        reused.
        """
        history, blocks = self._settings.history, self._blocks
        every, local = self._settings.predict_every, self._settings.local_tokens
        before, widths = ((cells + 2 - less - local) // BLOCK_TOKENS for less in (every, 0))
        known = widths - self._first_block - torch.where(before == widths, 0, EDGE_BLOCKS)
        stale = torch.where(is_kept, known.clamp(0, blocks), 0)
        widths = torch.where(is_in, (widths - self._first_block).clamp(0, blocks), -1)

        def spread(numbers: Tensor) -> Tensor:
            return numbers.repeat_interleave(self._kv_heads, -1)

        oldest = (cells + 1 - history) % (history + every)
        of_all = (spread(stale.int()), spread(oldest.int()), spread(limits.int()))
        of_turns = zip(spread(is_in).unbind(), spread(widths.int()).unbind(), strict=True)
        return [Choice(own, of_all[0], width, *of_all[1:]) for own, width in of_turns]


def find_rings(rows: StepRows, ring_of_slot: Tensor, samples: Tensor, heads: int) -> RingRows:
    """Compute `Turns.of_rows` in plain torch."""
    rings = rows.of_slots(ring_of_slot)
    return RingRows(rings, ((rings < 0) | samples).to(torch.uint8)[:, None].expand(-1, heads).contiguous())
