"""A prompt that went down in prefill is decoded as one that stayed: the two paths agree on every table and run."""

from collections.abc import Iterator

import numpy as np
import pytest

from gpu.runner import Runner
from gpu.step import (
    DecodeGroup,
    HostPrompt,
    HostRead,
    Offload,
    PageEviction,
    PageWrite,
    PrefillJob,
    PrefillPrompt,
    StepPlan,
    StepResult,
    TablePlace,
)
from tests.gpu.reference_model import GREEDY, document_prompt, layer_units, needle_prompt
from tests.gpu.twin_runners import DEFAULT_DENSE, NUM_LAYERS, NUM_PAGES, layout_of, load, tier_shape
from tests.reference_tier import ReferenceTier
from transfer.reading import Reading

PAGE, SINK, LUMP = 16, 16, 128
CONTEXT = 5
NUM_TOKENS = 8
LAYOUT = layout_of(len(DEFAULT_DENSE), NUM_PAGES)
DENSE_PAGES = LAYOUT.dense_pages(range(NUM_PAGES, LAYOUT.num_pages), 0, 200)


@pytest.fixture(scope="module")
def loaded() -> tuple[Runner, ReferenceTier]:
    tier = ReferenceTier(tier_shape(DEFAULT_DENSE), 2000, bulk_tokens=200, max_chunk_tokens=150)
    return load(tier, PAGE, 4, "cpu", "float32", ()), tier


@pytest.fixture
def runner(loaded: tuple[Runner, ReferenceTier]) -> Iterator[Runner]:
    """All slots free, all contexts closed, NaN wherever nothing is written."""
    runner = loaded[0]
    poison(runner)
    yield runner
    launch(runner, StepPlan(released_slots=[0, 1, 2], closed_contexts=[CONTEXT]))


def poison(runner: Runner) -> None:
    staging = runner._prefill.staging
    assert staging is not None
    staging.poison()
    runner.pool.poison()


def launch(runner: Runner, plan: StepPlan) -> StepResult:
    return runner.launch(plan).collect()


def tokens_that_stay(runner: Runner, ids: np.ndarray) -> list[int]:
    """Greedy tokens of a prompt in slot 0 that stays on the device."""
    job = PrefillJob(1, [PrefillPrompt(0, ids, 0, len(ids), GREEDY, "exact")])
    pages = list(range(-(-(len(ids) + NUM_TOKENS) // PAGE)))
    plan = StepPlan(page_writes=[PageWrite(0, 0, pages)], new_jobs=[job], units=layer_units(job, 100, NUM_LAYERS))
    tokens = [launch(runner, plan).tokens[0].token_id]
    tokens += decode(runner, 0, len(ids), 0, range(1, NUM_TOKENS))
    launch(runner, StepPlan(released_slots=[0]))
    return tokens


def decode(runner: Runner, slot: int, num_prompt: int, run_end: int, drawn: range) -> Iterator[int]:
    """run_end: where the run of CONTEXT ends, or 0: all is on the device."""
    for number in drawn:
        asks = [HostRead(CONTEXT, SINK, run_end)] if run_end else None
        group = DecodeGroup([slot], [num_prompt + number - 1], [number], asks)
        yield launch(runner, StepPlan(decode=[group])).tokens[0].token_id


def plan_down(ids: np.ndarray, slot: int, context_id: int) -> tuple[StepPlan, int]:
    """The step in which a whole prompt goes down, and where its run ends; pages of slot 0 are others."""
    end = (len(ids) - 64) // PAGE * PAGE
    host = HostPrompt(context_id, None, SINK, end, end, reading=Reading.WHOLE)
    job = PrefillJob(2, [PrefillPrompt(slot, ids, 0, len(ids), GREEDY, "offloaded", host)])
    window = range(200, 200 + -(-(len(ids) + NUM_TOKENS - end) // PAGE))
    pages = [199, *DENSE_PAGES[: (end - SINK) // PAGE], *window]
    return StepPlan(
        page_writes=[PageWrite(slot, 0, pages)], new_jobs=[job], units=layer_units(job, 100, NUM_LAYERS)
    ), end


@pytest.mark.parametrize("ids", [document_prompt(330, 1), needle_prompt(420, 2)])
def test_a_prompt_that_went_down_gives_the_text_of_one_that_stayed(runner: Runner, ids: np.ndarray) -> None:
    wanted = tokens_that_stay(runner, ids)
    poison(runner)
    plan, end = plan_down(ids, 2, CONTEXT)
    tokens = [launch(runner, plan).tokens[0].token_id]
    tokens += decode(runner, 2, len(ids), end, range(1, NUM_TOKENS))
    assert tokens == wanted


def test_what_a_deposit_adds_to_a_prompt_that_went_down_is_read_where_it_went(runner: Runner) -> None:
    ids = document_prompt(400, 3)
    wanted = tokens_that_stay(runner, ids)
    poison(runner)
    plan, end = plan_down(ids, 1, CONTEXT)
    tokens = [launch(runner, plan).tokens[0].token_id]
    tokens += decode(runner, 1, len(ids), end, range(1, NUM_TOKENS // 2))
    first = (end - SINK) // PAGE
    deposit = Offload(1, CONTEXT, end, end + 2 * PAGE, [200, 201], opens=False, reading=Reading.WHOLE)
    release = PageEviction([200, 201], DENSE_PAGES[first : first + 2], [TablePlace(1, end // PAGE)])
    launch(runner, StepPlan(offloads=[deposit], evictions=[release]))
    for pages in (*runner.pool.key_pages, *runner.pool.value_pages):
        pages[200:202] = float("nan")
    tokens += decode(runner, 1, len(ids), end + 2 * PAGE, range(NUM_TOKENS // 2, NUM_TOKENS))
    assert tokens == wanted


def test_a_prompt_that_the_host_refuses_fails_and_leaves_the_runner_well(
    runner: Runner, loaded: tuple[Runner, ReferenceTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = document_prompt(400, 1)
    monkeypatch.setattr(loaded[1], "capacity_tokens", 100)
    plan, _ = plan_down(ids, 2, CONTEXT)
    result = launch(runner, plan)
    assert list(result.failures) == [2]
    assert result.failures[2].startswith("host memory: asked")
    assert [(token.slot, token.token_id) for token in result.tokens] == [(2, -1)]
    assert runner.num_prefill_jobs == 0
    launch(runner, StepPlan(released_slots=[2], closed_contexts=[CONTEXT]))
    assert len(tokens_that_stay(runner, ids)) == NUM_TOKENS
