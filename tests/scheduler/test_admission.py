"""Who is admitted, in which order, and how many at once; who waits again, and where in the queue."""

import pytest

from scheduler.engine.engine import Engine
from scheduler.sequences.capacity import Capacity, QueueFullError, TooLargeError
from tests.scheduler.engines import PAGE, PROFILES, drain, make_engine, make_request, prompt_of


def waiting(engine: Engine) -> list[str]:
    return [sequence.request_id for sequence in engine.scheduler._admission.waiting]


def test_a_request_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    """Small requests come for ever, and never leave the pages that the large one needs."""
    engine, _ = make_engine(num_pages=40, max_running=8)
    small = 0

    def keep_busy() -> None:
        nonlocal small
        while engine.stats().num_waiting < 4:
            engine.submit([make_request(f"s{small}", [1000 + small, *prompt_of(63)], max_tokens=16)])
            small += 1

    for _ in range(6):
        keep_busy()
        engine.step()
    began = small
    engine.submit([make_request("large", prompt_of(560), max_tokens=4)])
    while "large" in waiting(engine):
        assert small - began < 100, "the large request is passed for ever"
        engine.step()
        keep_busy()
    assert small - began >= 60, "the small ones do pass it, as long as they may"


def test_a_queue_without_room_takes_what_there_are_slots_for() -> None:
    engine, _ = make_engine(max_running=3, max_queue=0)
    engine.submit([make_request(f"r{i}", prompt_of(20, salt=i)) for i in range(3)])
    with pytest.raises(QueueFullError):
        engine.submit([make_request("r3", prompt_of(20))])
    assert set(drain(engine)) == {"r0", "r1", "r2"}


def test_no_more_jobs_are_under_way_than_are_allowed() -> None:
    engine, _ = make_engine(num_pages=400, max_jobs=2)
    engine.submit([make_request(f"r{i}", prompt_of(500, salt=i + 1), max_tokens=1) for i in range(5)])
    seen = set()
    while engine.has_work:
        engine.step()
        seen.add(engine.stats().num_prefilling)
    assert max(seen) == 2


def test_prompts_share_a_job_up_to_a_chunk_of_tokens() -> None:
    engine, _ = make_engine(chunk_tokens=64)
    engine.submit([make_request(f"r{i}", prompt_of(30, salt=i + 1), max_tokens=1) for i in range(5)])
    plan = engine.scheduler.schedule(lambda _: True)
    assert [len(job.prompts) for job in plan.new_jobs] == [2, 2, 1]


def test_hidden_states_under_way_count_against_the_bound() -> None:
    engine, _ = make_engine(num_pages=400, max_hidden_tokens=1000)
    engine.submit([make_request(f"r{i}", prompt_of(450, salt=i + 1), max_tokens=1) for i in range(2)])
    engine.step()
    engine.submit([make_request(f"late{i}", prompt_of(450, salt=i + 7), max_tokens=1) for i in range(2)])
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.scheduler._prefill.num_hidden_tokens)
    assert most == 900


def test_the_youngest_is_preempted_and_waits_in_front_of_those_who_came_later() -> None:
    engine, _ = make_engine(num_pages=14, max_running=4)
    engine.submit([make_request(f"r{i}", prompt_of(30, salt=i + 1), max_tokens=90) for i in range(4)])
    while not engine.stats().preemptions:
        engine.step()
    assert waiting(engine) == ["r3"]
    engine.submit([make_request("late", prompt_of(180, salt=9))])
    while engine.stats().preemptions < 2:
        engine.step()
    assert waiting(engine)[:3] == ["r2", "r3", "late"]
    drain(engine)


def test_who_was_preempted_is_counted_once_among_prefix_queries() -> None:
    engine, _ = make_engine(num_pages=14, max_running=4)
    engine.submit([make_request(f"r{i}", prompt_of(30, salt=i + 1), max_tokens=90) for i in range(4)])
    drain(engine)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_queries_tokens == 4 * 30


@pytest.mark.parametrize(
    ("capacity", "what"),
    [
        (Capacity(100, PAGE, 64, 1000, None), "the context is 64"),
        (Capacity(4, PAGE, 1000, 1000, None), "KV pages hold 64"),
        (Capacity(100, PAGE, 1000, 64, None), "hidden states fit 64"),
    ],
)
def test_a_request_that_just_fits_is_accepted_and_one_token_more_is_not(capacity: Capacity, what: str) -> None:
    exact = PROFILES["exact"]
    assert capacity.longest_tokens(exact) == 64
    capacity.check(make_request("fits", prompt_of(40), max_tokens=24), exact)
    with pytest.raises(TooLargeError, match=what):
        capacity.check(make_request("too long", prompt_of(40), max_tokens=25), exact)
