"""Define what a prefill method does in each layer of a prefill unit.

Invariant: a query's result depends on the keys, values and queries of its own prompt up to the end of its own aligned
block, and on where the prompt ends. It never depends on where units end or on what else is computed. So KV that the
next layer computes from it can be found again by its tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from gpu.attention.prefill_attention import Whole
from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.methods.device_side import Site
from gpu.methods.method import ProfilePart
from gpu.step import PartId


class PrefillSide(ABC):
    """A prefill method with its settings.

    Units end at multiples of its `align_tokens` or at the prompt's end; `query.begin` is such a multiple, or 0.
    """

    def make_state(self, layer: int, begin: int, num_prompt_tokens: int) -> object | None:
        """Return the method's state for one layer of a prompt, of which positions `[begin, num_prompt_tokens)` are
        computed.

        The state comes with each query, from unit to unit, and is dropped when the layer is done.
        """
        return None

    def first_own_token(self) -> int:
        """Return where the first unit begins that the method does not leave to dense prefill; a multiple of
        `align_tokens`.
        """
        return 0

    def is_faster_alone(self, num_queries: int, past: int) -> bool:
        """Return whether so many queries of a prompt are computed faster without being packed with other prompts."""
        return False

    @property
    def packed_kernel(self) -> Whole:
        """Return the kernel that attends to prompts which are packed into one launch."""
        return "flash"

    @abstractmethod
    def attend(self, query: PrefillQuery) -> Attended:
        """Attend with the queries to all keys up to their own positions."""


def make_prefill_sides(parts: Sequence[ProfilePart], site: Site, dense: PrefillSide) -> dict[PartId, PrefillSide]:
    """Return the prefill sides of these parts, by the id that units use. dense: the side that they fall back on."""
    found = [(part, part.method.prefill_side) for part in parts]
    return {
        part.id: import_module(module).make_prefill_side(part.settings, site, dense)
        for part, module in found
        if module is not None
    }


def warm_up_sides(
    sides: Iterable[PrefillSide], keys: Tensor, values: Tensor, num_heads: int, chunk_tokens: int, layer: int
) -> None:
    """Compile each side's kernels on one attention unit of random keys, so that no prompt waits for them.

    keys, values: `[kv_heads, context, dim]`, strided as prefill's own buffers; they are overwritten. layer: one that no
    method leaves to dense prefill, such as the model's last. A side that has no unit in so short a context is skipped.
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
