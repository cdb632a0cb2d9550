"""Define the formats of matrices, and count the bytes of a loaded matrix with its scales and zero points."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["int4", "int8", "fp8", "fp4"]
BITS: dict[Kind, int] = {"int4": 4, "int8": 8, "fp8": 8, "fp4": 4}
WORD_BITS = 32
UNIT_WORDS = 16  # words of a unit; a row has whole units (`word_layout`)
MOST_PACKED_TOKENS = 128  # most tokens that are multiplied by a packed matrix; for more it is widened first
# On the CPU, by the bytes of a number of the dtype that computes: libraries multiply bf16 faster there than float32.
MOST_MULTIPLIED_TOKENS = {2: 64, 4: 256}
MULTIPLIED_COLUMNS = 32  # a row that the CPU multiplies as it is stored is of whole runs of so many
MULTIPLIED_GROUP = 16  # columns; and groups, where a row has several, are of multiples of this: a vector's
# What humming-kernels multiplies: whole tiles, with groups of columns that tiles are made of.
HUMMING_ROWS, HUMMING_COLUMNS, HUMMING_GROUPS = 128, 128, (32, 64, 128)
HUMMING_BLOCK_ROWS = 64  # the least that share scales with each other and not with all
ROUNDED_ROWS = 16  # torch's scaled product has multiples of so many
_ORDER_BYTES = 8  # of a column
_RUN_BYTES = 4  # two float16


def unit_columns(bits: int) -> int:
    """Return the columns in a unit of words, for numbers of `bits` bits."""
    return UNIT_WORDS * WORD_BITS // bits


def num_words(inner: int, bits: int) -> int:
    """Return the words of a row of `inner` columns."""
    return -(-inner // unit_columns(bits)) * UNIT_WORDS


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """The format of a packed matrix.

    group: columns that share a scale; None: all columns of a row.
    row_block: rows that share their scales.
    has_zeros: whether each group has a zero point of one byte.
    has_order: whether the checkpoint's groups are not of neighbouring columns.
    run: columns that share a pair of float16 numbers, of which the groups' one-byte scales and offsets are multiples;
        None: scales have no such factor.
    humming: whether it gets that library's layout after it is loaded (`gpu.weights.humming_matrix`).
    rounds_tokens: whether several tokens are rounded to FP8 and multiplied in 8 bits (`fp8_linear`).
    """

    kind: Kind
    group: int | None
    scale_bytes: int = 2
    row_block: int = 1
    has_zeros: bool = False
    has_order: bool = False
    run: int | None = None
    humming: bool = False
    rounds_tokens: bool = False

    def num_bytes(self, rows: int, inner: int) -> int:
        if self.humming:
            return self._humming_bytes(rows, inner)
        group = self.group or inner
        groups = -(-rows // self.row_block) * -(-inner // group)
        each = self.scale_bytes + self.has_zeros
        runs = 0 if self.run is None else rows * (inner // self.run) * _RUN_BYTES
        words = rows * num_words(inner, BITS[self.kind]) * WORD_BITS // 8
        return words + groups * each + runs + self.has_order * inner * _ORDER_BYTES

    def _humming_bytes(self, rows: int, inner: int) -> int:
        """Return the bytes in humming's layout. Nothing is padded, scales of blocks are float32 and all others bf16,
        and zero points have as many bits as numbers.
        """
        bits, groups = BITS[self.kind], inner // (self.group or inner)
        scales = rows // self.row_block * groups * 4 if self.row_block > 1 < groups else rows * groups * 2
        return (rows * inner + self.has_zeros * rows * groups) * bits // 8 + scales

    def why_not_humming(self, rows: int, inner: int) -> str | None:
        """Return the reason why the library cannot multiply such a matrix; None if it can."""
        group = inner if self.group is None else self.group
        if self.kind == "fp4":
            return "numbers of FP4"
        if self.run is not None:
            return "scales of runs (GGUF)"
        if self.has_order:
            return "columns in an order of their own (act-order)"
        if rows % HUMMING_ROWS or inner % HUMMING_COLUMNS:
            return f"{rows:,} by {inner:,}, no multiples of {HUMMING_ROWS} rows and {HUMMING_COLUMNS} columns"
        if group not in (*HUMMING_GROUPS, inner):
            return f"groups of {group}"
        if self.row_block > 1 and self.kind != "fp8":
            return "integers with scales of several rows"
        if self.row_block > 1 and group < inner and (self.row_block % HUMMING_BLOCK_ROWS or rows % self.row_block):
            return f"blocks of {self.row_block} rows"
        return None

    def why_not_rounding(self, rows: int, inner: int) -> str | None:
        """Return the reason why tokens in FP8 cannot be multiplied by such a matrix; None if they can."""
        if self.kind != "fp8":
            return f"numbers of {self.kind}"
        if self.row_block > 1 or self.group not in (None, inner):
            return "scales of blocks"
        return f"{rows:,} rows, no multiple of {ROUNDED_ROWS}" if rows % ROUNDED_ROWS else None


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The packed matrices of a model.

    scheme: how files store them, or "rounded": a plain checkpoint is rounded as it is loaded.
    layers: the format of layers' matrices.
    output: the format of the output matrix; None: plain, as a tied one is except in GGUF files.
    plain: modules that stay plain: a name, a part of one between dots, or `re:` and an expression.
    matrices: by layer and name, each matrix's own format (None: plain), if formats differ. Then `layers` is the most
        frequent one.
    note: a description of the formats for printing; None: `layers` describes them.
    humming: whether that library multiplies the matrices that it can.
    rounds_tokens: whether tokens are rounded to FP8 for the matrices that allow it.
    integers: whether a CPU rounds tokens to 16 bits and multiplies the matrices that it can in integers.
    wants_cpu: whether `integers` was asked for by name, so that another device is an error.
    """

    scheme: str
    layers: MatrixFormat
    output: MatrixFormat | None
    plain: tuple[str, ...] = ()
    matrices: Mapping[tuple[int, str], MatrixFormat | None] | None = field(default=None, hash=False)
    note: str | None = None
    humming: bool = False
    rounds_tokens: bool = False
    integers: bool = False
    wants_cpu: bool = False

    @property
    def products(self) -> str:
        """Return the kernels that were asked for by name, as `model.products` names them; "own": none."""
        return "integers" if self.wants_cpu else "humming" if self.humming else "fp8" if self.rounds_tokens else "own"

    def leaves(self, names: tuple[str, ...]) -> bool:
        """Return whether a module stays plain. names: all its names."""
        return any(_matches(pattern, name) for pattern in self.plain for name in names)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."


_OUTPUT = MatrixFormat("int8", 128)
ROUNDED = {
    "int4": Quantisation("rounded", MatrixFormat("int4", 128, has_zeros=True), _OUTPUT),
    "int8": Quantisation("rounded", MatrixFormat("int8", 128), _OUTPUT),
    "fp8": Quantisation("rounded", MatrixFormat("fp8", None, scale_bytes=4), _OUTPUT),
}
