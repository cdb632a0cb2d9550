"""What was evicted is reloaded where pages are free: in pieces, for all that share it, and not at once."""

import pytest

from gpu.step import FinishedReload, Reload
from scheduler.engine.engine import Engine
from scheduler.residence import evictions
from tests.scheduler.engines import PAGE, check_output, drain, prompt_of, text
from tests.scheduler.host_engines import OFFLOAD_BLOCK, ask, check_idle, make_engine
from tests.scheduler.page_runner import PageRunner
from tests.scheduler.test_residency import context_of, releases_of, start

QUIET = 4


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions, "QUIET_STEPS", QUIET)


def fetches_of(runner: PageRunner) -> list[Reload]:
    return [fetch for plan in runner.plans for fetch in plan.reloads]


def restores_of(runner: PageRunner) -> list[FinishedReload]:
    return [restore for plan in runner.plans for restore in plan.finished_reloads]


def press(engine: Engine, *names: str) -> None:
    """All that these have written is evicted."""
    for name in names:
        context = context_of(engine, name)
        assert engine.scheduler.residence.evictor.evict_to(context, context.num_blocks)


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("dense_layers", [0, 2])
def test_a_context_that_gave_all_up_is_asked_for_less_and_less_and_then_for_nothing(
    is_pipelined: bool, dense_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictions, "RELOADED_TOKENS", 2 * OFFLOAD_BLOCK)
    engine, runner = make_engine(is_adaptive=True, num_pages=120, is_pipelined=is_pipelined, dense_layers=dense_layers)
    request = ask("a", prompt_of(600), max_tokens=120)
    deltas = start(engine, request)
    press(engine, "a")
    num_blocks = context_of(engine, "a").num_evicted
    num_before = len(runner.plans)
    deltas += drain(engine)["a"]
    check_output(request, deltas)
    ends = [
        group.host_reads[0].end if group.host_reads else 0
        for plan in runner.plans[num_before:]
        for group in plan.decode
    ]
    assert ends[0] > 500
    assert sorted(ends, reverse=True) == ends
    assert ends[-1] == 0
    assert len(set(ends)) > 4, "a few offload blocks at a time"
    assert max(len(fetch.page_ids) for fetch in fetches_of(runner)) == 2 * OFFLOAD_BLOCK // PAGE
    assert sum(len(restore.page_ids) for restore in restores_of(runner)) == num_blocks
    assert engine.scheduler.residence.evictor.num_reloaded == num_blocks
    assert engine.scheduler.residence.contexts.num_evicted == 0
    check_idle(engine, runner)


def test_nothing_comes_back_while_anybody_waits_or_pages_are_short() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=60, max_running=1)
    first = ask("a", prompt_of(600), max_tokens=60)
    start(engine, first)
    press(engine, "a")
    engine.submit([ask("b", prompt_of(30, salt=2), max_tokens=3, profile="exact")])
    while any(one.request_id == "a" for one in engine.scheduler.roster.running):
        engine.step()
    assert not fetches_of(runner), "b waits for its slot"
    drain(engine)
    check_idle(engine, runner)


def test_it_comes_back_only_some_steps_after_pages_were_evicted_last() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=120)
    start(engine, ask("a", prompt_of(600), max_tokens=120))
    press(engine, "a")
    num_before = len(runner.plans)
    drain(engine)
    first = next(index for index, plan in enumerate(runner.plans[num_before:]) if plan.reloads)
    assert first == QUIET
    check_idle(engine, runner)


def test_pages_that_others_may_take_soon_and_some_more_stay_free() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=64)
    request = ask("a", prompt_of(600), max_tokens=150)
    start(engine, request, ask("b", prompt_of(200, salt=2), max_tokens=200, profile="exact"))
    press(engine, "a")
    free = []
    while engine.has_work:
        engine.step()
        if runner.plans[-1].reloads:
            coming = sum(map(engine.scheduler.residence.room.num_coming_pages, engine.scheduler.roster.running))
            free.append(engine.scheduler.pages.num_available - coming)
    assert free
    assert min(free) >= 64 // 16
    assert len(releases_of(runner)) <= 5 * len(restores_of(runner)), "what is reloaded is not evicted at once"
    assert engine.stats().preemptions == 0
    check_idle(engine, runner)


def test_forks_get_back_what_they_share_together() -> None:
    engine, _ = make_engine(is_adaptive=True, num_pages=200, limit_blocks=900)
    first = ask("first", prompt_of(400), max_tokens=60)
    start(engine, first)
    engine.step()
    document = first.prompt_token_ids
    forks = [ask(name, document + prompt_of(120, salt=salt), max_tokens=60) for salt, name in ((3, "b"), (4, "c"))]
    start(engine, *forks)
    contexts = [context_of(engine, name) for name in ("first", "b", "c")]
    assert contexts[0] is contexts[1].parent is contexts[2].parent
    press(engine, "b", "first")
    evictor = engine.scheduler.residence.evictor
    assert [one.num_evicted for one in contexts][2] == contexts[2].size.num_shared
    num_free = engine.scheduler.pages.num_available
    fetched = evictor.begin_reload(contexts[0], 1000, lambda _: True)
    assert fetched.context_id == contexts[1].context_id, "what a fork has behind what they share comes first"
    assert fetched.begin == contexts[1].size.num_shared * PAGE
    assert fetched.end == contexts[1].num_blocks * PAGE
    evictor.finish_reload()
    fetched = evictor.begin_reload(contexts[2], 1000, lambda _: True)
    assert (fetched.context_id, fetched.begin) == (contexts[0].context_id, 0)
    evictor.finish_reload()
    assert [one.num_evicted for one in contexts] == [0, 0, 0]
    assert contexts[0].pages[:10] == contexts[1].pages[:10] == contexts[2].pages[:10]
    assert engine.scheduler.pages.num_available < num_free
    assert [len(one.storage) for one in contexts] == [0, 0, 0]
    evictor._reloads.clear()
    evictor._evictions.clear()


def test_a_next_turn_gets_its_prefix_back() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=120)
    first = ask("a", prompt_of(500), max_tokens=40)
    start(engine, first)
    engine.step()
    press(engine, "a")
    engine.cancel(["a"])
    second = ask("b", first.prompt_token_ids + prompt_of(40, salt=2), max_tokens=60)
    engine.submit([second])
    deltas = drain(engine)["b"]
    check_output(second, deltas)
    assert deltas[0].num_cached_tokens > 400
    assert len(text(deltas)) == 60
    assert fetches_of(runner)
    assert not runner.plans[-1].decode or runner.plans[-1].decode[0].host_reads is None
    check_idle(engine, runner)


def test_a_prefix_that_a_next_turn_has_read_comes_back_right_behind_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions, "QUIET_STEPS", 1000)
    engine, runner = make_engine(is_adaptive=True, num_pages=120)
    first = ask("a", prompt_of(500), max_tokens=40)
    start(engine, first)
    engine.step()
    press(engine, "a")
    engine.cancel(["a"])
    num_before = len(runner.plans)
    second = ask("b", first.prompt_token_ids + prompt_of(40, salt=2), max_tokens=60)
    engine.submit([second])
    check_output(second, drain(engine)["b"])
    plans = runner.plans[num_before:]
    ended = max(index for index, plan in enumerate(plans) if plan.units)
    assert next(index for index, plan in enumerate(plans) if plan.reloads) <= ended + 2
    check_idle(engine, runner)


@pytest.mark.parametrize("how", ["cancel", "need", "preempt"])
def test_what_is_on_its_way_back_is_settled_whatever_becomes_of_its_context(how: str) -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=120)
    start(engine, ask("a", prompt_of(600), max_tokens=120))
    press(engine, "a")
    evictor = engine.scheduler.residence.evictor
    while not evictor.is_reloading:
        engine.step()
    if how == "cancel":
        engine.cancel(["a"])
        contexts = engine.scheduler.residence.contexts
        while contexts.evict_idle([]):
            pass
    elif how == "need":
        assert engine.scheduler.residence.room.free_pages(engine.scheduler.pages.num_available + 30, [])
        assert not evictor.is_reloading
    else:
        engine.scheduler.roster.preempt_last(engine.scheduler.roster.running)
    drain(engine)
    assert not evictor.is_reloading
    check_idle(engine, runner)


def test_fixed_residence_brings_nothing_back() -> None:
    engine, runner = make_engine(num_pages=120)
    start(engine, ask("a", prompt_of(600), max_tokens=120))
    drain(engine)
    assert not fetches_of(runner)
    check_idle(engine, runner)
