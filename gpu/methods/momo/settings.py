"""Settings of MOMO's prefill and its selections of key blocks. No torch: the plan and the server's process read them.

Invariant: blocks of keys, blocks of queries and windows are powers of two and divide each other, so all grids of
absolute positions meet where a query block begins.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from transfer.settings_model import Settings

SelectionName = Literal["exact", "estimated"]
DEFAULT_K: dict[Any, int] = {"exact": 64, "estimated": 128}


@dataclass(frozen=True, slots=True)
class Selection:
    """How a sparse query's row keeps key blocks as it passes over them. k: how many. k_exact: how many of them by rank,
    where the others are taken by an estimated threshold (paper: section 3, k and k_exact).
    """

    name: SelectionName
    k: int
    k_exact: int


class MomoSettings(Settings):
    """Paper: gamma = γ, key_block = β, query_block = χ."""

    gamma: int = Field(16, ge=1, le=128, description="one query of so many attends to everything")
    key_block: int = Field(64, ge=16, le=128, description="keys that are chosen together")
    query_block: int = Field(128, ge=16, le=128, description="queries that read the same key blocks; units of prefill "
                             "and shared prefixes end at multiples of it")  # fmt: skip
    selection: SelectionName = Field("exact", description="how a sparse query chooses: exact (by rank, on chip) or "
                                     "estimated (by a threshold)")  # fmt: skip
    k: int = Field(64, ge=1, le=1024, description="key blocks that a sparse query chooses; 128 unless given where "
                   "selection is estimated")  # fmt: skip
    k_exact: int = Field(8, ge=1, le=64, description="of them chosen by rank where selection is estimated")
    k_trim: int = Field(64, ge=1, description="key blocks that a query block reads at most, its own and the first "
                        "among them")  # fmt: skip
    dense_until_tokens: int = Field(16384, ge=0, description="queries before it read everything, in every prompt")
    dense_layers: int = Field(0, ge=0, description="first layers, in which every query reads everything")

    @model_validator(mode="before")
    @classmethod
    def _fill_k(cls, given: Any) -> Any:
        if isinstance(given, dict) and "k" not in given:
            return {**given, "k": DEFAULT_K.get(given.get("selection"), DEFAULT_K["exact"])}
        return given

    @model_validator(mode="after")
    def _check(self) -> "MomoSettings":
        for name in ("gamma", "key_block", "query_block", "k", "k_exact"):
            number = getattr(self, name)
            if number & (number - 1):
                raise ValueError(f"{name} is {number}; wanted a power of two")
        if self.query_block < max(self.key_block, self.gamma):
            raise ValueError(
                f"query_block is {self.query_block}; wanted at least key_block ({self.key_block}) and gamma "
                f"({self.gamma})"
            )
        if self.selection == "exact" and self.k > 128:
            raise ValueError(f"k is {self.k}; exact selection keeps at most 128 on chip: write `selection: estimated`")
        if self.selection == "estimated" and self.k_exact >= self.k:
            raise ValueError(f"k_exact is {self.k_exact}; wanted less than k ({self.k})")
        if self.k_trim <= self.query_block // self.key_block:
            raise ValueError(
                f"k_trim is {self.k_trim}; wanted more than a query block's own {self.query_block // self.key_block}"
            )
        return self

    @property
    def how(self) -> Selection:
        return Selection(self.selection, self.k, self.k_exact)
