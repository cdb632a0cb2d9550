"""What of a model goes down to host memory, and how it is kept there. No torch, so that plans can count its bytes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TierShape:
    """What goes down: `layers` are indices of the model; rows are kept as `rows`; codes as the sampler wants them.

    paper: K = bits_per_table, L = num_tables. `num_tables` 0: nothing is sampled, so there are no codes and no tables.
    """

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    dim: int
    rows: Literal["bfloat16", "int8"]
    bits_per_table: int
    num_tables: int
