"""Prompt logprobs in pieces are those of the whole, to the last bit on the CPU, and are dropped with their job."""

import gc
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.config import GpuConfig, ModelConfig
from gpu.prefill.scored_rows import LEAST_ROWS, LOGITS_BLOCK_ROWS, cut_rows
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import LogitsUnit, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan, TokenLogprob
from tests.gpu.reference_model import Pages, document_prompt, layer_units, shallow_model
from tests.gpu.small_runner import load_small

LENGTHS = (323, 259, 40, 2, 1, 66)  # blocks of 256 rows and more, of 2, of few, none
ASKS = SamplingParams(temperature=0.0, num_prompt_logprobs=2)


@pytest.fixture(scope="module")
def runner() -> Runner:
    """One layer is enough: what comes after the last one is looked at."""
    return load_small(
        ModelConfig(path=Path(shallow_model(1).name)), GpuConfig(device="cpu", dtype="float32", graph_batch_sizes=())
    )


def prefilled(runner: Runner) -> tuple[PrefillJob, StepPlan]:
    """A job whose layers are done, and the plan that lets go of it."""
    pages = Pages(runner)
    prompts = [PrefillPrompt(slot, document_prompt(n, n)[:n], 0, n, ASKS, "exact") for slot, n in enumerate(LENGTHS)]
    job = PrefillJob(1, prompts)
    layers = [unit for unit in layer_units(job, 1000, 1) if isinstance(unit, PrefillUnit)]
    writes = [pages.take(prompt.slot, len(prompt.token_ids) + 1) for prompt in prompts]
    result = runner.launch(StepPlan(page_writes=writes, new_jobs=[job], units=layers)).collect()
    assert (result.tokens, result.prompt_logprobs) == ((), {}), "a scored job ends with its logits"
    return job, StepPlan(released_slots=list(range(len(LENGTHS))))


def score(runner: Runner, cuts: list[int]) -> tuple[list[int], dict[int, list[TokenLogprob]]]:
    """First tokens and logprobs of the job, its logits cut there."""
    job, release = prefilled(runner)
    borders = [0, *cuts, job.num_scored_tokens]
    for begin, end in pairwise(borders):
        result = runner.launch(StepPlan(units=[LogitsUnit(1, begin, end)])).collect()
    runner.launch(release).collect()
    return [token.token_id for token in result.tokens], result.prompt_logprobs


def test_pieces_equal_the_whole_to_the_last_bit_wherever_they_are_cut(runner: Runner) -> None:
    whole = score(runner, [])
    assert [len(entries) for entries in whole[1].values()] == [length - 1 for length in LENGTHS]
    draw = np.random.default_rng(0)
    total = sum(LENGTHS) - len(LENGTHS)
    for cuts in ([1, 2, 255, 257, 322, 324], sorted(set(draw.integers(1, total, 12).tolist()))):
        assert score(runner, cuts) == whole


def test_the_comparison_sees_products_of_few_rows(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power of the one above: without rows beside them, three rows are added up in another order."""
    whole = score(runner, [])
    monkeypatch.setattr("gpu.prefill.scored_rows.LEAST_ROWS", 1)
    assert score(runner, [64, 67]) != whole


def test_a_unit_scores_its_own_tokens_alone_whoevers_they_are(runner: Runner) -> None:
    _, release = prefilled(runner)
    told = []
    for begin, end in ((0, 100), (100, 330)):
        runner.launch(StepPlan(units=[LogitsUnit(1, begin, end)])).collect()
        scored = runner._prefill._jobs[1].scored
        told.append([sum(len(piece.token) for piece in pieces) for pieces in scored.values()])
    runner.launch(release).collect()
    assert told == [[100, 0, 0, 0, 0, 0], [322, 8, 0, 0, 0, 0]]


def test_a_job_that_is_dropped_between_two_pieces_leaves_no_hidden_states(runner: Runner) -> None:
    _, release = prefilled(runner)
    runner.launch(StepPlan(units=[LogitsUnit(1, 0, 100)])).collect()
    hidden = weakref.ref(runner._prefill._jobs[1].hidden)
    assert hidden() is not None
    runner.launch(release).collect()
    gc.collect()
    assert hidden() is None
    assert runner.num_prefill_jobs == 0


@given(st.integers(1, 1100), st.data())
def test_every_row_is_told_once_and_products_are_no_smaller_than_their_block_allows(num_rows: int, data) -> None:
    begin = data.draw(st.integers(0, num_rows - 1))
    end = data.draw(st.integers(begin + 1, num_rows))
    told = []
    for rows in cut_rows(begin, end, num_rows):
        computed = range(num_rows)[rows.computed]
        assert list(computed[rows.wanted]) == list(range(rows.reported.start, rows.reported.stop))
        block = computed.start // LOGITS_BLOCK_ROWS
        assert block == (computed.stop - 1) // LOGITS_BLOCK_ROWS, "a product is of one block"
        in_block = min(LOGITS_BLOCK_ROWS, num_rows - block * LOGITS_BLOCK_ROWS)
        assert len(computed) >= min(LEAST_ROWS, in_block)
        told += computed[rows.wanted]
    assert told == list(range(begin, end))
