"""What slots of an exchange hold in host memory: arrays that are allocated and that plans count. No torch."""

from dataclasses import dataclass

from transfer.arrays import ArraySpec
from transfer.tier_shape import WORD_BITS

ANSWERED = ArraySpec((1,), "int32")
"""The stamp of a slot's last answer, beside its rows."""


@dataclass(frozen=True, slots=True)
class SlotShape:
    """A row of a slot in which attention is asked for (`transfer.exchange.ExchangeSlot`).

    num_tables: of the codes beside each query, 0: none.
    dtype: of queries.
    exclusion_blocks: of a context, that a row may exclude for each of `kv_heads`, 0: none.
    is_counted: answers say how many tokens they stand for.
    """

    heads: int
    dim: int
    num_tables: int
    dtype: str
    kv_heads: int = 0
    exclusion_blocks: int = 0
    is_counted: bool = False

    def row_arrays(self) -> dict[str, ArraySpec]:
        """Return the arrays of one row, out and back."""
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
    """Return the arrays of one row of a slot in which experts are asked for (`transfer.expert_exchange.ExpertSlot`)."""
    return {
        "hidden": ArraySpec((hidden,), "float32"),
        "experts": ArraySpec((per_token,), "int32"),
        "shares": ArraySpec((per_token,), "float32"),
        "out": ArraySpec((hidden,), "float32"),
        "flags": ArraySpec((), "int32"),
    }


def most_token_floats(inner: int) -> int:
    """Return the most float32 of a rounded token (`transfer.simd.row_tiles.token_floats`), of units of 64 columns and
    groups of 16, and lines behind it that are read.
    """
    return (inner // 2 + -(-inner // 64) + inner // 16) // 16 * 16 + 32


def expert_work_arrays(num_rows: int, per_token: int, intermediate: int, hidden: int) -> dict[str, ArraySpec]:
    """Return what the CPU computes experts in: for each pair of a row and an expert its products, their sum, and what
    either matrix takes, rounded.
    """
    return {
        "rounded": ArraySpec((num_rows * per_token, most_token_floats(max(intermediate, hidden))), "float32"),
        "gated": ArraySpec((num_rows * per_token, intermediate), "float32"),
        "made": ArraySpec((num_rows * per_token, hidden), "float32"),
    }
