"""A context whose rows have not landed leaves its own row out of a step, for a while, and holds nobody else up."""

import pytest

from gpu.step import HostRead
from scheduler.steps import drawing_rows
from tests.scheduler.engines import answer, check_output, drain, prompt_of
from tests.scheduler.host_engines import ask, check_idle, make_engine
from tests.scheduler.page_runner import PageRunner

LONG = ask("long", prompt_of(600), max_tokens=30)
SHORT = ask("short", prompt_of(20, salt=1), max_tokens=80, profile="exact")


def late(runner: PageRunner, num_times: int) -> None:
    """What is asked first of a context is so often not there."""
    ready = runner.is_ready

    def is_ready(one: HostRead) -> bool:
        runner.late_steps.setdefault((one.context_id, one.end), num_times)
        return ready(one)

    runner.is_ready = is_ready


def rows_of(runner: PageRunner) -> list[int]:
    return [sum(len(group.slots) for group in plan.decode) for plan in runner.plans]


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_late_row_is_left_out_and_says_what_it_says_alone(is_pipelined: bool) -> None:
    engine, runner = make_engine(is_pipelined=is_pipelined)
    late(runner, 12)
    engine.submit([LONG, SHORT])
    deltas = drain(engine)
    check_output(LONG, deltas["long"])
    check_output(SHORT, deltas["short"])
    assert engine.scheduler.late.num_left_out >= 12
    decoding = [plan for plan in runner.plans if plan.decode]
    assert all(group.slots for plan in decoding for group in plan.decode)
    assert len(decoding) <= 80, "nobody waited for it"
    check_idle(engine, runner)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_where_there_is_nothing_else_to_do_a_late_row_is_waited_for(is_pipelined: bool) -> None:
    engine, runner = make_engine(is_pipelined=is_pipelined)
    late(runner, 1_000_000)
    engine.submit([LONG])
    num_steps = 0
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        num_steps += 1
    check_output(LONG, deltas)
    assert num_steps < 300
    assert max(rows_of(runner)) == 1
    check_idle(engine, runner)


def test_of_several_late_rows_the_one_goes_that_has_waited_longest() -> None:
    engine, runner = make_engine(is_pipelined=False, num_pages=200, limit_blocks=900)
    requests = [ask(f"r{salt}", prompt_of(600, salt=salt), max_tokens=20) for salt in range(3)]
    late(runner, 1_000_000)
    answer(engine, requests)
    drawn = [group.slots for plan in runner.plans for group in plan.decode if not plan.units]
    assert [len(slots) for slots in drawn] == [1] * len(drawn)
    turns = [slots[0] for slots in drawn[-30:]]
    assert all(len(set(turns[begin : begin + 3])) == 3 for begin in range(24)), "in turns"
    check_idle(engine, runner)


def test_no_row_is_left_out_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 256
    monkeypatch.setattr(drawing_rows, "MOST_STEPS", most)
    engine, runner = make_engine()
    late(runner, 1_000_000)
    short = ask("short", prompt_of(20, salt=1), max_tokens=600, profile="exact")
    engine.submit([ask("long", prompt_of(600), max_tokens=3), short])
    order: dict[str, int] = {}
    steps = 0
    while engine.has_work:
        steps += 1
        for delta in engine.step():
            if delta.finish_reason:
                order[delta.request_id] = steps
    assert most < order["long"] < order["short"]
    assert engine.scheduler.late.num_left_out == 2 * most
    check_idle(engine, runner)
