"""Define an attention method of the evaluations: a decode step over the full KV of a layer, and what it read.

A decode method is given the whole KV of a layer, contiguous, and may keep a state of its own; it returns a partial over
the tokens that it covers. Everything is batched over prompts of different lengths: rows are padded on the right, and
what stands at or behind a row's length is never read (tests poison it with NaN).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

from evals.methods.budget import Budget, parse_budget


class MethodError(Exception):
    """A method that cannot be parsed or cannot run as asked; the message names setting, value and remedy."""


@dataclass(slots=True)
class PromptLayer:
    """One layer of a batch of prompts, as the prefill leaves it.

    queries, pre_rope_queries: `[requests, heads, tokens, dim]`. keys, values: `[requests, kv_heads, capacity, dim]`
    with capacity >= tokens. lengths: int64 `[requests]`; longest: the largest of them, on the host. `shared` keeps what
    several methods derive from the same prompt (column masses, page bounds), by name.
    """

    layer: int
    queries: torch.Tensor
    pre_rope_queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    longest: int
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, computed for the first method that asks under this name. Whoever changes the result copies
        it.
        """
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of one layer, the new token's key and value in their place.

    query, pre_rope_query: `[requests, heads, dim]`. keys, values: `[requests, kv_heads, longest, dim]`.
    lengths: int64 `[requests]`, the new token included; longest: the largest of them, on the host.
    """

    layer: int
    query: torch.Tensor
    pre_rope_query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    longest: int

    @property
    def group(self) -> int:
        """Return query heads to a KV head."""
        return self.query.shape[1] // self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The partial of a step and what it cost.

    out: float32 `[requests, heads, dim]`. lse: float32 `[requests, heads]`, natural log of the mass that `out` stands
    for. keys_scored: float32 `[requests, heads]`, keys whose exact logit entered the softmax. rows_read: float32
    `[requests, kv_heads]`, rows of KV (a key and a value) read: heads of a group that read the same rows together count
    once, heads that choose for themselves count each. A method's index is in `rows_read`; an oracle's search is not.
    accepted, skipped: float32 `[requests]`, of a method that reuses: heads that found something, and cells of their
    contexts that they took over, as shares; gaps: int64 `[requests, heads]`, positions back to what they found, 0:
    nothing.
    """

    out: torch.Tensor
    lse: torch.Tensor
    keys_scored: torch.Tensor
    rows_read: torch.Tensor
    accepted: torch.Tensor | None = None
    skipped: torch.Tensor | None = None
    gaps: torch.Tensor | None = None


BudgetSetting: TypeAlias = Annotated[
    Budget, BeforeValidator(parse_budget), PlainSerializer(lambda budget: str(budget), return_type=str)
]


class Method(BaseModel):
    """Settings that every method has. Subclasses are frozen: a method is its name and its settings.

    `dense_layers` are read in full whatever the method: ids, ranges and `half` (the middle layer, number layers / 2)
    joined by `+`, such as `0-1+16` and `0+half`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    name: ClassVar[str]
    paper: ClassVar[str]
    dense_layers: str = Field("", description="layers read in full: ids, ranges and half joined by +, such as 0-1+16")

    @field_validator("dense_layers")
    @classmethod
    def _ids(cls, text: str) -> str:
        parse_layers(text, 0)
        return text

    def handles(self, layer: int, num_layers: int) -> bool:
        return layer not in parse_layers(self.dense_layers, num_layers)

    @property
    def settings(self) -> dict[str, Any]:
        return self.model_dump()

    @property
    def label(self) -> str:
        """Return the shortest text that `parse_method` turns into this method again."""
        given = self.model_dump(exclude_defaults=True)
        return self.name + (":" + ",".join(f"{key}={value}" for key, value in given.items()) if given else "")


class DecodeMethod(Method):
    """A method that stands in for attention in decode steps."""

    def begin(self, prompt: PromptLayer) -> Any:
        """Return the method's own state of a layer, made from its prefill; None if it keeps none. `step` may
        change it.
        """
        return None

    def step(self, step: Step, state: Any) -> StepResult:
        raise NotImplementedError


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """Return `0-1+half` of 32 layers -> {0, 1, 16}. Raises ValueError."""
    layers: set[int] = set()
    for part in filter(None, text.split("+")):
        if part == "half":
            layers.add(num_layers // 2)
            continue
        begin, dash, end = part.partition("-")
        if not begin.isdigit() or (dash and not end.isdigit()):
            raise ValueError(f"dense_layers: {text!r}; wanted ids, ranges and half joined by +, such as 0-1+16")
        layers.update(range(int(begin), int(end or begin) + 1))
    return frozenset(layers)
