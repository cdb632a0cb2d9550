"""Define an attention method of the evaluations: a decode step over the full KV of a layer, and what it read.

A decode method gets the whole KV of a layer, contiguous, and may keep a state of its own. It returns a partial over the
tokens that it covers. Everything is batched over prompts of different lengths. Rows are padded on the right, and no
value at or behind a row's length is ever read (tests fill these with NaN).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

from evals.methods.budget import Budget, parse_budget


class MethodError(Exception):
    """A method that cannot be parsed or cannot run as asked. The message names the setting, its value and a remedy."""


@dataclass(slots=True)
class PromptLayer:
    """One layer of a batch of prompts, as the prefill leaves it.

    queries, pre_rope_queries: `[requests, heads, tokens, dim]`. keys, values: `[requests, kv_heads, capacity, dim]`
    with capacity >= tokens. lengths: int64 `[requests]`; longest: the largest of them, on the host. shared: results
    that several methods compute from the same prompt (column masses, page bounds), by name.
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
        """Return `make()`, which is called only for the first method that asks under this name.

        Callers that change the result must copy it first.
        """
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of one layer. The new token's key and value are already in place.

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
        """Return the number of query heads per KV head."""
        return self.query.shape[1] // self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The partial of a step and what it cost.

    out: float32 `[requests, heads, dim]`. lse: float32 `[requests, heads]`, natural log of the mass that `out` covers.
    keys_scored: float32 `[requests, heads]`, keys whose exact logit entered the softmax.
    rows_read: float32 `[requests, kv_heads]`, rows of KV (a key and a value) read. Heads of a group that read the same
    rows together count them once; heads that choose for themselves count each. Reads of a method's index are included,
    an oracle's search is not.
    accepted, skipped: float32 `[requests]`, only of a method that reuses: the share of heads that found a match, and
    the share of their contexts' cells that the match covers.
    gaps: int64 `[requests, heads]`, how many positions back the match is; 0: none.
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

    dense_layers: layers that are read in full under any method: ids, ranges and `half` (the middle layer, number layers
    / 2) joined by `+`, such as `0-1+16` and `0+half`.
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
        """Return the shortest text that `parse_method` parses to this method."""
        given = self.model_dump(exclude_defaults=True)
        return self.name + (":" + ",".join(f"{key}={value}" for key, value in given.items()) if given else "")


class DecodeMethod(Method):
    """A method that replaces attention in decode steps."""

    def begin(self, prompt: PromptLayer) -> Any:
        """Return the method's own state of a layer, made from the prompt's prefill; None if it keeps none.

        `step` may change the state.
        """
        return None

    def step(self, step: Step, state: Any) -> StepResult:
        raise NotImplementedError

    def read_between(self, step: Step, result: StepResult) -> torch.Tensor | None:
        """Return the rows that a KV head read between sink and window, over those that are there: `[requests]`.

        None: this method does not say it.
        """
        return None


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """Parse `0-1+half` to layer ids, such as {0, 1, 16} for 32 layers. Raises ValueError."""
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
