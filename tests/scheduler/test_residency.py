"""What the host has stays on the device while nobody needs its pages, and gives them up where somebody does."""

import pytest

from gpu.step import Release
from scheduler.engine import Engine
from tests.scheduler.page_runner import PageRunner
from tests.scheduler.test_host import LUMP, PROFILES, SINK, ask, check_idle, make_engine
from tests.scheduler.test_scheduler import PAGE, check_output, drain, prompt_of


def releases_of(runner: PageRunner) -> list[Release]:
    return [release for plan in runner.plans for release in plan.releases]


def start(engine: Engine, *requests) -> None:
    engine.submit(list(requests))
    while len(engine.scheduler._running) < len(requests):
        engine.step()


def context_of(engine: Engine, name: str):
    return next(one for one in engine.scheduler._running if one.request_id == name).context


def test_a_context_that_fits_the_device_is_written_and_never_asked_for() -> None:
    engine, runner = make_engine(is_adaptive=True)
    request = ask("a", prompt_of(600), max_tokens=300)
    engine.submit([request])
    check_output(request, drain(engine)["a"])
    assert not releases_of(runner)
    assert all(group.asks is None for plan in runner.plans for group in plan.decode)
    assert len(next(iter(runner.contexts.values()))) > 600 + 300 - 32 - LUMP - PAGE - SINK
    check_idle(engine, runner)


def test_a_prompt_that_does_not_fit_keeps_its_last_tokens() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=40)
    start(engine, ask("a", prompt_of(800), max_tokens=60))
    context = context_of(engine, "a")
    assert 0 < context.num_released < context.num_blocks
    assert engine.scheduler.residence.num_released_tokens == context.num_released * PAGE
    assert engine.stats().pages_used >= 30, "what is left is for its window to grow"
    drain(engine)
    check_idle(engine, runner)


def test_pages_are_given_up_where_another_request_needs_them_and_nobody_gives_way() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=60)
    long = ask("long", prompt_of(700), max_tokens=200)
    others = [ask(f"r{salt}", prompt_of(150, salt=salt), max_tokens=60, profile="exact") for salt in (1, 2, 3)]
    start(engine, long)
    assert context_of(engine, "long").num_released == 0
    engine.submit(others)
    deltas = drain(engine)
    for request in others:
        check_output(request, deltas[request.request_id])
    assert releases_of(runner)
    assert engine.stats().preemptions == 0
    check_idle(engine, runner)


def test_idle_contexts_give_up_theirs_first_then_sampled_ones() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=100)
    engine.submit([ask("idle", prompt_of(300, salt=9))])
    drain(engine)
    residence = engine.scheduler.residence
    assert residence.contexts is not None
    (idle,) = residence.contexts._contexts.values()
    start(engine, ask("whole", prompt_of(300, salt=1), 90), ask("sample", prompt_of(200, salt=2), 90, "sampled"))
    whole, sample = context_of(engine, "whole"), context_of(engine, "sample")
    assert (idle.num_released, whole.num_released, sample.num_released) == (0, 0, 0)
    order = residence.contexts.yielding()
    assert order == [idle, sample, whole]
    assert residence._free_pages(residence.pages.num_available + 2, [])
    assert idle.num_released > 0 == sample.num_released
    residence._yield_pages(100, [idle])
    assert idle.num_resident == 0
    assert residence._free_pages(residence.pages.num_available + 2, [])
    assert sample.num_released > 0 == whole.num_released
    drain(engine)
    check_idle(engine, runner)


def test_a_fork_and_what_it_stands_on_give_up_shared_pages_together() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=100)
    first = prompt_of(400)
    engine.submit([ask("first", first)])
    drain(engine)
    fork = ask("fork", first + prompt_of(100, salt=3), max_tokens=40)
    start(engine, fork)
    residence = engine.scheduler.residence
    context = context_of(engine, "fork")
    parent = context.parent
    assert parent is not None
    shared = parent.pages[: context.size.num_shared]
    assert shared == context.pages[: len(shared)]
    available = residence.pages.num_available
    residence._give_up(parent, 8)
    assert residence.pages.num_available == available + 8 - residence._host[0].layout.blocks_for(8)
    assert parent.num_released == context.num_released == 8
    assert parent.pages[:8] == context.pages[:8] != shared[:8]
    deltas = drain(engine)
    assert releases_of(runner)[0].places, "the fork's table is told"
    assert len([token for delta in deltas["fork"] for token in delta.token_ids]) >= 38
    check_idle(engine, runner)


def test_a_release_is_of_a_few_lumps_at_most() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=100)
    start(engine, ask("a", prompt_of(1200), max_tokens=60))
    residence = engine.scheduler.residence
    context = context_of(engine, "a")
    residence._yield_pages(residence.pages.num_pages, [context])
    assert context.num_resident == 0
    drain(engine)
    sizes = [len(release.page_ids) for release in releases_of(runner)]
    assert max(sizes) == 8 * LUMP // PAGE
    assert sum(sizes) >= context.num_blocks - LUMP // PAGE
    check_idle(engine, runner)


def test_a_prefill_keeps_the_pages_that_it_writes() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=100, chunk_tokens=64)
    request = ask("a", prompt_of(400), max_tokens=4)
    engine.submit([request])
    engine.step()
    residence = engine.scheduler.residence
    assert residence.contexts is not None
    (context,) = residence.contexts._contexts.values()
    assert engine.stats().num_prefilling == 1
    assert residence.contexts.num_resident == 0
    assert not residence._give_up(context, 8)
    check_output(request, drain(engine)["a"])
    check_idle(engine, runner)


def test_fixed_residence_releases_what_it_writes_and_nothing_else() -> None:
    engine, runner = make_engine(num_pages=60)
    request = ask("a", prompt_of(300), max_tokens=300)
    engine.submit([request])
    check_output(request, drain(engine)["a"])
    for plan in runner.plans:
        assert [deposit.page_ids for deposit in plan.deposits] == [release.page_ids for release in plan.releases]
    assert releases_of(runner)
    check_idle(engine, runner)


@pytest.mark.parametrize("num_pages", [44, 50, 59])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_source_whose_dense_pages_leave_no_room_for_the_rest_of_a_prompt_goes(
    num_pages: int, is_adaptive: bool
) -> None:
    engine, runner = make_engine(num_pages=num_pages, dense_layers=4, limit_blocks=3000, is_adaptive=is_adaptive)
    for name, prompt in (("a", prompt_of(1000)), ("b", prompt_of(40) + prompt_of(960, salt=3))):
        request = ask(name, prompt, max_tokens=4)
        engine.submit([request])
        for _ in range(2000):
            if not engine.has_work:
                break
            engine.step()
        assert not engine.has_work, "it waits for pages that only its own source has"
    check_idle(engine, runner)


def test_profiles_of_the_two_ways_share_no_prefix() -> None:
    assert "residency=adaptive" in PROFILES["offloaded"].kv_key
    assert "residency" not in PROFILES["exact"].kv_key
