"""Layers that keep their window alone: what a sequence holds, where a prompt may begin, and who waits for a window."""

import pytest

from scheduler.cache.window_pool import Windows
from scheduler.messages import EngineRequest
from tests.scheduler.engines import (
    PAGE,
    answer,
    check_empty,
    check_output,
    drain,
    make_engine,
    make_request,
    prompt_of,
    text,
)
from tests.scheduler.window_model import TokenWindows


def prefilled(runner) -> list[int]:
    return [prompt.num_computed_tokens for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]


def test_the_next_turn_begins_where_the_last_one_ended() -> None:
    engine, _ = make_engine(num_windows=4)
    first = make_request("a", prompt_of(200), max_tokens=100)
    engine.submit([first])
    answer = text(drain(engine)["a"])
    second = make_request("b", first.prompt_token_ids + answer + prompt_of(30, salt=2))
    engine.submit([second])
    deltas = drain(engine)["b"]
    check_output(second, deltas)
    assert deltas[0].num_cached_tokens == 299 // PAGE * PAGE
    check_empty(engine)


KEPT = ["num_windows", "num_states"]


@pytest.mark.parametrize("kept", KEPT)
def test_choices_of_one_prompt_begin_behind_it_while_the_first_goes_on(kept: str) -> None:
    engine, runner = make_engine(num_pages=200, **{kept: 6})
    requests = [make_request(f"r{i}", prompt_of(150), max_tokens=90) for i in range(4)]
    answer(engine, requests)
    assert prefilled(runner) == [150] + 3 * [150 - 144]
    check_empty(engine)


@pytest.mark.parametrize("kept", KEPT)
def test_who_finds_no_window_or_state_waits_for_one(kept: str) -> None:
    engine, runner = make_engine(max_running=8, num_pages=200, **{kept: 2})
    requests = [make_request(f"r{i}", prompt_of(40, salt=i), max_tokens=20) for i in range(6)]
    answer(engine, requests)
    assert max(len(group.slots) for plan in runner.plans for group in plan.decode) == 2
    check_empty(engine)


def parting(name: str, salt: int) -> EngineRequest:
    """220 tokens, of which 160 are the same in all."""
    return make_request(name, prompt_of(160) + prompt_of(60, salt=salt))


def test_prompts_that_part_in_the_middle_begin_there_from_the_third_one_on() -> None:
    engine, _ = make_engine(num_windows=8, num_pages=300)
    cached = []
    for number in range(4):
        request = parting(f"r{number}", 10 + number)
        engine.submit([request])
        deltas = drain(engine)[request.request_id]
        check_output(request, deltas)
        cached.append(deltas[0].num_cached_tokens)
    assert cached == [0, 0, 160, 160]
    check_empty(engine)


def test_one_of_those_that_come_together_leaves_a_window_where_they_part() -> None:
    engine, runner = make_engine(num_windows=8, num_pages=300)
    engine.submit([parting("first", 10)])
    drain(engine)
    requests = [parting(f"r{number}", 20 + number) for number in range(3)]
    answer(engine, requests)
    assert prefilled(runner) == [220, 220, 60, 60]
    assert sum(bool(prompt.branches) for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts) == 1
    check_empty(engine)


def test_a_branch_behind_a_copy_has_what_the_copy_had() -> None:
    """The third prompt parts further behind than the second: it begins with a window, and leaves another one."""
    engine, _ = make_engine(num_windows=8, num_pages=300)
    cached = []
    for name, shared, salt in (("a", 220, 0), ("b", 112, 1), ("c", 144, 2), ("d", 144, 3), ("e", 112, 4)):
        request = make_request(name, prompt_of(shared) + prompt_of(220 - shared, salt=salt))
        engine.submit([request])
        deltas = drain(engine)[name]
        check_output(request, deltas)
        cached.append(deltas[0].num_cached_tokens)
    assert cached == [0, 0, 112, 144, 112]
    check_empty(engine)


def test_a_branch_takes_the_place_of_what_is_kept_only_where_it_saves_much() -> None:
    for shared, wanted in ((160, 0), (288, 288)):
        engine, _ = make_engine(num_windows=6, num_pages=300)
        for other in range(6):
            engine.submit([make_request(f"other{other}", prompt_of(60, salt=100 + other))])
            drain(engine)
        assert not engine.scheduler.residence.windows._free
        for number in range(3):
            request = make_request(f"r{number}", prompt_of(shared) + prompt_of(60, salt=10 + number), max_tokens=2)
            engine.submit([request])
            deltas = drain(engine)[request.request_id]
            check_output(request, deltas)
        assert deltas[0].num_cached_tokens == wanted


def test_a_branch_is_dropped_with_its_prefill_and_with_a_context_that_failed() -> None:
    engine, _ = make_engine(num_windows=8, num_pages=300, chunk_tokens=32)
    windows = engine.scheduler.residence.windows
    engine.submit([parting("first", 10)])
    drain(engine)
    engine.submit([parting("second", 11)])
    engine.step()
    assert len(windows._coming) == 1
    engine.cancel(["second"])
    drain(engine)
    assert (windows.num_free, windows._coming) == (8, {})
    check_empty(engine)
    third = parting("third", 12)
    engine.submit([third])
    engine.step()
    (sequence,) = engine.scheduler.roster.holding()
    windows.retract(sequence)
    check_output(third, drain(engine)["third"])
    fourth = parting("fourth", 13)
    engine.submit([fourth])
    assert drain(engine)["fourth"][0].num_cached_tokens == 0


def test_a_prefix_whose_window_is_gone_is_computed_again() -> None:
    """What pages have of it is of no use to layers that keep windows."""
    engine, _ = make_engine(num_windows=2, num_pages=200)
    for salt in range(3):
        engine.submit([make_request(f"r{salt}", prompt_of(200, salt=salt))])
        drain(engine)
    again = make_request("again", prompt_of(200))
    engine.submit([again])
    deltas = drain(engine)["again"]
    check_output(again, deltas)
    assert deltas[0].num_cached_tokens == 0
    hashes = engine.scheduler.intake.prepare([again], lambda: None)[0].hashes
    assert engine.scheduler.pages.count_known(hashes, 0, 12) == 12
    check_empty(engine)


def test_a_window_has_the_ends_whose_cells_are_there() -> None:
    engine, _ = make_engine(num_windows=4, num_pages=200)
    engine.submit([make_request("a", prompt_of(200), max_tokens=2)])
    drain(engine)
    for name, shared in (("b", 165), ("c", 158)):
        request = make_request(name, prompt_of(200)[:shared] + prompt_of(60, salt=3)[::-1])
        engine.submit([request])
        deltas = drain(engine)[name]
        check_output(request, deltas)
        assert deltas[0].num_cached_tokens == (160 if shared >= 160 else 0)


def test_nothing_is_kept_of_what_began_behind_a_context_that_failed() -> None:
    """The second one has a copy of the first one's window when that is known to be bad."""
    engine, runner = make_engine(num_windows=6, num_pages=200)
    engine.submit([make_request("first", prompt_of(150), max_tokens=90)])
    while not engine.scheduler.roster.running:
        engine.step()
    engine.submit([make_request("second", prompt_of(150), max_tokens=90)])
    while len(engine.scheduler.roster.running) < 2:
        engine.step()
    runner.broken = {engine.scheduler.roster.running[0].slot}
    deltas = drain(engine)
    assert deltas["second"][0].num_cached_tokens == 144
    assert not engine.scheduler.residence.windows._kept
    check_empty(engine)


def test_without_a_prefix_cache_no_window_is_kept() -> None:
    engine, runner = make_engine(num_windows=4, prefix_cache=False)
    engine.submit([make_request("a", prompt_of(200))])
    drain(engine)
    assert [write.source for plan in runner.plans for write in plan.window_writes] == [None]
    assert not engine.scheduler.residence.windows._kept


def test_the_model_of_windows_sees_one_cell_of_another_context() -> None:
    """Power of what is above."""
    windows = TokenWindows(1, 80, 40)
    tokens = list(range(200))
    windows.of_slot[0] = 0
    for position, token in enumerate(tokens):
        windows.put(0, position, token)
    windows.check(0, tokens)
    windows.rings[0][(200 - 39) % 80] = -1
    with pytest.raises(AssertionError):
        windows.check(0, tokens)


def test_models_without_windows_hold_none() -> None:
    windows = Windows(0, 0, PAGE, True)
    assert not windows.lacks()
    assert windows.last_end([b"a", b"b", b"c"], 3, 2) == 2
    assert windows.take_writes() == []


def test_a_copy_lacks_what_its_source_had_written_over() -> None:
    """Each goes on from the window of the one before, nearer to the front, where a longer one has been."""
    engine, _ = make_engine(num_windows=2, num_pages=29, max_running=1, max_hidden_tokens=200)
    for length in (88, 72, 63):
        request = make_request(f"of {length}", [*prompt_of(length - 1), 1], max_tokens=5)
        engine.submit([request])
        check_output(request, drain(engine)[request.request_id])
    check_empty(engine)
