"""Tokens of the last ten minutes, by steps of ten seconds."""

from server.engine.token_rates import NUM_STEPS, STEP_SECONDS, TokenRates


class Clock:
    def __init__(self) -> None:
        self.seconds = 1003.0

    def __call__(self) -> float:
        return self.seconds


def test_tokens_are_counted_in_their_step_and_forgotten_after_ten_minutes() -> None:
    clock = Clock()
    rates = TokenRates(clock)
    assert STEP_SECONDS * NUM_STEPS == 600
    assert rates.last() == [0] * NUM_STEPS
    rates.count(3)
    clock.seconds = 1009.9
    rates.count(4)
    clock.seconds = 1010.0
    rates.count(5)
    assert rates.last()[-3:] == [0, 7, 5]
    clock.seconds = 1015.0
    assert rates.per_second() == (7 + 5) / 15
    clock.seconds = 1035.0
    assert rates.last()[-5:] == [0, 7, 5, 0, 0]
    clock.seconds = 1000.0 + 600
    assert rates.last() == [5] + [0] * (NUM_STEPS - 1)
    clock.seconds = 10**9
    rates.count(2)
    assert rates.last() == [0] * (NUM_STEPS - 1) + [2]
