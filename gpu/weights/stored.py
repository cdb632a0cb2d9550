"""Put a checkpoint module's tensors into rows of packed matrices, and define tensors that several weight formats share.

A module's tensors may be in different files, so each is placed independently. If groups are not of neighbouring
columns, the tensor with the columns' groups is loaded first. Numbers, scales and zero points are exactly those of the
file.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gpu.model.matrix_format import MatrixFormat
from gpu.model.spec import ModelError
from gpu.model.weight_format import find_format
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.word_layout import pack_words
from gpu.weights.gguf_blocks import Numbers
from gpu.weights.weight_allocation import UNSET

INTEGER = ("I32",)
SCALES = ("F16", "BF16")
WIDE_SCALES = ("F32", "BF16", "F16")
PLAIN = ("BF16", "F16", "F32")
_NUMBERS_AT_ONCE = 2**24  # numbers that are unpacked or packed at once: this takes several times their memory


class StoredError(ValueError):
    """A tensor with invalid content. The message continues the tensor's name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a module: the shapes and types that it may have, and how it is loaded.

    fill: puts the tensor, or a GGUF file's Blocks, into its place; None: the tensor is not used.
    is_needed: whether a file without it is refused.
    comes_first: whether the places of other tensors depend on it.
    fill_rows: puts some rows into their places, from a row number on; None: all rows are needed at once.
    rows_at_once: how many rows are gathered for `fill_rows`; None: as many as are read.
    as_is: the place itself, if the tensor is placed unchanged, except perhaps for its type; else None.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    fill: Callable[[Any], None] | None
    is_needed: bool = True
    comes_first: bool = False
    fill_rows: Callable[[int, Tensor], None] | None = None
    rows_at_once: int | None = None
    as_is: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModuleRows:
    """Rows `[begin, end)` of a packed matrix, which one module fills. order: the order of its rows, as in `Place`."""

    packed: Packed
    begin: int
    end: int
    order: Tensor | None

    @property
    def rows(self) -> int:
        return self.end - self.begin

    @property
    def num_groups(self) -> int:
        return self.packed.scales.shape[1]

    def put_numbers(self, numbers: Tensor) -> None:
        """Place numbers, uint8 `[rows, inner]`, with columns in the order of the file."""
        if self.packed.order is not None:
            numbers = numbers.index_select(1, self.packed.order)
        words = self.packed.words[self.begin : self.end]
        step = max(1, _NUMBERS_AT_ONCE // self.packed.inner)
        for place, part in zip(words.split(step), self._ordered(numbers).split(step), strict=True):
            place.copy_(pack_words(part, self.packed.bits))

    def put_scales(self, scales: Tensor, row_block: int) -> None:
        """Place scales `[rows / row_block, groups]`, or one for all rows. Raises StoredError for infinity and NaN."""
        if not bool(scales.isfinite().all()):
            raise StoredError("holds scales that are not finite; wanted finite numbers")
        self._put(self.packed.scales, scales, row_block)

    def put_exponents(self, exponents: Tensor) -> None:
        """Place FP4's scales, uint8 `[rows, groups]`. Raises StoredError for NaN."""
        if bool((exponents == 255).any()):
            raise StoredError("holds scales that are NaN; wanted exponents up to 254")
        self._put(self.packed.scales, exponents, 1)

    def put_zeros(self, zeros: Tensor) -> None:
        """Place zero points, uint8 `[rows, groups]`, or one for all."""
        assert self.packed.zeros is not None, "zero points have a place"
        self._put(self.packed.zeros, zeros, 1)

    def put_runs(self, numbers: Numbers) -> None:
        """Place scales and offsets of groups, and the runs' numbers that multiply them, repeated for finer groups."""
        assert self.packed.runs is not None, "they have a place"
        for name, values in (("d", numbers.d), ("least", numbers.least)):
            if not bool(values.isfinite().all()):
                raise StoredError(f"holds scales ({name}) that are not finite; wanted finite numbers")
        pair = torch.stack([numbers.scales, numbers.offsets], 2).view(torch.int16)[..., 0]
        run = torch.stack([numbers.d, numbers.least], 2).view(torch.int32)[..., 0]
        self._put(self.packed.scales, pair.repeat_interleave(self.num_groups // pair.shape[1], 1), 1)
        self._put(self.packed.runs, run.repeat_interleave(self.packed.runs.shape[1] // run.shape[1], 1), 1)

    def parts(self, num_rows: int) -> Iterator[tuple["ModuleRows", slice | Tensor]]:
        """Yield parts of `num_rows` rows, each with the module's rows that it takes, in order."""
        for begin in range(0, self.rows, num_rows):
            end = min(begin + num_rows, self.rows)
            yield self.cut(begin, end), slice(begin, end) if self.order is None else self.order[begin:end]

    def cut(self, begin: int, end: int) -> "ModuleRows":
        """Return rows `[begin, end)` of these rows, without an order."""
        return ModuleRows(self.packed, self.begin + begin, self.begin + end, None)

    def put_order(self, groups: Tensor, is_moved: bool) -> None:
        """Place each column's group, int32 `[inner]`. is_moved: groups may be scattered. Raises StoredError if the
        columns do not make whole groups, or another module of the product has another order.
        """
        group = self.packed.group
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups.index_select(0, order), torch.arange(len(groups), device=groups.device) // group):
            raise StoredError(f"does not hold groups of {group} columns")
        if self.packed.order is None:
            if is_moved or not torch.equal(order, torch.arange(len(order), device=order.device)):
                raise StoredError(
                    "has columns out of order; wanted them in order, since quantization_config has no desc_act"
                )
        elif bool((self.packed.order == UNSET).all()):
            self.packed.order.copy_(order)
        elif not torch.equal(self.packed.order, order):
            raise StoredError("has another column order than the other modules of its product; wanted the same")

    def _put(self, place: Tensor, stored: Tensor, row_block: int) -> None:
        ours = self.packed.row_block
        if stored.numel() == 1:
            stored = stored.reshape(1, 1).expand(-(-self.rows // ours), self.num_groups)
        elif row_block != ours:
            stored = stored.repeat_interleave(row_block // ours, 0)[: -(-self.rows // ours)]
        begin = self.begin // ours
        place[begin : begin + len(stored)].copy_(self._ordered(stored))

    def _ordered(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else rows.index_select(0, self.order.to(rows.device))


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return a module's tensors by the ends of their names, as `.qweight`. row_block: rows that share the file's
    scales.

    Tensors are unpacked on the device, also those of a matrix in host memory.
    """
    module = import_module(find_format(scheme).tensors)
    found: dict[str, StoredTensor] = module.stored_tensors(scheme, stored, part, row_block)
    return found


def stacked_tensors(
    scheme: str, stored: MatrixFormat, experts: Sequence[ModuleRows], is_transposed: bool
) -> dict[str, StoredTensor]:
    """Return the tensors with all experts of a layer, by the ends of their names. is_transposed: whether a plain
    checkpoint has each expert transposed. Raises ModelError if the format has no such tensors.
    """
    module = import_module(find_format(scheme).tensors)
    if not hasattr(module, "stacked_tensors"):
        raise ModelError(
            f"model: experts in one tensor are not served in {scheme}; served: bfloat16, the formats of model.weights, "
            "and mxfp4 where the checkpoint has it"
        )
    found: dict[str, StoredTensor] = module.stacked_tensors(stored, experts, is_transposed)
    return found


def fp8_weight(part: ModuleRows) -> StoredTensor:
    """Return the tensor of FP8 numbers, which refuses NaN."""

    def fill(weight: Tensor) -> None:
        numbers = weight.view(torch.uint8)
        if bool(((numbers & 0x7F) == 0x7F).any()):
            raise StoredError("holds NaN; wanted finite numbers")
        part.put_numbers(numbers)

    return StoredTensor(((part.rows, part.packed.inner),), ("F8_E4M3",), fill)


def input_scale() -> dict[str, StoredTensor]:
    """Return the tensor of an activation scale, which a file may have. It is not used: activations are not rounded."""
    return {".input_scale": StoredTensor(((), (1,)), WIDE_SCALES, None, is_needed=False)}


def row_scales(stored: MatrixFormat, part: ModuleRows, row_block: int, dtypes: tuple[str, ...]) -> StoredTensor:
    """Return the tensor of scales: of groups and blocks, or, without groups, of rows or of the whole matrix."""
    rows, groups = part.rows, part.num_groups
    shapes: tuple[tuple[int, ...], ...] = ((-(-rows // row_block), groups),)
    if stored.group is None:
        shapes = ((rows, 1), (rows,), (), (1,), (1, 1))

    def fill(scales: Tensor) -> None:
        part.put_scales(with_group_axis(scales), row_block)

    return StoredTensor(shapes, dtypes, fill)


def with_group_axis(values: Tensor) -> Tensor:
    """Return values as `[rows, groups]`, also if the file has one for each row, or one for all, without that axis."""
    return values if values.ndim == 2 else values.reshape(-1, 1)


def group_order(stored: MatrixFormat, part: ModuleRows) -> StoredTensor:
    """Return the tensor with each column's group, on which the places of other tensors depend."""

    def fill(groups: Tensor) -> None:
        part.put_order(groups.to(torch.int64), is_moved=stored.has_order)

    return StoredTensor(
        ((part.packed.inner,),), INTEGER, fill, is_needed=stored.has_order, comes_first=True
    )  # fmt: skip


def unpack_numbers(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 `[lines, words]` to uint8 `[lines, words * 32 / bits]`, from the lowest bits up."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers = torch.empty(*words.shape, len(shifts), dtype=torch.uint8, device=words.device)
    step = max(1, _NUMBERS_AT_ONCE // numbers[0].numel())
    for place, part in zip(numbers.split(step), words.split(step), strict=True):
        place.copy_((part[:, :, None] >> shifts) & (2**bits - 1))
    return numbers.flatten(1)
