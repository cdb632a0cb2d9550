"""How long a prefill unit or a decode step will take, learnt from those that ran.

A unit's work is counted in FLOPs; the machine's rate on it is a running estimate. Small units run at a lower rate than
large ones, so the estimate is kept per power of two of the unit's tokens and borrowed from the nearest size known.
"""

from gpu.architecture import Architecture
from gpu.step import PrefillUnit

_FIRST_RATE = 5e9  # FLOP/s: before anything has run, small enough that a first unit is short on any machine
_SMOOTHING = 0.3


class CostModel:
    def __init__(self, architecture: Architecture) -> None:
        self._weights = architecture.num_layer_weights
        self._attention_width = architecture.num_heads * architecture.dim
        self._rates: dict[int, float] = {}
        self.decode_seconds = 0.0

    def unit_flops(self, num_tokens: int, context: int) -> float:
        """Projections of one layer, and scores and values over the mean context of a chunk that ends at `context`."""
        mean_context = max(context - num_tokens / 2, 1.0)
        return num_tokens * (2.0 * self._weights + 4.0 * self._attention_width * mean_context)

    def unit_seconds(self, num_tokens: int, context: int) -> float:
        return self.unit_flops(num_tokens, context) / self._rate(num_tokens)

    def tokens_within(self, seconds: float, begin: int, most: int, least: int) -> int:
        """The most tokens, a power of two times `least` or `most`, whose unit from position `begin` fits `seconds`."""
        best = count = min(least, most)
        while count < most:
            count = min(count * 2, most)
            if self.unit_seconds(count, begin + count) > seconds:
                break
            best = count
        return best

    def observe_units(self, units: list[PrefillUnit], contexts: list[int], seconds: float) -> None:
        """Learn from units that ran together in `seconds`; `contexts[i]` is where unit i ended."""
        if not units or seconds <= 0:
            return
        flops = sum(self.unit_flops(unit.end - unit.begin, end) for unit, end in zip(units, contexts, strict=True))
        for unit in units:
            size = (unit.end - unit.begin).bit_length()
            known = self._rates.get(size)
            rate = flops / seconds
            self._rates[size] = rate if known is None else known + _SMOOTHING * (rate - known)

    def observe_decode(self, seconds: float) -> None:
        if seconds > 0:
            known = self.decode_seconds or seconds
            self.decode_seconds = known + _SMOOTHING * (seconds - known)

    def _rate(self, num_tokens: int) -> float:
        if not self._rates:
            return _FIRST_RATE
        size = num_tokens.bit_length()
        return self._rates[min(self._rates, key=lambda known: (abs(known - size), known))]
