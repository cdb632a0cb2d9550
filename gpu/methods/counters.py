"""Define a method's counters while it serves, and how evaluations use them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Counts = Mapping[str, Sequence[int]]
"""Numbers by counter: one per layer if the counter is `by_layer`, else a single one."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A named number of a method; `/metrics` shows it as `tandem_NAME`.

    description: its help text. by_layer: there is one number per layer of the model. is_gauge: the number is a present
    value; else it only grows from the engine's start.
    """

    description: str
    by_layer: bool = False
    is_gauge: bool = False


@dataclass(frozen=True, slots=True)
class RequestFigure:
    """A number of a single request. The answer's `usage` has it by name; `/metrics` sums it as `tandem_METRIC`.

    description: help text. of_prompt: the number describes the prompt. Then it is in `prompt_tokens_details`, and
    counts once for all answers to the prompt; else it is summed over answers, in `completion_tokens_details`. metric:
    empty: it is not summed.
    """

    description: str
    of_prompt: bool = False
    metric: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """A quotient of two counters, `part` over `whole`, that evaluations report.

    by_group: multiply it by the query heads of a KV head. of_all_layers: report it also over all layers together.
    """

    part: str
    whole: str
    by_group: bool = False
    of_all_layers: bool = False


@dataclass(frozen=True, slots=True)
class SavedReads:
    """What a method saved decode steps from reading, and what it cost them.

    keys: keys that query heads did not read, summed over heads and layers.
    rows: keys with their values that KV heads did not read.
    own_bytes: bytes that the method read and wrote itself.
    rows_include_host: whether `rows` include rows in host memory.
    host_rows: those of `rows` that another such method of the profile counts as well.
    """

    keys: int = 0
    rows: int = 0
    own_bytes: int = 0
    rows_include_host: bool = False
    host_rows: int = 0


def add_counts(counts: Sequence[Counts]) -> dict[str, list[int]]:
    """Return the sums by name over several methods or profiles."""
    sums: dict[str, list[int]] = {}
    for one in counts:
        for name, numbers in one.items():
            before = sums.get(name, [0] * len(numbers))
            sums[name] = [now + then for now, then in zip(numbers, before, strict=True)]
    return sums


def subtract_counts(after: Counts, before: Counts) -> dict[str, list[int]]:
    """Return what was counted between two readings of the counters."""
    return {
        name: [late - early for late, early in zip(numbers, before.get(name, [0] * len(numbers)), strict=True)]
        for name, numbers in after.items()
    }
