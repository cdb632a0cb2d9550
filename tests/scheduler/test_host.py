"""Long contexts whose middle is offloaded: texts come out as if each request ran alone, and nothing is left behind."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu.step import HostRead
from scheduler.residence import evictions
from scheduler.sequences.capacity import TooLargeError
from scheduler.sequences.offloaded_context import RunSize
from tests.scheduler.engines import PAGE, Workload, answer, check_output, drain, follow, prompt_of, text
from tests.scheduler.host_engines import (
    OFFLOAD_BLOCK,
    PROFILES,
    RESIDENT,
    SINK,
    WINDOW,
    ask,
    check_idle,
    make_engine,
)
from tests.scheduler.page_runner import PageRunner
from transfer.reading import Reading


@pytest.mark.parametrize("way", ["retract", "discard"])
def test_a_conversation_of_thousands_of_turns_is_let_go_at_once(way: str) -> None:
    """Each turn stands on the one before it: far more of them than calls may nest."""
    num_turns = 3000
    engine, _ = make_engine(num_pages=2 * num_turns, limit_blocks=10 * num_turns)
    contexts, pages = engine.scheduler.residence.contexts, engine.scheduler.pages
    turn = None
    for number in range(num_turns):
        num_shared = min(number, 1)
        turn = contexts.add(RunSize(num_shared, 1, num_shared + 1, Reading.WHOLE), turn)
        turn.is_open = True
        contexts.append(turn, pages.allocate(1))
        contexts.publish(turn, [b"first", b"%d" % number][: num_shared + 1])
        contexts.release(turn, is_kept=True)
    assert len(contexts) == num_turns
    first = next(iter(contexts))
    contexts.retract([b"%d" % (num_turns - 1)]) if way == "retract" else contexts.discard(first)
    assert (len(contexts), contexts.used_bytes, contexts._owners, pages.num_held) == (0, 0, {}, 0)
    assert sorted(contexts.take_closed()) == list(range(num_turns))


def prefilled(runner: PageRunner) -> list[int]:
    return [job.num_tokens for plan in runner.plans for job in plan.new_jobs]


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("length", [129, 200, 1000])
def test_a_long_prompt_is_offloaded_and_its_text_is_its_own(length: int, is_pipelined: bool) -> None:
    engine, runner = make_engine(is_pipelined=is_pipelined)
    request = ask("a", prompt_of(length), max_tokens=300)
    answer(engine, [request])
    host = next(prompt.host for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts)
    assert (host.sink, host.source_id, host.reading) == (SINK, None, Reading.WHOLE)
    assert WINDOW <= length - host.end < WINDOW + PAGE
    blocks = [offload for plan in runner.plans for offload in plan.offloads]
    assert len(blocks) >= 3
    assert all(offload.end - offload.begin == OFFLOAD_BLOCK and not offload.is_new_context for offload in blocks)
    check_idle(engine, runner)


def test_a_context_stays_on_the_device_until_it_outgrows_the_limit_and_an_offload_block() -> None:
    engine, runner = make_engine()
    request = ask("a", prompt_of(RESIDENT), max_tokens=210)
    answer(engine, [request])
    offloads = [offload for plan in runner.plans for offload in plan.offloads]
    assert [offload.is_new_context for offload in offloads] == [True, False, False]
    assert (offloads[0].begin, offloads[0].end) == (SINK, RESIDENT + OFFLOAD_BLOCK - WINDOW)
    asks = [group.host_reads for plan in runner.plans for group in plan.decode]
    assert asks[0] is None
    assert asks[-1] == (HostRead(offloads[0].context_id, SINK, offloads[-1].end, reads_all=True),)
    check_idle(engine, runner)


def test_the_window_is_never_shorter_than_asked_nor_longer_than_an_offload_block_more() -> None:
    engine, runner = make_engine()
    engine.submit([ask("a", prompt_of(700), max_tokens=300)])
    held = []
    while engine.has_work:
        engine.step()
        for group in runner.plans[-1].decode:
            context = runner.contexts[group.host_reads[0].context_id] if group.host_reads else None
            if context is not None:
                held.append(group.positions[0] + 1 - SINK - len(context))
    assert min(held) >= WINDOW
    assert max(held) < WINDOW + OFFLOAD_BLOCK


def test_a_profile_without_host_keeps_every_context_on_the_device() -> None:
    engine, runner = make_engine()
    request = ask("a", prompt_of(500), max_tokens=200, profile="exact")
    answer(engine, [request])
    assert not runner.contexts
    assert not any(plan.offloads for plan in runner.plans)


def test_the_next_turn_forks_the_context_of_the_last() -> None:
    engine, runner = make_engine()
    first = ask("a", prompt_of(500), max_tokens=150)
    engine.submit([first])
    answer = text(drain(engine)["a"])
    second = ask("b", first.prompt_token_ids + answer + prompt_of(40, salt=2))
    engine.submit([second])
    deltas = drain(engine)["b"]
    check_output(second, deltas)
    down = 500 - WINDOW - (500 - WINDOW) % PAGE + 2 * OFFLOAD_BLOCK
    assert deltas[0].num_cached_tokens == down
    assert prefilled(runner) == [500, 690 - down]
    assert engine.stats().prefix_hits_tokens == down
    check_idle(engine, runner)


def test_asking_again_computes_the_window_alone() -> None:
    engine, runner = make_engine()
    for name in ("a", "b", "c"):
        request = ask(name, prompt_of(500))
        engine.submit([request])
        check_output(request, drain(engine)[name])
    assert prefilled(runner) == [500, 500 - 464, 500 - 464]
    assert len(engine.scheduler.residence.contexts) == 1, "a context with nothing of its own is not kept"
    check_idle(engine, runner)


def test_profiles_do_not_share_contexts() -> None:
    engine, runner = make_engine()
    for profile in ("offloaded", "sampled"):
        engine.submit([ask(profile, prompt_of(500), profile=profile)])
        assert drain(engine)[profile][0].num_cached_tokens == 0
    assert [p.host.reading for plan in runner.plans for job in plan.new_jobs for p in job.prompts] == [
        Reading.WHOLE,
        Reading.SAMPLE,
    ]


def test_all_rows_of_a_step_are_one_group_whatever_their_profiles_and_wherever_their_tokens_lie() -> None:
    engine, runner = make_engine(num_pages=200)
    requests = [
        ask(profile + name, prompt_of(length, salt=salt), max_tokens=120, profile=profile)
        for salt, profile in enumerate(("exact", "offloaded", "whole", "sampled"))
        for name, length in (("", 30), ("-long", 300))
    ]
    answer(engine, requests)
    groups = [plan.decode for plan in runner.plans if plan.decode]
    assert all(len(group) == 1 for group in groups)
    numbers = [(len(one.slots), sum(ask is not None for ask in one.host_reads or [])) for (one,) in groups]
    assert any(1 < num_asks < num_rows for num_rows, num_asks in numbers)
    check_idle(engine, runner)


def test_one_prompt_is_offloaded_at_a_time_and_short_ones_pass_it() -> None:
    engine, runner = make_engine(chunk_tokens=256)
    long = [ask(f"long{i}", prompt_of(900, salt=i), max_tokens=2) for i in range(3)]
    short = ask("short", prompt_of(20, salt=9), max_tokens=2)
    engine.submit([*long, short])
    order = list(drain(engine))  # the runner holds the jobs to it
    assert order[0] == "short"
    check_idle(engine, runner)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_context_that_host_memory_can_never_hold_is_refused_and_told_what_fits() -> None:
    engine, _ = make_engine(limit_blocks=40)
    with pytest.raises(TooLargeError, match=r"700 \+ 50 = 750 tokens, host memory holds (\d+); .* host.memory_limit"):
        engine.submit([ask("a", prompt_of(700), max_tokens=50)])
    fits = engine.scheduler.residence._capacity.longest_tokens(PROFILES["offloaded"])
    assert fits < 750
    engine.submit([ask("a", prompt_of(fits - 50), max_tokens=50)])
    assert drain(engine)["a"][-1].finish_reason == "length"
    with pytest.raises(TooLargeError, match="host memory holds"):
        engine.submit([ask("b", prompt_of(fits), max_tokens=1)])


def test_a_sampled_context_takes_its_tables_as_well() -> None:
    engine, _ = make_engine(limit_blocks=40)
    longest = {name: engine.scheduler.residence._capacity.longest_tokens(profile) for name, profile in PROFILES.items()}
    assert RESIDENT < longest["sampled"] < longest["offloaded"] < longest["exact"]


def test_dense_pages_bound_a_context() -> None:
    engine, runner = make_engine(num_pages=15)
    fits = engine.scheduler.residence._capacity.longest_tokens(PROFILES["offloaded"])
    assert fits == SINK + 4 * 4 * PAGE + WINDOW + PAGE - 1
    with pytest.raises(TooLargeError, match=rf"pages of dense layers hold {fits}; shorten .* or raise gpu.kv_cache"):
        engine.submit([ask("a", prompt_of(fits), max_tokens=1)])
    request = ask("b", prompt_of(fits - 5), max_tokens=5)
    answer(engine, [request])
    check_idle(engine, runner)


def test_the_youngest_is_preempted_when_host_memory_runs_out() -> None:
    engine, runner = make_engine(limit_blocks=75, num_pages=200)
    requests = [ask(f"r{i}", prompt_of(RESIDENT, salt=i), max_tokens=600) for i in range(2)]
    engine.submit(requests)
    deltas = drain(engine)
    assert engine.stats().preemptions > 0
    for request in requests:
        check_output(request, deltas[request.request_id])
    check_idle(engine, runner)


def test_who_is_preempted_for_a_lack_of_pages_forks_what_it_left() -> None:
    engine, runner = make_engine(num_pages=38)
    requests = [
        ask("exact", prompt_of(20, salt=9), max_tokens=260, profile="exact"),
        *(ask(f"r{i}", prompt_of(300, salt=i), max_tokens=190) for i in range(2)),
    ]
    engine.submit(requests)
    deltas = drain(engine)
    assert engine.stats().preemptions > 0
    for request in requests:
        check_output(request, deltas[request.request_id])
    begins = [prompt.begin for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]
    assert begins[:3] == [0, 0, 0]
    assert all(begin >= 256 for begin in begins[3:])
    check_idle(engine, runner)


def test_prompts_that_are_offloaded_leave_each_other_the_pages_to_grow() -> None:
    for num_pages in range(18, 70, 3):  # every remainder of the four pages that leave at once
        engine, runner = make_engine(num_pages=num_pages)
        engine.submit([ask(f"r{i}", prompt_of(300, salt=i), max_tokens=190) for i in range(4)])
        drain(engine)
        assert engine.stats().preemptions == 0
        check_idle(engine, runner)


def test_a_context_that_stands_in_its_own_forks_way_goes() -> None:
    """The fork shares a little of a large context: both do not fit, so the prompt is computed anew."""
    engine, runner = make_engine(limit_blocks=60)
    shared = prompt_of(100)
    for name, salt in (("a", 1), ("b", 2)):
        request = ask(name, shared + prompt_of(700, salt=salt))
        engine.submit([request])
        check_output(request, drain(engine)[name])
    check_idle(engine, runner)


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_cancelled_prefill_leaves_nothing_in_host_memory() -> None:
    engine, runner = make_engine()
    engine.submit([ask("a", prompt_of(900))])
    for _ in range(3):
        engine.step()
    assert engine.scheduler.residence.contexts.used_bytes > 0
    engine.cancel(["a"])
    assert engine.scheduler.residence.contexts.used_bytes == 0
    drain(engine)
    assert not runner.contexts, "the device hears of it though no other request comes"
    assert not runner.jobs
    check_idle(engine, runner)


def test_a_cancelled_answer_leaves_its_context_for_the_next() -> None:
    engine, runner = make_engine()
    engine.submit([ask("a", prompt_of(500), max_tokens=400)])
    while not engine.stats().num_running:
        engine.step()
    for _ in range(20):
        engine.step()
    engine.cancel(["a"])
    request = ask("b", prompt_of(500))
    engine.submit([request])
    deltas = drain(engine)["b"]
    check_output(request, deltas)
    assert deltas[0].num_cached_tokens == 464
    check_idle(engine, runner)


def test_without_a_prefix_cache_no_context_outlives_its_request() -> None:
    engine, runner = make_engine(prefix_cache=False)
    request = ask("a", prompt_of(500), max_tokens=100)
    answer(engine, [request])
    assert engine.scheduler.residence.contexts.used_bytes == 0
    check_idle(engine, runner)


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("when", ["prefill", "decode", "opening"])
def test_a_host_that_refuses_memory_ends_one_request_and_no_other(when: str, is_pipelined: bool) -> None:
    engine, runner = make_engine(is_pipelined=is_pipelined)
    prompt = prompt_of(RESIDENT if when == "opening" else 400)
    engine.submit([ask("short", prompt_of(20, salt=1), max_tokens=300, profile="exact")])
    engine.step()
    runner.refuses_memory = when == "prefill"
    engine.submit([ask("a", prompt, max_tokens=200)])
    deltas: dict[str, list] = {"a": [], "short": []}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        runner.refuses_memory |= bool(deltas["a"])
    assert deltas["a"][-1].finish_reason == "error"
    assert "host memory: asked 9" in deltas["a"][-1].error
    assert [delta.finish_reason for delta in deltas["a"][:-1]] == [None] * (len(deltas["a"]) - 1)
    assert deltas["short"][-1].finish_reason == "length"
    runner.refuses_memory = False
    again = ask("again", prompt, max_tokens=200)
    engine.submit([again])
    check_output(again, drain(engine)["again"])
    check_idle(engine, runner)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_states_of_a_request_that_the_host_refuses_memory_are_found_by_nobody(is_pipelined: bool) -> None:
    """It computes no more, and a plan that was launched behind that copies its state all the same."""
    engine, runner = make_engine(is_pipelined=is_pipelined, num_states=20, num_pages=200)

    def serve(name: str, tokens: list[int]) -> None:
        request = ask(name, tokens, max_tokens=4)
        engine.submit([request])
        check_output(request, drain(engine)[name])

    engine.submit([ask("failing", prompt_of(256), max_tokens=300)])
    said: list[int] = []
    while engine.has_work:
        said += [token for delta in engine.step() for token in delta.token_ids]
        runner.refuses_memory = len(said) > 30
    runner.refuses_memory = False
    whole = prompt_of(256) + said
    assert len(whole) == 320, "it fails where its state is copied"
    serve("after", whole + prompt_of(70, salt=9))
    serve("beside", whole + prompt_of(150, salt=8))
    check_idle(engine, runner)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_context_without_finite_logits_is_found_by_nobody(is_pipelined: bool) -> None:
    engine, runner = make_engine(is_pipelined=is_pipelined)
    engine.submit([ask("before", prompt_of(400))])
    drain(engine)
    engine.submit([ask("a", prompt_of(400), max_tokens=100)])
    while not engine.stats().num_running:
        engine.step()
    runner.broken.add(engine.scheduler.roster.running[0].slot)
    deltas = drain(engine)["a"]
    assert deltas[-1].finish_reason == "error"
    runner.broken.clear()
    again = ask("again", prompt_of(400))
    engine.submit([again])
    deltas = drain(engine)["again"]
    assert deltas[0].num_cached_tokens == 0
    check_output(again, deltas)
    check_idle(engine, runner)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Requests with the step at which each arrives and, for some, the step at which it is cancelled."""
    entries = []
    for index in range(draw(st.integers(1, 10))):
        shared = prompt_of(draw(st.integers(0, 420)), salt=draw(st.integers(0, 1)))
        own = draw(st.lists(st.integers(0, 49), min_size=1, max_size=20))
        request = ask(
            f"r{index}",
            shared + own,
            max_tokens=draw(st.integers(0, 260)),
            num_prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
            profile=draw(st.sampled_from(["exact", "sampled", "offloaded", "offloaded", "reusing", "reusing-down"])),
        )
        entries.append((request, draw(st.integers(0, 200)), draw(st.none() | st.integers(0, 300))))
    return entries


@pytest.fixture(scope="module")
def soon() -> Iterator[None]:
    """What was evicted is reloaded after a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evictions, "QUIET_STEPS", 2)
        patch.setattr(evictions, "RELOADED_TOKENS", 2 * OFFLOAD_BLOCK)
        yield


@pytest.mark.usefixtures("soon")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    num_pages=st.integers(55, 90),
    is_adaptive=st.booleans(),
    dense_layers=st.sampled_from([0, 1, 2, 4, 5]),
    limit_blocks=st.integers(90, 160),
    max_running=st.integers(1, 6),
    num_rings=st.integers(1, 3),
    num_windows=st.integers(0, 8),
    chunk_tokens=st.sampled_from([48, 256]),
    is_pipelined=st.booleans(),
    prefix_cache=st.booleans(),
    num_late=st.integers(0, 3),
    order=st.none() | st.integers(0, 2**32 - 1).map(Random),  # what is drawn of it follows from times as well
)
def test_no_request_is_lost_or_mixed_up_and_no_context_leaks(
    workload: Workload,
    num_pages: int,
    is_adaptive: bool,
    dense_layers: int,
    limit_blocks: int,
    max_running: int,
    num_rings: int,
    num_windows: int,
    chunk_tokens: int,
    is_pipelined: bool,
    prefix_cache: bool,
    num_late: int,
    order: Random | None,
) -> None:
    """Whatever arrives, is cancelled or preempted, in one lane or two that run side by side: every other request gets
    the text of its lone run.
    """
    engine, runner = make_engine(
        num_pages=num_pages,
        is_adaptive=is_adaptive,
        dense_layers=dense_layers,
        limit_blocks=limit_blocks,
        max_running=max_running,
        num_rings=num_rings,
        num_windows=num_windows,
        chunk_tokens=chunk_tokens,
        is_pipelined=is_pipelined or order is not None,
        prefix_cache=prefix_cache,
        order=order,
    )
    runner.num_late = num_late
    contexts = engine.scheduler.residence.contexts
    assert contexts is not None

    def check_limit() -> None:
        assert contexts.used_bytes <= contexts.limit_bytes

    follow(engine, workload, 200, check_limit)
    check_idle(engine, runner)
