"""Describe what of a model is offloaded to host memory, and how it is stored there. No torch, so that plans can count
its bytes.
"""

from dataclasses import dataclass
from typing import Literal

from transfer.arrays import ArraySpec

BLOCK_TOKENS = 16  # of a context's run, that one bit of a host request's exclusions stands for
WORD_BITS = 32
HYPERPLANE_COLUMNS = 32  # that a kernel takes at once
HOST_DIMS = (64, 96, 128, 256)  # of a head, that rows in host memory are read for
MAX_HOST_GROUP = 16  # query heads to a KV head, likewise
INT4_GROUP = 32  # dimensions of an int4 row that have one scale and one offset
ROW_ALIGN_BYTES = 16
Rows = Literal["bfloat16", "int8", "int4"]


def int4_row_bytes(dim: int) -> int:
    """Return the bytes of an int4 row: codes, and scale and offset of each group in bf16."""
    num_bytes = dim // 2 + 4 * (dim // INT4_GROUP)
    return -(-num_bytes // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class TierShape:
    """What is offloaded: `layers` are indices of the model; rows are kept as `rows`; codes as the sampler wants them.

    paper: K = bits_per_table, L = num_tables. `num_tables` 0: nothing is sampled, so there are no codes and no tables.
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
        """Return the numbers that a stored row is made of: dimensions, or bytes of int4."""
        return int4_row_bytes(self.dim) if self.rows == "int4" else self.dim


def hyperplane_array(dim: int, bits_per_table: int, num_tables: int, dtype: str) -> ArraySpec:
    """Return the hyperplanes that codes are made with, `[bits, dim, columns]`; columns past the tables are zeros."""
    columns = -(-num_tables // HYPERPLANE_COLUMNS) * HYPERPLANE_COLUMNS
    return ArraySpec((bits_per_table, dim, columns), dtype)
