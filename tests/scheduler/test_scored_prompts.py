"""Prompts whose logprobs are asked for: their logits come in pieces after the layers, beside streams."""

import msgspec
import numpy as np
import pytest

from gpu.model.architecture import NAMED_SHAPES
from gpu.pooling import Pooling
from gpu.sampling_params import SamplingParams
from gpu.step import DENSE, LogitsUnit, PrefillJob, PrefillPrompt, PrefillUnit
from scheduler.engine_config import PrefillConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.prefill.prefill_queue import LEAST_UNIT_TOKENS, MOST_SCORED_TOKENS, PrefillQueue
from tests.scheduler.engines import PAGE, SHAPE, check_empty, check_output, drain, make_engine, make_request
from tests.scheduler.engines import prompt_of as draw_prompt
from tests.scheduler.page_runner import PageRunner
from tests.tolerances import COST_MODEL

TARGET_S = 0.05
LOGITS_S = 2.5e-4  # a scored token, far more than the FLOPs of a layer say: ten targets for a prompt of 2,000
TINY = NAMED_SHAPES["tiny"]
Prompts = tuple[tuple[int, int | None], ...]  # tokens, and the logprobs that are asked for


def logits_of(runner: PageRunner) -> list[LogitsUnit]:
    return [unit for plan in runner.plans for unit in plan.units if isinstance(unit, LogitsUnit)]


def make_queue(*prompts: tuple[int, int | None]) -> PrefillQueue:
    """With one job of these prompts."""
    listed = [
        PrefillPrompt(slot, np.zeros(tokens, np.int32), 0, tokens, SamplingParams(num_prompt_logprobs=top), "exact")
        for slot, (tokens, top) in enumerate(prompts)
    ]
    queue = PrefillQueue(PrefillConfig(chunk_tokens=2048), TINY.num_layers, CostModel(TINY))
    queue.jobs.append(JobInProgress(PrefillJob(0, listed), [], DENSE, 1, TINY.num_layers))
    return queue


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_stream_beside_a_scored_prompt_keeps_its_gap_near_the_target(is_pipelined: bool) -> None:
    runner = PageRunner(SHAPE.num_layers, PAGE, unit_seconds=2e-6, decode_seconds=5e-3)
    runner.logits_seconds = LOGITS_S
    engine, _ = make_engine(
        num_pages=1200, chunk_tokens=2048, max_hidden_tokens=20_000, token_gap_target_ms=1e3 * TARGET_S,
        is_pipelined=is_pipelined, runner=runner,
    )  # fmt: skip
    engine.submit([make_request("stream", draw_prompt(20), max_tokens=3000)])
    for _ in range(20):
        engine.step()
    scored = make_request("scored", draw_prompt(2000, salt=1), max_tokens=1, num_prompt_logprobs=0)
    engine.submit([scored])
    gaps, last, answer = [], runner.clock, None
    while answer is None:
        for delta in engine.step():
            if delta.request_id == "stream":
                gaps.append(runner.clock - last)
                last = runner.clock
            else:
                answer = delta
    check_output(scored, [answer])
    assert max(gaps) <= 1.1 * TARGET_S
    assert sum(gaps) / len(gaps) >= 0.4 * TARGET_S, "and it uses the time it may take"
    assert 1999 * LOGITS_S > 9 * TARGET_S, "in one piece it would be seen"
    engine.cancel(["stream"])
    drain(engine)
    check_empty(engine)


@pytest.mark.parametrize("prompts", [((700, 0), (300, None), (1, 5), (500, 2)), ((200, 0), (100, None))])
def test_logits_come_after_the_layers_in_order_and_end_the_job_once(
    prompts: tuple[tuple[int, int | None], ...],
) -> None:
    """The second job's layers leave room for its logits in their step."""
    queue = make_queue(*prompts)
    units, finished = [], []
    while queue.jobs:
        new, done = queue.next_units(None)
        assert len({type(unit) for unit in new}) == 1, "a step has units of one kind"
        units, finished = units + new, finished + done
    kinds = [isinstance(unit, LogitsUnit) for unit in units]
    assert kinds == sorted(kinds)
    scored = units[kinds.index(True) :]
    assert [unit.begin for unit in scored] == [0, *(unit.end for unit in scored[:-1])]
    assert scored[-1].end == sum(tokens - 1 for tokens, top in prompts if top is not None)
    assert all(unit.end - unit.begin <= MOST_SCORED_TOKENS for unit in scored)
    assert len(finished) == 1


def test_a_prompt_that_is_not_scored_has_no_unit_and_no_time_more() -> None:
    queue, scored = make_queue((700, None), (300, None)), make_queue((700, 0), (300, None))
    units = []
    entry = queue.jobs[0]
    assert scored.jobs[0].remaining() - entry.remaining() == 699
    while queue.jobs:
        units += queue.next_units(None)[0]
    assert {type(unit) for unit in units} == {PrefillUnit}
    assert sum(unit.end - unit.begin for unit in units) == TINY.num_layers * 1000


def test_what_was_drawn_before_is_not_scored_again() -> None:
    asks = SamplingParams(num_prompt_logprobs=0)
    first = PrefillPrompt(0, np.zeros(50, np.int32), 0, 50, asks, "exact")
    resumed = PrefillPrompt(0, np.zeros(53, np.int32), 0, 50, asks, "exact")
    assert (first.num_scored_tokens, resumed.num_scored_tokens) == (49, 0)


def test_a_scored_prompt_that_is_cancelled_between_two_pieces_leaves_nothing() -> None:
    engine, runner = make_engine(num_pages=200, chunk_tokens=512, max_hidden_tokens=5000)
    engine.submit([make_request("scored", draw_prompt(1500), max_tokens=1, num_prompt_logprobs=0)])
    while len(logits_of(runner)) < 2:
        engine.step()
    assert logits_of(runner)[-1].end < 1499, "the test means something"
    engine.cancel(["scored"])
    assert drain(engine) == {}
    assert runner.jobs == {}
    check_empty(engine)


def test_a_scored_prompt_that_is_preempted_between_two_pieces_is_scored_anew_and_whole() -> None:
    """The stream needs its pages."""
    engine, runner = make_engine(num_pages=66, chunk_tokens=512, max_hidden_tokens=5000, token_gap_target_ms=1.0)
    stream = make_request("stream", draw_prompt(20), max_tokens=120)
    scored = make_request("scored", draw_prompt(960, salt=1), max_tokens=3, num_prompt_logprobs=0)
    engine.submit([stream])
    for _ in range(3):
        engine.step()
    engine.submit([scored])
    deltas: dict[str, list] = {"stream": [], "scored": []}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    check_output(scored, deltas["scored"])
    assert engine.scheduler.roster.num_preemptions > 0
    begins = [unit.job_id for unit in logits_of(runner) if unit.begin == 0]
    assert len(begins) == 2, "it had begun when it was preempted"
    check_empty(engine)


def test_logits_are_learnt_apart_from_layers() -> None:
    """Before any have run they are taken for projections; after, no unit of a layer costs more or less."""
    model = CostModel(TINY)
    flops = 2.0 * TINY.hidden * TINY.vocab_size
    per_layer = 2.0 * TINY.num_layer_weights
    for tokens in (100, 400, 1600):
        model.observe_units([PrefillUnit(0, 0, 0, tokens)], [tokens], 2e-6 * tokens)
    layers = model.unit_seconds(400, 400, DENSE)
    assert model.logits_seconds(100) == pytest.approx(2e-4 * flops / per_layer, rel=COST_MODEL)
    assert model.logits_seconds(0) == 0.0
    assert model.knows(PrefillUnit(0, 0, 0, 1)) > model.knows(LogitsUnit(0, 0, 1))
    for rows in (64, 128, 256):
        model.observe_units([LogitsUnit(0, 0, rows)], [0], 1e-3 + 5e-4 * rows)
    assert model.unit_seconds(400, 400, DENSE) == layers
    assert model.seconds_of(LogitsUnit(0, 30, 530), 0) == pytest.approx(1e-3 + 5e-4 * 500, rel=COST_MODEL)
    assert model.familiar_rows == 512
    assert model.familiar_tokens(DENSE) == 3200
    assert model.rows_within(0.07, 2000, LEAST_UNIT_TOKENS) == 128


@pytest.mark.parametrize(("kind", "num_cached"), [("last", 96), ("mean", 0)])
def test_a_mean_is_of_all_tokens_also_of_those_that_are_known(kind: str, num_cached: int) -> None:
    engine, runner = make_engine()
    prompt = draw_prompt(100)
    for name in ("first", "second"):
        plain = make_request(name, prompt, max_tokens=0)
        engine.submit([msgspec.structs.replace(plain, pooling=Pooling(kind=kind))])
        (delta,) = drain(engine)[name]
        assert (delta.finish_reason, delta.token_ids) == ("length", [])
    assert delta.num_cached_tokens == num_cached
    last = [job for plan in runner.plans for job in plan.new_jobs][-1].prompts[0]
    assert (last.begin, last.pooling.kind) == (num_cached, kind)
