"""The queries of one prompt in one layer of a prefill unit, and what a prefill method returns for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.partial import Partial


@dataclass(frozen=True, slots=True)
class PrefillQuery:
    """Queries of one prompt in `layer`: query i sees the keys of positions `[0, positions[i]]`.

    query, pre_rope_query: `[tokens, heads, dim]`, rotated and not.
    keys, values: `[kv_heads, context, dim]` (strided), rotated, of positions `[0, context)`; all in the pool's dtype.
    positions: int64 `[tokens]` on the device, ascending. They need be neither consecutive nor the context's last ones;
        `begin` is the first one's where they are consecutive, else None.
    num_prompt_tokens: of the whole prefill, computed before and to come, so its last position plus one.
    state: what the method made for this job, prompt and layer, or None.
    """

    layer: int
    query: Tensor
    pre_rope_query: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    begin: int | None
    num_prompt_tokens: int
    scale: float
    state: object | None


@dataclass(frozen=True, slots=True)
class Attended:
    """The output of a prefill method. out: `[tokens, heads, dim]`, float32 or the model's dtype. lse: float32 `[tokens,
    heads]`, natural log; or None: the method covers the whole past by no softmax over a set, and what it returns is
    merged with nothing.
    """

    out: Tensor
    lse: Tensor | None

    @property
    def partial_lse(self) -> Tensor:
        """Return the lse, to merge the output with another; it must have one."""
        assert self.lse is not None, "attended: a method that has no lse covers the whole past"
        return self.lse

    def partial(self) -> Partial:
        return Partial(self.out.float(), self.partial_lse)


def joined(attended: Sequence[Attended]) -> Attended:
    """Return the outputs of queries that stand behind each other as one; without an lse if any has none."""
    if len(attended) == 1:
        return attended[0]
    lses = [one.lse for one in attended if one.lse is not None]
    lse = torch.cat(lses) if len(lses) == len(attended) else None
    return Attended(torch.cat([one.out for one in attended]), lse)
