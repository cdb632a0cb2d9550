"""Tensors of quantised modules, as each scheme's files have them, and how they become words, scales and offsets.

`gpu.model.quantisation` names the schemes. It refuses to know layers and families. A module's tensors may lie in
different files, so each is put into its place alone; where groups are not of neighbours, what says so comes first.
Invariant: numbers, scales and zero points are those of the file, exactly; nothing is rounded but plain checkpoints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.matrix_format import BITS, MatrixFormat
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.word_layout import pack_words
from gpu.weights.gguf_blocks import Blocks, Numbers, read_numbers
from gpu.weights.rounding import round_rows, rows_at_once
from gpu.weights.weights import UNSET

INTEGER = ("I32",)
SCALES = ("F16", "BF16")
WIDE_SCALES = ("F32", "BF16", "F16")
PLAIN = ("BF16", "F16", "F32")
# Of eight columns, where AWQ's kernels have each of a word's nibbles, from the lowest up.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_NIBBLES = tuple(_AWQ_ORDER.index(column) for column in range(8))
_NUMBERS_AT_ONCE = 2**24  # that are unpacked or packed: they take several times their memory on the way


class StoredError(ValueError):
    """What is wrong with a tensor's content."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a module: the shapes and types that it may have, and what puts it, a tensor or a GGUF file's
    Blocks, into its place (None: nothing is made of it). is_needed: whether it must be there; comes_first: whether
    others' places hang on it. fill_rows: puts rows of a tensor from one on into their places, where they need no
    others; rows_at_once: so many are gathered for it, None: as many as are read; as_is: its place, if that is what it
    is stored as but, it may be, for the type.
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
    """Rows `[begin, end)` of a packed matrix, which one module holds. order: of its rows, as in a `Place`."""

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
        """uint8 `[rows, inner]`, columns as files have them."""
        if self.packed.order is not None:
            numbers = numbers.index_select(1, self.packed.order)
        words = self.packed.words[self.begin : self.end]
        step = max(1, _NUMBERS_AT_ONCE // self.packed.inner)
        for place, part in zip(words.split(step), self._ordered(numbers).split(step), strict=True):
            place.copy_(pack_words(part, self.packed.bits))

    def put_scales(self, scales: Tensor, row_block: int) -> None:
        """`[rows / row_block, groups]`, or one for all."""
        if not bool(scales.isfinite().all()):
            raise StoredError("holds scales that are not finite")
        self._put(self.packed.scales, scales, row_block)

    def put_zeros(self, zeros: Tensor) -> None:
        """uint8 `[rows, groups]`, or one for all."""
        assert self.packed.zeros is not None, "zero points have a place"
        self._put(self.packed.zeros, zeros, 1)

    def put_runs(self, numbers: Numbers) -> None:
        """Scales and offsets of groups, and what they are multiples of; finer ones than the file's are repeated."""
        assert self.packed.runs is not None, "they have a place"
        for name, values in (("d", numbers.d), ("least", numbers.least)):
            if not bool(values.isfinite().all()):
                raise StoredError(f"holds scales ({name}) that are not finite")
        pair = torch.stack([numbers.scales, numbers.offsets], 2).view(torch.int16)[..., 0]
        run = torch.stack([numbers.d, numbers.least], 2).view(torch.int32)[..., 0]
        self._put(self.packed.scales, pair.repeat_interleave(self.num_groups // pair.shape[1], 1), 1)
        self._put(self.packed.runs, run.repeat_interleave(self.packed.runs.shape[1] // run.shape[1], 1), 1)

    def parts(self, num_rows: int) -> Iterator[tuple["ModuleRows", slice | Tensor]]:
        """Of so many rows each, and which of the module's rows a part takes, in this order."""
        for begin in range(0, self.rows, num_rows):
            end = min(begin + num_rows, self.rows)
            yield self.cut(begin, end), slice(begin, end) if self.order is None else self.order[begin:end]

    def cut(self, begin: int, end: int) -> "ModuleRows":
        """Of these rows of it, in their order."""
        return ModuleRows(self.packed, self.begin + begin, self.begin + end, None)

    def put_order(self, groups: Tensor, is_moved: bool) -> None:
        """int32 `[inner]`, each column's group. is_moved: whether groups need not be of neighbours."""
        group = self.packed.group
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups.index_select(0, order), torch.arange(len(groups), device=groups.device) // group):
            raise StoredError(f"does not hold groups of {group} columns")
        if self.packed.order is None:
            if is_moved or not torch.equal(order, torch.arange(len(order), device=order.device)):
                raise StoredError("has columns out of order, and quantization_config has not")
        elif bool((self.packed.order == UNSET).all()):
            self.packed.order.copy_(order)
        elif not torch.equal(self.packed.order, order):
            raise StoredError("has another order than the module that it is multiplied with")

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
    """By the ends of their names, as `.qweight`. row_block: of the file's scales. Tensors are unpacked where they lie,
    which is the device also of a matrix in host memory.
    """
    return _SCHEMES[scheme](stored, part, row_block)


def _rounded(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """In parts, which are gathered one at a time but where rows are put in order: an output matrix that is gathered
    and rounded as a whole takes gigabytes, beside weights that leave less.
    """

    def put(place: ModuleRows, rows: Tensor) -> None:
        numbers, scales, zeros = round_rows(rows, stored)
        place.put_numbers(numbers)
        place.put_scales(scales, 1)
        if zeros is not None:
            place.put_zeros(zeros)

    def fill(weight: Tensor) -> None:
        for place, rows in part.parts(at_once):
            put(place, weight[rows])

    def fill_rows(begin: int, rows: Tensor) -> None:
        put(part.cut(begin, begin + len(rows)), rows)

    at_once, shape = rows_at_once(part.packed.inner), (part.rows, part.packed.inner)
    if part.order is not None:
        return {".weight": StoredTensor((shape,), PLAIN, fill)}
    return {".weight": StoredTensor((shape,), PLAIN, fill, fill_rows=fill_rows, rows_at_once=at_once)}


def _awq(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    rows, inner, groups = part.rows, part.packed.inner, part.num_groups

    def numbers(words: Tensor) -> Tensor:
        """int32 `[lines, rows / 8]` -> uint8 `[rows, lines]`."""
        nibbles = _numbers(words, 4).view(len(words), -1, 8)
        return nibbles[:, :, list(_AWQ_NIBBLES)].flatten(1).t().contiguous()

    return {
        ".qweight": StoredTensor(((inner, rows // 8),), INTEGER, lambda words: part.put_numbers(numbers(words))),
        ".qzeros": StoredTensor(((groups, rows // 8),), INTEGER, lambda words: part.put_zeros(numbers(words))),
        ".scales": StoredTensor(((groups, rows),), SCALES, lambda scales: part.put_scales(scales.t(), 1)),
    }


def _gptq(stored: MatrixFormat, part: ModuleRows, row_block: int, is_one_less: bool = True) -> dict[str, StoredTensor]:
    """is_one_less: whether a zero point of z is stored as z - 1, with what that wraps around to."""
    rows, inner, groups, bits = part.rows, part.packed.inner, part.num_groups, BITS[stored.kind]
    planes = 32 // bits

    def fill_numbers(words: Tensor) -> None:  # [inner / planes, rows]
        part.put_numbers(_numbers(words.t().contiguous(), bits))

    def fill_zeros(words: Tensor) -> None:  # [groups, rows / planes]
        zeros = _numbers(words, bits)
        part.put_zeros(((zeros + is_one_less) & (2**bits - 1)).t())

    return {
        ".qweight": StoredTensor(((inner // planes, rows),), INTEGER, fill_numbers),
        ".qzeros": StoredTensor(((groups, rows // planes),), INTEGER, fill_zeros),
        ".scales": StoredTensor(((groups, rows),), SCALES, lambda scales: part.put_scales(scales.t(), 1)),
        ".g_idx": _order(stored, part),
        ".bias": StoredTensor(((rows,),), PLAIN, _refuse_bias(part), is_needed=False),
    }


def _gptq_v2(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    return _gptq(stored, part, row_block, is_one_less=False)


def _pack_quantized(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    rows, inner, groups, bits = part.rows, part.packed.inner, part.num_groups, BITS[stored.kind]
    planes = 32 // bits

    def check_shape(shape: Tensor) -> None:
        if shape.tolist() != [rows, inner]:
            raise StoredError(f"says {shape.tolist()}; wanted {[rows, inner]}")

    def fill_zeros(words: Tensor) -> None:  # [rows / planes, groups], signed numbers from the middle
        part.put_zeros(_numbers(words.t().contiguous(), bits)[:, :rows].t())

    tensors = {
        ".weight_packed": StoredTensor(
            ((rows, -(-inner // planes)),), INTEGER, lambda words: part.put_numbers(_numbers(words, bits)[:, :inner])
        ),
        ".weight_scale": _scales(stored, part, row_block, SCALES),
        ".weight_shape": StoredTensor(((2,),), ("I64", "I32"), check_shape, is_needed=False),
        ".weight_g_idx": _order(stored, part),
    }
    if stored.has_zeros:
        tensors[".weight_zero_point"] = StoredTensor(((-(-rows // planes), groups),), INTEGER, fill_zeros)
    return tensors


def _compressed(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Bytes of FP8, or signed ones."""
    is_float = stored.kind == "fp8"

    def fill_zeros(zeros: Tensor) -> None:
        part.put_zeros(_from_middle(_a_row_each(zeros)))

    tensors = {
        ".weight": _fp8_weight(part) if is_float else StoredTensor(
            ((part.rows, part.packed.inner),), ("I8",),
            lambda weight: part.put_numbers(_from_middle(weight)),
        ),
        ".weight_scale": _scales(stored, part, row_block, WIDE_SCALES if is_float else SCALES),
    }  # fmt: skip
    if stored.has_zeros:
        shapes = tensors[".weight_scale"].shapes
        tensors[".weight_zero_point"] = StoredTensor(shapes, ("I8",), fill_zeros)
    return tensors | _input_scale()


def _from_middle(numbers: Tensor) -> Tensor:
    """int8 -> uint8, of which 128 is 0."""
    return numbers.view(torch.uint8) ^ 128


def _fp8(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    scale = _scales(stored, part, row_block, WIDE_SCALES)
    return {".weight": _fp8_weight(part), ".weight_scale": scale} | _input_scale()


def _fp8_blocks(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    scale = _scales(stored, part, row_block, WIDE_SCALES)
    return {".weight": _fp8_weight(part), ".weight_scale_inv": scale} | _input_scale()


def _fp8_weight(part: ModuleRows) -> StoredTensor:
    def fill(weight: Tensor) -> None:
        numbers = weight.view(torch.uint8)
        if bool(((numbers & 0x7F) == 0x7F).any()):
            raise StoredError("holds NaN")
        part.put_numbers(numbers)

    return StoredTensor(((part.rows, part.packed.inner),), ("F8_E4M3",), fill)


def _input_scale() -> dict[str, StoredTensor]:
    """A file's scale of tokens, which are not rounded here."""
    return {".input_scale": StoredTensor(((), (1,)), WIDE_SCALES, None, is_needed=False)}


def _scales(stored: MatrixFormat, part: ModuleRows, row_block: int, dtypes: tuple[str, ...]) -> StoredTensor:
    rows, groups = part.rows, part.num_groups
    shapes: tuple[tuple[int, ...], ...] = ((-(-rows // row_block), groups),)
    if stored.group is None:
        shapes = ((rows, 1), (rows,), (), (1,), (1, 1))

    def fill(scales: Tensor) -> None:
        part.put_scales(_a_row_each(scales), row_block)

    return StoredTensor(shapes, dtypes, fill)


def _a_row_each(values: Tensor) -> Tensor:
    """`[rows, groups]`, also of a file that has one for each row, or one for all, without the second axis."""
    return values if values.ndim == 2 else values.reshape(-1, 1)


def _order(stored: MatrixFormat, part: ModuleRows) -> StoredTensor:
    def fill(groups: Tensor) -> None:
        part.put_order(groups.to(torch.int64), is_moved=stored.has_order)

    return StoredTensor(
        ((part.packed.inner,),), INTEGER, fill, is_needed=stored.has_order, comes_first=True
    )  # fmt: skip


def _refuse_bias(part: ModuleRows) -> Callable[[Tensor], None]:
    """Some files have a bias of zeros for every product."""

    def fill(bias: Tensor) -> None:
        if bool(bias.any()):
            raise StoredError("is not zero, and this model's product has no bias")

    return fill


def _gguf(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Blocks, of which each kind has scales of its own; here all parts of a matrix have the same."""

    def fill(blocks: Blocks) -> None:
        for place, rows in part.parts(blocks.rows_at_once):
            numbers = read_numbers(blocks.rows(rows))
            if stored.run is not None:
                place.put_numbers(numbers.q)
                place.put_runs(numbers)
                continue
            middle = 2 ** (blocks.layout.bits - 1)
            place.put_numbers(numbers.q + (place.packed.middle - middle))
            place.put_scales(numbers.d, 1)

    return {".weight": StoredTensor(((part.rows, part.packed.inner),), tuple(BLOCK_KINDS), fill)}


def _numbers(words: Tensor, bits: int) -> Tensor:
    """int32 `[lines, words]` -> uint8 `[lines, words * 32 / bits]`, from the lowest bits up."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    numbers = torch.empty(*words.shape, len(shifts), dtype=torch.uint8, device=words.device)
    step = max(1, _NUMBERS_AT_ONCE // numbers[0].numel())
    for place, part in zip(numbers.split(step), words.split(step), strict=True):
        place.copy_((part[:, :, None] >> shifts) & (2**bits - 1))
    return numbers.flatten(1)


_SCHEMES: dict[str, Callable[[MatrixFormat, ModuleRows, int], dict[str, StoredTensor]]] = {
    "rounded": _rounded,
    "awq": _awq,
    "gptq": _gptq,
    "gptq_v2": _gptq_v2,
    "pack-quantized": _pack_quantized,
    "compressed": _compressed,
    "fp8": _fp8,
    "fp8 rows": _fp8,
    "fp8 blocks": _fp8_blocks,
    "gguf": _gguf,
}
