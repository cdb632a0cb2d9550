"""Carry out on one rank what rank 0 launches, and compare the drawn tokens.

Rank 0 sends the tokens of each step that it has collected. Then this rank collects the same step and compares. Its own
host may have failed to answer, and ranks that drew different tokens would compute different texts from there on.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from gpu.in_flight import InFlight
from gpu.runner import Runner
from gpu.step import Collected, StepPlan
from transfer.host_tier import HostMemoryError


class PartedError(Exception):
    """Two ranks drew different tokens in one step."""


class Follower:
    """One rank's steps. most_in_flight: with so many, the oldest is collected before the next launch."""

    def __init__(self, runner: Runner, most_in_flight: int) -> None:
        self._runner = runner
        self._most = most_in_flight
        self._steps: deque[InFlight] = deque()
        self._num_collected = 0
        self._drawn: dict[int, list[tuple[int, int]]] = {}  # slots and tokens, by step, until rank 0 sends its own

    def take(self, message: StepPlan | Collected | Mapping[int, np.ndarray]) -> None:
        """Carry out a plan, draw the newest step with masks, or compare tokens.

        Raises HostMemoryError if this rank's part of a step failed, and PartedError if tokens differ.
        """
        if isinstance(message, StepPlan):
            while len(self._steps) >= self._most:
                self._collect()
            self._steps.append(self._runner.launch(message))
        elif isinstance(message, Collected):
            while self._num_collected < message.number:
                self._collect()
            self._compare(message)
        else:
            self._runner.draw(self._steps[-1], message)

    def end(self) -> None:
        """Wait for the steps in flight, and end the runner's threads."""
        with suppress(AssertionError):  # the last step may not have been drawn
            while self._steps:
                self._collect()
        self._runner.shutdown()

    def _collect(self) -> None:
        result = self._steps.popleft().collect()
        self._num_collected += 1
        if result.failures:  # rank 0 has already used this rank's part
            raise HostMemoryError(next(iter(result.failures.values())))
        self._drawn[self._num_collected] = [(one.slot, one.token_id) for one in result.tokens]

    def _compare(self, told: Collected) -> None:
        slots = {slot for slot, _ in told.tokens}
        own = tuple(one for one in self._drawn[told.number] if one[0] in slots)
        if own != told.tokens:
            pairs = zip(own, told.tokens, strict=False)
            slot, token = next((one for one, other in pairs if one != other), (-1, -1))
            raise PartedError(
                f"step {told.number}: drew token {token} in slot {slot} ({len(own)} tokens in all), and rank 0 drew "
                f"another ({len(told.tokens)}); their texts part"
            )
        self._drawn = {number: drawn for number, drawn in self._drawn.items() if number > told.number}
