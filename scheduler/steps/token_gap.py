"""Share the time between two tokens of a stream with prefill.

Invariant: units that put off a decode step take no more than its budget, as far as is known.
"""

from gpu.step import Unit
from scheduler.engine_config import SchedulerConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.sequences.lane_fences import Rows

_LEAST_PREFILL_SHARE = 0.1  # of the token gap target, however long decode takes


class TokenGap:
    """`seconds_since_decode`: of prefill units, as estimated."""

    def __init__(self, config: SchedulerConfig, costs: CostModel) -> None:
        self.seconds_since_decode = 0.0
        self._config = config
        self._costs = costs

    def seconds_left(self) -> float:
        """For prefill, until the next decode step must come."""
        return self._prefill_seconds() - self.seconds_since_decode

    def decode_can_wait(self, units: list[Unit], contexts: list[int], budget: float) -> bool:
        """Whether another step of units like these fits before the next decode step must come, as far as is known.
        `contexts[i]` is where unit i ends in its prompt; budget: what `seconds_left` said before they were chosen.

        A step has no more than one whole unit, so that a request that arrives never waits for more than two.
        """
        seconds = sum(self._costs.seconds_of(unit, context) for unit, context in zip(units, contexts, strict=True))
        waits = bool(units) and self._costs.knows(units[0]) and 2 * seconds <= budget
        self.seconds_since_decode = self.seconds_since_decode + seconds if waits else 0.0
        return waits

    def _prefill_seconds(self) -> float:
        """Between two decode steps: prefill's share of the time, within the token gap target."""
        target, share = self._config.token_gap_target_ms / 1e3, self._config.prefill.share
        decode = self._costs.decode_seconds[Rows.DEVICE]
        return max(min(target - decode, decode * share / (1.0 - share)), _LEAST_PREFILL_SHARE * target)
