"""Count the tokens generated in the last ten minutes, in steps of ten seconds."""

import time
from collections import deque
from collections.abc import Callable

STEP_SECONDS = 10
NUM_STEPS = 60


class TokenRates:
    """Count tokens by the step in which they came; `clock` is in seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[int] = deque([0] * NUM_STEPS, maxlen=NUM_STEPS)
        self._step = self._now()

    def count(self, num_tokens: int) -> None:
        self._move_on()
        self._counts[-1] += num_tokens

    def last(self) -> list[int]:
        """Return the tokens of the last `NUM_STEPS` steps, oldest first; the last step is not over yet."""
        self._move_on()
        return list(self._counts)

    def per_second(self) -> float:
        """Return the rate of the last ten to twenty seconds: the last complete step, and the current one."""
        self._move_on()
        return sum(list(self._counts)[-2:]) / (STEP_SECONDS + self._clock() % STEP_SECONDS)

    def _move_on(self) -> None:
        now = self._now()
        self._counts.extend([0] * min(now - self._step, NUM_STEPS))
        self._step = now

    def _now(self) -> int:
        return int(self._clock() // STEP_SECONDS)
