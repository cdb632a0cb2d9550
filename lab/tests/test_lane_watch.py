"""What is told of lanes is of the window alone, by kind, and the engine is left as it was."""

import gc
import sys
import time
from types import SimpleNamespace

import pytest

from bench.as_served import interpreter_as_served
from gpu.step import DecodeGroup, HostRead, Lane, StepPlan, StepResult
from lab.speed.lane_watch import LaneWatch, describe
from scheduler.engine.engine_process import HANDOVER_SECONDS

ASK = HostRead(0, 16, 160)


def plan(lane: Lane, *asks: HostRead | None, is_fenced: bool = False) -> StepPlan:
    count = len(asks)
    group = DecodeGroup([0] * count, [9] * count, [1] * count, list(asks) if any(asks) else None)
    return StepPlan(lane, is_fenced=is_fenced, decode=[group] if asks else [])


class Runner:
    host_read_times = SimpleNamespace(requests=10, steps=1, ready_s=0.0)

    def launch(self, plan: StepPlan) -> None:
        time.sleep(0.02 if plan.is_fenced else 0.0)
        self.host_read_times = SimpleNamespace(requests=26, steps=2, ready_s=0.0)


class Scheduler:
    num_rows_left_out = 3

    def schedule(self, is_ready: object, lane: Lane) -> StepPlan:
        return plan(lane)

    def postprocess(self, result: StepResult, lane: Lane) -> list[object]:
        return [result]


class Engine:
    """It has had a step of one row in each lane when it is looked at, and one of each is in flight."""

    def __init__(self) -> None:
        self._runner, self.scheduler, self.host_layers = Runner(), Scheduler(), (1, 2, 3, 4)
        self._tier = SimpleNamespace(stats=lambda: SimpleNamespace(bytes_pinned=0))
        self.waited = 1.0

    def _num_in_flight(self, lane: Lane) -> int:
        return 1

    def client(self) -> SimpleNamespace:
        def stats() -> SimpleNamespace:
            self.waited += 0.0016
            return SimpleNamespace(tables_built=0, rows_read=0, wait_seconds=self.waited, attend_seconds=2.0)

        return SimpleNamespace(engine=self, host_stats=stats)


def result(milliseconds: float) -> StepResult:
    return StepResult([], {}, 0.0, 1e-3 * milliseconds)


def test_steps_are_told_by_kind_with_what_they_took_and_what_was_launched_before_is_not() -> None:
    engine = Engine()
    runner, scheduler = engine._runner, engine.scheduler
    with LaneWatch(engine.client()) as watch:
        scheduler.postprocess(result(999.0), Lane.HOST)  # launched before
        for one, milliseconds in (
            (plan(Lane.HOST, ASK, ASK), 50.0),
            (plan(Lane.HOST, ASK, None, is_fenced=True), 70.0),
            (plan(Lane.HOST), 1.0),
            (plan(Lane.HOST, ASK, ASK, ASK), 60.0),
        ):
            runner.launch(one)
            scheduler.postprocess(result(milliseconds), Lane.HOST)
        runner.launch(plan(Lane.DEVICE, None, None))
        scheduler.schedule(None, Lane.DEVICE)
        gc.collect()
    told = watch.told()
    assert {name: (kind["steps"], kind["rows"], kind["fenced"]) for name, kind in told["steps"].items()} == {
        "host rows": (2, 2.5, 0), "joint rows": (1, 2, 1), "device rows": (1, 2, 0),
    }  # fmt: skip
    assert told["steps"]["host rows"]["median_ms"] == pytest.approx(55)
    assert told["steps"]["device rows"]["most_ms"] == 0, "it is in flight"
    assert told["parts"] == 4, "sixteen asks of one step in four layers"
    assert told["hop_wait_us"] == pytest.approx(100)
    assert told["rows_left_out"] == 0, "in the window"
    assert told["longest_ms"]["launch"] >= 20
    assert told["longest_ms"]["collection"] > 0
    assert "2 steps of 2.5 host rows 55.0 ms (most 60, 0 fenced)" in describe(told)


def test_the_engine_is_left_as_it_was() -> None:
    engine, before = Engine(), list(gc.callbacks)
    with LaneWatch(engine.client()):
        assert "launch" in vars(engine._runner)
    assert engine._runner.launch.__func__ is Runner.launch
    assert engine.scheduler.schedule.__func__ is Scheduler.schedule
    assert engine.scheduler.postprocess.__func__ is Scheduler.postprocess
    assert gc.callbacks == before


def test_an_engine_in_a_benchmark_has_the_interpreter_that_it_has_where_it_serves() -> None:
    before = sys.getswitchinterval()
    gc.unfreeze()
    with interpreter_as_served():
        assert sys.getswitchinterval() == pytest.approx(HANDOVER_SECONDS)
        assert gc.get_freeze_count() > 0
    assert sys.getswitchinterval() == pytest.approx(before)
    assert gc.get_freeze_count() == 0
