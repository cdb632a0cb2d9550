"""Define the settings of indexed attention. No torch: the plan and the server's process read them."""

from typing import Literal

from pydantic import Field, model_validator

from transfer.settings_model import Settings


class IndexErrors(Settings):
    """How errors of estimates are measured and bounded."""

    audit_steps: int = Field(
        4,
        ge=0,
        description="every so many steps a thread reads all offloaded keys of one layer and KV head, in turn, to find "
        "the true error; 0: never",
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        description="the largest bound of a head's relative error: a KV head above it reads twice as much at the "
        "next step, up to `budget_tokens`, and the step is counted; default: none. A request may have its own: "
        "`attention_epsilon`",
    )
    on_exceed: Literal["report", "reread"] = Field(
        "report",
        description="what happens above `epsilon`: `report` keeps the head's answer, `reread` replaces it within the "
        "step by one from all the keys of its index, over the link or in resident pages",
    )

    @model_validator(mode="after")
    def check_epsilon(self) -> "IndexErrors":
        if self.on_exceed == "reread" and self.epsilon is None:
            raise ValueError("errors.on_exceed: `reread` without `epsilon`; wanted the error above which to read again")
        return self


class IndexedSettings(Settings):
    key_bits: Literal[2, 3, 4, 8] = Field(4, description="bits of each dimension of a key in the index")
    value_bits: Literal[2, 4] = Field(2, description="bits of each dimension of a value in the index, for estimates")
    budget_share: float = Field(
        0.02, gt=0.0, le=1.0, description="share of the offloaded tokens that a KV head reads exactly at each step"
    )
    least_tokens: int = Field(64, ge=16, le=8192, description="tokens that it reads at least, if there are so many")
    budget_tokens: int = Field(
        2048,
        ge=64,
        le=8192,
        multiple_of=64,
        description="tokens that it reads at most; there are slots on the device for as many, or for its share of the "
        "longest context if that is less and `errors.epsilon` is not set",
    )
    min_context_tokens: int = Field(
        1024, ge=0, description="if prompt and answer are shorter together, the CPU reads them in full"
    )
    resident: Literal["full", "indexed", "auto"] = Field(
        "full",
        description="how a context that is whole on the device is read there: in full, or by an index of its pages; "
        "auto: whichever is faster for a step's rows, by times measured at the start; in full without a GPU",
    )
    rings: int | None = Field(
        None,
        ge=1,
        description="sequences of the profile that run at once; default: what an eighth of the memory beside the "
        "weights holds with indexes of a quarter of the longest context each, at least one",
    )
    index_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of all indexes together, in pages of 1,024, at least those of the longest context; "
        "default: with `rings`, as many longest contexts, else the rest of that eighth",
    )
    errors: IndexErrors = Field(IndexErrors(), description="how errors of estimates are measured and bounded")

    @property
    def on_exceed(self) -> str:
        """Return what happens to an answer whose error may be larger than `epsilon`."""
        return self.errors.on_exceed

    @property
    def epsilon(self) -> float | None:
        """Return the largest error that does not increase the budget, or None."""
        return self.errors.epsilon

    @property
    def num_works(self) -> int:
        """Return how many steps may run side by side: those with host reads, and those without."""
        return 1 if self.resident == "full" else 2

    def token_bytes(self, dim: int) -> int:
        """Return the index's bytes per token and KV head: codes and two scales."""
        return dim * (self.key_bits + self.value_bits) // 8 + 4

    def count_chosen(self, num_tokens: int) -> int:
        """Return how many of so many offloaded tokens a KV head reads exactly at most."""
        share = -(-num_tokens * round(self.budget_share * SHARE_UNIT) // SHARE_UNIT)
        return min(max(share, self.least_tokens), self.budget_tokens)

    def num_slots(self, max_context_tokens: int) -> int:
        """Return the number of slots for a KV head's rows: a multiple of 64 that holds all that it may choose."""
        if self.epsilon is not None:
            return self.budget_tokens
        most = self.count_chosen(max_context_tokens)
        return min(-(-most // SLOT_STEP) * SLOT_STEP, self.budget_tokens)


SLOT_STEP = 64

SHARE_UNIT = 1 << 16
"""Budgets are computed in integers, on host and device, as shares in units of 1 / SHARE_UNIT."""
