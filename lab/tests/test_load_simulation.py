"""A load through the real scheduler, on a device that only takes its time."""

import pytest

from gpu.model.shapes import named_shape
from lab.speed.load_simulation import DeviceTimes, Load, Outcome, simulate
from scheduler.engine_config import SchedulerConfig


def run(**settings: object) -> Outcome:
    tree = {"prefix_cache": False, "prefill": {"chunk_tokens": 8192}} | settings
    config = SchedulerConfig.model_validate(tree)
    return simulate(config, named_shape("llama-3.1-8b"), Load(64, 1000, 64), DeviceTimes(), 64)


def test_auto_loses_less_to_steps_of_few_rows_and_keeps_the_gap_target() -> None:
    latency, auto, throughput = (run(favour=favour) for favour in ("latency", "auto", "throughput"))
    assert latency.few_rows_s > 2 * auto.few_rows_s > 2 * throughput.few_rows_s
    assert latency.seconds - auto.seconds > 0.3
    assert max(auto.gaps_s) <= 0.1005
    assert len(auto.firsts_s) == 64
    assert len(auto.gaps_s) == 64 * 63


def test_all_time_is_of_units_and_steps() -> None:
    outcome = run(favour="auto", token_gap_target_ms=50)
    assert outcome.seconds == pytest.approx(outcome.prefill_s + outcome.decode_s)
    assert max(outcome.gaps_s) <= 0.0505
