"""Prefill: chunks, packing, unit order, shared pages and resumption change nothing of what comes out."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.host.gathered import GatheredKv
from gpu.prefill.job_state import pack_job
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, PageWrite, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan, StepResult, Unit
from tests.gpu.reference_model import (
    GREEDY,
    NUM_LAYERS,
    Generated,
    Pages,
    decode,
    document_prompt,
    generate,
    layer_units,
    logits_units,
    needle_prompt,
    prefill_prompts,
    reference_runner,
    units_without,
)
from tests.tolerances import CHUNKING_LOGPROB_ATOL

WITH_LOGPROBS = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
PROMPTS = [document_prompt(150, 1), needle_prompt(90, 2), np.array([0, 17, 99], dtype=np.int32), document_prompt(40, 3)]
NUM_TOKENS = 6


def make_runner() -> Runner:
    return reference_runner(max_running=8, num_pages=200, max_context_tokens=1024)


@pytest.fixture(scope="module")
def alone() -> Generated:
    return generate(make_runner(), PROMPTS, NUM_TOKENS, WITH_LOGPROBS)


def run_units(runner: Runner, jobs: list[PrefillJob], units: list[Unit]) -> Generated:
    """Give pages to every prompt, run the units one a step, then decode all slots."""
    pages = Pages(runner)
    prompts = sorted((prompt for job in jobs for prompt in job.prompts), key=lambda prompt: prompt.slot)
    writes = [pages.take(prompt.slot, len(prompt.token_ids) + NUM_TOKENS) for prompt in prompts]
    runner.launch(StepPlan(page_writes=writes, new_jobs=jobs)).collect()
    generated = Generated([[] for _ in prompts], {})
    for unit in units:
        result = runner.launch(StepPlan(units=[unit])).collect()
        for token in result.tokens:
            generated.tokens[token.slot].append(token.token_id)
        generated.prompt_logprobs.update(result.prompt_logprobs)
    decode(runner, generated, [len(prompt.token_ids) for prompt in prompts], NUM_TOKENS)
    return generated


def assert_same(got: Generated, wanted: Generated) -> None:
    assert got.tokens == wanted.tokens
    assert got.prompt_logprobs.keys() == wanted.prompt_logprobs.keys()
    for slot, entries in wanted.prompt_logprobs.items():
        np.testing.assert_allclose(
            [entry.logprob for entry in got.prompt_logprobs[slot]],
            [entry.logprob for entry in entries],
            rtol=0,
            atol=CHUNKING_LOGPROB_ATOL,
        )


@pytest.mark.parametrize("chunk_tokens", [7, 16, 33, 1000])
def test_packing_and_chunking_change_nothing(chunk_tokens: int, alone: Generated) -> None:
    job = PrefillJob(5, prefill_prompts(PROMPTS, WITH_LOGPROBS))
    assert_same(run_units(make_runner(), [job], layer_units(job, chunk_tokens)), alone)


def counted_rows(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Count the hidden states that leave each layer."""
    rows: dict[int, int] = {}
    leave = runner._prefill.decoder.leave

    def counting(index: int, hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
        rows[index] = rows.get(index, 0) + len(hidden)
        return leave(index, hidden, *rest, **named)

    monkeypatch.setattr(runner._prefill.decoder, "leave", counting)
    return rows


@pytest.mark.parametrize("chunk_tokens", [7, 16, 33, 1000])
def test_the_last_layer_goes_on_with_last_tokens_alone(
    chunk_tokens: int, alone: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn tokens have the logprobs that they have where all tokens are scored, packed or one prompt at a time."""
    drawn = []
    for scored in (0, None):
        sampling = SamplingParams(temperature=0.0, num_logprobs=0, num_prompt_logprobs=scored)
        runner = make_runner()
        job, pages = PrefillJob(5, prefill_prompts(PROMPTS, sampling)), Pages(runner)
        writes = [pages.take(prompt.slot, len(prompt.token_ids) + NUM_TOKENS) for prompt in job.prompts]
        rows = counted_rows(runner, monkeypatch)
        units = layer_units(job, chunk_tokens)
        result = runner.launch(StepPlan(page_writes=writes, new_jobs=[job], units=units)).collect()
        assert rows[NUM_LAYERS - 2] == job.num_tokens
        assert rows[NUM_LAYERS - 1] == (len(PROMPTS) if scored is None else job.num_tokens)
        drawn.append({token.slot: (token.token_id, token.logprob) for token in result.tokens})
        generated = Generated([[token.token_id] for token in sorted(result.tokens, key=lambda one: one.slot)], {})
        monkeypatch.undo()
        decode(runner, generated, [len(ids) for ids in PROMPTS], NUM_TOKENS)
        assert generated.tokens == alone.tokens, "the last layer's keys and values of all tokens are written"
    for slot, (token_id, logprob) in drawn[0].items():
        assert drawn[1][slot][0] == token_id
        assert drawn[1][slot][1].logprob == pytest.approx(logprob.logprob, rel=0, abs=CHUNKING_LOGPROB_ATOL)


def test_chunks_may_differ_from_layer_to_layer(alone: Generated) -> None:
    job = PrefillJob(5, prefill_prompts(PROMPTS, WITH_LOGPROBS))
    draw = np.random.default_rng(0)
    units = []
    for layer in range(NUM_LAYERS):
        cuts = sorted({0, job.num_tokens, *draw.integers(1, job.num_tokens, 4).tolist()})
        units += [PrefillUnit(5, layer, begin, end) for begin, end in itertools.pairwise(cuts)]
    units += logits_units(job, 50)
    assert_same(run_units(make_runner(), [job], units), alone)


def test_jobs_interleave_in_any_order(alone: Generated) -> None:
    prompts = prefill_prompts(PROMPTS, WITH_LOGPROBS)
    jobs = [PrefillJob(1, prompts[:1]), PrefillJob(2, prompts[1:3]), PrefillJob(3, prompts[3:])]
    queues = [layer_units(job, 32) for job in jobs]
    draw = np.random.default_rng(1)
    units = []
    while any(queues):
        units.append(draw.choice([index for index, queue in enumerate(queues) if queue]))
        units[-1] = queues[units[-1]].pop(0)
    assert_same(run_units(make_runner(), jobs, units), alone)


def test_the_comparison_sees_one_lost_token(alone: Generated) -> None:
    lost = [PROMPTS[0][1:], *PROMPTS[1:]]
    got = generate(make_runner(), lost, 1, WITH_LOGPROBS).prompt_logprobs[0]
    wanted = alone.prompt_logprobs[0][1:]
    differences = [abs(a.logprob - b.logprob) for a, b in zip(got, wanted, strict=True)]
    assert max(differences) > CHUNKING_LOGPROB_ATOL


def launch_whole(runner: Runner, prompt: PrefillPrompt, writes: list[PageWrite], job_id: int) -> StepResult:
    job = PrefillJob(job_id, [prompt])
    return runner.launch(StepPlan(page_writes=writes, new_jobs=[job], units=layer_units(job, 64))).collect()


def test_a_shared_prefix_page_is_read_and_not_written() -> None:
    runner = make_runner()
    ids = document_prompt(100, 7)
    other = np.concatenate([ids[:64], document_prompt(60, 8)[1:]])
    wanted = generate(make_runner(), [ids, other], NUM_TOKENS).tokens
    pages = Pages(runner)
    first = pages.take(0, len(ids) + NUM_TOKENS)
    shared = PageWrite(1, 0, first.page_ids[:4])
    own = pages.take(1, len(other) + NUM_TOKENS, first_page=4)
    result = launch_whole(runner, PrefillPrompt(0, ids, 0, len(ids), GREEDY, "exact"), [first], 1)
    tokens = [[result.tokens[0].token_id]]
    before = runner.pool.key_pages[3][list(first.page_ids[:4])].clone()
    second = launch_whole(runner, PrefillPrompt(1, other, 64, len(other), GREEDY, "exact"), [shared, own], 2)
    tokens.append([second.tokens[0].token_id])
    generated = Generated(tokens, {})
    decode(runner, generated, [len(ids), len(other)], NUM_TOKENS)
    assert generated.tokens == wanted
    assert torch.equal(before, runner.pool.key_pages[3][list(first.page_ids[:4])])


def test_a_resumed_sequence_goes_on_with_the_same_text() -> None:
    ids = needle_prompt(120, 6)
    wanted = generate(make_runner(), [ids], 24).tokens[0]
    runner = make_runner()
    pages = Pages(runner)
    cut = 9
    so_far = np.concatenate([ids, np.array(wanted[:cut], dtype=np.int32)])
    prompt = PrefillPrompt(0, so_far, 0, len(ids), GREEDY, "exact")
    assert prompt.samples == cut
    result = launch_whole(runner, prompt, [pages.take(0, len(ids) + 24)], 1)
    generated = Generated([[*wanted[:cut], result.tokens[0].token_id]], {})
    for drawn in range(cut + 1, 24):
        generated.tokens[0].append(decode_one(runner, len(ids) + drawn - 1, drawn))
    assert generated.tokens[0] == wanted


def decode_one(runner: Runner, position: int, drawn: int) -> int:
    group = DecodeGroup([0], [position], [drawn])
    return runner.launch(StepPlan(decode=[group])).collect().tokens[0].token_id


def test_a_dropped_job_frees_its_hidden_states_and_its_slot(alone: Generated) -> None:
    runner = make_runner()
    pages = Pages(runner)
    prompt = prefill_prompts(PROMPTS[:1])[0]
    writes = [pages.take(0, len(prompt.token_ids) + NUM_TOKENS)]
    job = PrefillJob(9, [prompt])
    units = layer_units(job, 64)
    runner.launch(StepPlan(page_writes=writes, new_jobs=[job], units=units[:7])).collect()
    assert runner.num_prefill_jobs == 1
    runner.launch(StepPlan(released_slots=[0])).collect()
    assert runner.num_prefill_jobs == 0
    again = runner.launch(StepPlan(new_jobs=[job], units=units)).collect()
    assert again.tokens[0].token_id == alone.tokens[0][0]
    assert runner.num_prefill_jobs == 0


@pytest.mark.parametrize(
    ("num_units", "leaving"),
    [(3, 0), (12, 1), (NUM_LAYERS * 5 - 1, 3), (NUM_LAYERS * 5 + 4, 3)],
)
def test_a_prompt_that_is_cut_out_anywhere_changes_nothing_for_the_others(
    num_units: int, leaving: int, alone: Generated
) -> None:
    """Within a layer and between two, while logprobs are computed, and where nothing is left but to end the job. Its
    slot is another prompt's at once.
    """
    runner = make_runner()
    pages = Pages(runner)
    prompts = prefill_prompts(PROMPTS, WITH_LOGPROBS)
    job, units = PrefillJob(5, prompts), layer_units(PrefillJob(5, prompts), 64)
    writes = [pages.take(prompt.slot, len(prompt.token_ids) + NUM_TOKENS) for prompt in prompts]
    runner.launch(StepPlan(page_writes=writes, new_jobs=[job], units=units[:num_units])).collect()
    other = PrefillJob(6, [prompts[leaving]])
    plan = StepPlan(released_slots=[leaving], page_writes=[writes[leaving]], new_jobs=[other])
    runner.launch(plan).collect()
    rest = [*units_without(job, units[num_units:], leaving), *layer_units(other, 64)]
    results = [runner.launch(StepPlan(units=[unit])).collect() for unit in rest]
    tokens = {token.slot: token.token_id for result in results for token in result.tokens}
    assert len(tokens) == len([token for result in results for token in result.tokens]) == len(PROMPTS)
    generated = Generated([[tokens[slot]] for slot in range(len(PROMPTS))], {})
    for result in results:
        generated.prompt_logprobs.update(result.prompt_logprobs)
    decode(runner, generated, [len(ids) for ids in PROMPTS], NUM_TOKENS)
    assert_same(generated, alone)
    assert runner.num_prefill_jobs == 0


def test_more_hidden_states_than_agreed_are_refused() -> None:
    runner = reference_runner(max_running=2, num_pages=10, max_context_tokens=128, max_hidden_tokens=100)
    jobs = [PrefillJob(prompt.slot, [prompt]) for prompt in prefill_prompts([PROMPTS[1], PROMPTS[1]])]
    with pytest.raises(ValueError, match=r"beside .* under way; wanted at most 100"):
        runner.launch(StepPlan(new_jobs=jobs))


def test_gathered_kv_grows_by_what_is_new_and_follows_its_owner() -> None:
    runner = make_runner()
    pool = runner.pool
    pool.write_pages([PageWrite(0, 0, [9, 4, 7, 1]), PageWrite(1, 0, [3, 2, 0, 8])])
    for pages in (*pool.key_pages, *pool.value_pages):
        pages.normal_()
    gathered = GatheredKv(pool, 2, 64)

    def check(job_id: int, slot: int, layer: int, end: int) -> None:
        keys, values = gathered.gather(job_id, slot, layer, end)
        for got, pages in ((keys, pool.key_pages), (values, pool.value_pages)):
            wanted = pages[layer][pool.page_table[slot].long()].transpose(0, 1).flatten(1, 2)[:, :end]
            assert torch.equal(got, wanted)

    for job_id, slot, layer, end in [(1, 0, 0, 5), (1, 0, 0, 20), (1, 0, 0, 64), (1, 0, 1, 30), (1, 0, 2, 64),
                                     (1, 1, 2, 64), (1, 0, 1, 30), (1, 0, 1, 12), (2, 1, 1, 40), (2, 1, 1, 41),
                                     (1, 0, 1, 41)]:  # fmt: skip
        check(job_id, slot, layer, end)


def test_hidden_states_of_all_tokens_are_taken_as_they_are_and_of_some_are_copied() -> None:
    job = PrefillJob(0, [PrefillPrompt(0, np.arange(6, dtype=np.int32), 0, 6, SamplingParams(), "exact")])
    state = pack_job(job, torch.device("cpu"))
    state.hidden = torch.zeros(6, 4)
    rows = torch.ones(6, 4)
    state.put(slice(0, 6), rows)
    assert state.hidden is rows
    state.put(slice(2, 4), torch.full((2, 4), 2.0))
    assert state.hidden[:, 0].tolist() == [1, 1, 2, 2, 1, 1]
    state.put(slice(0, 6), torch.zeros(6, 4, dtype=torch.float64))
    assert state.hidden.dtype == torch.float32
