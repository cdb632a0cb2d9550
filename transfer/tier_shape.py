"""Describe which layers of a model are offloaded to host memory, and how rows are stored there. No torch, so that plans
can count the bytes.
"""

from dataclasses import dataclass
from typing import Literal

from transfer.arrays import ArraySpec

BLOCK_TOKENS = 16  # tokens of a context's run for each bit of a host request's exclusions
WORD_BITS = 32
HYPERPLANE_COLUMNS = 32  # columns that a kernel takes at once
HOST_DIMS = (64, 96, 128, 256)  # head sizes for which the host has attention kernels
MAX_HOST_GROUP = 16  # the most query heads for a KV head in these kernels
INT4_GROUP = 32  # dimensions of an int4 row that share one scale and one offset
ROW_ALIGN_BYTES = 16
Rows = Literal["bfloat16", "int8", "int4"]


def int4_row_bytes(dim: int) -> int:
    """Return the bytes of an int4 row: codes, and scale and offset of each group in bf16."""
    num_bytes = dim // 2 + 4 * (dim // INT4_GROUP)
    return -(-num_bytes // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class TierShape:
    """The shape of offloaded KV. layers: indices of the model's layers. rows: their format.

    bits_per_table and num_tables are the sampler's (the paper's K and L). num_tables 0: nothing is sampled, so there
    are no codes and no tables.
    """

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    dim: int
    rows: Rows
    bits_per_table: int
    num_tables: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a key or a value of one KV head."""
        return self.row_width * (2 if self.rows == "bfloat16" else 1)

    @property
    def row_width(self) -> int:
        """Return the length of a stored row: dimensions, or, of int4, bytes."""
        return int4_row_bytes(self.dim) if self.rows == "int4" else self.dim


def hyperplane_array(dim: int, bits_per_table: int, num_tables: int, dtype: str) -> ArraySpec:
    """Return the hyperplanes that codes are made with, `[bits, dim, columns]`; columns past the tables are zeros."""
    columns = -(-num_tables // HYPERPLANE_COLUMNS) * HYPERPLANE_COLUMNS
    return ArraySpec((bits_per_table, dim, columns), dtype)
