"""Drafts in the scheduler: texts are what they are without them, wherever sequences end, are preempted or cancelled."""

from dataclasses import replace
from random import Random

import msgspec
import pytest

from bench.engine_patches import switch_drafts
from gpu.operations.recurrent.state_arrays import MOST_STEP_ROWS
from gpu.step import StepPlan
from scheduler.messages import ACCEPTED, REJECTED, Delta, EngineRequest
from tests.scheduler import engines
from tests.scheduler.drafting import DRAFTING, foresee
from tests.scheduler.engines import PAGE, check_empty, check_output, drain, make_engine, make_request, prompt_of
from tests.scheduler.page_runner import Done, PageRunner, expected_output


@pytest.fixture(autouse=True)
def _drafting_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.PROFILES, "drafting", DRAFTING)


def request_of(
    name: str, length: int = 20, max_tokens: int = 60, profile: str = "drafting", **more: object
) -> EngineRequest:
    return make_request(name, prompt_of(length, int(name)), max_tokens, profile=profile, **more)  # type: ignore[arg-type]


def outputs_of(requests: list[EngineRequest]) -> dict[str, list[int]]:
    return {
        one.request_id: expected_output(
            one.prompt_token_ids, one.max_tokens, one.stop_token_ids, one.attention_profile, one.min_tokens
        )
        for one in requests
    }


def decode_steps(runner: PageRunner) -> int:
    return sum(bool(plan.decode) for plan in runner.plans)


def drafts_of(runner: PageRunner) -> list[tuple[int, ...]]:
    return [draft for plan in runner.plans for group in plan.decode for draft in group.drafts or () if draft]


def check_all(requests: list[EngineRequest], deltas: dict[str, list[Delta]]) -> None:
    for request in requests:
        check_output(request, deltas[request.request_id])


@pytest.mark.parametrize("is_pipelined", [True, False])
@pytest.mark.parametrize("spoilt", [0.0, 0.3, 1.0])
def test_the_text_is_the_same_and_takes_fewer_steps_where_drafts_are_right(is_pipelined: bool, spoilt: float) -> None:
    steps = {}
    for is_on in (False, True):
        engine, runner = make_engine(is_pipelined=is_pipelined, max_running=16)
        requests = [request_of("1"), request_of("2", 33, 45)]
        sources = foresee(engine, outputs_of(requests), spoilt)
        switch_drafts(engine.scheduler.drafts, is_on)
        engine.submit(requests)
        deltas = drain(engine)
        check_all(requests, deltas)
        check_empty(engine)
        steps[is_on] = decode_steps(runner)
        assert bool(drafts_of(runner)) is is_on
        assert all(source.is_forgotten for source in sources)
        stats = engine.stats().drafts
        assert stats.proposed == sum(map(len, drafts_of(runner)))
        figures = [one[-1].figures for one in deltas.values()]
        assert sum(one.get(ACCEPTED, 0) for one in figures) == stats.accepted
        assert sum(one.get(ACCEPTED, 0) + one.get(REJECTED, 0) for one in figures) == stats.proposed
        assert (stats.accepted > 0) == (is_on and spoilt < 1.0)
    assert (steps[True] < 0.7 * steps[False]) if spoilt == 0.0 else steps[True] > 0


def test_a_stop_token_ends_a_text_and_is_not_drafted() -> None:
    engine, runner = make_engine(max_running=32)
    requests = [msgspec.structs.replace(request_of(str(n), 10 + n), stop_token_ids=(7, 11)) for n in range(12)]
    foresee(engine, outputs_of(requests), 0.0)
    engine.submit(requests)
    check_all(requests, drain(engine))
    assert drafts_of(runner)
    assert not {7, 11} & {token for draft in drafts_of(runner) for token in draft}


def test_who_draws_from_a_mask_drafts_as_others_do() -> None:
    """`min_tokens` bars the ends of a text, so its draws have masks until it has so many."""
    engine, runner = make_engine(max_running=16)
    least = 30
    held = msgspec.structs.replace(request_of("1", 20, 60), stop_token_ids=(7,), min_tokens=least)
    barred = msgspec.structs.replace(request_of("3", 25, 60), bad_token_ids=((51,),))
    requests = [held, request_of("2", 22, 60), barred]
    foresee(engine, outputs_of(requests), 0.2)
    engine.submit(requests)
    check_all(requests, drain(engine))
    drafted: dict[bool, set[int]] = {False: set(), True: set()}
    for plan in runner.plans:
        for group in plan.decode:
            for slot, draft in zip(group.slots, group.drafts or (), strict=False):
                if draft:
                    drafted[slot in plan.masked_slots].add(slot)
    assert len(drafted[True]) == 2
    assert len(drafted[False]) == 2, "one is barred for ever, and one no longer once it has its tokens"


def test_nothing_steps_in_a_lane_while_a_draft_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the next token stands is not known, and rows of others would read the weights once more."""
    engine, runner = make_engine(max_running=16)
    requests = [request_of("1"), request_of("2", profile="exact")]
    foresee(engine, outputs_of(requests), 0.2)
    launch, num_drafted = runner.launch, 0

    def watched(plan: StepPlan) -> Done:
        nonlocal num_drafted
        for group in plan.decode:
            drafts = dict(zip(group.slots, group.drafts or [()] * len(group.slots), strict=True))
            for one in engine.scheduler.roster.running:
                assert one.num_drafted == len(drafts.get(one.slot, ())), "of another step"
                num_drafted += one.num_drafted
        return launch(plan)

    monkeypatch.setattr(runner, "launch", watched)
    engine.submit(requests)
    check_all(requests, drain(engine))
    assert num_drafted > 30


@pytest.mark.parametrize("kept", [{}, {"num_windows": 10}, {"num_states": 10}, {"num_states": 3, "num_host_states": 4}])
@pytest.mark.parametrize("is_pipelined", [True, False])
def test_texts_are_right_whoever_is_preempted_or_cancelled(is_pipelined: bool, kept: dict[str, int]) -> None:
    """Few pages, so that sequences are preempted with drafts in flight; prompts share their fronts, and windows or
    states are left that others begin with.
    """
    draw, told = Random(len(kept)), dict[str, list[Delta]]()
    engine, _ = make_engine(
        num_pages=30, max_running=8, is_pipelined=is_pipelined, chunk_tokens=32, snapshot_tokens=32, **kept
    )
    requests = []
    for number in range(60):
        front = prompt_of(16 * draw.randint(0, 5), draw.randint(0, 2))
        prompt = front + prompt_of(draw.randint(1, 30), number)
        profile = draw.choice(["drafting", "drafting", "exact"])
        requests.append(make_request(str(number), prompt, draw.randint(1, 70), [draw.randint(0, 49)], profile))
    foresee(engine, outputs_of(requests), 0.15)
    cancelled = set(draw.sample(range(60), 12))
    waiting = list(requests)
    for step in range(6000):
        if waiting and step % 3 == 0:
            engine.submit([waiting.pop(0)])
        if not waiting and not engine.has_work:
            break
        for delta in engine.step():
            told.setdefault(delta.request_id, []).append(delta)
        if step % 7 == 0 and cancelled:
            name = draw.choice(sorted(cancelled))
            if str(name) in engine.scheduler.roster._unfinished:
                engine.cancel([str(name)])
                cancelled.discard(name)
                requests = [one for one in requests if one.request_id != str(name)]
        if step % 11 == 10 and engine.scheduler.roster.running:
            engine.scheduler.roster.preempt_last([draw.choice(engine.scheduler.roster.running)])
    check_all(requests, told)
    check_empty(engine)
    assert engine.stats().drafts.accepted > 200
    assert engine.scheduler.roster.num_preemptions > 10
    assert not engine.scheduler.drafts._drafters


def test_pages_of_what_is_refused_serve_the_tokens_that_come() -> None:
    engine, runner = make_engine(max_running=16)
    requests = [request_of("1", 20, 90)]
    foresee(engine, outputs_of(requests), 1.0)
    engine.submit(requests)
    most = 0
    while engine.has_work:
        engine.step()
        for one in engine.scheduler.roster.running:
            most = max(most, len(one.pages) * PAGE - one.num_tokens)
    assert len([write for plan in runner.plans for write in plan.page_writes]) == len(
        {write.first_page for plan in runner.plans for write in plan.page_writes}
    )
    assert most <= 2 * PAGE


def test_no_draft_is_worth_a_page_that_others_need() -> None:
    """Each running sequence is left a page of its own; a draft takes what is free beyond, and preempts nobody."""
    engine, runner = make_engine(num_pages=8, max_running=16, prefix_cache=False)
    requests = [request_of(str(number), 14, 16) for number in range(4)]
    foresee(engine, outputs_of(requests), 0.0)
    engine.submit(requests)
    check_all(requests, drain(engine))
    assert engine.scheduler.roster.num_preemptions == 0
    assert runner.plans


@pytest.mark.parametrize("length", range(110, 126))
def test_what_a_refused_draft_wrote_to_a_window_is_in_nobodys_way(length: int) -> None:
    """A prompt begins with a window where all that a layer sees is left, behind what was written and not drawn."""
    engine, _ = make_engine(num_windows=6, num_pages=200, max_running=16)
    whole_text = request_of("1", length, 60)
    outputs = outputs_of([whole_text])
    first = msgspec.structs.replace(whole_text, stop_token_ids=outputs["1"][30:31])
    foresee(engine, outputs, 1.0)
    engine.submit([first])
    drain(engine)
    whole, begun = first.prompt_token_ids + outputs_of([first])["1"], []
    for end in range(len(whole) // PAGE * PAGE, 0, -PAGE):
        other = make_request(f"2{end}", [*whole[:end], 49, 48, 47], 4, profile="other")
        other = msgspec.structs.replace(other, attention_profile="drafting")
        foresee(engine, outputs | outputs_of([other]), 0.5)
        engine.submit([other])
        deltas = drain(engine)[other.request_id]
        check_output(other, deltas)
        begun.append(deltas[0].num_cached_tokens)
    assert max(begun) > 0
    check_empty(engine)


@pytest.mark.parametrize("is_pipelined", [True, False])
@pytest.mark.parametrize("spoilt", [0.0, 0.3, 1.0])
def test_one_that_is_preempted_with_a_draft_goes_on_behind_what_is_drawn_of_it(
    is_pipelined: bool, spoilt: float
) -> None:
    """Its state is behind as many tokens as the result says, and nothing is computed again."""
    engine, runner = make_engine(num_pages=200, max_running=24, is_pipelined=is_pipelined, num_states=8)
    requests = [request_of(str(number), 5 + 30 * number, 120) for number in range(3)]
    foresee(engine, outputs_of(requests), spoilt)
    engine.submit(requests)
    told, caught = dict[str, list[Delta]](), 0
    for step in range(6000):
        for delta in engine.step() if engine.has_work else ():
            told.setdefault(delta.request_id, []).append(delta)
        running = engine.scheduler.roster.running
        if step % 3 == 2 and running:
            victim = running[step % len(running)]
            caught += victim.num_drafted > 0
            engine.scheduler.roster.preempt_last([victim])
    check_all(requests, told)
    check_empty(engine)
    assert caught > 5 or not is_pipelined
    assert engine.stats().recomputed_tokens == 0
    prompts = [prompt for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]
    assert all(prompt.num_computed_tokens == 1 for prompt in prompts if prompt.samples)
    assert len({prompt.begin % PAGE for prompt in prompts}) > 5


@pytest.mark.parametrize("spoilt", [0.0, 0.4])
def test_states_are_copied_where_they_are_due_whatever_is_drafted(spoilt: float) -> None:
    engine, runner = make_engine(num_pages=200, max_running=16, num_states=20, snapshot_tokens=64)
    request = request_of("1", 40, 400)
    foresee(engine, outputs_of([request]), spoilt)
    engine.submit([request])
    check_all([request], drain(engine))
    assert drafts_of(runner)
    assert max(map(len, drafts_of(runner))) == MOST_STEP_ROWS - 1
    kept = engine.scheduler.residence.windows
    whole = [*request.prompt_token_ids, *outputs_of([request])["1"], 1, 2]
    assert kept.num_kept >= 400 // 64
    other = make_request("2", [*whole[:300], 1, 2, 3], 4, profile="drafting")
    foresee(engine, outputs_of([other]), 0.0)
    engine.submit([other])
    deltas = drain(engine)["2"]
    check_output(other, deltas)
    assert deltas[0].num_cached_tokens >= 300 - 64 - PAGE


def test_a_draft_that_a_state_keeps_is_seen() -> None:
    """Power: a state that has taken in what was refused."""
    engine, runner = make_engine(max_running=16, num_states=4)
    requests = [request_of("1")]
    foresee(engine, outputs_of(requests), 1.0)
    assert runner.windows is not None
    runner.windows.settle = lambda slot, num_cells: None  # type: ignore[method-assign]
    engine.submit(requests)
    with pytest.raises(AssertionError, match="a state is"):
        drain(engine)


def test_prefill_beside_a_draft_in_flight_is_part_of_the_gap_between_tokens() -> None:
    """A step whose rows wait for a draft has units alone, which those that follow have less time for."""
    runner = PageRunner(engines.SHAPE.num_layers, PAGE, unit_seconds=20e-6, decode_seconds=20e-3)
    engine, _ = make_engine(
        num_pages=1200, chunk_tokens=1024, max_hidden_tokens=20_000, token_gap_target_ms=50.0, runner=runner,
        max_running=16,
    )  # fmt: skip
    requests = [request_of("1", 20, 400), request_of("2", 9000, 1)]
    foresee(engine, outputs_of(requests), 0.0)
    engine.submit(requests[:1])
    for _ in range(10):
        engine.step()
    engine.submit(requests[1:])
    num_before = len(runner.plans)
    while engine.scheduler.roster.num_unfinished == 2:
        engine.step()
    gaps, units_s = [], 0.0
    for plan in runner.plans[num_before:]:
        units_s += sum(runner._seconds(unit) for unit in plan.units)
        if plan.decode:
            gaps.append(units_s + runner.decode_seconds)
            units_s = 0.0
    assert any(plan.units and not plan.decode for plan in runner.plans[num_before:])
    assert max(gaps) <= 0.056, "of 50 ms, and what a unit takes more than was known"


def test_a_draft_of_one_that_had_failed_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device learns of a failure before the scheduler does, and computes nothing of what was planned meanwhile."""
    engine, runner = make_engine(max_running=16)
    requests = [request_of("1")]
    foresee(engine, outputs_of(requests), 0.0)
    launch, failed = runner.launch, set[int]()

    def failing(plan: StepPlan) -> Done:
        done = launch(plan)
        drafts = {
            slot for group in plan.decode for slot, one in zip(group.slots, group.drafts or (), strict=False) if one
        }
        if drafts and not failed:
            failed.add(plan.decode[0].slots[0])
            assert done.result is not None
            done.result = replace(done.result, tokens=[], failures=dict.fromkeys(failed, "lost"))
        return done

    monkeypatch.setattr(runner, "launch", failing)
    engine.submit(requests)
    (delta,) = [one for one in drain(engine)["1"] if one.finish_reason]
    stats = engine.stats().drafts
    assert failed
    assert delta.error == "lost"
    assert (stats.steps, stats.proposed, stats.accepted) == (0, 0, 0)
    check_empty(engine)


def test_a_draft_that_may_be_refused_counts_for_nothing_that_is_computed_again() -> None:
    engine, _ = make_engine(max_running=16)
    requests = [request_of("1")]
    foresee(engine, outputs_of(requests), 0.0)
    engine.submit(requests)
    roster = engine.scheduler.roster
    while not (roster.running and roster.running[0].num_drafted):
        engine.step()
    victim = roster.preempt_last(list(roster.running))
    assert victim.num_drafted
    assert victim.num_computed_tokens == victim.num_tokens, "the last one is being computed"
    engine.cancel(["1"])
    drain(engine)
    check_empty(engine)
