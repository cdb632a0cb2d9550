"""Define a matrix of 4 or 8 bits: its words, scales and numbers. `packed_linear` has the products.

Number `q` of a group stands for `(q - zero) * scale`, with `q` in `[0, 2**bits)`. For FP8 (e4m3, no infinities) and FP4
(e2m1) it is the number that its bits encode, times the scale. FP4's scale may be a power of two, stored as its exponent
(e8m0). If groups come in runs (GGUF), it is `q * d * scale - least * offset`, where d and least are float16 of a run,
and scale and offset signed bytes of a group.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gpu.model.matrix_format import BITS, Kind, num_words
from gpu.operations.linear.word_layout import RUN_COLUMNS, unpack_words
from transfer.host_pages import advise_huge_pages
from transfer.model_constants import FP4_NUMBERS, TILE


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix.

    kind: of numbers. dtype: of products. inner: columns. group: columns that share a scale. row_block: rows that share
        scales.
    words: int32 `[rows, num_words]` (`word_layout`).
    scales: bf16, float16 or float32, for FP4 also uint8, `[ceil(rows / row_block), ceil(inner / group)]`.
    zeros: uint8 of that shape; None: the middle of the range.
    order: int64 `[inner]`, the token's column that each of our columns is multiplied by; None: the same one.
    runs: int32 `[rows, inner / run]`, the bits of d below those of least. Scales are then int16, a scale below an
        offset, and there are no zeros.
    in_tiles: whether the tensors of each TILE rows have first the first element of every row, then the second, and so
        on (`transfer.simd.row_tiles`).
    has_equal_pairs: for tiles with runs, whether all scales are equal, as where a run is one group: then only one is
        read.
    rounds_tokens: whether several tokens are rounded to FP8 and multiplied in 8 bits (`fp8_linear`).
    """

    kind: Kind
    dtype: torch.dtype
    inner: int
    group: int
    row_block: int
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    runs: Tensor | None = None
    in_tiles: bool = False
    has_equal_pairs: bool = False
    rounds_tokens: bool = False

    @property
    def bits(self) -> int:
        return BITS[self.kind]

    @property
    def rows(self) -> int:
        return self.words.shape[0]

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def num_words(self) -> int:
        """Return the number of words of a row."""
        return num_words(self.inner, self.bits)

    @property
    def run(self) -> int:
        """Return the number of columns of a run; 0: there are no runs."""
        return 0 if self.runs is None else self.inner // self.runs.shape[1]

    @property
    def cuts_runs(self) -> bool:
        """Return whether a group may end inside a run of columns, as words store them (`RUN_COLUMNS`)."""
        return self.scales.shape[1] > 1 and self.group % RUN_COLUMNS != 0

    @property
    def middle(self) -> int:
        """Return the zero point that is used if none is stored."""
        return 2 ** (self.bits - 1)

    @property
    def nbytes(self) -> int:
        held = (getattr(self, part.name) for part in fields(self))
        return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))

    def take_rows(self, begin: int, end: int) -> "Packed":
        """Return rows `[begin, end)`, which share this matrix's memory.

        Both bounds are multiples of row_block, or the end; for rows in tiles they are multiples of TILE.
        """
        assert not self.in_tiles or begin % TILE == end % TILE == 0, "rows in tiles are taken in whole tiles"
        whole, scaled = slice(begin, end), slice(begin // self.row_block, -(-end // self.row_block))
        return replace(
            self,
            words=self.words[whole],
            scales=self.scales[scaled],
            zeros=None if self.zeros is None else self.zeros[scaled],
            runs=None if self.runs is None else self.runs[whole],
        )


EXPONENT_BIAS = 127  # of FP4's scales

Stored = Tensor | Packed  # a matrix, plain or of few bits


def lay_in_tiles(packed: Packed) -> Packed:
    """Return a copy of the matrix with its rows in tiles."""
    return _laid_out(packed, True)


def lay_in_rows(packed: Packed) -> Packed:
    """Return a copy of a matrix in tiles with each row by itself."""
    return _laid_out(packed, False)


def why_not_in_tiles(packed: Packed, parts: int = 1) -> str | None:
    """Return why a matrix cannot be in tiles, although the CPU multiplies it by rows; None: it can.

    parts: the matrix consists of so many, as of experts. Both halves of each part's rows must be whole tiles.
    """
    if packed.kind == "fp8":
        return "fp8 is no integer"
    if packed.order is not None:
        return "columns are in an order of their own"
    if packed.row_block > 1:
        return f"{packed.row_block} rows share scales"
    rows = packed.rows // parts
    return f"{rows} rows are no multiple of {2 * TILE}" if rows % (2 * TILE) else None


def _laid_out(packed: Packed, in_tiles: bool) -> Packed:
    def moved(part: Tensor) -> Tensor:
        tiles = (-1, TILE, part.shape[1]) if in_tiles else (-1, part.shape[1], TILE)
        made = torch.empty_like(part)
        advise_huge_pages(made.data_ptr(), made.nbytes)
        made.view(-1, *tiles[:0:-1]).copy_(part.view(tiles).transpose(1, 2))
        return made

    parts = {name: getattr(packed, name) for name in ("words", "scales", "zeros", "runs")}
    made = {name: moved(part) for name, part in parts.items() if part is not None}
    has_equal_pairs = in_tiles and packed.runs is not None and bool((packed.scales == packed.scales[0, 0]).all())
    return replace(packed, **made, in_tiles=in_tiles, has_equal_pairs=has_equal_pairs)


def unpack_reference(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Unpack in plain torch, computing in `dtype`: `[rows, inner]`, columns in the order of tokens."""
    packed = lay_in_rows(packed) if packed.in_tiles else packed
    numbers = unpack_words(packed.words, packed.bits, packed.inner)
    row = torch.arange(packed.rows, device=numbers.device) // packed.row_block
    column = torch.arange(packed.inner, device=numbers.device) // packed.group
    if packed.runs is not None:
        result = _of_runs(packed, numbers, dtype)
        return result if packed.order is None else _placed(packed, result)
    if packed.kind == "fp4":
        levels = torch.tensor(FP4_NUMBERS, dtype=dtype, device=numbers.device)
        result = torch.cat([levels, -levels])[numbers.long()]
        if packed.scales.dtype != torch.uint8:
            return result * packed.scales.to(dtype)[row][:, column]
        return torch.ldexp(result, (packed.scales.int() - EXPONENT_BIAS)[row][:, column])
    scales = packed.scales.to(dtype)[row][:, column]
    if packed.kind == "fp8":
        result = numbers.view(torch.float8_e4m3fn).to(dtype) * scales
    else:
        zeros = packed.middle if packed.zeros is None else packed.zeros.to(dtype)[row][:, column]
        result = (numbers.to(dtype) - zeros) * scales
    return result if packed.order is None else _placed(packed, result)


def unpack_rows(packed: Packed, rows: Tensor) -> Tensor:
    """Return some rows of a matrix whose columns are in order, `[len(rows), inner]` of packed.dtype, each rounded once.

    rows: int64. Plain torch, on any device, also in captured steps.
    """
    assert packed.row_block == 1, "rows do not share scales"

    def take(part: Tensor) -> Tensor:
        if not packed.in_tiles:
            return part.index_select(0, rows)
        return part.view(-1, part.shape[1], TILE)[rows // TILE, :, rows % TILE]

    taken = replace(
        packed,
        words=take(packed.words),
        scales=take(packed.scales),
        zeros=None if packed.zeros is None else take(packed.zeros),
        runs=None if packed.runs is None else take(packed.runs),
        in_tiles=False,
    )
    return unpack_reference(taken, torch.float32).to(packed.dtype)


def _of_runs(packed: Packed, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    assert packed.runs is not None, "the caller has checked for runs"
    d, least = packed.runs.view(torch.float16).view(packed.rows, -1, 2).to(dtype).unbind(2)
    scale, offset = packed.scales.view(torch.int8).view(packed.rows, -1, 2).to(dtype).unbind(2)
    column = torch.arange(packed.inner, device=numbers.device)
    group, run = column // packed.group, column // packed.run
    return numbers.to(dtype) * (d[:, run] * scale[:, group]) - least[:, run] * offset[:, group]


def _placed(packed: Packed, result: Tensor) -> Tensor:
    placed = torch.empty_like(result)
    placed[:, packed.order] = result
    return placed
