"""Report the error of each step's answers: a bound for every query head, and the data that audits compare.

**The bound.** A head's answer is out = sum of p(t) v(t) over all tokens. Resident and chosen tokens enter it exactly.
Any other token enters it with two errors:

- Its key is rounded in steps s(t). Each of the key's dimensions then errs evenly within a step, with variance s^2 / 12,
  so its logit errs with variance V(t) = |q|^2 s(t)^2 / (12 dim), and p(t) by a factor whose variance is exp(V) - 1.
- Its value is rounded, less its block's centre. The rounded value u(t) has the whole of the value's length along the
  value (`codes`), so its error is orthogonal to the value and has the square D |u(t)|^2, with D = `VALUE_LOSS`.

Errors of different tokens are independent, so their squares add up. With sums over the estimated tokens:

    E |error of out|^2 = sum of p(t)^2 |u(t)|^2 (D + exp(V(t)) - 1)

|u(t)|^2 is dim * `NUMBER_SQUARE` * scale(t)^2, as the numbers of a rotated value are normally distributed.
`work.rest_square` is this sum without the factor. p(t) is approximated by the token's estimated share, and the distance
between a value and the answer, by which an error of p(t) counts, by |u(t)|. The square root of the sum, over |out|, is
the expected relative error; the device's own rounding is added (ROUNDING). This leaves out errors that tokens have in
common, such as a common direction of their values' errors. So the bound is the expected error times a running factor of
the layer, which audits set so that 95 % of true errors lie below the bound (`auditing`).

If some query head of a KV head has a bound above epsilon, the KV head's budget is doubled for the next step. It is
halved again once all bounds are below half of epsilon. Each ring has its own epsilon, so one graph serves requests with
different ones.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.indexed import MASS_UNIT, SPLIT_TOKENS, report_arrays
from gpu.methods.indexed.codes import NUMBER_SQUARE
from gpu.methods.indexed.ring import Layout, Work
from gpu.methods.indexed.scoring import RingStep, group_shape, place_of
from gpu.model.architecture import Architecture
from gpu.operations.arguments import runs_on_triton
from transfer.allocation import allocate_all
from transfer.partial import Partial, merge

ROUNDING = 2.0**-9  # relative error of an output in bfloat16
NO_LIMIT = torch.finfo(torch.float32).max  # an epsilon that no error exceeds
UNREPORTED = -1.0
MOST_DOUBLINGS = 7  # from the smallest budget to the largest
READ_MASS, BOUND, OVER = range(3)  # columns of `Report.of_layers`
HEADS, ESTIMATED, READ, STEPS_OVER, GENERATION = range(5)  # columns of `Report.of_rings`

_SPLIT, _MASS_UNIT = tl.constexpr(SPLIT_TOKENS), tl.constexpr(MASS_UNIT)
_ROUNDING, _UNREPORTED, _MOST_DOUBLINGS = (tl.constexpr(one) for one in (ROUNDING, UNREPORTED, MOST_DOUBLINGS))
_READ_MASS, _BOUND, _OVER = tl.constexpr(READ_MASS), tl.constexpr(BOUND), tl.constexpr(OVER)
_HEADS, _ESTIMATED, _READ = tl.constexpr(HEADS), tl.constexpr(ESTIMATED), tl.constexpr(READ)
_STEPS_OVER = tl.constexpr(STEPS_OVER)
_OF_RINGS = tl.constexpr(5)


@dataclass(frozen=True, slots=True)
class Report:
    """What steps record about their errors.

    By layer, of the last step; with an axis of layers in front, or of one layer:
    queries, near_out, out: float32 `[places, group, dim]`: the query, the resident partial, and the answer.
    near_lse: float32 `[places, group]`, of the resident partial.
    error: float32 `[places, group]`, the answer's expected relative error; UNREPORTED: the head read nothing by index.
    doublings: int32 `[places]`, of budgets. factor: float32 `[]`, of bounds.
    of_layers: int64 `[NUM_OF_LAYERS]`, sums since the start.

    For all layers together:
    of_rings: int64 `[rings, NUM_OF_RINGS]`, sums since the ring was assigned; GENERATION counts the assignments.
    exceeds: int32 `[places]`, whether a bound of the layer that was reported last is above epsilon.
    is_over: int32 `[rings + 1]`, whether a bound of the present step is; the last entry is for rows without a ring.
    limits: float32 `[rings]`, epsilon, or NO_LIMIT.
    """

    queries: Tensor
    near_out: Tensor
    near_lse: Tensor
    out: Tensor
    error: Tensor
    doublings: Tensor
    of_layers: Tensor
    of_rings: Tensor
    exceeds: Tensor
    is_over: Tensor
    limits: Tensor
    factor: Tensor

    def layer(self, place: int) -> "Report":
        whole = ("of_rings", "exceeds", "is_over", "limits")
        own = {each.name: getattr(self, each.name) for each in fields(Report)}
        return Report(**{name: one if name in whole else one[place] for name, one in own.items()})


def new_report(shape: Architecture, num_layers: int, num_rings: int, device: torch.device) -> Report:
    """Return an empty report without limits."""
    report = Report(**allocate_all(report_arrays(shape, num_layers, num_rings), device))
    report.limits.fill_(NO_LIMIT)
    return report


def report_errors_reference(query: Tensor, near: Partial, found: Partial, wanted: Tensor, work: Work, report: Report,
                            step: RingStep, layout: Layout) -> None:  # fmt: skip
    """Compute `report_errors` in plain torch."""
    group, dim = group_shape(query, layout.kv_heads)
    answer, factor = merge(near, found), float(report.factor)
    report.error.unflatten(0, (-1, layout.kv_heads))[step.rings[step.rows >= 0].long()] = UNREPORTED
    for place, row, _ in step.list_places(layout.kv_heads):
        ring, kv_head = divmod(place, layout.kv_heads)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        own = wanted[row, heads] != 0
        own_lse, scale = answer.lse[row, heads], dim * NUMBER_SQUARE[layout.value_bits]
        of_total = (work.total_lse[place] - own_lse).exp()
        expected = scale * work.rest_square[place].sum(0) * of_total.square()
        lengths = answer.out[row, heads].square().sum(-1).clamp_min(1e-30)
        error = (expected / lengths + ROUNDING**2).sqrt()
        report.queries[place] = query[row, heads].float()
        report.near_out[place], report.near_lse[place] = near.out[row, heads], near.lse[row, heads]
        report.out[place], report.error[place] = answer.out[row, heads], torch.where(own, error, UNREPORTED)
        estimated = work.rest_mass[place].sum(0) * of_total
        read = ((found.lse[row, heads] - own_lse).exp() - estimated).clamp_min(0.0)
        estimated, read, bound = estimated[own], read[own], factor * error[own]
        limit = float(report.limits[ring])
        is_over = bound > limit
        report.of_layers[READ_MASS] += (read * MASS_UNIT).long().sum()
        report.of_layers[BOUND] += (bound * MASS_UNIT).long().sum()
        report.of_layers[OVER] += is_over.sum()
        report.of_rings[ring, HEADS] += own.sum()
        report.of_rings[ring, ESTIMATED] += (estimated * MASS_UNIT).long().sum()
        report.of_rings[ring, READ] += (read * MASS_UNIT).long().sum()
        report.exceeds[place] = int(is_over.any())
        if bool(is_over.any()):
            report.of_rings[ring, STEPS_OVER] += 1 - report.is_over[ring]
            report.is_over[ring] = 1
            report.doublings[place] = min(int(report.doublings[place]) + 1, MOST_DOUBLINGS)
        elif bool((bound < limit / 2).all()):
            report.doublings[place] = max(int(report.doublings[place]) - 1, 0)


@triton.jit
def _report_kernel(
    query, near_out, near_lse, found_out, found_lse, wanted, total_lse, rest_mass, rest_square, rows, rings,
    num_tokens, queries, kept_out, kept_lse, outs, errors, doublings, of_layers, of_rings, exceeds, is_over, limits,
    factor, row_stride, splits, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Report one place: all query heads of one KV head of a ring."""
    row, ring, place = place_of(rows, rings, KV_HEADS)
    row, kv_head, count = row.to(tl.int64), place % KV_HEADS, tl.load(num_tokens + place)
    if row < 0:
        return
    member, column, split = tl.arange(0, SIZE), tl.arange(0, WIDE)[None, :], tl.arange(0, SPLITS)[:, None]
    is_head = member < GROUP
    is_number = is_head[:, None] & (column < DIM)
    head, to = (row * KV_HEADS + kv_head) * GROUP + member, place * GROUP + member
    if count <= 0:
        tl.store(errors + to, tl.zeros([SIZE], tl.float32) + _UNREPORTED, mask=is_head)
        return
    is_own = is_head & (tl.load(wanted + head, mask=is_head, other=0) != 0)
    near = tl.load(near_lse + head, mask=is_head, other=0.0)
    found = tl.load(found_lse + head, mask=is_head, other=0.0)
    most = tl.maximum(near, found)
    of_near, of_found = tl.exp(near - most), tl.exp(found - most)
    sums = of_near + of_found
    own_lse = most + tl.log(sums)
    near_rows = tl.load(near_out + head[:, None] * DIM + column, mask=is_number, other=0.0)
    found_rows = tl.load(found_out + head[:, None] * DIM + column, mask=is_number, other=0.0)
    out = (near_rows * of_near[:, None] + found_rows * of_found[:, None]) / sums[:, None]
    own = tl.load(
        query + row * row_stride + (kv_head * GROUP + member)[:, None] * DIM + column, mask=is_number, other=0.0
    )
    tl.store(queries + to[:, None] * DIM + column, own.to(tl.float32), mask=is_number)
    tl.store(kept_out + to[:, None] * DIM + column, near_rows, mask=is_number)
    tl.store(outs + to[:, None] * DIM + column, out, mask=is_number)
    tl.store(kept_lse + to, near, mask=is_head)

    at = (place * splits + split) * GROUP + member[None, :]
    is_split = (split * _SPLIT < count) & is_head[None, :]
    of_total = tl.exp(tl.load(total_lse + to, mask=is_own, other=0.0) - tl.where(is_own, own_lse, 0.0))
    mass = tl.sum(tl.load(rest_mass + at, mask=is_split, other=0.0), 0) * of_total
    square = tl.sum(tl.load(rest_square + at, mask=is_split, other=0.0), 0) * of_total * of_total
    length = tl.maximum(tl.sum(out * out, 1), 1e-30)
    error = tl.sqrt(square * scale / length + _ROUNDING * _ROUNDING)
    tl.store(errors + to, tl.where(is_own, error, _UNREPORTED), mask=is_head)
    bound = tl.where(is_own, error * tl.load(factor), 0.0)
    read = tl.where(is_own, tl.maximum(of_found / sums - mass, 0.0), 0.0)
    mass = tl.where(is_own, mass, 0.0)
    limit = tl.load(limits + ring)
    num_over = tl.sum((bound > limit).to(tl.int64), 0)
    read_mass, rest = tl.sum((read * _MASS_UNIT).to(tl.int64), 0), tl.sum((mass * _MASS_UNIT).to(tl.int64), 0)
    tl.atomic_add(of_layers + _READ_MASS, read_mass, sem="relaxed")
    tl.atomic_add(of_layers + _BOUND, tl.sum((bound * _MASS_UNIT).to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(of_layers + _OVER, num_over, sem="relaxed")
    sums_of_ring = of_rings + ring * _OF_RINGS
    tl.atomic_add(sums_of_ring + _HEADS, tl.sum(is_own.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(sums_of_ring + _ESTIMATED, rest, sem="relaxed")
    tl.atomic_add(sums_of_ring + _READ, read_mass, sem="relaxed")
    before = tl.load(doublings + place)
    tl.store(exceeds + place, (num_over > 0).to(tl.int32))
    if num_over > 0:
        is_first = tl.atomic_max(is_over + ring, 1, sem="relaxed") == 0
        tl.atomic_add(sums_of_ring + _STEPS_OVER, is_first.to(tl.int64), sem="relaxed")
        tl.store(doublings + place, tl.minimum(before + 1, _MOST_DOUBLINGS))
    elif tl.max(bound, 0) < limit / 2:
        tl.store(doublings + place, tl.maximum(before - 1, 0))


def report_errors(query: Tensor, near: Partial, found: Partial, wanted: Tensor, work: Work, report: Report,
                  step: RingStep, layout: Layout) -> None:  # fmt: skip
    """Record one layer's errors of rows with a ring. Errors above a ring's limit are counted, and double the budget.

    query: `[rows, heads, dim]`. near: the resident partial. found: what `join_parts` returned for `wanted`. report: of
    the layer; its `is_over` is 0 before the step's first layer.
    """
    if not runs_on_triton(work.logits):
        report_errors_reference(query, near, found, wanted, work, report, step, layout)
        return
    group, dim = group_shape(query, layout.kv_heads)
    splits = work.rest_mass.shape[1]
    _report_kernel[(step.num_entries * layout.kv_heads,)](
        query, near.out.contiguous(), near.lse.contiguous(), found.out, found.lse, wanted, work.total_lse,
        work.rest_mass, work.rest_square, step.rows, step.rings, step.num_tokens, report.queries,
        report.near_out, report.near_lse, report.out, report.error, report.doublings, report.of_layers,
        report.of_rings, report.exceeds, report.is_over, report.limits, report.factor, query.stride(0), splits,
        dim * NUMBER_SQUARE[layout.value_bits],
        KV_HEADS=layout.kv_heads, GROUP=group, SIZE=triton.next_power_of_2(group), DIM=dim,
        WIDE=triton.next_power_of_2(dim), SPLITS=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
