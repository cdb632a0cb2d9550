"""Define the queries of one prompt in one layer of a prefill unit, and what a prefill method returns for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.partial import Partial


@dataclass(frozen=True, slots=True)
class PrefillQuery:
    """Queries of one prompt in `layer`: query i sees the keys of positions `[0, positions[i]]`.

    query, pre_rope_query: `[tokens, heads, dim]`, after and before RoPE.
    keys, values: `[kv_heads, context, dim]` (strided), rotated, of positions `[0, context)`; all in the pool's dtype.
    positions: int64 `[tokens]` on the device, ascending. They need be neither consecutive nor the context's last.
    begin: the first position if positions are consecutive, else None.
    num_prompt_tokens: of the whole prompt, computed and still to come: its last position plus one.
    state: what the method's `make_state` returned for this prompt and layer, or None.
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
    """The output of a prefill method.

    out: `[tokens, heads, dim]`, float32 or the model's dtype. lse: float32 `[tokens, heads]`, natural logarithm. None:
    the method covers the whole past, but not by a softmax over a set of keys, so its output cannot be merged with
    another.
    """

    out: Tensor
    lse: Tensor | None

    @property
    def partial_lse(self) -> Tensor:
        """Return the lse, for merging the output with another. Asserts that there is one."""
        assert self.lse is not None, "attended: a method that has no lse covers the whole past"
        return self.lse

    def partial(self) -> Partial:
        return Partial(self.out.float(), self.partial_lse)


def joined(attended: Sequence[Attended]) -> Attended:
    """Concatenate the outputs of consecutive queries. The result has an lse if every output has one."""
    if len(attended) == 1:
        return attended[0]
    lses = [one.lse for one in attended if one.lse is not None]
    lse = torch.cat(lses) if len(lses) == len(attended) else None
    return Attended(torch.cat([one.out for one in attended]), lse)
