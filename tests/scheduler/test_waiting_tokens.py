"""How much work waits: the tokens of prompts that are neither computed nor found."""

import pytest
from msgspec.structs import replace

from scheduler.engine.engine import Engine
from tests.scheduler import host_engines
from tests.scheduler.engines import PAGE, drain, make_engine, make_request, prompt_of


def test_waiting_tokens_are_those_that_would_be_computed() -> None:
    engine, _ = make_engine(max_running=1, chunk_tokens=64)
    shared = prompt_of(200)
    engine.submit([make_request("known", shared, max_tokens=1)])
    drain(engine)
    assert work_of(engine) == (0, 0)
    engine.submit([make_request("long", prompt_of(300, 1), max_tokens=30)])
    engine.submit([make_request("again", shared + prompt_of(7, 2)), make_request("new", prompt_of(50, 3))])
    found = 200 // PAGE * PAGE
    assert work_of(engine) == (300 + 207 + 50, 300 + (207 - found) + 50)
    engine.step()
    waiting, uncached = work_of(engine)
    assert waiting == 207 + 50
    assert 207 - found + 50 < uncached <= 300 + 207 - found + 50
    left = []
    while engine.stats().num_prefilling:
        engine.step()
        left.append(work_of(engine)[1])
    assert left == sorted(left, reverse=True)
    assert left[-1] == 207 - found + 50
    drain(engine)
    assert work_of(engine) == (0, 0)


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_what_is_in_host_memory_is_found_too(is_adaptive: bool) -> None:
    engine, _ = host_engines.make_engine(max_running=1, is_adaptive=is_adaptive)
    engine.submit([host_engines.ask("a", prompt_of(500))])
    drain(engine)
    engine.submit([host_engines.ask("b", prompt_of(20, 1), max_tokens=40, profile="exact")])
    engine.step()
    engine.submit([host_engines.ask("c", prompt_of(500))])
    assert work_of(engine)[0] == 500
    uncached = work_of(engine)[1] - work_of_prefill(engine)
    assert uncached == 500 - 464
    drain(engine)


def work_of(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.waiting_tokens, stats.waiting_uncached_tokens


def work_of_prefill(engine: Engine) -> int:
    return sum(entry.num_left_tokens for entry in engine.scheduler._prefill.jobs)


def test_adapters_are_told_of_by_who_runs_and_who_waits() -> None:
    engine, _ = make_engine(max_running=1)
    engine.submit([replace(make_request("a", prompt_of(40), 20), adapter=2)])
    engine.step()
    engine.submit([replace(make_request(name, prompt_of(40), 20), adapter=n) for n, name in enumerate("bcd")])
    stats = engine.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == ([2], [1, 2])
    drain(engine)
