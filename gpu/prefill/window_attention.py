"""Prefill a layer whose windows are stored outside of pages: a unit's rows are kept beside the window until it is done.

A unit writes its keys and values to a buffer. A prompt's queries attend to the end of its window and to their own rows
in the buffer. Then the unit's last rows are copied to the window. So a window need be no longer than what a token sees,
however long units are. A prompt may leave a second window, a copy of its own at an earlier token, for prompts that
differ from there on. Cells of a window are written in the order of a prompt's units, and none is overwritten that a
query of this unit or of the next one sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.attention.prefill_attention import Packing, has_flash, packed_prefill_attention, windowed_attention
from gpu.attention.prefill_query import Attended, joined
from gpu.kv.pool import KvPool
from gpu.layers.decoder import Pages
from gpu.prefill.prefill_arrays import seen_rows, window_buffer
from gpu.step import WindowBranch
from gpu.upload import upload
from transfer.allocation import allocate, allocate_empty


@dataclass(frozen=True, slots=True)
class UnitPart:
    """A prompt's part of a unit: tokens `[begin, end)` of the unit are the last of the first `context` tokens of
    `slot`.

    branch: the second window that the prompt leaves, or None.
    """

    slot: int
    begin: int
    end: int
    context: int
    branch: WindowBranch | None

    @property
    def first(self) -> int:
        """Return the cell of the part's first token."""
        return self.context - (self.end - self.begin)

    def branched(self, num_cells: int) -> slice:
        """Return the unit's tokens that are among the last `num_cells` of the branch's window."""
        if self.branch is None:
            return slice(self.begin, self.begin)
        first = self.begin + max(0, self.branch.end - num_cells - self.first)
        return slice(first, self.begin + min(self.context, self.branch.end) - self.first)


class WindowedUnit:
    """Where a unit's rows go in the windows: the same in every layer with a window.

    positions, slots: of the unit's tokens.
    """

    def __init__(self, pool: KvPool, parts: Sequence[UnitPart], positions: Tensor, slots: Tensor) -> None:
        self.parts = parts
        num_cells = pool.windows.num_cells
        self.kept = [slice(max(part.begin, part.end - num_cells), part.end) for part in parts]
        if sum(kept.stop - kept.start for kept in self.kept) == len(positions):
            self.kept = [slice(0, len(positions))]
        cells = torch.cat([positions[kept] for kept in self.kept])
        pages = torch.cat([slots[kept] for kept in self.kept]).long()
        page_ids = [pool.windows.page_table[pages, cells // pool.page_tokens].long()]
        for part in parts:
            kept = part.branched(num_cells)
            if part.branch is not None and kept.start < kept.stop:
                self.kept.append(kept)
                cells = torch.cat([cells, positions[kept]])
                page_ids.append(pool.windows.page_ids(part.branch.window, positions[kept]))
        self.page_ids = torch.cat(page_ids)
        self.offsets = cells % pool.page_tokens

    def is_whole(self) -> bool:
        """Return whether every prompt's part begins at the prompt's first token."""
        return all(part.first == 0 for part in self.parts)

    def packing(self, device: torch.device) -> Packing:
        """Return the packing of the parts, which must begin at their prompts' first tokens (`is_whole`)."""
        begins = np.array([0, *(part.end for part in self.parts)], np.int32)
        uploaded, most = upload(begins, device), max(part.context for part in self.parts)
        return Packing(uploaded, uploaded, most, most)


class WindowPrefill:
    """Holds the buffer for a unit's keys and values, each `[1, kv_heads, tokens, dim]`.

    The buffer grows to the longest unit, by doubling.
    """

    def __init__(self, pool: KvPool, scale: float) -> None:
        self.pool = pool
        self.scale = scale
        self._one_page = torch.zeros(pool.max_slots, 1, dtype=torch.int32, device=pool.device)
        self._resize(0)

    def pages(self, num_tokens: int) -> Pages:
        """Return the buffer as a single page, the first one of every slot. Its cells are the unit's tokens."""
        if num_tokens > self._keys.shape[2]:
            self._resize(num_tokens)
        return self._keys, self._values, self._one_page

    def cells(self, num_tokens: int) -> Tensor:
        """Return the cells of a unit's tokens in the buffer, int64."""
        return self._cells[:num_tokens]

    def attend(self, unit: WindowedUnit, layer: int, window: int, query: Tensor) -> Attended:
        """Attend for all prompts of a unit whose rows are in the buffer; query and output: `[tokens, heads, dim]`."""
        keys, values = self._keys[0], self._values[0]
        if len(unit.parts) > 1 and unit.is_whole() and has_flash(query):
            own = [rows[:, : len(query)].transpose(0, 1) for rows in (keys, values)]
            return packed_prefill_attention(query, own[0], own[1], unit.packing(query.device), self.scale, window)
        attended = []
        for part in unit.parts:
            own = [rows[:, part.begin : part.end] for rows in (keys, values)]
            seen = self._before(layer, part, window, own)
            attended.append(windowed_attention(query[part.begin : part.end], seen[0], seen[1], window, self.scale))
        return joined(attended)

    def keep(self, unit: WindowedUnit, layer: int) -> None:
        """Copy the last rows of each prompt to its window, after they were attended to."""
        kept = [[buffer[0, :, kept] for kept in unit.kept] for buffer in (self._keys, self._values)]
        keys, values = (rows[0] if len(rows) == 1 else torch.cat(rows, 1) for rows in kept)
        self.pool.write(layer, unit.page_ids, keys, values, unit.offsets)

    def _before(self, layer: int, part: UnitPart, window: int, own: list[Tensor]) -> list[Tensor]:
        """Return the keys and values `[kv_heads, tokens, dim]` of a part's tokens and of the tokens in front that they
        see.
        """
        first = max(0, part.first - window + 1)
        if first == part.first:
            return own
        page_tokens = self.pool.page_tokens
        page_ids = self.pool.windows.page_table[part.slot, first // page_tokens : -(-part.first // page_tokens)].long()
        seen = slice(first % page_tokens, first % page_tokens + part.first - first)
        pool = self.pool
        keys = seen_rows(pool.windows.num_kv_heads, pool.windows.dim, len(page_ids) * page_tokens, pool.dtype.itemsize)
        before = [allocate_empty(keys, pool.device) for _ in range(2)]
        self.pool.read(layer, page_ids, *before)
        return [torch.cat((rows[:, seen], others), 1) for rows, others in zip(before, own, strict=True)]

    def _resize(self, num_tokens: int) -> None:
        pool = self.pool
        keys = window_buffer(pool.windows.num_kv_heads, pool.windows.dim, num_tokens, pool.dtype.itemsize)
        self._keys, self._values = allocate(keys, pool.device), allocate(keys, pool.device)
        self._cells = torch.arange(keys.shape[2], device=pool.device)
