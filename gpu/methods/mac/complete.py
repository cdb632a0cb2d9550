"""Complete MAC-Attention (arXiv 2604.00235, eq. (7)): merge what was read with what is reused.

    prefix = far + (hit: the entry's summary; miss: what the host filled)      whole = near + prefix

The prefix is at once the summary of this cell, over `[sink, m + 1 - band)`, without any subtraction, on hits and
misses. It is appended to the ring with the query. If the prefix held more than `max_prefix_share` of the whole, the
entry is marked as one that must not be reused. Invariants: an entry is read before it is overwritten; a side without
mass adds nothing, whatever its output holds. Bytes moved: 4 * dim for each of up to five sides of a (row, head), 2 *
dim for the query, and the ring's entry, read and written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.mac.match import Limits, Matched
from gpu.methods.mac.rings import LEAST_NORM, RowRings
from gpu.operations.arguments import check, check_contiguous, runs_on_triton
from transfer.merge import merge_outputs_reference
from transfer.partial import Partial


def complete_reference(
    near: Partial, far: Partial, filled: Partial | None, query: Tensor, matched: Matched, own: RowRings,
    limits: Limits, is_estimate_row: Tensor,
) -> Partial:  # fmt: skip
    """Compute `complete` in plain torch. Partials may be float64."""
    ring, rings, cells = own.ring, own.rings, own.cells
    wide, capacity = near.out.dtype, ring.norms.shape[-1]
    is_hit, heads = matched.entries >= 0, torch.arange(query.shape[1], device=query.device)
    entries = rings.clamp_min(0).long()[:, None], heads, matched.entries.clamp_min(0).long()  # [rows, heads]
    rest_out = ring.outs[entries].to(wide)
    rest_lse = torch.where(is_hit, ring.lses[entries].to(wide), -torch.inf)
    if filled is not None:
        rest_out = torch.where(is_hit[..., None], rest_out, filled.out)
        rest_lse = torch.where(is_hit, rest_lse, filled.lse)
    prefix_out, prefix_lse = merge_outputs_reference([far.out, rest_out], [far.lse, rest_lse])
    whole = Partial(*merge_outputs_reference([near.out, prefix_out], [near.lse, prefix_lse]))
    is_asked = (matched.bounds[0] < matched.bounds[1]) & (is_estimate_row != 0)[:, None]
    origins = torch.where(is_hit, ring.origins[entries], cells[:, None].int())
    is_estimate = torch.where(is_hit, ring.is_estimate[entries], is_asked.to(torch.uint8))
    rounded = query.to(torch.bfloat16)
    is_reusable = (cells + 1 - limits.band > limits.sink)[:, None] & prefix_lse.isfinite()
    norms, is_refused = rounded.to(wide).square().sum(-1), prefix_lse - whole.lse > limits.max_log_share
    norms = torch.where(is_reusable, torch.where(is_refused, -norms.clamp_min(LEAST_NORM), norms), torch.inf)
    has_ring = rings >= 0
    place = rings[has_ring].long()[:, None], heads, (cells[has_ring] % capacity)[:, None]
    for kept, new in (
        (ring.queries, rounded), (ring.norms, norms), (ring.outs, prefix_out), (ring.lses, prefix_lse),
        (ring.origins, origins), (ring.is_estimate, is_estimate),
    ):  # fmt: skip
        kept[place] = new[has_ring].to(kept.dtype)
    return whole


_LEAST_NORM = tl.constexpr(LEAST_NORM)


@triton.jit
def _add(out_a, lse_a, out_b, lse_b):
    """Return the merged partial of two disjoint sets of cells; out `[dim]`."""
    top = tl.maximum(lse_a, lse_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass_a, mass_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    mass = mass_a + mass_b
    divisor = tl.where(mass == 0.0, 1.0, mass)
    out = tl.where(mass_a == 0.0, 0.0, out_a * (mass_a / divisor))
    out += tl.where(mass_b == 0.0, 0.0, out_b * (mass_b / divisor))
    return out, tl.where(mass == 0.0, float("-inf"), base + tl.log(divisor))


@triton.jit
def _complete_kernel(
    near_out, near_lse, far_out, far_lse, filled_out, filled_lse, query, entries, bounds, rings, cells, is_estimate_row,
    queries, norms, outs, lses, origins, is_estimate, out, lse, query_row, query_head, plane, sink, band,
    max_log_share,
    HEADS: tl.constexpr, CAPACITY: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK_DIM)
    is_column = column < DIM
    at = row * HEADS + head
    ring, cell = tl.load(rings + row).to(tl.int64), tl.load(cells + row)
    entry = tl.load(entries + at)
    is_hit = entry >= 0
    first = (ring * HEADS + head) * CAPACITY
    reused = column < tl.where(is_hit, DIM, 0)  # all of them or none
    rest = tl.load(outs + (first + entry) * DIM + column, mask=reused, other=0.0).to(tl.float32)
    rest_lse = tl.load(lses + first + entry, mask=is_hit, other=float("-inf"))
    origin = tl.load(origins + first + entry, mask=is_hit, other=0)
    holds_sampled = tl.load(is_estimate + first + entry, mask=is_hit, other=0)
    if FILLED:
        is_filled = is_column & (column >= tl.where(is_hit, DIM, 0))
        other = tl.load(filled_out + at * DIM + column, mask=is_filled, other=0.0)
        other_lse = tl.load(filled_lse + at, mask=entry < 0, other=float("-inf"))
        rest = tl.where(is_hit, rest, other)
        rest_lse = tl.where(is_hit, rest_lse, other_lse)
    far = tl.load(far_out + at * DIM + column, mask=is_column, other=0.0)
    near = tl.load(near_out + at * DIM + column, mask=is_column, other=0.0)
    prefix, prefix_lse = _add(far, tl.load(far_lse + at), rest, rest_lse)
    whole, whole_lse = _add(near, tl.load(near_lse + at), prefix, prefix_lse)
    tl.store(out + at * DIM + column, whole, mask=is_column)
    tl.store(lse + at, whole_lse)
    if ring >= 0:
        own = tl.load(query + row * query_row + head * query_head + column, mask=is_column, other=0.0).to(tl.bfloat16)
        wide = own.to(tl.float32)
        is_asked = (tl.load(bounds + at) < tl.load(bounds + plane + at)) & (tl.load(is_estimate_row + row) != 0)
        is_reusable = (cell + 1 - band > sink) & (prefix_lse > float("-inf")) & (prefix_lse < float("inf"))
        to = first + cell % CAPACITY
        tl.debug_barrier()  # the new entry may overwrite the one that was read
        tl.store(queries + to * DIM + column, own, mask=is_column)
        norm, is_refused = tl.sum(wide * wide, 0), prefix_lse - whole_lse > max_log_share
        norm = tl.where(is_refused, -tl.maximum(norm, _LEAST_NORM), norm)
        tl.store(norms + to, tl.where(is_reusable, norm, float("inf")))
        tl.store(outs + to * DIM + column, prefix.to(outs.dtype.element_ty), mask=is_column)
        tl.store(lses + to, prefix_lse)
        tl.store(origins + to, tl.where(is_hit, origin, cell.to(tl.int32)))
        tl.store(is_estimate + to, tl.where(is_hit, holds_sampled, is_asked.to(tl.uint8)))


def complete(
    near: Partial, far: Partial, filled: Partial | None, query: Tensor, matched: Matched, own: RowRings,
    limits: Limits, is_estimate_row: Tensor,
) -> Partial:  # fmt: skip
    """Return the whole attention of each (row, head), float32, and add an entry to each row's ring, at `cells %
    capacity`.

    near, far: read with `matched.bounds`. filled: what the host returned for skipped ranges, or None if it was not
    asked; it may be in pinned host memory, and is ignored for hits. query: before RoPE, `[rows, heads, dim]`, as
    matched. is_estimate_row: uint8 `[rows]`, whether the host samples for the row. A summary's origin is the oldest
    cell at which a part of it was computed. Raises ValueError for another shape, dtype or device.
    """
    ring, rings, cells = own.ring, own.rings, own.cells
    op, (rows, heads, dim), device = "complete", query.shape, query.device
    num_rings, _, capacity, _ = ring.queries.shape
    shape = (num_rings, heads, capacity)
    check(op, "ring.queries", ring.queries, (*shape, dim), torch.bfloat16, device)
    check(op, "ring.outs", ring.outs, (*shape, dim), ring.outs.dtype, device)
    check(op, "ring.norms", ring.norms, shape, ring.norms.dtype, device)
    check(op, "ring.lses", ring.lses, shape, ring.norms.dtype, device)
    check(op, "ring.origins", ring.origins, shape, torch.int32, device)
    check(op, "ring.is_estimate", ring.is_estimate, shape, torch.uint8, device)
    check(op, "rings", rings, (rows,), torch.int32, device)
    check(op, "cells", cells, (rows,), torch.int64, device)
    check(op, "is_estimate_row", is_estimate_row, (rows,), torch.uint8, device)
    check(op, "entries", matched.entries, (rows, heads), torch.int32, device)
    check(op, "bounds", matched.bounds, (3, rows, heads), torch.int32, device)
    for name, side in (("near", near), ("far", far), ("filled", filled)):
        if side is not None and (side.out.shape != query.shape or side.lse.shape != query.shape[:2]):
            got = f"{tuple(side.out.shape)} and {tuple(side.lse.shape)}"
            raise ValueError(f"{op}: {name} is {got}; wanted {tuple(query.shape)} and {(rows, heads)}")
    if not runs_on_triton(query) or rows == 0:
        return complete_reference(near, far, filled, query, matched, own, limits, is_estimate_row)
    check(op, "query", query, (rows, heads, dim), query.dtype, device)
    kept = (ring.queries, ring.norms, ring.outs, ring.lses, ring.origins, ring.is_estimate)
    sides = [tensor for side in (near, far, filled or far) for tensor in (side.out, side.lse)]
    for tensor in (*kept, *sides, matched.entries, matched.bounds):
        check_contiguous(op, "an argument", tensor)
    if any(side.dtype != torch.float32 for side in sides):
        raise ValueError(f"{op}: partials of {[side.dtype for side in sides]}; wanted float32")
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
    _complete_kernel[(rows, heads)](
        *sides, query, matched.entries, matched.bounds, rings, cells, is_estimate_row, *kept, out, lse, query.stride(0),
        query.stride(1), rows * heads, limits.sink, limits.band, limits.max_log_share,
        HEADS=heads, CAPACITY=capacity, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), FILLED=filled is not None,
        num_warps=1,
    )  # fmt: skip
    return Partial(out, lse)
