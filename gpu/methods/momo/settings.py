"""Define the settings of MOMO's prefill. No torch: the plan and the server's process read them.

Invariant: the sizes of key blocks, query blocks and windows are powers of two, so the grids of all three align where a
query block begins.
"""

from pydantic import Field, model_validator

from transfer.settings_model import Settings


class MomoSettings(Settings):
    """Settings of MOMO. In the paper's terms: gamma = γ, key_block = β, query_block = χ."""

    gamma: int = Field(16, ge=1, le=128, description="one query in so many attends to everything")
    key_block: int = Field(64, ge=16, le=128, description="keys that are chosen together")
    query_block: int = Field(128, ge=16, le=128, description="queries that read the same key blocks; prefill units "
                             "and shared prefixes end at multiples of it")  # fmt: skip
    k: int = Field(64, ge=1, le=128, description="key blocks that a sparse query chooses, by rank, on chip")
    k_trim: int = Field(64, ge=1, description="the most key blocks that a query block reads, its own and the first "
                        "included")  # fmt: skip
    dense_until_tokens: int = Field(
        16384, ge=0, description="in every prompt, queries before this position read everything"
    )
    dense_layers: int = Field(0, ge=0, description="first layers, in which every query reads everything")

    @model_validator(mode="after")
    def _check(self) -> "MomoSettings":
        for name in ("gamma", "key_block", "query_block", "k"):
            number = getattr(self, name)
            if number & (number - 1):
                raise ValueError(f"{name} is {number}; wanted a power of two")
        if self.query_block < max(self.key_block, self.gamma):
            raise ValueError(
                f"query_block is {self.query_block}; wanted at least key_block ({self.key_block}) and gamma "
                f"({self.gamma})"
            )
        if self.k_trim <= self.query_block // self.key_block:
            raise ValueError(
                f"k_trim is {self.k_trim}; wanted more than a query block's own {self.query_block // self.key_block}"
            )
        return self
