"""Score all offloaded tokens of a layer by their keys in few bits, and count the scores by size.

logit of a token = (R q . code * scale + q . centre) / sqrt(dim), with the rotation R of the index. Queries are rotated
once. A KV head's index is read once for all query heads of its group. A token's score is the sum, over these heads, of
its share of the whole softmax, resident tokens included. Bytes: the index, once, and two bytes per query head and
token, written once and read twice.

Products are computed in integers. A query is rounded to 32,000 steps, which is finer than float16 for large numbers. A
step number has two digits in int8, in columns of their own: tiles of the tensor cores have eight columns, and a group
of four heads would otherwise use half of them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.indexed import BINS, SPLIT_TOKENS
from gpu.methods.indexed.codes import decode_reference, plane_bytes
from gpu.methods.indexed.ring import Index, Layout, Work
from gpu.methods.indexed.unpacking import exp2_of, log2_of, plane_assembly, plane_of, thirds_of, twice_of_zero
from gpu.operations.arguments import runs_on_triton

TILE, WARPS = 128, 2  # tokens that are scored at once, and the warps that do it
MOST_STEPS = 16_000.0  # step number of a query's largest entry; two digits of int8 hold 16,319
ROTATED_COLUMNS = 32  # columns of a KV head's rotated queries that one program computes
ELSEWHERE = 1e30  # resident lse of a query head that reads nothing here: no token gets a share of its softmax
LOG2E = 1.4426950408889634
BINS_PER_OCTAVE = 20
LOWEST_OCTAVE = -20  # scores of 2^-20 and less share the lowest bin

_SPLIT, _BINS = tl.constexpr(SPLIT_TOKENS), tl.constexpr(BINS)
_LOG2E, _MOST_STEPS = tl.constexpr(LOG2E), tl.constexpr(MOST_STEPS)
_LEAST = tl.constexpr(-1e30)  # below every logit, and finite
_PER_OCTAVE, _LOWEST = tl.constexpr(BINS_PER_OCTAVE), tl.constexpr(LOWEST_OCTAVE)


@dataclass(frozen=True, slots=True)
class RingStep:
    """The rows of a step that read by a ring, at most one row per ring.

    rows, rings: int32 `[entries]`, a row and its ring. Row -1 marks an unused entry, whatever its ring, since a
        captured step has a fixed number of entries. Kernels have programs for each entry.
    num_tokens: int32 `[places]`, tokens with an index; 0 if no query head of the KV head reads them.
    budgets: int32 `[places]`, how many of these tokens the KV head reads exactly.
    page_slots: int32 `[rings]`, the slot whose pages hold these tokens, -1: they are in host memory; None: all are.

    Kernels address entries by number, so each tensor is contiguous. (An expanded one may look right in torch: of a
    single ring, `[1, heads].flatten()` is a view of one number.)
    """

    rows: Tensor
    rings: Tensor
    num_tokens: Tensor
    budgets: Tensor
    page_slots: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "rings", "num_tokens", "budgets", "page_slots"):
            own = getattr(self, name)
            assert own is None or own.is_contiguous(), f"a step's {name}, of strides {own.stride()}; wanted contiguous"

    @property
    def num_entries(self) -> int:
        return self.rows.shape[0]

    def list_places(self, kv_heads: int) -> list[tuple[int, int, int]]:
        """Return the places that read something, each with its row and its number of tokens."""
        counts, entries = self.num_tokens.tolist(), zip(self.rings.tolist(), self.rows.tolist(), strict=True)
        own = [(ring * kv_heads + kv_head, row) for ring, row in entries if row >= 0 for kv_head in range(kv_heads)]
        return [(place, row, counts[place]) for place, row in own if counts[place]]


def bin_of(scores: Tensor) -> Tensor:
    """Return the histogram bins of scores, int64."""
    octaves = torch.log2(scores.clamp_min(2.0 ** (LOWEST_OCTAVE - 1)))
    return ((octaves - LOWEST_OCTAVE) * BINS_PER_OCTAVE).floor().clamp(0, BINS - 1).long()


def group_shape(query: Tensor, kv_heads: int) -> tuple[int, int]:
    """Return the number of query heads per KV head, and the head size."""
    return query.shape[1] // kv_heads, query.shape[2]


def centre_terms(query: Tensor, index: Index, place: int, row: int, layout: Layout) -> Tensor:
    """Return q . centre / sqrt(dim) of a place's query heads, float32 `[group]`."""
    group, dim = group_shape(query, layout.kv_heads)
    kv_head = place % layout.kv_heads
    own = query[row, kv_head * group : (kv_head + 1) * group].float()
    return own @ index.centres[place] * dim**-0.5


def score_tokens_reference(query: Tensor, resident_lse: Tensor, index: Index, work: Work, step: RingStep,
                           layout: Layout) -> None:  # fmt: skip
    """Compute `score_tokens` in plain torch."""
    group, dim = group_shape(query, layout.kv_heads)
    for place, row, num_tokens in step.list_places(layout.kv_heads):
        first = place % layout.kv_heads * group
        heads = slice(first, first + group)
        codes, scales = (index.rows_of(one, place, num_tokens) for one in (index.codes, index.scales))
        keys = decode_reference(codes, scales, layout.key_bits)
        rotated = query[row, heads].float() @ layout.rotation * dim**-0.5
        work.rotated[place] = rotated.half()
        logits = rotated @ keys.T
        work.logits[place, :num_tokens] = logits.T.half()
        work.shift[place] = centre_terms(query, index, place, row, layout)
        logits = work.logits[place, :num_tokens].T.float() + work.shift[place][:, None]
        total = torch.logaddexp(logits.logsumexp(-1), resident_lse[row, heads].float())
        work.total_lse[place] = total
        scores = (logits - total[:, None]).exp().sum(0)
        bins = bin_of(scores)
        work.bins[place, :num_tokens] = bins.short()
        work.histogram[place] = torch.bincount(bins, minlength=BINS).int()


@triton.jit
def place_of(rows, rings, KV_HEADS: tl.constexpr):
    """Return this program's row, -1: unused, its ring, and the place of its KV head there, int64."""
    entry, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    row, ring = tl.load(rows + entry), tl.load(rings + entry).to(tl.int64)
    return row, ring, ring * KV_HEADS + kv_head


@triton.jit
def _rotate_kernel(
    query, rotation, centres, rows, rings, num_tokens, rotated, shifts, histogram, row_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the rotated queries of one place. The first program also clears the place's histogram."""
    row, _, place = place_of(rows, rings, KV_HEADS)
    kv_head = place % KV_HEADS
    if (row < 0) | (tl.load(num_tokens + place) <= 0):
        return
    member, column = tl.arange(0, SIZE), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = query + row.to(tl.int64) * row_stride + (kv_head * GROUP + member)[:, None] * DIM
    out, shift = tl.zeros([SIZE, COLUMNS], tl.float32), tl.zeros([SIZE], tl.float32)
    for first in range(0, DIM, PART):
        dim = first + tl.arange(0, PART)
        numbers = tl.load(own + dim[None, :], mask=(member < GROUP)[:, None] & (dim < DIM)[None, :], other=0.0)
        numbers = numbers.to(tl.float32) / tl.sqrt(DIM * 1.0)
        inside = (dim < DIM)[:, None] & (column < DIM)[None, :]
        turned = tl.load(rotation + dim[:, None] * DIM + column[None, :], mask=inside, other=0.0)
        out += tl.sum(numbers[:, :, None] * turned[None, :, :], 1)
        centre = tl.load(centres + place * DIM + dim, mask=dim < DIM, other=0.0)
        shift += tl.sum(numbers * centre[None, :], 1)
    to = place * GROUP + member
    is_number = (member < GROUP)[:, None] & (column < DIM)[None, :]
    tl.store(rotated + to[:, None] * DIM + column[None, :], out.to(tl.float16), mask=is_number)
    if tl.program_id(1) == 0:
        tl.store(histogram + place * _BINS + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))
        tl.store(shifts + to, shift, mask=member < GROUP)


@triton.jit
def _query_plane(rotated, place, PLANE: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
                 GROUP: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Return one plane of a place's rotated queries, each one twice, float32 `[WIDTH, 2 * SIZE]`."""
    byte, member = tl.arange(0, WIDTH)[:, None], tl.arange(0, 2 * SIZE)[None, :] // 2
    at = rotated + (place * GROUP + member) * DIM + PLANE * W + byte
    return tl.load(at, mask=(byte < W) & (member < GROUP), other=0.0).to(tl.float32)


@triton.jit
def _steps_of(query, per_unit):
    """Round queries to whole steps, int32."""
    return tl.floor(query * per_unit[None, :] + 0.5).to(tl.int32)


@triton.jit
def _digits_of(steps, COLUMNS: tl.constexpr):
    """Return the digits of step numbers, int8: even columns have the higher digit, which counts 128, odd ones the
    lower.
    """
    high = (steps + 64) >> 7
    return tl.where(tl.arange(0, COLUMNS)[None, :] % 2 == 0, high, steps - (high << 7)).to(tl.int8)


@triton.jit
def page_of(table, ring, split, kv_head, splits, KV_HEADS: tl.constexpr):
    """Return the index page of a ring's split, for this KV head, int64: pages are counted per KV head."""
    return tl.load(table + ring * splits + split).to(tl.int64) * KV_HEADS + kv_head


@triton.jit
def _score_kernel(
    rotated, shifts, codes, scales, table, rows, rings, num_tokens, logits, split_lse, tokens, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Score one split of one place, with queries as integers of two int8 digits."""
    row, ring, place = place_of(rows, rings, KV_HEADS)
    split = tl.program_id(1)
    count, begin = tl.load(num_tokens + place), split * _SPLIT
    if (row < 0) | (begin >= count):
        return
    page = page_of(table, ring, split, place % KV_HEADS, splits, KV_HEADS)
    COLUMNS: tl.constexpr = 2 * SIZE
    first = _query_plane(rotated, place, 0, W, WIDTH, DIM, GROUP, SIZE)
    second, third, fourth = first, first, first
    most = tl.max(tl.abs(first), 0)
    if BITS <= 4:
        second = _query_plane(rotated, place, 1, W, WIDTH, DIM, GROUP, SIZE)
        most = tl.maximum(most, tl.max(tl.abs(second), 0))
    if BITS <= 3:
        third = _query_plane(rotated, place, 2, W, WIDTH, DIM, GROUP, SIZE)
        fourth = _query_plane(rotated, place, 3, W, WIDTH, DIM, GROUP, SIZE)
        most = tl.maximum(most, tl.maximum(tl.max(tl.abs(third), 0), tl.max(tl.abs(fourth), 0)))
    per_unit = tl.where(most > 0, _MOST_STEPS / most, 0.0)
    steps = _steps_of(first, per_unit)
    total, first_digits = tl.sum(steps, 0), _digits_of(steps, COLUMNS)
    second_digits, third_digits, fourth_digits = first_digits, first_digits, first_digits
    if BITS <= 4:
        steps = _steps_of(second, per_unit)
        total += tl.sum(steps, 0)
        second_digits = _digits_of(steps, COLUMNS)
    if BITS <= 3:
        steps = _steps_of(third, per_unit)
        total += tl.sum(steps, 0)
        third_digits = _digits_of(steps, COLUMNS)
        steps = _steps_of(fourth, per_unit)
        total += tl.sum(steps, 0)
        fourth_digits = _digits_of(steps, COLUMNS)
    offset, _ = tl.split(tl.reshape(total * twice_of_zero(BITS), [SIZE, 2]))
    unit, _ = tl.split(tl.reshape(most / (2.0 * _MOST_STEPS), [SIZE, 2]))  # unit of numbers that are doubled below
    byte, member, lane = tl.arange(0, WIDTH)[None, :], tl.arange(0, SIZE), tl.arange(0, TILE)
    own_codes, own_scales = codes + page * _SPLIT * ROW, scales + page * _SPLIT
    own_logits = logits + place * tokens * GROUP
    most = tl.full([2, 8, SIZE], _LEAST, tl.float32)
    mass = tl.zeros([2, 8, SIZE], tl.float32)
    coming = tl.load(own_scales + lane, mask=begin + lane < count, other=0.0)
    for at in range(begin, tl.minimum(begin + _SPLIT, count), TILE):
        token = at + lane
        is_there, cell = token < count, at - begin + lane
        scale = coming.to(tl.float32)
        coming = tl.load(own_scales + cell + TILE, mask=(cell + TILE < _SPLIT) & (token + TILE < count), other=0.0)
        own_row = own_codes + cell[:, None] * ROW
        packed = tl.load(own_row + byte, mask=byte < W, other=0)
        if BITS == 3:
            thirds = tl.load(own_row + W + byte // 2, mask=byte < W, other=0)
            product = tl.dot(thirds_of(packed, thirds, byte, 0), first_digits, out_dtype=tl.int32)
            product = tl.dot(thirds_of(packed, thirds, byte, 1), second_digits, product, out_dtype=tl.int32)
            product = tl.dot(thirds_of(packed, thirds, byte, 2), third_digits, product, out_dtype=tl.int32)
            product = tl.dot(thirds_of(packed, thirds, byte, 3), fourth_digits, product, out_dtype=tl.int32)
        else:
            product = tl.dot(plane_of(packed, 0, BITS, ASSEMBLY), first_digits, out_dtype=tl.int32)
            if BITS <= 4:
                product = tl.dot(plane_of(packed, 1, BITS, ASSEMBLY), second_digits, product, out_dtype=tl.int32)
            if BITS == 2:
                product = tl.dot(plane_of(packed, 2, BITS, ASSEMBLY), third_digits, product, out_dtype=tl.int32)
                product = tl.dot(plane_of(packed, 3, BITS, ASSEMBLY), fourth_digits, product, out_dtype=tl.int32)
        high, low = tl.split(tl.reshape(product, [TILE, SIZE, 2]))
        twice = (high << 8) + (low << 1) + offset[None, :]
        rounded = (twice.to(tl.float32) * unit[None, :] * scale[:, None]).to(tl.float16)
        to = own_logits + token[:, None] * GROUP + member[None, :]
        tl.store(to, rounded, mask=is_there[:, None] & (member < GROUP)[None, :])
        logit = tl.where(is_there[:, None], rounded.to(tl.float32) * _LOG2E, float("-inf"))
        logit = tl.reshape(logit, [TILE // 32, 2, 2, 8, SIZE])  # a thread has those along the first and third axis
        higher = tl.maximum(most, tl.max(tl.max(logit, 0), 1))
        parts = exp2_of(logit - higher[None, :, None, :, :])
        mass = mass * exp2_of(most - higher) + tl.sum(tl.sum(parts, 0), 1)
        most = higher
    most, mass = tl.reshape(most, [16, SIZE]), tl.reshape(mass, [16, SIZE])
    higher = tl.max(most, 0)
    mass = tl.sum(mass * exp2_of(most - higher[None, :]), 0)
    shift = tl.load(shifts + place * GROUP + member, mask=member < GROUP, other=0.0)
    to = split_lse + (place * splits + split) * GROUP + member
    tl.store(to, (higher + tl.log2(mass)) / _LOG2E + shift, mask=member < GROUP)


@triton.jit
def logits_of(logits, token, is_there, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """Return tokens' logits for each query head, float16 `[tokens, SIZE]`; -inf where `is_there` is false.

    logits: pointer to those of the place.
    """
    member = tl.arange(0, SIZE)[None, :]
    at = logits + token[:, None] * GROUP + member
    return tl.load(at, mask=is_there[:, None] & (member < GROUP), other=float("-inf"))


@triton.jit
def shares_of(logit, less):
    """Return tokens' shares of each query head's softmax, float32.

    less: the lse of the whole softmax minus the centre's term, `[SIZE]`.
    """
    return exp2_of(logit.to(tl.float32) * _LOG2E - (less * _LOG2E)[None, :])


@triton.jit
def bins_of(score):
    """Return the histogram bins of scores, int32."""
    octave = log2_of(tl.maximum(score, 4.76837158203125e-07))  # 2^-21
    number = tl.floor((octave - _LOWEST) * _PER_OCTAVE)
    return tl.minimum(tl.maximum(number, 0.0), _BINS - 1.0).to(tl.int32)


@triton.jit
def _count_kernel(
    resident_lse, shifts, rows, rings, num_tokens, logits, split_lse, total_lse, histogram, bins, tokens, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute and count the bins of one split of one place.

    The first split's program also stores the lse over all tokens.
    """
    row, _, place = place_of(rows, rings, KV_HEADS)
    kv_head, split = place % KV_HEADS, tl.program_id(1)
    count, begin = tl.load(num_tokens + place), split * _SPLIT
    if (row < 0) | (begin >= count):
        return
    member = tl.arange(0, SIZE)
    token = begin + tl.arange(0, _SPLIT)
    logit = logits_of(logits + place * tokens * GROUP, token, token < count, GROUP, SIZE)
    shift = tl.load(shifts + place * GROUP + member, mask=member < GROUP, other=0.0)
    side, head = tl.arange(0, SPLITS)[:, None], member[None, :]
    of_splits = split_lse + (place * splits + side) * GROUP + head
    lse = tl.load(of_splits, mask=(side * _SPLIT < count) & (head < GROUP), other=float("-inf"))
    near = tl.load(resident_lse + row * KV_HEADS * GROUP + kv_head * GROUP + member, mask=member < GROUP, other=0.0)
    most = tl.maximum(tl.max(lse, 0), near)
    total = most + tl.log(tl.sum(tl.exp(lse - most[None, :]), 0) + tl.exp(near - most))
    if split == 0:
        tl.store(total_lse + place * GROUP + member, total, mask=member < GROUP)
    score = tl.sum(shares_of(logit, total - shift), 1)
    own = bins_of(score)
    tl.store(bins + place * tokens + token, own.to(tl.int16))
    counted, number = tl.histogram(own, _BINS), tl.arange(0, _BINS)
    tl.atomic_add(histogram + place * _BINS + number, counted, mask=(counted > 0) & (number > 0), sem="relaxed")


def score_tokens(query: Tensor, resident_lse: Tensor, index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Score the offloaded tokens of every ring's row in one layer.

    Fills `work.logits`, `total_lse`, `bins` and `histogram`.

    The histogram's first bin has no meaning. query: `[rows, heads, dim]`, after RoPE. resident_lse: float32 `[rows,
    heads]`, of what is read on the device, or ELSEWHERE. index: of the layer.
    """
    if not runs_on_triton(index.codes):
        score_tokens_reference(query, resident_lse, index, work, step, layout)
        return
    group, dim = group_shape(query, layout.kv_heads)
    programs, tokens = step.num_entries * layout.kv_heads, work.logits.shape[1]
    _, width = plane_bytes(dim, layout.key_bits)
    splits, size = work.split_lse.shape[1], triton.next_power_of_2(group)
    shape = {"KV_HEADS": layout.kv_heads, "GROUP": group}
    wide = triton.next_power_of_2(dim)
    columns = min(ROTATED_COLUMNS, wide)
    _rotate_kernel[(programs, wide // columns)](
        query, layout.rotation, index.centres, step.rows, step.rings, step.num_tokens, work.rotated, work.shift,
        work.histogram, query.stride(0), SIZE=size, DIM=dim, COLUMNS=columns,
        PART=min(wide, max(4, 128 // size) * wide // columns), num_warps=4, **shape,
    )  # fmt: skip
    _score_kernel[(programs, splits)](
        work.rotated, work.shift, index.codes, index.scales, index.table, step.rows, step.rings, step.num_tokens,
        work.logits, work.split_lse, tokens, splits, SIZE=max(4, size), DIM=dim, ROW=index.codes.shape[3], W=width,
        WIDTH=max(32, triton.next_power_of_2(width)), BITS=layout.key_bits, TILE=TILE,
        ASSEMBLY=plane_assembly(layout.key_bits), num_warps=WARPS, **shape,
    )  # fmt: skip
    _count_kernel[(programs, splits)](
        resident_lse, work.shift, step.rows, step.rings, step.num_tokens, work.logits, work.split_lse,
        work.total_lse, work.histogram, work.bins, tokens, splits, SIZE=size, SPLITS=triton.next_power_of_2(splits),
        num_warps=4, **shape,
    )  # fmt: skip
