"""Attend to a share of the host reads on the device, over the link, while the CPU attends to the rest.

A row that attends to a whole run leaves the last tokens of that run to the device, which reads them in host memory. The
share balances the time that a token takes on each side. The CPU's time grows with the number of rows that read the
token together, and the link's does not, so there is a share for each number of rows. Shares are fixed when the engine
starts.

Invariant: in every offloaded layer the CPU is asked for the front of each row's run, and the device attends to the
rest.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gpu.attention.step_rows import StepRows
from gpu.host.footprint import LINKED_PARTS, MOST_LINKED_ROWS, link_arrays
from gpu.methods.device_side import LayerReads
from gpu.operations.host_rows import chunk_columns as linked
from gpu.operations.host_rows.chunk_columns import CHUNKS
from gpu.operations.host_rows.linked_attention import MOST_TOGETHER, LinkedChunks, linked_attention
from gpu.step import HostRead
from transfer import places
from transfer.allocation import allocate_empty
from transfer.host_tier import Attention, ContextRead, HostTier
from transfer.partial import Partial
from transfer.tier_shape import TierShape

LEAST_TOKENS = 4096  # of a run that is shared: the CPU attends to a shorter one before a transfer pays
_SHARE_TOKENS = 64  # what the device reads is a multiple of this
_MOST_SHARE = 0.9
_MEASURED_TOKENS = 8_192  # of one layer; more are not needed, since no cache lies before the link
_REPEATS = 3

_COPIED = [
    (linked.KEY_HEAD_BYTES, places.KEY_HEAD_BYTES), (linked.KEY_ROW_BYTES, places.KEY_ROW_BYTES),
    (linked.VALUE_HEAD_BYTES, places.VALUE_HEAD_BYTES), (linked.VALUE_ROW_BYTES, places.VALUE_ROW_BYTES),
    (linked.CENTRE, places.CENTRE), (linked.KEY_SCALE, places.KEY_SCALE), (linked.VALUE_SCALE, places.VALUE_SCALE),
]  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    """What the rows of one part of a step read over the link.

    chunks: int64 `[layers, rows, COLUMNS, CHUNKS]` on the device; known: its values, on the host.
    sharing: int32 `[3, rows]`: `together` and `leaders` of `linked_attention`, and the number of tokens.
    """

    chunks: Tensor
    known: np.ndarray
    sharing: Tensor
    is_empty: bool = True


class LinkReads:
    """The device's share of contexts in host memory.

    shares: the share of a run by the number of rows that read it together, from one on; the last entry is for more
    rows.
    """

    def __init__(self, shape: TierShape, shares: Sequence[float], scale: float, device: torch.device) -> None:
        self.shares = shares
        self._shape, self._scale, self._device = shape, scale, device
        self._places = {layer: place for place, layer in enumerate(shape.layers)}
        arrays = link_arrays(shape)
        self._work = allocate_empty(arrays["outs"], device), allocate_empty(arrays["lses"], device)
        self._parts = []
        for _ in range(LINKED_PARTS):
            chunks = allocate_empty(arrays["chunks"], device)
            sharing = allocate_empty(arrays["sharing"], device)
            chunks.zero_()
            sharing.zero_()
            sharing[1].fill_(-1)
            self._parts.append(_Part(chunks, np.zeros(arrays["chunks"].shape, np.int64), sharing))
        self._part_of: WeakKeyDictionary[StepRows, _Part] = WeakKeyDictionary()

    def assign(self, rows: StepRows, part: int) -> None:
        """Register the rows of a step as its part number `part`, for which `attend` reads what `fill` uploaded.

        A part with more than MOST_LINKED_ROWS rows is not registered.
        """
        if rows.num_rows <= MOST_LINKED_ROWS and part < LINKED_PARTS:
            self._part_of[rows] = self._parts[part]

    def fill(
        self, part: int, reads: Sequence[ContextRead], host_reads: Sequence[HostRead | None], whole: Attention,
        is_linked: bool = True,
    ) -> Sequence[ContextRead]:  # fmt: skip
        """Upload which tokens a part's rows read over the link, in stream order. Return what is left for the CPU.

        reads: the rows' whole runs. whole: the attention over these, lent to the device until it has passed the step.
        is_linked: False if some part of the step is too large; then no part reads anything over the link.
        """
        asked = [*reads]
        own, sharing = self._parts[part], np.zeros((3, MOST_LINKED_ROWS), np.int32)
        sharing[1] = -1
        known, is_changed = own.known, False
        for leader, count in self._groups(host_reads) if is_linked else ():
            end = reads[leader].num_tokens
            front = end - int(end * self.shares[min(count, len(self.shares)) - 1]) // _SHARE_TOKENS * _SHARE_TOKENS
            chunks = cut_chunks(whole.places(leader), front, end) if front < end else None
            if chunks is None:
                continue
            rows = slice(leader, leader + count)
            asked[rows] = [ContextRead(reads[leader].context_id, front)] * count
            sharing[0, leader], sharing[1, rows], sharing[2, rows] = count, leader, end - front
            if not np.array_equal(known[:, leader], chunks):
                known, is_changed = known if is_changed else known.copy(), True
                known[:, leader] = chunks
        is_empty = not sharing[0].any()
        if is_changed:
            self._upload(known, own.chunks)
            own.known = known
        if not (is_empty and own.is_empty):
            self._upload(sharing, own.sharing)
        own.is_empty = is_empty
        return asked

    def attend(self, reads: LayerReads, is_counted: bool) -> Partial | None:
        """Attend to the device's share in one layer. Returns None if the step is too large to have a share."""
        part = self._part_of.get(reads.rows)
        if part is None:
            return None
        rows, heads = reads.rows.num_rows, reads.query.shape[1]
        out, lse = linked_attention(
            reads.query, LinkedChunks(part.chunks[self._places[reads.layer], :rows], *part.sharing[:2, :rows]),
            self._scale, self._shape.num_kv_heads, self._shape.rows == "int8", reads.wanted, self._work,
        )  # fmt: skip
        if not is_counted:
            return Partial(out, lse)
        covered = part.sharing[2, :rows, None].expand(rows, heads)
        return Partial(out, lse, covered if reads.wanted is None else torch.where(reads.wanted != 0, covered, 0))

    def _groups(self, host_reads: Sequence[HostRead | None]) -> list[tuple[int, int]]:
        """Return the first row and the number of rows of each group that reads one run together, for runs that are
        shared.
        """
        groups, row = [], 0
        for read, same in groupby(host_reads):
            left = len(list(same))
            while left:
                count = min(left, MOST_TOGETHER)
                if read is not None and read.reads_all and read.end - read.begin >= LEAST_TOKENS:
                    groups.append((row, count))
                row, left = row + count, left - count
        return groups

    def _upload(self, array: np.ndarray, to: Tensor) -> None:
        source = torch.from_numpy(array.copy())
        to.copy_(source.pin_memory() if self._device.type == "cuda" else source, non_blocking=True)


def cut_chunks(table: np.ndarray, front: int, end: int) -> np.ndarray | None:
    """Cut tokens `[front, end)` of a run into chunks, int64 `[layers, COLUMNS, CHUNKS]`.

    Returns None if the tokens lie in too many pieces. table: as in `transfer.places`.
    """
    begins, ends = np.maximum(table[0, places.RUN_BEGIN], front), np.minimum(table[0, places.RUN_END], end)
    pieces = np.flatnonzero(ends > begins)
    if not 0 < len(pieces) < CHUNKS:
        return None
    each = -(-(end - front) // (CHUNKS - len(pieces)))
    each = -(-each // _SHARE_TOKENS) * _SHARE_TOKENS
    cut = [(piece, first, min(first + each, int(ends[piece])))
           for piece in pieces.tolist() for first in range(int(begins[piece]), int(ends[piece]), each)]  # fmt: skip
    of_piece, firsts, lasts = (np.array(column, np.int64) for column in zip(*cut, strict=True))
    chunks = np.zeros((len(table), linked.COLUMNS, CHUNKS), np.int64)
    used, behind = slice(0, len(cut)), firsts - table[0, places.RUN_BEGIN, of_piece]
    for to, column in _COPIED:
        chunks[:, to, used] = table[:, column][:, of_piece]
    for to, column, step in (
        (linked.KEYS, places.KEYS, places.KEY_ROW_BYTES), (linked.VALUES, places.VALUES, places.VALUE_ROW_BYTES)
    ):  # fmt: skip
        chunks[:, to, used] = table[:, column][:, of_piece] + behind * table[:, step][:, of_piece]
    chunks[:, linked.TOKENS, used] = lasts - firsts
    return chunks


def open_link(
    tier: HostTier, share: float | None, scale: float, dtype: torch.dtype, device: torch.device
) -> LinkReads | None:
    """Return the device's share of contexts in host memory, or None if it has none.

    share: the share of a run; None: measure both sides here and balance their times. dtype: of queries.
    """
    shape = tier.shape
    if share == 0 or shape.rows not in ("bfloat16", "int8") or shape.num_heads // shape.num_kv_heads > 16:
        return None
    if share is not None:
        return LinkReads(shape, (share,), scale, device)
    if device.type != "cuda":
        return None
    link_s = measure_link(shape, dtype, device)
    cpu_s = [tier.attend_seconds(count) for count in (1, 2, 4, 8)]
    by_rows = np.interp(range(1, MOST_TOGETHER + 1), (1, 2, 4, 8), cpu_s)
    shares = [min(_MOST_SHARE, one / (one + link_s)) for one in by_rows]
    log.info(
        "link_reads shares=%s link_us=%.4f cpu_us=%s", ",".join(f"{one:.2f}" for one in shares), 1e6 * link_s,
        ",".join(f"{1e6 * one:.4f}" for one in cpu_s),
    )  # fmt: skip
    return LinkReads(shape, shares, scale, device)


def measure_link(shape: TierShape, dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds in which the device attends to one token of one layer in pinned memory: the best of several
    runs.
    """
    stored = torch.int8 if shape.rows == "int8" else torch.bfloat16
    rows = torch.zeros(2, shape.num_kv_heads, _MEASURED_TOKENS, shape.dim, dtype=stored).pin_memory()
    numbers = torch.zeros(2, shape.num_kv_heads, shape.dim).pin_memory()
    arrays = link_arrays(shape)
    work = allocate_empty(arrays["outs"], device), allocate_empty(arrays["lses"], device)
    table = np.zeros((1, places.COLUMNS, 1), np.int64)
    table[0, places.RUN_END] = _MEASURED_TOKENS
    for at, of in ((places.KEYS, rows[0]), (places.VALUES, rows[1])):
        strides = [of.element_size() * step for step in of.stride()[:2]]
        table[0, at : at + 3, 0] = of.data_ptr(), *strides
    table[0, [places.CENTRE, places.KEY_SCALE, places.VALUE_SCALE], 0] = [
        numbers[0].data_ptr(), numbers[1].data_ptr(), numbers[1].data_ptr()
    ]  # fmt: skip
    chunks = cut_chunks(table, 0, _MEASURED_TOKENS)
    assert chunks is not None, "one piece is cut into chunks"
    query = torch.zeros(1, shape.num_heads, shape.dim, dtype=dtype, device=device)
    sharing = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    on_device = torch.from_numpy(chunks[0][None]).to(device)
    took = []
    for _ in range(1 + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        linked_attention(
            query, LinkedChunks(on_device, *sharing), 1.0, shape.num_kv_heads, shape.rows == "int8", None, work
        )
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return 1e-3 * min(took) / _MEASURED_TOKENS
