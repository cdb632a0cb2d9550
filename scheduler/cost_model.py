"""How long a prefill unit or a decode step will take, learnt from those that ran.

A unit's time is a sum of three terms: one for itself, one for its projections' FLOPs, one for its attention's FLOPs
(machines run the two at different rates). Their costs are the non-negative least squares fit, in relative error, to the
last steps that had units.
"""

from collections import deque

import numpy as np
from scipy.optimize import nnls

from gpu.model.architecture import Architecture
from gpu.step import PrefillUnit

_FIRST_RATE = 5e9  # FLOP/s: before anything has run, low enough that a first unit is short on any machine
_WINDOW_STEPS = 64
_SMOOTHING = 0.3


class CostModel:
    def __init__(self, architecture: Architecture) -> None:
        self._weights = architecture.num_layer_weights
        self._attention_width = architecture.num_heads * architecture.dim
        self._seen: deque[tuple[np.ndarray, float]] = deque(maxlen=_WINDOW_STEPS)
        self._costs = [0.0, 1.0 / _FIRST_RATE, 1.0 / _FIRST_RATE]
        self._largest_tokens = 0
        self.decode_seconds = 0.0

    def unit_seconds(self, num_tokens: int, context: int) -> float:
        """Of one layer over `num_tokens` tokens that end at position `context`."""
        one, projections, attention = self._costs
        terms = self._terms(num_tokens, context)
        return one * terms[0] + projections * terms[1] + attention * terms[2]

    def tokens_within(self, seconds: float, begin: int, most: int, least: int) -> int:
        """The most tokens, a power of two times `least` or `most`, whose unit from position `begin` fits `seconds`."""
        best = count = min(least, most)
        while count < most:
            count = min(count * 2, most)
            if self.unit_seconds(count, begin + count) > seconds:
                break
            best = count
        return best

    @property
    def familiar_tokens(self) -> int:
        """Twice the most tokens that a step has had in its units: what more would cost is not known yet."""
        return 2 * self._largest_tokens

    def observe_units(self, units: list[PrefillUnit], contexts: list[int], seconds: float) -> None:
        """Learn from units that ran together in `seconds`; `contexts[i]` is where unit i ended."""
        if not units or seconds <= 0:
            return
        terms = [self._terms(unit.end - unit.begin, end) for unit, end in zip(units, contexts, strict=True)]
        self._largest_tokens = max(self._largest_tokens, sum(unit.end - unit.begin for unit in units))
        self._seen.append((np.sum(terms, axis=0), seconds))
        relative = np.array([total / taken for total, taken in self._seen])  # [steps, terms]
        scale = np.maximum(relative.max(axis=0), 1e-30)
        self._costs = (nnls(relative / scale, np.ones(len(relative)))[0] / scale).tolist()

    def observe_decode(self, seconds: float) -> None:
        if seconds > 0:
            known = self.decode_seconds or seconds
            self.decode_seconds = known + _SMOOTHING * (seconds - known)

    def _terms(self, num_tokens: int, context: int) -> tuple[float, float, float]:
        """1, projection FLOPs, attention FLOPs over the mean context of the chunk."""
        mean_context = max(context - num_tokens / 2, 1.0)
        attention = 4.0 * self._attention_width * mean_context
        return 1.0, 2.0 * self._weights * num_tokens, attention * num_tokens
