"""Find MAC-Attention's match (arXiv 2604.00235, section 3.2): the nearest of the last queries, and what is then read.

A head whose query is near enough to that of an earlier cell p reuses the summary over `[sink, p + 1 - band)` from
there, and reads the rest. A head without a match reads all that is on the device, and asks the host for the skipped
range. Invariants: a head takes at most one entry, the youngest of equal distances. It takes none whose prefix ends
before the offloaded range does. Bytes moved: 2 * dim + 8 per head for each entry of a ring that may be near enough in
time; bounds and sums are small beside that.

On a GPU there are two kernels. In the first, a head's ring is cut over programs. Each leaves its best candidate as one
number, whose upper half is the distance and whose lower half is the gap. The second kernel finds the least, writes
bounds and adds the counts. A near entry that is refused for its share has the threshold as its distance and 0 as its
gap, so it comes after every hit.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import inf, log

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.mac.rings import RowRings
from gpu.operations.arguments import check, runs_on_triton


class Count(IntEnum):
    """Columns of `counts`: sums over steps and over each (row, head) with a ring in a matching layer.

    TRIES, HITS: searches, and those with a match. CELLS: of their contexts. SKIPPED: cells that hits left out. GAPS: of
    hits, m - p. AGES: of hits, m - origin. READ: cells that a KV head read, for all heads of its group together. WHOLE:
    KV heads of which every head hit. REFUSED: searches without a hit that found a near entry whose prefix held too much
    of its own attention.
    """

    TRIES = 0
    HITS = 1
    CELLS = 2
    SKIPPED = 3
    GAPS = 4
    AGES = 5
    READ = 6
    WHOLE = 7
    REFUSED = 8


NUM_COUNTS = len(Count)
BLOCK_ENTRIES, MATCH_WARPS = 64, 2  # entries whose distances a program computes at once, and its warps
PROGRAMS_PER_SM = 8
LEAST_PROGRAMS = 24  # used without a GPU, where the interpreter runs each program

_TRIES, _HITS, _CELLS, _SKIPPED, _GAPS, _AGES, _READ, _WHOLE, _REFUSED = (tl.constexpr(int(count)) for count in Count)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a match at cell m to the entry of cell p.

    sink: cells in front that no summary covers.
    band: r of the paper.
    max_distance2: (sqrt(2 dim) (1 - tau))^2, eq. (3).
    max_gap, min_gap: of m - p.
    max_age: of m - origin.
    min_cells: a context shorter than this matches nothing.
    max_prefix_share: the most of its own attention that a reusable entry's prefix held, 1: any (as in the paper).
    """

    sink: int
    band: int
    max_distance2: float
    max_gap: int
    max_age: int
    min_cells: int
    max_prefix_share: float
    min_gap: int = 1

    @property
    def max_log_share(self) -> float:
        """Return the largest lse(prefix) - lse(whole) of a reusable entry, natural logarithm; inf: there is
        no limit.
        """
        return log(self.max_prefix_share) if self.max_prefix_share < 1 else inf


@dataclass(frozen=True, slots=True)
class Matched:
    """The matches of a step in one layer.

    entries: int32 `[rows, heads]`, index in the ring, -1: no match.
    distances2: float32 `[rows, heads]`, of the best candidate, inf: none. It is the threshold if a nearer one was
        refused for its share.
    bounds: int32 `[3, rows, heads]`, of attention on the device.
    wanted: uint8 `[rows, heads]`, whether the head asks the host, as in the exchange slot.
    """

    entries: Tensor
    distances2: Tensor
    bounds: Tensor
    wanted: Tensor


def match_reference(
    query: Tensor, own: RowRings, skips: Tensor, limits: Limits, is_matching: Tensor, counts: Tensor, kv_heads: int
) -> Matched:
    """Compute `match` in plain torch. Distances are of the dtype of `own.ring.norms`."""
    ring, rings, cells = own.ring, own.rings, own.cells
    capacity, wide = ring.norms.shape[-1], ring.norms.dtype
    cut = cells + 1 - limits.band
    is_tried = (rings >= 0) & (is_matching != 0) & (cells + 1 >= limits.min_cells) & (cut > limits.sink)
    place = rings.clamp_min(0).long()
    norms, origins = ring.norms[place], ring.origins[place].long()  # [rows, heads, capacity]
    is_kept, norms = norms >= 0, norms.abs()
    gaps = (cells[:, None] - 1 - torch.arange(capacity, device=cells.device)) % capacity + 1  # [rows, capacity]
    prefix_ends = cells[:, None] - gaps + 1 - limits.band
    is_in_reach = is_tried[:, None] & (gaps >= limits.min_gap) & (gaps <= limits.max_gap) & (gaps <= cells[:, None])
    is_in_reach &= (prefix_ends > limits.sink) & (prefix_ends >= skips[1, :, None])
    is_candidate = is_in_reach[:, None] & (cells[:, None, None] - origins <= limits.max_age) & norms.isfinite()
    rounded = query.to(torch.bfloat16).to(wide)
    products = (ring.queries[place].to(wide) @ rounded[..., None])[..., 0]
    distances2 = (rounded.square().sum(-1, keepdim=True) + norms - 2 * products).clamp_min(0)
    distances2 = torch.where(is_candidate & (distances2 < torch.inf), distances2, torch.inf)
    least_refused = torch.where(is_kept, torch.inf, distances2).amin(-1)
    distances2 = torch.where(is_kept, distances2, torch.inf)
    nearest = distances2.amin(-1)
    gap = torch.where(distances2 == nearest[..., None], gaps[:, None], capacity + 1).amin(-1)  # the youngest
    is_hit = nearest < limits.max_distance2
    is_refused = ~is_hit & (least_refused < limits.max_distance2)
    nearest = torch.where(is_refused, limits.max_distance2, nearest)
    entries = torch.where(is_hit, (cells[:, None] - gap) % capacity, -1)
    bounds = _bounds_of(cells[:, None] - gap, is_hit, rings, cells, skips, limits)
    wanted = (~is_hit).to(torch.uint8)
    ages = cells[:, None] - origins.gather(2, entries.clamp_min(0)[..., None])[..., 0]
    sums = {
        Count.TRIES: is_hit.shape[1] * is_tried.sum(),
        Count.HITS: is_hit.sum(),
        Count.CELLS: is_hit.shape[1] * ((cells + 1) * is_tried).sum(),
        Count.SKIPPED: torch.where(is_hit, bounds[1] - bounds[0], 0).sum(),
        Count.GAPS: torch.where(is_hit, gap, 0).sum(),
        Count.AGES: (ages * is_hit).sum(),
        Count.READ: (_read_cells(bounds, cells, kv_heads) * is_tried[:, None]).sum(),
        Count.WHOLE: is_hit.view(len(cells), kv_heads, -1).all(-1).sum(),
        Count.REFUSED: is_refused.sum(),
    }
    counts += torch.stack([sums[count] for count in Count]).to(counts.dtype)
    return Matched(entries.to(torch.int32), nearest.float(), bounds.to(torch.int32), wanted)


def _bounds_of(matched: Tensor, is_hit: Tensor, rings: Tensor, cells: Tensor, skips: Tensor, limits: Limits) -> Tensor:
    """Return bounds of attention on the device, int64 `[3, rows, heads]`, for hits, for misses, and for rows without a
    ring.

    matched: `[rows, heads]`, the cells of hits. If a row's prefix is empty, nothing is far.
    """
    begin, end, cut = (bound.long()[:, None] for bound in skips)
    own_cut = (cells + 1 - limits.band)[:, None]
    has_skip, has_far = begin < end, (rings >= 0)[:, None] & (own_cut > limits.sink)
    begin = torch.where(has_far & ~has_skip, limits.sink, begin)
    end = torch.where(has_far & ~has_skip, limits.sink, end)
    cut = torch.where(has_far, own_cut.maximum(end), cut)
    hit = [torch.full_like(matched, limits.sink), matched + 1 - limits.band, own_cut.expand_as(matched)]
    return torch.stack([torch.where(is_hit, new, old) for new, old in zip(hit, (begin, end, cut), strict=True)])


def _read_cells(bounds: Tensor, cells: Tensor, kv_heads: int) -> Tensor:
    """Return how many cells each KV head reads for all heads of its group together, `[rows, kv_heads]`."""
    begin, end, cut = bounds
    far_begin = torch.where(end < cut, end, cut)
    near_end, near_begin, far_begin = (part.view(len(cells), kv_heads, -1) for part in (begin, cut, far_begin))
    context = (cells + 1)[:, None]
    return near_end.amax(-1) + context - near_begin.amin(-1) + near_begin.amax(-1) - far_begin.amin(-1)


@triton.jit
def _match_kernel(
    query, queries, norms, origins, rings, cells, skips, is_matching, best, query_row, query_head, skips_plane,
    sink, band, max_distance2, max_gap, min_gap, max_age, min_cells, split_entries,
    HEADS: tl.constexpr, CAPACITY: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ring = tl.load(rings + row).to(tl.int64)
    cell = tl.load(cells + row).to(tl.int32)
    nothing: tl.constexpr = 0x7F800000 << 32  # distance inf
    to = best + (row * HEADS + head) * tl.num_programs(2) + split
    if (ring < 0) | (tl.load(is_matching) == 0) | (cell + 1 < min_cells) | (cell + 1 - band <= sink):
        tl.store(to, nothing)  # the other lane may turn matching on before the second kernel reads this
        return
    released = tl.load(skips + skips_plane + row)
    column = tl.arange(0, BLOCK_DIM)
    is_column = column < DIM
    own = tl.load(query + row.to(tl.int64) * query_row + head * query_head + column, mask=is_column, other=0.0)
    own = own.to(tl.bfloat16).to(tl.float32)
    own_norm = tl.sum(own * own, 0)
    first = (ring * HEADS + head) * CAPACITY
    least = tl.full([ENTRIES], nothing, tl.int64)
    for begin in range(split * split_entries, tl.minimum((split + 1) * split_entries, CAPACITY), ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        gap = (cell % CAPACITY + CAPACITY - 1 - entry) % CAPACITY + 1
        prefix_end = cell - gap + 1 - band
        is_in_reach = (entry < CAPACITY) & (gap >= min_gap) & (gap <= max_gap) & (gap <= cell)
        is_in_reach = is_in_reach & (prefix_end > sink) & (prefix_end >= released)
        norm = tl.load(norms + first + entry, mask=is_in_reach, other=float("inf"))
        origin = tl.load(origins + first + entry, mask=is_in_reach, other=0)
        from_queries = queries + (first + entry)[:, None] * DIM + column[None, :]
        rows = tl.load(from_queries, mask=is_in_reach[:, None] & is_column[None, :], other=0.0)
        product = tl.sum(rows.to(tl.float32) * own[None, :], 1)
        is_kept = norm >= 0.0
        distance2 = tl.maximum(own_norm + tl.abs(norm) - 2.0 * product, 0.0)
        is_candidate = is_in_reach & (cell - origin <= max_age) & (norm < float("inf")) & (distance2 < float("inf"))
        is_candidate = is_candidate & (is_kept | (distance2 < max_distance2))
        distance2 = tl.where(is_kept, distance2, max_distance2)  # after all hits, before all misses
        packed = (distance2.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tl.where(is_kept, gap, 0).to(tl.int64)
        least = tl.minimum(least, tl.where(is_candidate, packed, nothing))
    tl.store(to, tl.min(least, 0))


@triton.jit
def _bounds_kernel(
    best, origins, rings, cells, skips, is_matching, entries, distances2, bounds, wanted, counts, skips_plane,
    sink, band, max_distance2, min_cells, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr, NARROW: tl.constexpr, SPLITS: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0), tl.program_id(1)
    ring = tl.load(rings + row).to(tl.int64)
    cell = tl.load(cells + row).to(tl.int32)
    begin, end = tl.load(skips + row), tl.load(skips + skips_plane + row)
    cut = tl.load(skips + 2 * skips_plane + row)
    own_cut = cell + 1 - band
    has_far = (ring >= 0) & (own_cut > sink)
    is_tried = has_far & (tl.load(is_matching) != 0) & (cell + 1 >= min_cells)
    member = tl.arange(0, NARROW)
    is_head = member < GROUP
    head = kv_head * GROUP + member
    split = tl.arange(0, SPLITS)
    nothing: tl.constexpr = 0x7F800000 << 32
    is_tried_head = member < tl.where(is_tried, GROUP, 0)
    reads = is_tried_head[:, None] & (split < splits)[None, :]
    packed = tl.load(best + (row * HEADS + head)[:, None] * splits + split[None, :], mask=reads, other=nothing)
    least = tl.min(packed, 1)
    distance2 = (least >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    is_hit = is_tried_head & (distance2 < max_distance2)
    is_refused = is_tried_head & (least.to(tl.int32) == 0) & (distance2 < float("inf"))
    gap = tl.where(is_hit, least.to(tl.int32), 0)
    entry = tl.where(is_hit, (cell - gap) % CAPACITY, -1)

    is_whole = has_far & (begin >= end)
    begin = tl.where(is_whole, sink, begin)
    end = tl.where(is_whole, sink, end)
    cut = tl.where(has_far, tl.maximum(own_cut, end), cut)
    skip_begin = tl.where(is_hit, sink, begin)
    skip_end = tl.where(is_hit, cell - gap + 1 - band, end)
    head_cut = tl.where(is_hit, own_cut, cut)
    to = row * HEADS + head
    plane = tl.num_programs(0) * HEADS
    tl.store(entries + to, entry, mask=is_head)
    tl.store(distances2 + to, distance2, mask=is_head)
    tl.store(bounds + to, skip_begin, mask=is_head)
    tl.store(bounds + plane + to, skip_end, mask=is_head)
    tl.store(bounds + 2 * plane + to, head_cut, mask=is_head)
    tl.store(wanted + to, tl.where(is_hit, 0, 1).to(tl.uint8), mask=is_head)
    if is_tried:
        origin = tl.load(origins + (ring * HEADS + head) * CAPACITY + entry, mask=is_hit, other=0)
        far_begin = tl.where(is_head & (skip_end < head_cut), skip_end, own_cut)
        read = tl.max(tl.where(is_head, skip_begin, 0), 0) + cell + 1 - tl.min(tl.where(is_head, head_cut, cell + 1), 0)
        read += tl.max(tl.where(is_head, head_cut, 0), 0) - tl.min(far_begin, 0)
        hits = tl.sum(is_hit.to(tl.int32), 0)
        count = tl.arange(0, COUNTS)
        value = tl.where(count == _TRIES, GROUP, 0) + tl.where(count == _HITS, hits, 0)
        value += tl.where(count == _CELLS, GROUP * (cell + 1), 0)
        value += tl.where(count == _SKIPPED, tl.sum(tl.where(is_hit, skip_end - skip_begin, 0), 0), 0)
        value += tl.where(count == _GAPS, tl.sum(gap, 0), 0)
        value += tl.where(count == _AGES, tl.sum(tl.where(is_hit, cell - origin, 0), 0), 0)
        value += tl.where(count == _READ, read, 0) + tl.where(count == _WHOLE, (hits == GROUP).to(tl.int32), 0)
        value += tl.where(count == _REFUSED, tl.sum(is_refused.to(tl.int32), 0), 0)
        tl.atomic_add(counts + count, value.to(tl.int64), mask=value != 0, sem="relaxed")


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def match(
    query: Tensor, own: RowRings, skips: Tensor, limits: Limits, is_matching: Tensor, counts: Tensor, kv_heads: int
) -> Matched:
    """Find the entry that each (row, head) may reuse (eq. 3), and return what it then reads.

    query: before RoPE, `[rows, heads, dim]`, heads and rows may be strided; it is compared in bfloat16, as the ring
    stores it. A row without a ring matches nothing. skips: int32 `[3, rows]`, skip_begin, skip_end and cut of the host
    read; an empty range if nothing is offloaded. Skipped ranges begin at limits.sink. is_matching: int32 `[1]`, 0: the
    layer matches nothing. counts: int64 `[NUM_COUNTS]`, see `Count`, to which this adds. Raises ValueError for another
    shape, dtype or device; contents are trusted.
    """
    ring, rings, cells = own.ring, own.rings, own.cells
    op, (rows, heads, dim), device = "match", query.shape, query.device
    num_rings, _, capacity, _ = ring.queries.shape
    if heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads over {kv_heads} KV heads; wanted a multiple")
    check(op, "ring.queries", ring.queries, (num_rings, heads, capacity, dim), torch.bfloat16, device)
    check(op, "ring.norms", ring.norms, (num_rings, heads, capacity), ring.norms.dtype, device)
    check(op, "ring.origins", ring.origins, (num_rings, heads, capacity), torch.int32, device)
    check(op, "rings", rings, (rows,), torch.int32, device)
    check(op, "cells", cells, (rows,), torch.int64, device)
    check(op, "skips", skips, (3, rows), torch.int32, device)
    check(op, "is_matching", is_matching, (1,), torch.int32, device)
    check(op, "counts", counts, (NUM_COUNTS,), torch.int64, device)
    if not runs_on_triton(query) or rows == 0:
        return match_reference(query, own, skips, limits, is_matching, counts, kv_heads)
    check(op, "query", query, (rows, heads, dim), query.dtype, device)
    if any(not part.is_contiguous() for part in (ring.queries, ring.norms, ring.origins)):
        raise ValueError(f"{op}: a ring of {tuple(ring.queries.shape)}; wanted contiguous")
    programs = max(LEAST_PROGRAMS, PROGRAMS_PER_SM * _num_sms(device))
    splits = max(1, min(-(-programs // (rows * heads)), -(-capacity // BLOCK_ENTRIES)))
    split_entries = -(-capacity // (splits * BLOCK_ENTRIES)) * BLOCK_ENTRIES
    best = torch.empty(rows, heads, splits, dtype=torch.int64, device=device)
    matched = Matched(
        torch.empty(rows, heads, dtype=torch.int32, device=device),
        torch.empty(rows, heads, dtype=torch.float32, device=device),
        torch.empty(3, rows, heads, dtype=torch.int32, device=device),
        torch.empty(rows, heads, dtype=torch.uint8, device=device),
    )
    _match_kernel[(rows, heads, splits)](
        query, ring.queries, ring.norms, ring.origins, rings, cells, skips, is_matching, best, query.stride(0),
        query.stride(1), skips.stride(0), limits.sink, limits.band, limits.max_distance2, limits.max_gap,
        limits.min_gap, limits.max_age, limits.min_cells, split_entries,
        HEADS=heads, CAPACITY=capacity, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), ENTRIES=BLOCK_ENTRIES,
        num_warps=MATCH_WARPS,
    )  # fmt: skip
    group = heads // kv_heads
    _bounds_kernel[(rows, kv_heads)](
        best, ring.origins, rings, cells, skips, is_matching, matched.entries, matched.distances2, matched.bounds,
        matched.wanted, counts, skips.stride(0), limits.sink, limits.band, limits.max_distance2, limits.min_cells,
        splits,
        HEADS=heads, GROUP=group, CAPACITY=capacity, NARROW=triton.next_power_of_2(group),
        SPLITS=triton.next_power_of_2(splits), COUNTS=triton.next_power_of_2(NUM_COUNTS), num_warps=1,
    )  # fmt: skip
    return matched
