"""A measured rate is the bytes that were read, over the seconds of the fastest run."""

from itertools import accumulate, cycle

import pytest

import cpu.memory_rates
from cpu.memory_rates import GIB, STREAM_WAYS, measure_host_rates, measure_read_rate

RUNS_S = (0.5, 0.4, 0.8)  # as the clock has them, again and again
NUM_BYTES = GIB // 64


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which runs take RUNS_S, and nothing happens between two of them."""
    steps = (step for seconds in cycle(RUNS_S) for step in (0.0, seconds))
    monkeypatch.setattr(cpu.memory_rates.time, "perf_counter", accumulate(steps).__next__)


def test_host_rates_are_bytes_of_the_buffer_over_the_fastest_run() -> None:
    wanted = pytest.approx(NUM_BYTES / min(RUNS_S) / 1e9)
    assert measure_host_rates(1, gib=1 / 64) == {"host_stream_gb_s": wanted, "host_random_rows_gb_s": wanted}


def test_a_read_rate_is_of_whole_blocks() -> None:
    assert measure_read_rate(1, NUM_BYTES - 1) == pytest.approx(NUM_BYTES / min(RUNS_S) / 1e9)


def test_a_streams_rate_is_that_of_the_fastest_way_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts were read at 1.3 times a rate that was measured by one stream a core: no kernel may be above its floor's
    rate by reading otherwise."""
    rates = dict(zip(STREAM_WAYS, (80.0, 90.0, 120.0), strict=True))
    monkeypatch.setattr(
        cpu.memory_rates, "_best_rate", lambda read, num_bytes, repeats: rates.get(getattr(read, "func", 0), 50.0)
    )
    assert measure_host_rates(1, gib=1 / 64) == {"host_stream_gb_s": 120.0, "host_random_rows_gb_s": 50.0}
