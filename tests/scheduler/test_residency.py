"""What the host has stays on the device while nobody needs its pages, and gives them up where somebody does."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.engine_patches import set_adaptive
from gpu.step import Offload, PageEviction
from scheduler.engine.engine import Engine
from scheduler.messages import EngineRequest
from scheduler.sequences.capacity import LANDING_TOKENS
from tests.scheduler.engines import PAGE, answer, check_output, drain, prompt_of
from tests.scheduler.host_engines import OFFLOAD_BLOCK, PROFILES, RESIDENT, SINK, ask, check_idle, make_engine
from tests.scheduler.page_runner import PageRunner


def replace_name(request: EngineRequest, name: str) -> EngineRequest:
    return msgspec.structs.replace(request, request_id=name, arrival_s=request.arrival_s + 1000)


def releases_of(runner: PageRunner) -> list[PageEviction]:
    return [release for plan in runner.plans for release in plan.evictions]


def start(engine: Engine, *requests) -> list:
    """Until all of these run; what was said meanwhile."""
    engine.submit(list(requests))
    deltas, names = [], {request.request_id for request in requests}
    while not names <= {sequence.request_id for sequence in engine.scheduler.roster.running}:
        deltas += engine.step()
    return deltas


def context_of(engine: Engine, name: str):
    return next(one for one in engine.scheduler.roster.running if one.request_id == name).context


def test_a_context_that_fits_the_device_is_written_and_never_asked_for() -> None:
    engine, runner = make_engine(is_adaptive=True)
    request = ask("a", prompt_of(600), max_tokens=300)
    answer(engine, [request])
    assert not releases_of(runner)
    assert all(group.host_reads is None for plan in runner.plans for group in plan.decode)
    assert len(next(iter(runner.contexts.values()))) > 600 + 300 - 32 - OFFLOAD_BLOCK - PAGE - SINK
    check_idle(engine, runner)


def test_a_prompt_that_does_not_fit_keeps_its_last_tokens() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=40)
    start(engine, ask("a", prompt_of(800), max_tokens=60))
    context = context_of(engine, "a")
    assert 0 < context.num_evicted < context.num_blocks
    assert engine.scheduler.residence.contexts.num_evicted == context.num_evicted
    assert engine.stats().pages_used >= 30, "what is left is for its window to grow"
    (table,), (dense,) = runner.tables.values(), runner.dense.values()
    assert engine.scheduler.residence.evictor.num_resident_tokens() == (len(table) - len(dense)) * PAGE
    drain(engine)
    check_idle(engine, runner)


def test_pages_are_evicted_where_another_request_needs_them_and_nobody_is_preempted() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=60)
    long = ask("long", prompt_of(700), max_tokens=200)
    others = [ask(f"r{salt}", prompt_of(150, salt=salt), max_tokens=60, profile="exact") for salt in (1, 2, 3)]
    start(engine, long)
    assert context_of(engine, "long").num_evicted == 0
    answer(engine, others)
    assert releases_of(runner)
    assert engine.stats().preemptions == 0
    check_idle(engine, runner)


def test_idle_contexts_give_up_theirs_first_then_sampled_ones() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=100)
    engine.submit([ask("idle", prompt_of(300, salt=9))])
    drain(engine)
    residence = engine.scheduler.residence
    (idle,) = residence.contexts._contexts.values()
    start(engine, ask("whole", prompt_of(300, salt=1), 90), ask("sample", prompt_of(200, salt=2), 90, "sampled"))
    whole, sample = context_of(engine, "whole"), context_of(engine, "sample")
    assert (idle.num_evicted, whole.num_evicted, sample.num_evicted) == (0, 0, 0)
    order = residence.evictor.evictable()
    assert order == [idle, sample, whole]
    assert residence.room.free_pages(residence.pages.num_available + 2, [])
    assert idle.num_evicted > 0 == sample.num_evicted
    residence.evictor.evict_pages(100, [idle])
    assert idle.num_resident == 0
    assert residence.room.free_pages(residence.pages.num_available + 2, [])
    assert sample.num_evicted > 0 == whole.num_evicted
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
    shared = parent.pages[: context.size.num_shared]
    assert shared == context.pages[: len(shared)]
    available = residence.pages.num_available
    residence.evictor.evict(parent, 8)
    assert residence.pages.num_available == available + 8 - residence.contexts._layout.blocks_for(8)
    assert parent.num_evicted == context.num_evicted == 8
    assert parent.pages[:8] == context.pages[:8] != shared[:8]
    deltas = drain(engine)
    assert releases_of(runner)[0].places, "the fork's table is told"
    assert len([token for delta in deltas["fork"] for token in delta.token_ids]) >= 38
    check_idle(engine, runner)


def test_a_release_is_of_a_few_offload_blocks_at_most() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=100)
    start(engine, ask("a", prompt_of(1200), max_tokens=60))
    residence = engine.scheduler.residence
    context = context_of(engine, "a")
    residence.evictor.evict_pages(residence.pages.num_pages, [context])
    assert context.num_resident == 0
    drain(engine)
    sizes = [len(release.page_ids) for release in releases_of(runner)]
    assert max(sizes) == 8 * OFFLOAD_BLOCK // PAGE
    assert sum(sizes) >= context.num_blocks - OFFLOAD_BLOCK // PAGE
    check_idle(engine, runner)


def test_a_prefill_keeps_the_pages_that_it_writes() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=100, chunk_tokens=64)
    request = ask("a", prompt_of(400), max_tokens=4)
    engine.submit([request])
    engine.step()
    residence = engine.scheduler.residence
    (context,) = residence.contexts._contexts.values()
    assert engine.stats().num_prefilling == 1
    assert residence.contexts.num_resident == 0
    assert not residence.evictor.evict(context, 8)
    check_output(request, drain(engine)["a"])
    check_idle(engine, runner)


def test_fixed_residence_releases_what_it_writes_and_nothing_else() -> None:
    engine, runner = make_engine(num_pages=60)
    request = ask("a", prompt_of(300), max_tokens=300)
    answer(engine, [request])
    offloads = [(plan.decode[0].positions[0], one.page_ids) for plan in runner.plans for one in plan.offloads]
    releases = [(plan.decode[0].positions[0], one.page_ids) for plan in runner.plans for one in plan.evictions]
    assert len(releases) > 2
    assert releases == [(position + LANDING_TOKENS, page_ids) for position, page_ids in offloads][: len(releases)]
    assert len(offloads) - len(releases) <= 1
    check_idle(engine, runner)


def test_residence_that_is_fixed_for_a_while_is_so_for_all_of_it() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=110)
    set_adaptive(engine.scheduler.residence.evictor, False)
    request = ask("a", prompt_of(300), max_tokens=300)
    answer(engine, [request])
    assert len(releases_of(runner)) > 2
    set_adaptive(engine.scheduler.residence.evictor, True)
    check_idle(engine, runner)


def test_what_contexts_share_on_the_device_is_counted_once() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=100)
    engine.submit([ask("first", prompt_of(400))])
    drain(engine)
    residence = engine.scheduler.residence
    idle = residence.evictor.num_resident_tokens()
    assert idle == residence.contexts.num_blocks * PAGE + SINK, "its window went with its sequence"
    start(engine, ask("fork", prompt_of(400), max_tokens=40))
    table = next(iter(runner.tables.values()))
    assert residence.evictor.num_resident_tokens() == len(table) * PAGE
    engine.submit([ask("short", prompt_of(50), max_tokens=2)])
    drain(engine)
    assert residence.evictor.num_resident_tokens() == idle
    check_idle(engine, runner)


def ends_of(engine: Engine, runner: PageRunner, *requests) -> dict[int, int]:
    """Where what the host is asked for ends, at each position of the one request of the profile `whole`."""
    engine.submit(list(requests))
    ends: dict[int, int] = {}
    while engine.has_work:
        num_plans = len(runner.plans)
        engine.step()
        for plan in runner.plans[num_plans:]:
            for group in plan.decode:
                for row, slot in enumerate(group.slots):
                    if runner.profiles.get(slot) == "whole":
                        asked = group.host_reads[row] if group.host_reads else None
                        ends[group.positions[row]] = 0 if asked is None else asked.end
    return ends


@pytest.mark.parametrize("length", [100, RESIDENT, 300])
def test_what_fixed_residence_asks_for_depends_on_token_counts_alone(length: int) -> None:
    request = ask("a", prompt_of(length), max_tokens=400, profile="whole")
    engine, runner = make_engine(num_pages=200)
    alone = ends_of(engine, runner, request)
    others = [ask(f"r{salt}", prompt_of(120, salt=salt), max_tokens=300, profile="exact") for salt in (1, 2)]
    engine, runner = make_engine(num_pages=46)
    beside = ends_of(engine, runner, *others, replace_name(request, "b"))
    assert engine.stats().preemptions > 0
    assert len(set(alone.values())) > 4
    differing = {position for position in beside if beside[position] != alone[position]}
    assert not differing
    check_idle(engine, runner)


@pytest.mark.parametrize(("dense_layers", "num_pages"), [(5, 54), (4, 50), (4, 52)])
def test_choices_of_one_prompt_that_settle_in_one_step_each_find_room_for_their_dense_pages(
    dense_layers: int, num_pages: int
) -> None:
    """Others hold their front pages as well, so that what the first of them releases frees few."""
    engine, runner = make_engine(num_pages=num_pages, dense_layers=dense_layers, limit_blocks=3000)
    requests = [ask(f"r{index}", prompt_of(120), max_tokens=150) for index in range(6)]
    answer(engine, requests)
    check_idle(engine, runner)


@settings(max_examples=12, deadline=None)
@given(
    fronts=st.lists(st.sampled_from([100, 120, 200, 300]), min_size=2, max_size=6),
    own=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    max_tokens=st.sampled_from([100, 150, 230]),
    dense_layers=st.sampled_from([2, 4, 5]),
    num_pages=st.integers(50, 70),
    order=st.none() | st.integers(0, 99).map(Random),
)
def test_fixed_residence_serves_whatever_shares_large_fronts(
    fronts: list[int], own: list[int], max_tokens: int, dense_layers: int, num_pages: int, order: Random | None
) -> None:
    engine, runner = make_engine(num_pages=num_pages, dense_layers=dense_layers, limit_blocks=3000, order=order)
    requests = [
        ask(f"r{index}", prompt_of(front) + [index] * num_own, max_tokens=max_tokens)
        for index, (front, num_own) in enumerate(zip(fronts, own, strict=False))
    ]
    answer(engine, requests)
    check_idle(engine, runner)


def test_rows_that_were_just_written_are_the_last_to_be_asked_for() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=120)
    start(engine, ask("a", prompt_of(300, salt=1), 300), ask("b", prompt_of(300, salt=2), 300))
    first, second = context_of(engine, "a"), context_of(engine, "b")
    num_before = first.num_blocks
    while first.num_blocks == num_before:
        engine.step()
    evictor = engine.scheduler.residence.evictor
    assert (first.num_landed, first.num_evicted) == (num_before, 0)
    free = engine.scheduler.pages.num_available
    dense = engine.scheduler.residence.contexts._layout.blocks_for(num_before)
    evictor.evict_pages(free + num_before - dense + 2, [first, second])
    assert first.num_evicted == num_before
    assert second.num_evicted > 0
    evictor.evict_pages(1000, [first, second])
    assert (first.num_resident, second.num_resident) == (0, 0)
    while first.num_landed != first.num_blocks:
        engine.step()
    drain(engine)
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


# --- short contexts ---------------------------------------------------------------------------------------------------


def short(name: str, salt: int, profile: str = "offloaded", max_tokens: int = 90) -> EngineRequest:
    return ask(name, prompt_of(100, salt=salt), max_tokens=max_tokens, profile=profile)


def offloads_of(runner: PageRunner) -> list[Offload]:
    return [offload for plan in runner.plans for offload in plan.offloads]


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("profile", ["offloaded", "sampled"])
def test_short_contexts_are_offloaded_before_anybody_is_preempted(profile: str, is_pipelined: bool) -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=20, is_pipelined=is_pipelined)
    requests = [short(f"r{salt}", salt, profile) for salt in (1, 2)]
    answer(engine, requests)
    assert engine.stats().preemptions == 0
    assert [offload.is_new_context for offload in offloads_of(runner)][:1] == [True]
    assert all((one.end - one.begin) % OFFLOAD_BLOCK == 0 for one in offloads_of(runner))
    assert releases_of(runner)
    check_idle(engine, runner)


def test_a_chat_that_meets_no_pressure_takes_no_host_memory() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=40)
    engine.submit([short("a", 1), short("b", 2)])
    drain(engine)
    assert not offloads_of(runner)
    check_idle(engine, runner)


def test_with_fixed_residence_the_youngest_is_preempted_as_ever() -> None:
    engine, runner = make_engine(num_pages=20)
    requests = [short(f"r{salt}", salt) for salt in (1, 2)]
    answer(engine, requests)
    assert engine.stats().preemptions > 0
    assert not offloads_of(runner)
    check_idle(engine, runner)


def test_where_the_host_has_no_room_for_short_ones_the_youngest_is_preempted() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=14, limit_blocks=2)
    requests = [ask(f"r{salt}", prompt_of(60, salt=salt), max_tokens=68) for salt in (1, 2)]
    answer(engine, requests)
    assert engine.stats().preemptions > 0
    assert not offloads_of(runner)
    check_idle(engine, runner)


def test_sampled_ones_are_offloaded_first_and_then_the_longest() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=60)
    start(engine, short("whole", 1, max_tokens=60), short("sample", 2, "sampled", 60))
    start(engine, ask("long", prompt_of(125, salt=3), max_tokens=60))
    for _ in range(20):
        engine.step()
    order = []
    while engine.scheduler.residence.offload_short(engine.scheduler.roster.running):
        order.append(engine.scheduler.residence.offloads._offloaded_short[-1][0].request_id)
    assert order == ["sample", "long", "whole"]
    drain(engine)
    check_idle(engine, runner)


def test_one_that_is_preempted_in_the_plan_that_offloads_it_leaves_nothing() -> None:
    engine, runner = make_engine(is_adaptive=True, num_pages=60)
    request = short("a", 1)
    deltas = start(engine, request)
    for _ in range(20):
        deltas += engine.step()
    scheduler = engine.scheduler
    assert scheduler.residence.offload_short(scheduler.roster.running)
    assert scheduler.residence.room.free_pages(scheduler.pages.num_available + 2, [])
    scheduler.roster.preempt_last(scheduler.roster.running)
    assert len(scheduler.residence.contexts) == 0
    deltas += drain(engine)["a"]
    check_output(request, deltas)
    assert not offloads_of(runner)
    assert not runner.contexts
    check_idle(engine, runner)
