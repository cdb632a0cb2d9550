"""Size the arrays of exchange slots in host memory, as they are allocated and as plans count them. No torch."""

from dataclasses import dataclass

from transfer.arrays import ArraySpec
from transfer.tier_shape import WORD_BITS

ANSWERED = ArraySpec((1,), "int32")
"""The stamp of a slot's last answer, beside its rows."""


@dataclass(frozen=True, slots=True)
class SlotShape:
    """The shape of a row of a slot for attention (`transfer.exchange.ExchangeSlot`).

    num_tables: hash tables for which each query has codes; 0: none.
    dtype: dtype of queries.
    exclusion_blocks: blocks of a context that a row may exclude for each of `kv_heads`; 0: none.
    is_counted: whether answers have the number of tokens that they cover.
    """

    heads: int
    dim: int
    num_tables: int
    dtype: str
    kv_heads: int = 0
    exclusion_blocks: int = 0
    is_counted: bool = False

    def row_arrays(self) -> dict[str, ArraySpec]:
        """Return the arrays of one row, of its request and of its answer."""
        assert self.kv_heads > 0 or self.exclusion_blocks == 0, "exchange slot: exclusions are by KV head"
        arrays = {
            "queries": ArraySpec((self.heads, self.dim), self.dtype),
            "wanted": ArraySpec((self.heads,), "uint8"),
            "flags": ArraySpec((), "int32"),
            "out": ArraySpec((self.heads, self.dim), "float32"),
            "lse": ArraySpec((self.heads,), "float32"),
        }
        if self.num_tables:
            arrays["codes"] = ArraySpec((self.heads, self.num_tables), "uint16")
        if self.exclusion_blocks:
            arrays["excluded"] = ArraySpec((self.kv_heads, -(-self.exclusion_blocks // WORD_BITS)), "int32")
        if self.is_counted:
            arrays["covered"] = ArraySpec((self.heads,), "int32")
        return arrays


def expert_row_arrays(hidden: int, per_token: int) -> dict[str, ArraySpec]:
    """Return the arrays of one row of a slot for experts (`transfer.expert_exchange.ExpertSlot`)."""
    return {
        "hidden": ArraySpec((hidden,), "float32"),
        "experts": ArraySpec((per_token,), "int32"),
        "shares": ArraySpec((per_token,), "float32"),
        "out": ArraySpec((hidden,), "float32"),
        "flags": ArraySpec((), "int32"),
    }


def most_token_floats(inner: int) -> int:
    """Return the most float32 that a rounded token takes (`transfer.simd.row_tiles.token_floats`), which is with units
    of 64 columns and groups of 16, including lines behind it that are read.
    """
    return (inner // 2 + -(-inner // 64) + inner // 16) // 16 * 16 + 32


def expert_work_arrays(num_rows: int, per_token: int, intermediate: int, hidden: int) -> dict[str, ArraySpec]:
    """Return the work arrays of the CPU's experts, with a row for each pair of a row and an expert: the rounded input
    of either matrix, the gated product, and the result.
    """
    return {
        "rounded": ArraySpec((num_rows * per_token, most_token_floats(max(intermediate, hidden))), "float32"),
        "gated": ArraySpec((num_rows * per_token, intermediate), "float32"),
        "made": ArraySpec((num_rows * per_token, hidden), "float32"),
    }
