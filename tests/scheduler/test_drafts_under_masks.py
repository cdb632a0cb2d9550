"""Drafts of requests whose draws are held to something: each row has the mask that its draw would have alone."""

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from msgspec import structs

from gpu.step import TO_DRAFT, StepPlan
from scheduler.constraints import constraints
from scheduler.constraints.constraints import Constraints
from scheduler.engine.engine import Engine
from scheduler.messages import Delta, EngineRequest
from tests.scheduler import engines
from tests.scheduler.drafting import DRAFTING, foresee
from tests.scheduler.engines import SHAPE, check_empty, drain, make_engine, prompt_of, text
from tests.scheduler.page_runner import PageRunner
from tests.scheduler.test_constraints import (
    END,
    EVERYTHING,
    KINDS,
    WORDS,
    bits_of,
    check,
    expected,
    held,
    letters,
    with_letters,
)

PLAIN = sorted(set(KINDS) - {"free"})


@pytest.fixture(autouse=True)
def _drafting_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.PROFILES, "drafting", DRAFTING)


def make(kinds: list[str], spoilt: float, jumps: bool = False, **more: object) -> tuple[Engine, PageRunner, list]:
    """Return an engine whose drafts are the texts of these requests, spoilt."""
    made, runner = make_engine(max_running=64, **more)  # type: ignore[arg-type]
    engine = with_letters(made)
    engine.scheduler.jumps.is_on = jumps
    requests = [held(f"{number}", kind, prompt_of(20 + number, number), 40, "drafting")
                for number, kind in enumerate(kinds)]  # fmt: skip
    foresee(engine, {one.request_id: expected(one, kind)[0] for one, kind in zip(requests, kinds, strict=True)}, spoilt)
    return engine, runner, requests


def check_all(requests: list[EngineRequest], kinds: list[str], deltas: dict[str, list[Delta]]) -> None:
    """Texts are those of steps of one token, and a message may have several of them."""
    for request, kind in zip(requests, kinds, strict=True):
        check(request, kind, deltas[request.request_id])


def drafted_slots(plan: StepPlan) -> set[int]:
    return {
        slot for group in plan.decode for slot, draft in zip(group.slots, group.drafts or (), strict=False) if draft
    }


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("spoilt", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("is_pipelined", [True, False])
def test_held_requests_draft_and_their_texts_are_those_without(kind: str, spoilt: float, is_pipelined: bool) -> None:
    kinds = [kind] * 16
    engine, runner, requests = make(kinds, spoilt, is_pipelined=is_pipelined)
    engine.submit(requests)
    check_all(requests, kinds, drain(engine))
    check_empty(engine)
    stats = engine.stats().drafts
    assert any(drafted_slots(plan) & set(plan.masked_slots) for plan in runner.plans)
    assert stats.proposed > 8
    assert (stats.accepted > 4) is (spoilt < 1.0)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6),
    spoilt=st.sampled_from([0.0, 0.2, 0.6]),
    jumps=st.booleans(),
    is_pipelined=st.booleans(),
    num_pages=st.sampled_from([12, 18, 60]),
    seed=st.integers(0, 1000),
)
def test_texts_are_the_same_whoever_runs_beside_is_preempted_or_cancelled(
    kinds: list[str], spoilt: float, jumps: bool, is_pipelined: bool, num_pages: int, seed: int
) -> None:
    engine, _, requests = make(kinds, spoilt, jumps, is_pipelined=is_pipelined, num_pages=num_pages)
    draw, told, waiting = Random(seed), dict[str, list[Delta]](), [*requests]
    cancelled = draw.choice(requests) if len(requests) > 1 else None
    for step in range(4000):
        if waiting and draw.random() < 0.5:
            engine.submit([waiting.pop(0)])
        for delta in engine.step() if engine.has_work else ():
            told.setdefault(delta.request_id, []).append(delta)
        running = engine.scheduler.roster.running
        if running and draw.random() < 0.1:
            engine.scheduler.roster.preempt_last([draw.choice(running)])
        if step == 9 and cancelled is not None and cancelled not in waiting:
            engine.cancel([cancelled.request_id])
        if not waiting and not engine.has_work:
            break
    for request, kind in zip(requests, kinds, strict=True):
        if request is not cancelled:
            check(request, kind, told[request.request_id])
    check_empty(engine)


def test_masks_that_do_not_follow_the_draft_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: rows behind a draft that may be any token."""
    monkeypatch.setattr(constraints, "_fill_along", lambda *_: None)
    kinds = ["grammar"] * 4
    engine, _, requests = make(kinds, 0.0)
    engine.submit(requests)
    deltas = drain(engine)
    assert [text(deltas[one.request_id]) for one in requests] != [expected(one, "grammar")[0] for one in requests]


@pytest.mark.parametrize("kind", PLAIN)
def test_each_row_has_the_mask_of_its_own_draw(kind: str) -> None:
    """Behind some output, drafts of what may come, up to a token that may not; nothing is left of them afterwards."""
    made, draw = Constraints(SHAPE.vocab_size, letters), Random(3)
    allow = KINDS[kind].allow
    for _ in range(20):
        request = held("1", kind, prompt_of(8, 1), 40)
        (one,) = made.prepare([request], lambda: None)
        assert one is not None
        output: list[int] = []
        while (allowed := allow(output)) is not None and len(output) < 12:
            draft: list[int] = []
            while len(draft) < 5:
                may = allow(output + draft)
                others = sorted((may or EVERYTHING) - {END})
                if not others:
                    break
                draft.append(draw.choice(others))
                if may is None or draw.random() < 0.1:
                    draft[-1] = draw.choice(sorted(EVERYTHING - {END}))
            (masks,) = made.fill([(one, len(output), output, draft)])
            for step, words in enumerate(np.atleast_2d(masks)):
                may = allow(output + draft[:step])
                if may is None:
                    break  # it is over: nobody reads what is drawn
                assert bits_of(words) & EVERYTHING == may & EVERYTHING
                if step < len(draft) and draft[step] not in may:
                    break
            output.append(draw.choice(sorted(allowed - {END} or allowed)))
            made.consume([(one, output[-1])])
            if output[-1] == END:
                break
    made.shutdown()


def test_what_must_come_is_drafted_by_nobody_and_what_may_follows_it() -> None:
    """Words of more than one letter leave no choice, so they are runs; between them is one to draw."""
    kinds = ["text"] * 4
    engine, runner, requests = make(kinds, 0.0, jumps=True)
    engine.submit(requests)
    check_all(requests, kinds, drain(engine))
    groups = [group for plan in runner.plans for group in plan.decode]
    for group in groups:
        for run, draft in zip(group.runs or (), group.drafts or (), strict=False):
            assert not (run and draft)
    assert any(run for group in groups for run in group.runs or ())
    assert max(map(len, WORDS)) > 20


def test_a_rule_that_no_draw_changes_holds_every_row_of_a_draft_that_the_device_makes() -> None:
    """Nobody has read what was drafted by then."""
    made = Constraints(SHAPE.vocab_size, letters)
    plain = held("1", "free", prompt_of(8, 1), 40)
    late = structs.replace(plain, stop_token_ids=(60,), min_tokens=2)
    for request, wanted in (
        (structs.replace(plain, allowed_token_ids=(1, 2, 3)), [{1, 2, 3}] * 4),
        (structs.replace(plain, bad_token_ids=((60,),)), [EVERYTHING - {60}] * 4),
        (late, [EVERYTHING - {60}] * 2 + [EVERYTHING] * 2),
    ):
        (one,) = made.prepare([request], lambda: None)
        assert one is not None
        assert not one.needs_output
        (masks,) = made.fill([(one, 0, [], (TO_DRAFT,) * 3)])
        assert [bits_of(words) & EVERYTHING for words in masks] == wanted
    made.shutdown()


def test_a_grammar_that_fails_along_a_draft_leaves_all_to_draw_there_so_that_the_draw_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Constraints(SHAPE.vocab_size, letters)
    request = held("1", "grammar", prompt_of(8, 1), 40)
    (one,) = made.prepare([request], lambda: None)
    assert one is not None
    fill, num_filled = constraints.fill_next_token_bitmask, 0

    def failing(matcher: LLMatcher, words: np.ndarray) -> None:
        nonlocal num_filled
        num_filled += 1
        fill(matcher, words)
        if num_filled == 2:
            matcher.consume_token(30)  # what cannot follow here

    monkeypatch.setattr(constraints, "fill_next_token_bitmask", failing)
    (masks,) = made.fill([(one, 0, [], [0, 1, 0])])
    assert [bits_of(words) & EVERYTHING for words in masks[:3]] == [{0, 1}, {1}, EVERYTHING]
    assert not one.error, "the request's own goes on"
    (words,) = made.fill([(one, 0, [], [])])
    assert bits_of(words) & EVERYTHING == {0, 1}
    made.shutdown()
