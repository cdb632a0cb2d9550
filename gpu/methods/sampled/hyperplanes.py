"""Define SimHash codes: on which side of `bits_per_table` random hyperplanes a vector lies, for each table.

MagicPIG (arXiv 2410.16179), sections 4.2 and 4.3; paper: K = bits_per_table, L = num_tables. Invariant: bit `i` of
table `t` is set exactly if the product with column `t * bits_per_table + i` is above zero. So two codes of a table
agree with probability p^K, p = 1 - angle / pi. One draw serves all layers and heads of a model and never changes, so
that the same prompt always falls into the same buckets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PROJECTION_SEED = 241_016_179
"""Never changes: the same prompt falls into the same buckets."""

MAX_BITS_PER_TABLE = 16
"""A code is one uint16."""

MAX_PRODUCTS = 1 << 26
"""Products that `encode_reference` holds at once: 256 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Projections:
    """Random hyperplanes of the hash tables.

    matrix: `[dim, num_tables * bits_per_table]`, contiguous, any float dtype and device; each column is a hyperplane's
    normal.
    """

    matrix: Tensor
    bits_per_table: int
    num_tables: int

    @property
    def dim(self) -> int:
        return self.matrix.shape[0]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Projections":
        """Return the same hyperplanes on another device. A narrower dtype tilts them by its rounding."""
        return Projections(self.matrix.to(device, dtype), self.bits_per_table, self.num_tables)


def draw_projections(
    dim: int, bits_per_table: int, num_tables: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Projections:
    """Draw independent standard normal numbers, in float32 on the CPU, so that every device has the same.

    Tables are drawn one after another: if `dim` is a multiple of 16, a draw of more tables begins with the tables of a
    smaller draw. Raises ValueError for bits outside 1 to 16, or for no table.
    """
    if not 1 <= bits_per_table <= MAX_BITS_PER_TABLE:
        raise ValueError(
            f"simhash: bits_per_table is {bits_per_table}; wanted 1 to {MAX_BITS_PER_TABLE}, a code is one uint16"
        )
    if num_tables < 1:
        raise ValueError(f"simhash: num_tables is {num_tables}; wanted 1 or more")
    generator = torch.Generator("cpu").manual_seed(seed)
    normals = torch.randn(num_tables * bits_per_table, dim, generator=generator, dtype=torch.float32)
    return Projections(normals.T.contiguous().to(device, dtype), bits_per_table, num_tables)


def encode_reference(rows: Tensor, projections: Projections) -> Tensor:
    """Return the codes of rows `[..., dim]` of any float dtype: uint16 `[..., num_tables]`.

    Rows and hyperplanes are widened, never rounded: to float64 if either is float64, else to float32. Raises ValueError
    for rows of another dim or device than the projections'.
    """
    matrix, bits, tables = projections.matrix, projections.bits_per_table, projections.num_tables
    if rows.shape[-1] != projections.dim or rows.device != matrix.device:
        raise ValueError(
            f"simhash: rows are {tuple(rows.shape)} on {rows.device}; "
            f"wanted [..., {projections.dim}] on {matrix.device}, as the projections"
        )
    wide = torch.float64 if torch.float64 in (rows.dtype, matrix.dtype) else torch.float32
    matrix = matrix.to(wide)
    flat = rows.reshape(-1, projections.dim)
    codes = torch.zeros(len(flat), tables, dtype=torch.int32, device=rows.device)  # uint16 has few operations
    step = max(1, MAX_PRODUCTS // (tables * bits))
    for begin in range(0, len(flat), step):
        above = (flat[begin : begin + step].to(wide) @ matrix > 0).view(-1, tables, bits)
        for bit in range(bits):
            codes[begin : begin + step] |= above[..., bit].to(torch.int32) << bit
    return codes.to(torch.uint16).view(*rows.shape[:-1], tables)
