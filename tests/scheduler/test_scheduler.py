"""The scheduler against a runner that keeps tokens in pages: texts must come out as if each request ran alone."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.engine.engine import Engine
from scheduler.messages import Delta, EngineRequest
from scheduler.sequences.capacity import QueueFullError, TooLargeError
from tests.scheduler.engines import (
    PAGE,
    PROFILES,
    SHAPE,
    Workload,
    answer,
    check_empty,
    check_output,
    drain,
    follow,
    make_engine,
    make_request,
    prompt_of,
    text,
)
from tests.scheduler.page_runner import PageRunner, expected_output


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Requests with the step at which each arrives and, for some, the step at which it is cancelled."""
    entries = []
    for index in range(draw(st.integers(1, 14))):
        shared = prompt_of(draw(st.integers(0, 100)), salt=draw(st.integers(0, 1)))
        own = draw(st.lists(st.integers(0, 49), min_size=1, max_size=20))
        request = make_request(
            f"r{index}",
            shared + own,
            max_tokens=draw(st.integers(0, 40)),
            num_prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            stop=draw(st.lists(st.integers(0, 49), max_size=3)),
            profile=draw(st.sampled_from(sorted(PROFILES))),
            min_tokens=draw(st.integers(0, 12)),
        )
        entries.append((request, draw(st.integers(0, 60)), draw(st.none() | st.integers(0, 150))))
    return entries


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    num_pages=st.integers(11, 40),
    max_running=st.integers(1, 6),
    chunk_tokens=st.sampled_from([16, 48, 256]),
    max_jobs=st.integers(1, 3),
    is_pipelined=st.booleans(),
    prefix_cache=st.booleans(),
    num_windows=st.integers(0, 8),
)
def test_no_request_is_lost_or_mixed_up(
    workload: Workload,
    num_pages: int,
    max_running: int,
    chunk_tokens: int,
    max_jobs: int,
    is_pipelined: bool,
    prefix_cache: bool,
    num_windows: int,
) -> None:
    """Whatever arrives, is cancelled or preempted: every other request gets the text of its lone run."""
    engine, _ = make_engine(
        num_pages=num_pages,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        max_jobs=max_jobs,
        is_pipelined=is_pipelined,
        prefix_cache=prefix_cache,
        max_hidden_tokens=200,
        num_windows=num_windows,
    )
    follow(engine, workload, 60)
    check_empty(engine)


def test_the_page_runner_notices_a_page_given_away_twice() -> None:
    """Power of the tests above: one wrong free and the text changes or an assertion trips."""
    engine, _ = make_engine(num_pages=12, max_running=4, prefix_cache=False)
    first = make_request("a", prompt_of(40), max_tokens=60)
    engine.submit([first])
    for _ in range(12):
        engine.step()
    stolen = engine.scheduler.roster.running[0].pages[0]
    engine.scheduler.pages._blank.appendleft(stolen)
    engine.submit([make_request("b", prompt_of(20, salt=3), max_tokens=30)])
    with pytest.raises(AssertionError):
        check_output(first, drain(engine)["a"])


@pytest.mark.parametrize("num_windows", [0, 8])
def test_preempted_requests_finish_with_their_own_text(num_windows: int) -> None:
    engine, _ = make_engine(num_pages=14, max_running=4, num_windows=num_windows)
    requests = [make_request(f"r{i}", prompt_of(30, salt=i), max_tokens=90) for i in range(4)]
    engine.submit(requests)
    deltas = drain(engine)
    assert engine.stats().preemptions > 0
    for request in requests:
        check_output(request, deltas[request.request_id])
    check_empty(engine)


def test_a_shared_prefix_is_computed_once() -> None:
    engine, runner = make_engine(num_pages=200)
    shared = prompt_of(160)
    requests = [make_request(f"r{i}", shared + prompt_of(9, salt=i + 1)) for i in range(6)]
    deltas = answer(engine, requests)
    prefilled = sum(job.num_tokens for plan in runner.plans for job in plan.new_jobs)
    assert prefilled == 169 + 5 * 9
    assert [deltas[f"r{i}"][0].num_cached_tokens for i in range(6)] == [0] + [160] * 5
    assert engine.stats().prefix_hits_tokens == 5 * 160


def test_profiles_do_not_share_what_they_computed() -> None:
    engine, _ = make_engine()
    shared = prompt_of(64)
    engine.submit([make_request("a", shared), make_request("b", shared, profile="other")])
    deltas = drain(engine)
    assert deltas["b"][0].num_cached_tokens == 0


def test_the_next_turn_of_a_conversation_finds_its_answer_cached() -> None:
    engine, _ = make_engine()
    first = make_request("a", prompt_of(30), max_tokens=20)
    engine.submit([first])
    answer = text(drain(engine)["a"])
    engine.submit([make_request("b", first.prompt_token_ids + answer + prompt_of(5, salt=2))])
    assert drain(engine)["b"][0].num_cached_tokens == 48  # of 49 tokens whose keys were computed: three full pages


def test_cancellation_frees_pages_within_one_step() -> None:
    engine, _ = make_engine(num_pages=40)
    engine.submit([make_request("long", prompt_of(400), max_tokens=50), make_request("short", prompt_of(20, salt=1))])
    engine.step()
    assert engine.stats().pages_used > 0
    engine.cancel(["long", "short", "unknown"])
    assert engine.stats().pages_used == 0
    assert drain(engine) == {}
    check_empty(engine)


def test_a_full_queue_refuses_all_of_a_submission() -> None:
    engine, _ = make_engine(max_running=1, max_queue=2)
    engine.submit([make_request("a", prompt_of(5))])
    engine.step()
    engine.submit([make_request("b", prompt_of(5)), make_request("c", prompt_of(5))])
    with pytest.raises(QueueFullError, match=r"2 requests wait, asked 1 more, room for 2"):
        engine.submit([make_request("d", prompt_of(5))])
    assert set(drain(engine)) == {"a", "b", "c"}


def test_a_request_that_can_never_fit_is_refused_by_name() -> None:
    engine, _ = make_engine(num_pages=4)
    with pytest.raises(TooLargeError, match=r"60 \+ 8 = 68 tokens, KV pages hold 64; shorten .* gpu.kv_cache_gib"):
        engine.submit([make_request("a", prompt_of(60))])
    assert not engine.has_work


@pytest.mark.parametrize("num_pages", [64, 10])
def test_a_stop_token_is_not_drawn_before_min_tokens_and_ends_the_output_then(num_pages: int) -> None:
    """Also across preemption: ten pages are too few for both."""
    prompt, other = prompt_of(60), prompt_of(61, salt=1)
    stop = expected_output(prompt, 40, [], "exact", 0)[::6]
    engine, _ = make_engine(num_pages=num_pages)
    request = make_request("a", prompt, max_tokens=60, stop=stop, min_tokens=25)
    engine.submit([make_request("b", other, max_tokens=60), request])
    deltas = drain(engine)["a"]
    check_output(request, deltas)
    assert not set(text(deltas)[:24]) & set(stop)
    assert len(text(deltas)) >= 25
    assert (engine.stats().preemptions > 0) == (num_pages == 10)


def check_broken(engine: Engine, request: EngineRequest, deltas: list[Delta]) -> None:
    """It ended with an error, and a request with the same prompt is computed anew, and right."""
    assert deltas[-1].finish_reason == "error"
    assert "not finite" in deltas[-1].error
    again = make_request("again", request.prompt_token_ids)
    engine.submit([again])
    deltas = drain(engine)["again"]
    assert deltas[0].num_cached_tokens == 0
    check_output(again, deltas)
    check_empty(engine)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_what_gave_no_finite_logits_is_found_by_nobody(is_pipelined: bool) -> None:
    engine, runner = make_engine(is_pipelined=is_pipelined)
    request = make_request("a", prompt_of(70), max_tokens=30)
    engine.submit([request])
    deltas = [delta for _ in range(6) for delta in engine.step()]
    assert deltas
    runner.broken.add(engine.scheduler.roster.running[0].slot)
    deltas += drain(engine)["a"]
    runner.broken.clear()
    check_broken(engine, request, deltas)


def test_what_gave_no_finite_logits_is_found_by_nobody_though_it_was_preempted_meanwhile() -> None:
    engine, runner = make_engine(num_pages=40)
    request = make_request("a", prompt_of(70), max_tokens=30)
    engine.submit([request])
    deltas = [delta for _ in range(6) for delta in engine.step()]
    runner.broken.add(engine.scheduler.roster.running[0].slot)
    engine.step()
    engine.scheduler.roster.preempt_last(engine.scheduler.roster.running)
    assert engine.stats().num_waiting == 1
    deltas += drain(engine)["a"]
    runner.broken.clear()
    check_broken(engine, request, deltas)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_draw_from_which_nothing_is_left_ends_its_request_and_leaves_what_others_find(is_pipelined: bool) -> None:
    """What the request's own options did to its scores says nothing about its keys and values."""
    engine, runner = make_engine(is_pipelined=is_pipelined, num_pages=100)
    shared = prompt_of(160)
    other = make_request("other", shared + prompt_of(9, salt=1), max_tokens=40)
    engine.submit([other, make_request("a", shared + prompt_of(9, salt=2), max_tokens=30)])
    deltas = {"a": [], "other": []}
    while not any(sequence.request_id == "a" for sequence in engine.scheduler.roster.running):
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    runner.exhausted = {one.slot for one in engine.scheduler.roster.running if one.request_id == "a"}
    for name, more in drain(engine).items():
        deltas[name] += more
    assert deltas["a"][-1].finish_reason == "error"
    assert "no token has a finite score" in deltas["a"][-1].error
    check_output(other, deltas["other"])
    runner.exhausted.clear()
    again = make_request("again", shared + prompt_of(9, salt=3))
    engine.submit([again])
    deltas = drain(engine)["again"]
    assert deltas[0].num_cached_tokens == 160
    check_output(again, deltas)
    check_empty(engine)


def test_a_prefill_waits_for_hidden_states_and_short_prompts_pass_it() -> None:
    engine, runner = make_engine(num_pages=400, max_hidden_tokens=1000, chunk_tokens=64)
    long = [make_request(f"long{i}", prompt_of(900, salt=i), max_tokens=2) for i in range(2)]
    short = make_request("short", prompt_of(20, salt=9), max_tokens=2)
    engine.submit([*long, short])
    order = list(drain(engine))
    assert order == ["short", "long0", "long1"]
    for plan in runner.plans:
        assert sum(job.num_tokens for job in plan.new_jobs) <= 1000


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_short_prompt_during_a_long_prefill_waits_for_two_units_at_most(is_pipelined: bool) -> None:
    engine, runner = make_engine(num_pages=1100, chunk_tokens=512, max_hidden_tokens=20_000, is_pipelined=is_pipelined)
    engine.submit([make_request("long", prompt_of(9000), max_tokens=4)])
    for _ in range(7):
        engine.step()
    engine.submit([make_request("short", prompt_of(500, salt=1), max_tokens=4)])
    short_job = 1
    before = len(runner.plans)
    deltas: list[Delta] = []
    while not any(delta.request_id == "short" for delta in deltas):
        deltas = engine.step()
    units = [unit for plan in runner.plans[before:] for unit in plan.units]
    last = max(i for i, unit in enumerate(units) if unit.job_id == short_job)
    others = [unit for unit in units[: last + 1] if unit.job_id != short_job]
    assert len(others) <= 1  # and one more was under way when it came
    drain(engine)


def gaps_of_a_stream(target_ms: float, decode_seconds: float, chunk_tokens: int = 4096) -> list[float]:
    """Simulated seconds between a stream's tokens while 9,000 tokens are prefilled, 20 us a token-layer."""
    runner = PageRunner(SHAPE.num_layers, PAGE, unit_seconds=20e-6, decode_seconds=decode_seconds)
    engine, _ = make_engine(
        num_pages=1200, chunk_tokens=chunk_tokens, max_hidden_tokens=20_000, token_gap_target_ms=target_ms,
        runner=runner, is_pipelined=False,
    )  # fmt: skip
    engine.submit([make_request("stream", prompt_of(20), max_tokens=1000)])
    for _ in range(20):
        engine.step()
    engine.submit([make_request("long", prompt_of(9000, salt=1), max_tokens=1)])
    last, gaps = runner.clock, []
    while True:
        deltas = engine.step()
        if any(delta.request_id == "stream" for delta in deltas):
            gaps.append(runner.clock - last)
            last = runner.clock
        if any(delta.request_id == "long" for delta in deltas):
            return gaps


@pytest.mark.parametrize(
    ("decode_seconds", "chunk_tokens", "least"),
    [(5e-3, 4096, 0.02), (20e-3, 4096, 0.04), (20e-3, 256, 0.04)],  # a share of 0.8 would be 100 ms a gap of 20 ms
)
def test_a_long_prefill_keeps_the_gap_between_tokens_near_its_target(
    decode_seconds: float, chunk_tokens: int, least: float
) -> None:
    gaps = gaps_of_a_stream(target_ms=50.0, decode_seconds=decode_seconds, chunk_tokens=chunk_tokens)
    assert max(gaps) <= 0.055
    assert sum(gaps) / len(gaps) >= least, "it uses the time that it may take"


def test_prefill_goes_on_where_decode_alone_takes_longer_than_the_target() -> None:
    """With a tenth of the target's time: 5 ms a gap."""
    gaps = gaps_of_a_stream(target_ms=50.0, decode_seconds=60e-3)
    assert max(gaps) <= 0.066
    assert sum(gap - 0.06 for gap in gaps) / len(gaps) >= 0.0025


def seconds_of_a_long_prefill(num_streams: int) -> float:
    """Simulated time from the arrival of a 9,000-token prompt to its first token, while streams run."""
    runner = PageRunner(SHAPE.num_layers, PAGE, unit_seconds=2e-6, decode_seconds=5e-3)
    engine, _ = make_engine(num_pages=1200, chunk_tokens=512, max_hidden_tokens=20_000, runner=runner)
    engine.submit([make_request("first", prompt_of(2000, salt=5), max_tokens=1)])
    drain(engine)
    engine.submit([make_request(f"s{i}", prompt_of(20, salt=i + 2), max_tokens=500) for i in range(num_streams)])
    for _ in range(20):
        engine.step()
    began = runner.clock
    engine.submit([make_request("long", prompt_of(9000, salt=1), max_tokens=1)])
    while not any(delta.request_id == "long" for delta in engine.step()):
        pass
    return runner.clock - began


def test_prefill_gets_its_share_of_the_time_while_streams_run() -> None:
    """Share 0.8: a quarter longer than alone, and some rounding to whole units."""
    assert seconds_of_a_long_prefill(3) <= 1.45 * seconds_of_a_long_prefill(0)


def test_progress_grows_to_the_whole_prompt() -> None:
    engine, _ = make_engine(num_pages=200, chunk_tokens=64)
    engine.submit([make_request("a", prompt_of(1000), max_tokens=1)])
    seen = []
    while engine.has_work:
        engine.step()
        seen += [report.done_tokens for report in engine.scheduler.progress()]
    assert seen == sorted(seen)
    assert len(set(seen)) > 20
    assert 900 < seen[-1] <= 1000


def test_progress_counts_what_was_cached_as_done() -> None:
    engine, _ = make_engine(num_pages=200, chunk_tokens=64)
    engine.submit([make_request("a", prompt_of(640), max_tokens=1)])
    drain(engine)
    engine.submit([make_request("b", prompt_of(1280), max_tokens=1)])
    seen = []
    while engine.has_work:
        engine.step()
        seen += engine.scheduler.progress()
    assert {(report.cached_tokens, report.total_tokens) for report in seen} == {(640, 1280)}
    assert min(report.done_tokens for report in seen) >= 640
    assert max(report.done_tokens for report in seen) > 1200


def test_the_first_delta_alone_tells_the_time_in_the_queue_and_of_the_prefill() -> None:
    engine, _ = make_engine()
    began = time.monotonic()
    engine.submit([make_request("a", prompt_of(20))])
    deltas = drain(engine)["a"]
    first = deltas[0]
    assert first.queue_seconds is not None
    assert first.prefill_seconds is not None
    assert min(first.queue_seconds, first.prefill_seconds) >= 0
    assert first.queue_seconds + first.prefill_seconds <= time.monotonic() - began
    assert {(delta.queue_seconds, delta.prefill_seconds) for delta in deltas[1:]} == {(None, None)}


def test_steps_are_counted_as_they_are_launched() -> None:
    engine, runner = make_engine()
    engine.submit([make_request("a", prompt_of(100))])
    drain(engine)
    engine.step()
    assert engine.stats().steps == len(runner.plans)


def test_a_block_is_found_only_once_its_last_token_has_been_fed() -> None:
    engine, _ = make_engine(is_pipelined=False)
    first = make_request("a", prompt_of(30), max_tokens=20)
    engine.submit([first])
    drawn: list[int] = []
    while len(drawn) < 2:
        drawn += text(engine.step())
    engine.submit([make_request("b", [*first.prompt_token_ids, *drawn, *prompt_of(5)])])
    assert drain(engine)["b"][0].num_cached_tokens == 16


@pytest.mark.parametrize("favour", ["auto", "latency"])
def test_auto_computes_a_short_prompt_between_two_tokens_of_a_stream_and_latency_shares_the_time(favour: str) -> None:
    runner = PageRunner(SHAPE.num_layers, PAGE, unit_seconds=20e-6, decode_seconds=5e-3)
    engine, _ = make_engine(num_pages=1200, chunk_tokens=256, token_gap_target_ms=100.0, runner=runner, favour=favour)
    engine.submit([make_request("stream", prompt_of(600), max_tokens=1000)])
    for _ in range(40):
        engine.step()
    seconds = 20e-6 * SHAPE.num_layers * 600
    assert 0.02 < seconds < 0.095, "more than the share leaves, and less than the target does"
    engine.submit([make_request("short", prompt_of(600, salt=1), max_tokens=1)])
    deltas = [delta for _ in range(40) for delta in engine.step()]
    told = [delta.request_id for delta in deltas]
    # Two steps were in flight when it came, and the last of its units come with a decode step.
    assert (told.index("short") <= 3) is (favour == "auto")
