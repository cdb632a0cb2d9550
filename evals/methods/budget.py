"""Define how many keys a query head may read: a fraction of its context, or a number of tokens."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Budget:
    """Exactly one of `fraction` (0 to 1, rounded up to whole tokens) and `tokens` is set."""

    fraction: float | None
    tokens: int | None

    def __post_init__(self) -> None:
        assert (self.fraction is None) != (self.tokens is None), f"budget: {self.fraction} and {self.tokens} tokens"

    def of(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return int64 `[requests]`: how many tokens of each context may be read, at most its length."""
        if self.tokens is not None:
            return lengths.clamp(max=self.tokens)
        assert self.fraction is not None
        return torch.ceil(lengths.double() * self.fraction).long().clamp(min=1)

    def most(self, longest: int) -> int:
        """Return the largest number that `of(lengths)` can give, without a wait for the device."""
        if self.tokens is not None:
            return min(longest, self.tokens)
        assert self.fraction is not None
        return max(1, math.ceil(float(longest) * self.fraction))

    def __str__(self) -> str:
        return str(self.tokens) if self.tokens is not None else str(self.fraction)


def parse_budget(value: object) -> Budget:
    """Parse `0.05` and `5%` as fractions of the context, `512` as tokens. Raises ValueError."""
    if isinstance(value, Budget):
        return value
    text = str(value).strip()
    wanted = f"budget {text!r}; wanted a fraction with a point (0.05), a percentage (5%) or tokens (512)"
    try:
        if text.endswith("%"):
            number: float = float(text[:-1]) / 100
        elif text.isdigit():
            if int(text) < 1:
                raise ValueError(wanted)
            return Budget(None, int(text))
        else:
            number = float(text)
    except ValueError:
        raise ValueError(wanted) from None
    if not 0 < number <= 1:
        raise ValueError(wanted)
    return Budget(number, None)
