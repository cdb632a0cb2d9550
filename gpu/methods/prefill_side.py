"""How prompts are attended to: what a method of the slot `prefill` does in each layer of a unit.

It refuses to know units, pages and jobs. Invariant: what a query gets depends on the keys, values and queries of its
own prompt up to its own position's aligned block, and on where the prompt ends, never on where units end or on what
else is computed: so KV that the next layer makes of it can be found again by its tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module

from gpu.methods.device_side import Site
from gpu.prefill.query import Attended, PrefillQuery
from gpu.profiles import Part


class PrefillSide(ABC):
    """One method with its settings. Units end at multiples of the `align_tokens` that it states, or with the prompt;
    `query.begin` is such a multiple, or 0.
    """

    def make_state(self, layer: int, begin: int, num_prompt_tokens: int) -> object | None:
        """What it keeps from unit to unit of one prompt's layer, of which positions `[begin, num_prompt_tokens)` are
        computed: it comes with each query, and goes when the layer is done.
        """
        return None

    @abstractmethod
    def attend(self, query: PrefillQuery) -> Attended:
        """What the queries get of all keys up to their own positions."""


def make_prefill_sides(parts: Sequence[Part], site: Site, dense: PrefillSide) -> dict[str, PrefillSide]:
    """Of the prefill methods among these, by what units name them. dense: what they fall back on."""
    found = [(part, part.method.prefill_side) for part in parts]
    return {
        str(part): import_module(module).make_prefill_side(part.settings, site, dense)
        for part, module in found
        if module is not None
    }
