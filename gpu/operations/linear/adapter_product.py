"""Add LoRA adapters to a matrix's product, for rows with different adapters; steps of few rows have kernels.

All adapters of the matrix are stacked in `down` and in `up`; a row keeps the columns of its own adapter (LoRA, arXiv
2106.09685). The kernels read only each row's own columns, as Punica's do (arXiv 2310.18547). Floor: the bytes of the
adapters that rows have, once per row. At a few microseconds per matrix, launches are the cost. So an input is lowered
(multiplied by down) where it is normed. It is raised (multiplied by up) where the product is added to something or
gated, which also lowers the result for the next matrix.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Activation
from gpu.operations.arguments import check, check_contiguous, check_dtype, runs_on_triton
from gpu.operations.rms_norm import check_norm, normed_row, rms_norm
from gpu.operations.swiglu import activated, swiglu

MOST_TOKENS = 16  # with more, the library's products are used
_DOWN_BLOCK = 4096  # numbers of the inner dimension that 8 warps take at once
_UP_BLOCK, _UP_WARPS = 512, 4  # rows of a program, and its warps
_GATE_BLOCK, _GATE_WARPS = 256, 4
_COLUMN_BLOCK = 16  # columns that are raised at once
_FEWEST_PROGRAMS = 128  # if programs of `_adapter_down_kernel` have more than one column


class AdapterRange(NamedTuple):
    """Rows `[begin, begin + rows)` of a matrix, which `columns` columns of its adapters change."""

    begin: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """All adapters of one matrix. Columns are ordered by range, and within a range by adapter, numbered from 1 on.

    down: `[columns, inner]`.
    up: `[columns, most rows of a range]`, multiplied by the adapters' gains.
    owners: int64 `[columns]`, the adapter of each column.
    spans: int32 `[1 + adapters, ranges, 2]`, each adapter's first column in a range, and its number of columns there;
        adapter 0 has none.
    ranges: all rows of the matrix, also those that no adapter changes.
    most: the most columns of one adapter in a range.
    """

    down: Tensor
    up: Tensor
    owners: Tensor
    spans: Tensor
    ranges: tuple[AdapterRange, ...]
    most: int

    @property
    def inner(self) -> int:
        return self.down.shape[1]

    @property
    def num_rows(self) -> int:
        return self.ranges[-1].begin + self.ranges[-1].rows

    @property
    def width(self) -> int:
        """Return how many columns kernels use for a token in a range, a power of two."""
        return triton.next_power_of_2(self.most)


class AdapterRows:
    """The adapter of each token. ids: int64 `[tokens, 1]`, 0: none."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self._spans: dict[int, Tensor] = {}

    def spans(self, adapters: StackedAdapters) -> Tensor:
        """Return the tokens' own columns, int32 `[tokens, ranges, 2]`, looked up once for all matrices with the same
        spans.
        """
        key = id(adapters.spans)
        if key not in self._spans:
            self._spans[key] = adapters.spans.index_select(0, self.ids.flatten())
        return self._spans[key]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Lowered:
    """An input multiplied by the down matrices of the tokens' own adapters.

    numbers: from kernels float32 `[splits, tokens, ranges * width]`, to be summed over splits, 0 behind an adapter's
    own columns; else `[tokens, columns]` in down's dtype, 0 in the columns of other adapters.
    """

    adapters: StackedAdapters
    rows: AdapterRows
    numbers: Tensor

    @property
    def is_of_kernels(self) -> bool:
        return self.numbers.ndim == 3


def lower_reference(x: Tensor, adapters: StackedAdapters, rows: AdapterRows) -> Lowered:
    """Compute `lower` in plain torch."""
    numbers = x.to(adapters.down.dtype) @ adapters.down.T
    return Lowered(adapters, rows, numbers.masked_fill_(adapters.owners != rows.ids, 0))


def add_raised_reference(made: Tensor, lowered: Lowered, added: Tensor | None = None) -> Tensor:
    """Compute `add_raised` in plain torch, of what `lower_reference` returns."""
    if added is not None:
        made.add_(added)
    begin = 0
    for one in lowered.adapters.ranges:
        own = slice(begin, begin + one.columns)
        made[:, one.begin : one.begin + one.rows].addmm_(lowered.numbers[:, own], lowered.adapters.up[own, : one.rows])
        begin += one.columns
    return made


@triton.jit
def _own_tile(matrix, first, num_columns, at, row, is_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return `[COLUMNS, rows]` of a matrix `[columns, ROWS]`, from column `first + at` on; 0 behind `num_columns`."""
    column = at + tl.arange(0, COLUMNS)
    return tl.load(
        matrix + (first + column)[:, None].to(tl.int64) * ROWS + row[None],
        mask=(column < num_columns)[:, None] & is_row[None], other=0.0,
    )  # fmt: skip


@triton.jit
def _lowered_numbers(
    numbers, token, num_tokens, number, at, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    RANGES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the lowered numbers of a token and a range, float32 `[COLUMNS, 1]`, from column `at` on."""
    column, split = at + tl.arange(0, COLUMNS), tl.arange(0, SPLIT_BLOCK)[:, None]
    parts = tl.load(
        numbers + ((split * num_tokens + token) * RANGES + number) * WIDTH + column[None],
        mask=split < SPLITS, other=0.0,
    )  # fmt: skip
    return tl.sum(parts, 0)[:, None]


@triton.jit
def _adapter_down_kernel(
    x, gain, normed, down, spans, numbers, x_stride, eps, INNER: tl.constexpr, RANGES: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0), tl.program_id(1)
    span = spans + (token * RANGES + group * COLUMNS // WIDTH) * 2
    first, num_columns = tl.load(span), tl.load(span + 1)
    total = tl.zeros((COLUMNS, BLOCK), tl.float32)
    for at in tl.static_range(0, INNER, BLOCK):  # a single turn if it norms
        inner = at + tl.arange(0, BLOCK)
        row = tl.load(x + token.to(tl.int64) * x_stride + inner, mask=inner < INNER, other=0.0)
        weights = _own_tile(down, first, num_columns, group * COLUMNS % WIDTH, inner, inner < INNER, INNER, COLUMNS)
        if NORMS:
            row = normed_row(row, tl.load(gain + inner, mask=inner < INNER, other=0.0), eps, INNER)
            if group == 0:
                tl.store(normed + token.to(tl.int64) * INNER + inner, row, mask=inner < INNER)
        total += weights.to(tl.float32) * row.to(down.dtype.element_ty).to(tl.float32)[None]
    tl.store(numbers + token * RANGES * WIDTH + group * COLUMNS + tl.arange(0, COLUMNS), tl.sum(total, 1))


@triton.jit
def _adapter_up_kernel(
    made, added, numbers, up, spans, made_stride, added_stride, num_tokens, ADDS: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, ROWS: tl.constexpr, UP_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    RANGES: tl.constexpr = len(ROWS)
    block, token = tl.program_id(0), tl.program_id(1)
    number, begin, num_rows = 0, 0, ROWS[0]  # of the range that holds the block
    for before in tl.static_range(RANGES - 1):
        num_blocks = (ROWS[before] + BLOCK - 1) // BLOCK
        is_behind = (number == before) & (block >= num_blocks)
        block = tl.where(is_behind, block - num_blocks, block)
        begin = tl.where(is_behind, begin + ROWS[before], begin)
        num_rows = tl.where(is_behind, ROWS[before + 1], num_rows)
        number = tl.where(is_behind, before + 1, number)
    row = block * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    place = made + token.to(tl.int64) * made_stride + begin + row
    result = tl.load(place, mask=is_row, other=0.0).to(tl.float32)
    if ADDS:
        result += tl.load(added + token.to(tl.int64) * added_stride + begin + row, mask=is_row, other=0.0)
    span = spans + (token * RANGES + number) * 2
    first, num_columns = tl.load(span), tl.load(span + 1)
    total = tl.zeros((COLUMNS, BLOCK), tl.float32)
    for at in tl.static_range(0, WIDTH, COLUMNS):
        weights = _own_tile(up, first, num_columns, at, row, is_row, UP_ROWS, COLUMNS)
        total += weights.to(tl.float32) * _lowered_numbers(
            numbers, token, num_tokens, number, at, SPLITS, SPLIT_BLOCK, RANGES, WIDTH, COLUMNS
        )
    tl.store(place, (result + tl.sum(total, 0)).to(made.dtype.element_ty), mask=is_row)


@triton.jit
def _adapter_gate_kernel(
    gate_up, out, numbers, up, spans, down, down_spans, lowered, row_stride, num_tokens, SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, ROWS: tl.constexpr, UP_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, INTERMEDIATE: tl.constexpr, ACTIVATION: tl.constexpr,
    DOWN_WIDTH: tl.constexpr, DOWN_COLUMNS: tl.constexpr,
):  # fmt: skip
    LAST: tl.constexpr = len(ROWS) - 1  # gates and up share one range, or each has its own
    split, token = tl.program_id(0), tl.program_id(1)
    column = split * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    row = gate_up + token.to(tl.int64) * row_stride + column
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    beside = tl.load(row + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    span = spans + token * (LAST + 1) * 2
    first, num_columns = tl.load(span), tl.load(span + 1)
    last, num_last = tl.load(span + LAST * 2), tl.load(span + LAST * 2 + 1)
    behind, num_behind = 0, 0
    if DOWN_WIDTH > 0:  # loads are started before anything is summed
        behind, num_behind = tl.load(down_spans + token * 2), tl.load(down_spans + token * 2 + 1)
        downs = _own_tile(down, behind, num_behind, 0, column, inside, INTERMEDIATE, DOWN_COLUMNS)
    gates = tl.zeros((COLUMNS, BLOCK), tl.float32)
    ups = tl.zeros((COLUMNS, BLOCK), tl.float32)
    for at in tl.static_range(0, WIDTH, COLUMNS):
        of_gate = _own_tile(up, first, num_columns, at, column, inside, UP_ROWS, COLUMNS)
        in_range = column + INTERMEDIATE * (LAST == 0)
        of_up = _own_tile(up, last, num_last, at, in_range, inside, UP_ROWS, COLUMNS)
        gates += of_gate.to(tl.float32) * _lowered_numbers(
            numbers, token, num_tokens, 0, at, SPLITS, SPLIT_BLOCK, LAST + 1, WIDTH, COLUMNS
        )
        ups += of_up.to(tl.float32) * _lowered_numbers(
            numbers, token, num_tokens, LAST, at, SPLITS, SPLIT_BLOCK, LAST + 1, WIDTH, COLUMNS
        )
    product = activated(gate + tl.sum(gates, 0), beside + tl.sum(ups, 0), ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * INTERMEDIATE + column, product, mask=inside)
    if DOWN_WIDTH > 0:
        made = product.to(tl.float32)[None]
        for at in tl.static_range(0, DOWN_WIDTH, DOWN_COLUMNS):
            if at > 0:
                downs = _own_tile(down, behind, num_behind, at, column, inside, INTERMEDIATE, DOWN_COLUMNS)
            part = downs.to(tl.float32) * made
            place = (split * num_tokens + token) * DOWN_WIDTH + at + tl.arange(0, DOWN_COLUMNS)
            tl.store(lowered + place, tl.sum(part, 1))


def lower(x: Tensor, adapters: StackedAdapters, rows: AdapterRows) -> Lowered:
    """Multiply x by the down matrices of the tokens' own adapters. x: `[tokens, inner]` of any float dtype.

    Raises ValueError for another shape, dtype or device.
    """
    _check_lowered("lower", x, adapters, rows)
    if not _serves(x):
        return lower_reference(x, adapters, rows)
    return _launch_down(x, None, 0.0, adapters, rows)[1]


def lower_normed(
    x: Tensor, norm: Tensor, eps: float, adapters: StackedAdapters, rows: AdapterRows
) -> tuple[Tensor, Lowered]:
    """Return `rms_norm(x, norm, eps)` and `lower` of it: x `[tokens, inner]`, norm `[inner]` of x.dtype or float32.

    Raises ValueError for another shape, dtype or device.
    """
    check_norm("lower_normed", "norm", norm, x)
    _check_lowered("lower_normed", x, adapters, rows)
    if not _serves(x):
        normed = rms_norm(x, norm, eps)
        return normed, lower_reference(normed, adapters, rows)
    return _launch_down(x, norm, eps, adapters, rows)


def add_raised(made: Tensor, lowered: Lowered, added: Tensor | None = None) -> Tensor:
    """Add the lowered input, multiplied by the up matrices of the tokens' own adapters, to `made` in place; return it.

    made: `[tokens, rows]`, last axis contiguous. added: a further summand, `[tokens, rows]` or `[rows]` in made's
    dtype. Raises ValueError for another shape, dtype or device.
    """
    adapters, op = lowered.adapters, "add_raised"
    (tokens, rows), device = (len(lowered.rows), adapters.num_rows), adapters.down.device
    check(op, "made", made, (tokens, rows), adapters.down.dtype, device)
    if added is not None:
        check(op, "added", added, (tokens, rows)[2 - added.ndim :], made.dtype, device)
    if not lowered.is_of_kernels:
        return add_raised_reference(made, lowered, added)
    blocks = sum(triton.cdiv(one.rows, _UP_BLOCK) for one in adapters.ranges)
    _adapter_up_kernel[(blocks, tokens)](
        made, made if added is None else added, lowered.numbers, adapters.up, lowered.rows.spans(adapters),
        made.stride(0), 0 if added is None or added.ndim == 1 else added.stride(0), tokens, ADDS=added is not None,
        **_shape_of(lowered), BLOCK=_UP_BLOCK, num_warps=_UP_WARPS,
    )  # fmt: skip
    return made


def swiglu_raised(
    gate_up: Tensor, lowered: Lowered, activation: Activation, down: StackedAdapters | None = None
) -> tuple[Tensor, Lowered | None]:
    """Return `swiglu` of gate_up plus what the tokens' adapters add, `[tokens, intermediate]`, and `lower` of the
    result.

    The latter is for `down`, the adapters of the next matrix, if there are any. gate_up: `[tokens, 2 * intermediate]`,
    gate first; it may be changed. Raises ValueError for another shape, dtype or device.
    """
    adapters, op = lowered.adapters, "swiglu_raised"
    (tokens, rows), device = (len(lowered.rows), adapters.num_rows), adapters.down.device
    check(op, "gate_up", gate_up, (tokens, rows), adapters.down.dtype, device)
    if [one.rows for one in adapters.ranges] not in ([rows], [rows // 2] * 2):
        raise ValueError(f"{op}: ranges are {adapters.ranges}; wanted one, or one for gate and one for up")
    if down is not None and (2 * down.inner != rows or len(down.ranges) != 1):
        raise ValueError(
            f"{op}: down has {len(down.ranges)} ranges of rows and takes {down.inner}; wanted one, and half of {rows}"
        )
    if not lowered.is_of_kernels:
        product = swiglu(add_raised_reference(gate_up, lowered), activation)
        return product, None if down is None else lower_reference(product, down, lowered.rows)
    out = torch.empty(tokens, rows // 2, dtype=gate_up.dtype, device=device)
    splits = triton.cdiv(rows // 2, _GATE_BLOCK)
    numbers = None
    if down is not None:
        numbers = torch.empty(splits, tokens, down.width, dtype=torch.float32, device=device)
    behind = adapters if down is None else down
    _adapter_gate_kernel[(splits, tokens)](
        gate_up, out, lowered.numbers, adapters.up, lowered.rows.spans(adapters), behind.down,
        lowered.rows.spans(behind), lowered.numbers if numbers is None else numbers, gate_up.stride(0), tokens,
        **_shape_of(lowered), BLOCK=_GATE_BLOCK, INTERMEDIATE=rows // 2, ACTIVATION=activation or "silu",
        DOWN_WIDTH=0 if down is None else down.width, DOWN_COLUMNS=min(behind.width, _COLUMN_BLOCK),
        num_warps=_GATE_WARPS,
    )  # fmt: skip
    return out, None if down is None or numbers is None else Lowered(down, lowered.rows, numbers)


def _serves(x: Tensor) -> bool:
    return runs_on_triton(x) and 0 < len(x) <= MOST_TOKENS


def _check_lowered(op: str, x: Tensor, adapters: StackedAdapters, rows: AdapterRows) -> None:
    columns, inner = adapters.down.shape
    up_rows, device = max(one.rows for one in adapters.ranges if one.columns), adapters.down.device
    check(op, "x", x, (len(x), inner), x.dtype, device)
    check_contiguous(op, "down", adapters.down)
    check(op, "up", adapters.up, (columns, up_rows), adapters.down.dtype, device)
    check_contiguous(op, "up", adapters.up)
    check(op, "owners", adapters.owners, (columns,), torch.int64, device)
    check(op, "ids", rows.ids, (len(x), 1), torch.int64, device)


def _shape_of(lowered: Lowered) -> dict[str, int | tuple[int, ...]]:
    """Return the constants for which the raising kernels are compiled."""
    adapters = lowered.adapters
    return {
        "SPLITS": len(lowered.numbers),
        "SPLIT_BLOCK": triton.next_power_of_2(len(lowered.numbers)),
        "ROWS": tuple(one.rows for one in adapters.ranges),
        "UP_ROWS": adapters.up.shape[1],
        "WIDTH": adapters.width,
        "COLUMNS": min(adapters.width, _COLUMN_BLOCK),
    }


def _launch_down(
    x: Tensor, norm: Tensor | None, eps: float, adapters: StackedAdapters, rows: AdapterRows
) -> tuple[Tensor, Lowered]:
    check_dtype("lower", adapters.down)
    tokens, ranges, width = len(x), len(adapters.ranges), adapters.width
    all_columns = ranges * width
    columns = max(1, min(width, 8, triton.next_power_of_2(tokens * all_columns // _FEWEST_PROGRAMS) // 2))
    block = triton.next_power_of_2(adapters.inner)
    block = block if norm is not None else min(block, _DOWN_BLOCK)
    normed = x if norm is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    numbers = torch.empty(1, tokens, all_columns, dtype=torch.float32, device=x.device)
    _adapter_down_kernel[(tokens, all_columns // columns)](
        x, x if norm is None else norm, normed, adapters.down, rows.spans(adapters), numbers, x.stride(0), eps,
        INNER=adapters.inner, RANGES=ranges, WIDTH=width, COLUMNS=columns, BLOCK=block, NORMS=norm is not None,
        num_warps=8 if block * columns <= 2**15 else 16,
    )  # fmt: skip
    return normed, Lowered(adapters, rows, numbers)
