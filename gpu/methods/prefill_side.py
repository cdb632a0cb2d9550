"""The prefill side of a method: what a method of the slot `prefill` does in each layer of a unit.

Invariant: what a query gets depends on the keys, values and queries of its own prompt up to its own position's aligned
block, and on where the prompt ends, never on where units end or on what else is computed: so KV that the next layer
makes of it can be found again by its tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.methods.device_side import Site
from gpu.methods.method import ProfilePart
from gpu.step import PartId


class PrefillSide(ABC):
    """One method with its settings. Units end at multiples of the `align_tokens` that it states, or with the prompt;
    `query.begin` is such a multiple, or 0.
    """

    def make_state(self, layer: int, begin: int, num_prompt_tokens: int) -> object | None:
        """Return what it keeps from unit to unit of one prompt's layer, of which positions `[begin, num_prompt_tokens)`
        are computed: it comes with each query, and goes when the layer is done.
        """
        return None

    def first_own_token(self) -> int:
        """Return where the first unit begins that it does not leave to dense prefill; a multiple of `align_tokens`."""
        return 0

    def is_faster_alone(self, num_queries: int, past: int) -> bool:
        """Return whether a prompt's part of so many queries is better not computed together with others."""
        return False

    @abstractmethod
    def attend(self, query: PrefillQuery) -> Attended:
        """Return what the queries get of all keys up to their own positions."""


def make_prefill_sides(parts: Sequence[ProfilePart], site: Site, dense: PrefillSide) -> dict[PartId, PrefillSide]:
    """Return the sides of the prefill methods among these, by what units name them. dense: what they fall back on."""
    found = [(part, part.method.prefill_side) for part in parts]
    return {
        part.id: import_module(module).make_prefill_side(part.settings, site, dense)
        for part, module in found
        if module is not None
    }


def warm_up_sides(
    sides: Iterable[PrefillSide], keys: Tensor, values: Tensor, num_heads: int, chunk_tokens: int, layer: int
) -> None:
    """Compile the kernels of each side on one attention unit of random keys, so that no prompt waits for them.

    layer: one that no method leaves to dense prefill, such as the model's last. keys, values: `[kv_heads, context,
    dim]`, strided as prefill's own buffers are; overwritten. A side without a unit in so short a context is left out.
    """
    context, dim = keys.shape[1:]
    for side in sides:
        begin = side.first_own_token()
        tokens = min(chunk_tokens, context - begin)
        if tokens <= 0:
            continue
        end = begin + tokens
        own = keys[:, :end].normal_(), values[:, :end].normal_()
        query = torch.randn(tokens, num_heads, dim, dtype=keys.dtype, device=keys.device)
        positions = torch.arange(begin, end, device=keys.device)
        state = side.make_state(layer, begin, end)
        side.attend(PrefillQuery(layer, query, query, *own, positions, begin, end, dim**-0.5, state))
