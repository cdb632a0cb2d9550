"""Define partial attention, softmax attention over a set of tokens as (out, lse), and the ledger of how many tokens
each part of the system covers.

Partials over disjoint sets merge exactly, in any order and grouping, and the empty set is (0, -inf). Every lse here is
the natural logarithm of the softmax mass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from transfer.merge import MOST_SIDES, NO_MASS, merge_outputs


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention of each query over the tokens that one method covers.

    out: float32 `[tokens, heads, dim]`; lse: float32 `[tokens, heads]`, natural log; covered: int32 `[tokens, heads]`,
    how many tokens the method covers (debug runs), or None.
    """

    out: Tensor
    lse: Tensor
    covered: Tensor | None = None

    @staticmethod
    def empty(tokens: int, heads: int, dim: int, device: torch.device | str, counted: bool = False) -> "Partial":
        """Return the partial of no tokens. counted: whether it has a `covered` of zeros."""
        return Partial(
            torch.zeros(tokens, heads, dim, dtype=torch.float32, device=device),
            torch.full((tokens, heads), NO_MASS, dtype=torch.float32, device=device),
            torch.zeros(tokens, heads, dtype=torch.int32, device=device) if counted else None,
        )


def merge(a: Partial, b: Partial) -> Partial:
    """Return the partial of the union of two disjoint token sets, in new tensors; see `merge_all`. Raises ValueError if
    shapes, dtypes or devices differ.
    """
    return merge_all([a, b])


def merge_all(partials: Sequence[Partial]) -> Partial:
    """Merge one or more partials over pairwise disjoint token sets, a few in each pass. A single one is returned as it
    is.

    `covered` is the sum if all partials have it, and None otherwise. Raises ValueError for an empty sequence.
    """
    if not partials:
        raise ValueError("merge_all: got no partials, wanted one or more; use Partial.empty for the empty set")
    merged = partials[0]
    for first in range(1, len(partials), MOST_SIDES - 1):
        sides = [merged, *partials[first : first + MOST_SIDES - 1]]
        counts = [side.covered for side in sides if side.covered is not None]
        covered = torch.stack(counts).sum(0, dtype=torch.int32) if len(counts) == len(sides) else None
        merged = Partial(*merge_outputs([side.out for side in sides], [side.lse for side in sides]), covered)
    return merged


class Owner(IntEnum):
    """The part of the system that covers a token in one (layer, query head). DROPPED: left out on purpose. ESTIMATED:
    covered by estimated masses and mean values.
    """

    RESIDENT = 0
    HOST = 1
    REUSED = 2
    FETCHED = 3
    DROPPED = 4
    ESTIMATED = 5


class CoverageError(AssertionError):
    """Tokens of a context were lost or covered twice."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The ledger of one layer's attention: how many tokens each owner covers for each request and query head.

    request_ids: names of the rows of every count tensor, int32 `[requests, heads]`. Each owner is added once.
    """

    layer: int
    request_ids: Sequence[str]
    counts: dict[Owner, Tensor] = field(default_factory=dict)

    def add(self, owner: Owner, covered: Tensor | None) -> None:
        """Add an owner's counts, int32 `[requests, heads]`. Raises CoverageError if missing, misshapen or repeated."""
        if covered is None:
            raise CoverageError(f"coverage: layer {self.layer}: {owner.name} did not count; run it counted")
        if owner in self.counts:
            raise CoverageError(f"coverage: layer {self.layer}: {owner.name} counted twice, wanted once")
        heads = next((tuple(other.shape[1:]) for other in self.counts.values()), tuple(covered.shape[1:]))
        wanted = (len(self.request_ids), *heads)
        if covered.ndim != 2 or tuple(covered.shape) != wanted:
            raise CoverageError(
                f"coverage: layer {self.layer}: {owner.name} counts {tuple(covered.shape)}, wanted {wanted}"
            )
        self.counts[owner] = covered

    def check(self, context: Tensor) -> None:
        """Raise CoverageError unless all owners' counts, DROPPED included, add up to `context`, int `[requests]`.

        The message names the layer, the first wrong request and head, and each owner's count. Waits for the device.
        """
        if not self.counts:
            raise CoverageError(f"coverage: layer {self.layer}: no owner counted, wanted at least one")
        counts = {owner: counted.cpu().long() for owner, counted in sorted(self.counts.items())}
        wanted = context.cpu().long()
        total = torch.stack(list(counts.values())).sum(0)  # [requests, heads]
        negative = torch.stack(list(counts.values())).amin(0) < 0
        wrong = ((total != wanted[:, None]) | negative).nonzero()
        if len(wrong) == 0:
            return
        row, head = (int(index) for index in wrong[0])
        listed = ", ".join(f"{owner.name.lower()} {int(counted[row, head])}" for owner, counted in counts.items())
        raise CoverageError(
            f"coverage: layer {self.layer}, request {self.request_ids[row]}, head {head}: {listed} = "
            f"{int(total[row, head])} tokens, wanted the context of {int(wanted[row])}; {len(wrong)} (request, head)"
        )
