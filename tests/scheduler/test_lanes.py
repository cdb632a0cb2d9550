"""Rows that wait for the host step in a lane of their own: who steps where, and what is fenced."""

import time
from itertools import pairwise
from random import Random

import pytest

from gpu.step import Lane, PageEviction, StepPlan, TablePlace
from scheduler.engine import engine as in_flight
from scheduler.engine.engine import _PATIENCE_SECONDS, Engine
from scheduler.sequences.lane_fences import Lanes, Rows, rows_of
from tests.scheduler.engines import answer, check_output, drain, prompt_of
from tests.scheduler.host_engines import ask, check_idle, make_engine
from tests.scheduler.page_runner import PageRunner

BOTH = (Lane.HOST, Lane.DEVICE)


def two_lanes(**more: object) -> tuple[Engine, PageRunner]:
    return make_engine(order=Random(1), **more)


def counts_of(runner: PageRunner, lane: Lane) -> list[int]:
    """How many rows each decode step in a lane had."""
    return [len(group.slots) for plan in runner.plans if plan.lane is lane for group in plan.decode]


def run(engine: Engine, requests: list) -> None:
    answer(engine, requests)


def test_rows_that_ask_step_apart_from_the_others_and_from_prefills() -> None:
    engine, runner = two_lanes()
    runner.decode_times = [0.0]  # what it learns nothing from
    long, short = ask("long", prompt_of(600), 60), ask("short", prompt_of(300), 60, "exact")
    engine.submit([long])
    while not engine.scheduler.roster.running:
        engine.step()
    engine.submit([short])
    deltas = drain(engine)
    check_output(short, deltas["short"])
    asking = [plan for plan in runner.plans if plan.lane is Lane.HOST]
    assert sum(counts_of(runner, Lane.HOST)) == 59
    assert sum(counts_of(runner, Lane.DEVICE)) == 59
    assert all(group.host_reads is not None for plan in asking for group in plan.decode)
    assert not any(plan.units or plan.new_jobs or plan.released_slots for plan in asking)
    assert runner.num_ahead > 0
    check_idle(engine, runner)


def test_units_yield_while_rows_wait_for_the_host_beside_them_alone() -> None:
    engine, runner = two_lanes()
    engine.submit([ask("long", prompt_of(600), 60), ask("short", prompt_of(30), 200, "exact")])
    while len(engine.scheduler.roster.running) < 2:
        engine.step()
    engine.submit([ask("beside", prompt_of(900, salt=1), 2, "exact")])
    drain(engine)
    engine.submit([ask("alone", prompt_of(900, salt=2), 2, "exact")])
    drain(engine)
    limits_prefill_blocks = [plan.limits_prefill_blocks for plan in runner.plans if plan.units]
    first, last = (
        limits_prefill_blocks.index(True),
        len(limits_prefill_blocks) - limits_prefill_blocks[::-1].index(True),
    )
    assert all(limits_prefill_blocks[first:last])
    assert 0 < first < last < len(limits_prefill_blocks), (
        "before anybody waits, and once nobody does, blocks are as they come"
    )
    assert not any(plan.limits_prefill_blocks for plan in runner.plans if not plan.units)


def test_one_lane_is_never_fenced() -> None:
    engine, runner = make_engine()
    run(engine, [ask("long", prompt_of(600), 60), ask("short", prompt_of(30), 60, "exact")])
    assert not any(plan.is_fenced or plan.limits_prefill_blocks for plan in runner.plans)
    assert {plan.lane for plan in runner.plans} == {Lane.DEVICE}


@pytest.mark.parametrize(("host_ms", "num_joint"), [(3.0, 2), (40.0, 1)], ids=["weights-once", "the-host-takes-long"])
def test_rows_that_ask_nothing_join_where_all_together_draw_more_and_wait_little(
    host_ms: float, num_joint: int
) -> None:
    """Of a device that takes 10 ms to read its weights, half as long beside the other lane as it has of it."""
    engine, runner = two_lanes()
    runner.host_seconds, runner.num_parts = 1e-3 * host_ms, 1
    of_lanes = {Rows.DEVICE: 15.0, Rows.HOST: 20.0 + host_ms, Rows.JOINT: 10.0 + host_ms}
    runner.time_of = lambda plan: 1e-3 * of_lanes[kind_of(plan)]
    run(engine, [ask("long", prompt_of(600), 200), ask("short", prompt_of(30), 200, "exact")])
    kinds = [kind_of(plan) for plan in runner.plans if plan.lane is Lane.HOST and plan.decode]
    assert {Rows.JOINT: 2, Rows.HOST: 1}[kinds[150]] == num_joint
    assert sum(kind is not before for before, kind in pairwise(kinds[:150])) == num_joint - 1


def test_rows_part_again_where_a_joint_step_takes_longer_than_it_was_expected_to() -> None:
    engine, runner = two_lanes()
    runner.host_seconds = 3e-3
    of_lanes = {Rows.DEVICE: 15.0, Rows.HOST: 23.0, Rows.JOINT: 40.0}
    runner.time_of = lambda plan: 1e-3 * of_lanes[kind_of(plan)]
    run(engine, [ask("long", prompt_of(600), 200), ask("short", prompt_of(30), 200, "exact")])
    kinds = [kind_of(plan) for plan in runner.plans if plan.lane is Lane.HOST and plan.decode]
    assert Rows.JOINT in kinds
    assert kinds[150] is Rows.HOST


def kind_of(plan: StepPlan) -> Rows:
    return rows_of(plan.lane, [ask for group in plan.decode for ask in group.host_reads or [None]])


def test_a_row_that_comes_from_the_other_lane_is_fenced_while_that_one_is_busy() -> None:
    lanes = Lanes(BOTH)
    assert not lanes.fence(Lane.HOST, is_other_busy=True, takes=True, comes=False)
    assert lanes.fence(Lane.HOST, is_other_busy=True, takes=False, comes=True)
    assert not lanes.fence(Lane.HOST, is_other_busy=False, takes=False, comes=True)


def test_what_one_lane_gives_back_the_other_takes_behind_a_fence_once() -> None:
    lanes = Lanes(BOTH)
    lanes.give_back(Lane.HOST)
    assert not lanes.fence(Lane.HOST, is_other_busy=True, takes=True, comes=False)
    assert not lanes.fence(Lane.DEVICE, is_other_busy=True, takes=False, comes=False)
    assert lanes.fence(Lane.DEVICE, is_other_busy=True, takes=True, comes=False)
    assert not lanes.fence(Lane.DEVICE, is_other_busy=True, takes=True, comes=False)
    lanes.give_back(Lane.HOST)
    assert not lanes.fence(Lane.DEVICE, is_other_busy=False, takes=False, comes=False)
    assert not lanes.fence(Lane.DEVICE, is_other_busy=True, takes=True, comes=False)  # all that used it is over


def test_what_changes_the_tables_of_both_lanes_fences_both() -> None:
    lanes = Lanes(BOTH)
    lanes.move()
    for lane in BOTH:
        assert lanes.fence(lane, is_other_busy=True, takes=False, comes=False)
        assert not lanes.fence(lane, is_other_busy=True, takes=False, comes=False)


def test_contexts_that_make_room_for_an_offload_are_closed_with_it_whoever_steps() -> None:
    engine, _ = two_lanes()
    scheduler, contexts = engine.scheduler, engine.scheduler.residence.contexts
    run(engine, [ask("before", prompt_of(600, salt=1), 2)])
    engine.submit([ask("long", prompt_of(600), 60)])
    while not scheduler.roster.running:
        engine.step()
    collect_all(engine)
    assert contexts.evict_idle([])
    plan = scheduler.schedule(lambda ask: True, Lane.HOST)
    assert plan.decode
    assert len(plan.closed_contexts) == 1


def collect_all(engine: Engine) -> None:
    while engine._in_flight:
        plan, step, _ = engine._in_flight.pop(0)
        engine.scheduler.postprocess(step.collect(), plan.lane)


def test_a_step_that_hangs_is_waited_for_so_that_it_is_seen() -> None:
    engine, _ = two_lanes()
    long_ago = time.perf_counter() - 2 * _PATIENCE_SECONDS
    engine._in_flight = [(StepPlan(Lane.HOST), Step(), long_ago), (StepPlan(), Step(), time.perf_counter())]
    assert engine._next_finished() == 0


def test_pages_that_were_released_are_taken_behind_a_fence_however_often_the_other_lane_has_nothing_to_do() -> None:
    engine, runner = two_lanes()
    scheduler = engine.scheduler
    schedule_release(engine, runner)
    for _ in range(3):
        assert scheduler.schedule(runner.is_ready, Lane.DEVICE).is_empty
    engine.submit([ask("short", prompt_of(30), 5, "exact")])
    assert scheduler.schedule(runner.is_ready, Lane.DEVICE).is_fenced


def test_a_plan_that_is_never_launched_uses_no_fence_up() -> None:
    engine, runner = two_lanes()
    scheduler = engine.scheduler
    start_long(engine)
    assert not scheduler.schedule(runner.is_ready, Lane.HOST).evictions
    scheduler._lanes.move()
    assert scheduler.schedule(runner.is_ready, Lane.DEVICE).is_empty
    engine.submit([ask("short", prompt_of(30), 5, "exact")])
    assert scheduler.schedule(runner.is_ready, Lane.DEVICE).is_fenced


def test_a_release_waits_for_no_unit_and_no_unit_for_it() -> None:
    engine, runner = two_lanes()
    scheduler = engine.scheduler
    start_long(engine)
    engine.submit([ask("next", prompt_of(600, salt=1), 5)])
    unit = scheduler.schedule(runner.is_ready, Lane.DEVICE)
    assert unit.units
    host = schedule_release(engine, runner, submits=False)
    assert not host.is_fenced
    scheduler.postprocess(runner.launch(unit).collect(), Lane.DEVICE)
    following = scheduler.schedule(runner.is_ready, Lane.DEVICE)
    assert following.units
    assert not following.is_fenced


def test_a_release_waits_for_a_prefill_that_reads_what_is_released() -> None:
    engine, _ = two_lanes()
    scheduler = engine.scheduler
    start_long(engine)
    (long,) = scheduler.roster.running
    slots = [TablePlace(long.slot, 1)]
    long.lane = Lane.HOST
    assert scheduler._are_of(Lane.HOST, [PageEviction([1], [2], slots)])
    assert not scheduler._are_of(Lane.DEVICE, [PageEviction([1], [2], slots)])
    engine.submit([ask("next", prompt_of(600, salt=1), 5)])
    engine.step()
    (entry,) = scheduler._prefill.jobs
    reading = [*slots, TablePlace(entry.sequences[0].slot, 1)]
    for lane in BOTH:
        assert not scheduler._are_of(lane, [PageEviction([1], [2], reading)])


def test_a_release_takes_pages_that_the_other_lane_gave_back_behind_a_fence() -> None:
    engine, runner = two_lanes()
    scheduler = engine.scheduler
    host = schedule_release(engine, runner)
    engine.submit([ask("next", prompt_of(600, salt=1), 5)])
    assert scheduler.schedule(runner.is_ready, Lane.DEVICE).units
    plan = StepPlan(Lane.HOST, evictions=host.evictions)
    assert not scheduler._fence(plan, scheduler.roster.running)
    scheduler._lanes.give_back(Lane.DEVICE)
    assert scheduler._fence(plan, scheduler.roster.running)


def start_long(engine: Engine) -> None:
    """A stream whose rows ask the host, with nothing in flight."""
    engine.submit([ask("long", prompt_of(600), 300)])
    while not engine.scheduler.roster.running:
        engine.step()
    collect_all(engine)


def schedule_release(engine: Engine, runner: PageRunner, submits: bool = True) -> StepPlan:
    """The first plan of rows with host reads which releases something, launched by nobody yet."""
    scheduler = engine.scheduler
    if submits:
        start_long(engine)
    while not (host := scheduler.schedule(runner.is_ready, Lane.HOST)).evictions:
        scheduler.postprocess(runner.launch(host).collect(), Lane.HOST)
    return host


def test_steps_of_rows_that_ask_do_not_put_off_those_that_do_not() -> None:
    """A prefill's units pass decode steps of their own lane as long as the gap target allows, and no longer."""
    engine, _ = two_lanes()
    scheduler = engine.scheduler
    engine.submit([ask("long", prompt_of(600), 30)])
    while not scheduler.roster.running:
        engine.step()
    collect_all(engine)
    scheduler._gap.seconds_since_decode = 0.05
    assert scheduler.schedule(lambda ask: True, Lane.HOST).decode
    assert scheduler._gap.seconds_since_decode == 0.05


class Step:
    """In flight; over when it is told to be."""

    def __init__(self) -> None:
        self.is_over = False


def test_a_fenced_step_is_told_of_behind_those_launched_before_it() -> None:
    engine, _ = two_lanes()
    plans = [StepPlan(Lane.HOST), StepPlan(Lane.DEVICE), StepPlan(Lane.DEVICE, is_fenced=True)]
    engine._in_flight = [(plan, Step(), time.perf_counter()) for plan in plans]
    for _, step, _ in engine._in_flight[1:]:
        step.is_over = True
    assert engine._next_finished() == 1
    engine._in_flight.pop(1)
    assert engine._next_finished() is None
    engine._in_flight[0][1].is_over = True
    assert engine._next_finished() == 0
    engine._in_flight.pop(0)
    assert engine._next_finished() == 0


@pytest.mark.parametrize("order", [None, Random(1)])
def test_with_one_step_in_flight_each_is_collected_before_the_next_is_launched(
    order: Random | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Python lies between two steps; texts are the same. It may change while steps are under way."""
    engine, runner = make_engine(order=order)
    most: dict[int, int] = {1: 0, 2: 0}
    launch = runner.launch

    def count(plan: StepPlan) -> object:
        most[in_flight.MOST_IN_FLIGHT] = max(most[in_flight.MOST_IN_FLIGHT], engine._num_in_flight(plan.lane) + 1)
        return launch(plan)

    runner.launch = count
    requests = [ask("long", prompt_of(600), 60), ask("short", prompt_of(30), 60, "exact")]
    engine.submit(requests)
    deltas = {request.request_id: [] for request in requests}
    for number in range(100_000):
        if not engine.has_work:
            break
        monkeypatch.setattr(in_flight, "MOST_IN_FLIGHT", 1 + number // 20 % 2)
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    for request in requests:
        check_output(request, deltas[request.request_id])
    assert most == {1: 1, 2: 2}
    check_idle(engine, runner)
