"""Before the first request: common prefills are compiled, what units take is known, and nothing is left behind."""

from types import SimpleNamespace
from typing import Any

import pytest

from gpu.model.architecture import named_shape
from gpu.profiles import resolve_profiles
from gpu.step import DENSE, PrefillUnit
from scheduler.engine.load_engine import block_seconds, rehearse
from scheduler.engine_config import PrefillConfig, SchedulerConfig
from scheduler.sequences.capacity import Capacity
from scheduler.steps.scheduler import Scheduler
from tests.gpu.reference_model import GREEDY, NUM_LAYERS, document_prompt, generate, reference_runner

SHAPE = named_shape("tiny")
SECONDS_A_TOKEN = 2.0**-20


class Rehearsed:
    """A runner whose units take their tokens' time."""

    def __init__(self, **limits: int) -> None:
        self.limits = SimpleNamespace(**limits)
        self.lengths: list[list[int]] = []

    def time_prefill(self, lengths: list[int], method: str) -> tuple[list[PrefillUnit], float]:
        self.lengths.append(lengths)
        units = [PrefillUnit(0, layer, 0, sum(lengths), method) for layer in range(SHAPE.num_layers)]
        return units, SECONDS_A_TOKEN * sum(lengths) * len(units)


def make_scheduler() -> Scheduler:
    return Scheduler(
        SchedulerConfig(), SHAPE, Capacity(100, 16, 1000, 4000, None), b"model", resolve_profiles({}, None)
    )


def test_what_units_take_is_known_from_the_start() -> None:
    scheduler = make_scheduler()
    runner: Any = Rehearsed(max_context_tokens=4096, num_pages=500, page_tokens=16, max_running=24)
    rehearse(runner, scheduler, 2048)
    assert runner.lengths == [[64], [64] * 8, [2047]]
    assert scheduler._costs.unit_seconds(300, 300, DENSE) == pytest.approx(300 * SECONDS_A_TOKEN, rel=0.1)
    assert scheduler._costs.familiar_tokens(DENSE) >= 2048


@pytest.mark.parametrize(
    "limits",
    [
        {"max_context_tokens": 32, "num_pages": 500, "page_tokens": 16, "max_running": 24},
        {"max_context_tokens": 4096, "num_pages": 5, "page_tokens": 16, "max_running": 24},
        {"max_context_tokens": 4096, "num_pages": 500, "page_tokens": 64, "max_running": 1},
    ],
)
def test_it_keeps_to_the_pages_and_slots_that_there_are(limits: dict[str, int]) -> None:
    runner: Any = Rehearsed(**limits)
    rehearse(runner, make_scheduler(), 2048)
    for lengths in runner.lengths:
        assert 0 < min(lengths) <= max(lengths) < limits["max_context_tokens"]
        assert len(lengths) <= limits["max_running"]
        assert sum(length // limits["page_tokens"] + 1 for length in lengths) <= limits["num_pages"]


def test_a_rehearsal_changes_nothing_of_what_is_said_after_it() -> None:
    prompts = [document_prompt(50, 1), document_prompt(30, 2)]
    fresh, used = (reference_runner(max_running=4, num_pages=40, max_context_tokens=256) for _ in range(2))
    units, seconds = used.rehearsal.time_prefill([60, 20, 35], DENSE)
    assert [(unit.layer, unit.begin, unit.end) for unit in units] == [(layer, 0, 115) for layer in range(NUM_LAYERS)]
    assert seconds > 0
    assert used.num_prefill_jobs == 0
    assert generate(used, prompts, 5, GREEDY).tokens == generate(fresh, prompts, 5, GREEDY).tokens


def test_blocks_beside_rows_that_wait_follow_from_the_gap_target() -> None:
    """If each of a layer's dozen launches waits for a whole one, all of them wait for half the target."""
    assert block_seconds(SchedulerConfig(token_gap_target_ms=100), 32) == pytest.approx(0.05 / (12 * 32))
    assert block_seconds(SchedulerConfig(token_gap_target_ms=50), 64) == pytest.approx(0.025 / (12 * 64))
    for asked in (0.0, 80.0):
        assert block_seconds(SchedulerConfig(prefill=PrefillConfig(block_us=asked)), 32) == pytest.approx(1e-6 * asked)
