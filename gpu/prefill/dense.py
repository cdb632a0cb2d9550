"""Dense prefill: what a profile whose slot `prefill` is empty means. Each query attends to its whole past, exactly.

It refuses to know which kernel does so. It stands beside the methods, not among them: short prompts of it are packed
into one launch (`gpu.prefill.jobs`), other methods fall back on it, and it is there where nothing is configured.
"""

from gpu.methods.prefill_side import PrefillSide
from gpu.prefill.attention import prefill_attention, scattered_attention
from gpu.prefill.query import Attended, PrefillQuery


class Dense(PrefillSide):
    """No state, and any unit ends."""

    def attend(self, query: PrefillQuery) -> Attended:
        if query.begin is None:
            return scattered_attention(query.query, query.keys, query.values, query.positions, query.scale)
        end = query.begin + query.query.shape[0]
        return prefill_attention(query.query, query.keys[:, :end], query.values[:, :end], query.scale)
