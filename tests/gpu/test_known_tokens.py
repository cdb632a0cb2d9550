"""Tokens that are known to follow take rows of one step: the draw behind them, and all that is told, is as if each had
a step of its own with no other token to draw.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, Lane, PageWrite, SampledToken, StepPlan
from tests.gpu.poison import poison_pool
from tests.gpu.reference_model import document_prompt
from tests.gpu.test_drafted_rows import DEVICES, PENALISED, PLAIN, PROMPTS, QUIET, begin, runner_on
from tests.gpu.twin_runners import Twins
from tests.tolerances import CHUNKING_LOGPROB_ATOL, HOP_LOGITS_FLOAT32

KNOWN = {0: {2: 301, 3: 17, 4: 301, 7: 55}, 1: {}, 2: {1: 9, 3: 44, 4: 45, 5: 46, 6: 47, 7: 301}}  # by slot and draw
NUM_TOKENS = 10


def end(runner: Runner) -> None:
    runner.launch(StepPlan(released_slots=[0, 1, 2])).collect()


def only(runner: Runner, token_id: int) -> np.ndarray:
    bits = np.zeros(-(-runner.limits.vocab_size // 32) * 32, np.uint8)
    bits[token_id] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def one_by_one(runner: Runner, params: list[SamplingParams]) -> list[list[SampledToken]]:
    """Each known token is drawn, as the only one that may be."""
    told = begin(runner, params)
    for number in range(1, NUM_TOKENS):
        places = [len(prompt) + number - 1 for prompt in PROMPTS]
        masks = {slot: only(runner, known[number]) for slot, known in KNOWN.items() if number in known}
        step = runner.launch(StepPlan(decode=[DecodeGroup([0, 1, 2], places, [number] * 3)], masked_slots=[0]))
        runner.draw(step, masks)
        for token in step.collect().tokens:
            told[token.slot].append(token)
    end(runner)
    return told


def at_once(runner: Runner, params: list[SamplingParams], lane: Lane = Lane.DEVICE) -> list[list[SampledToken]]:
    """Each known token that follows one that is there comes without a draw."""
    told = begin(runner, params)
    while slots := [slot for slot in KNOWN if len(told[slot]) < NUM_TOKENS]:
        runs = []
        for slot in slots:
            number, run = len(told[slot]), list[int]()
            while number + len(run) in KNOWN[slot] and number + len(run) < NUM_TOKENS - 1:
                run.append(KNOWN[slot][number + len(run)])
            runs.append(run)
        places = [len(PROMPTS[slot]) + len(told[slot]) - 1 for slot in slots]
        samples = [len(told[slot]) + len(run) for slot, run in zip(slots, runs, strict=True)]
        group = DecodeGroup(slots, places, samples, runs=runs if any(runs) else None)
        for token in runner.launch(StepPlan(lane, decode=[group])).collect().tokens:
            told[token.slot].append(token)
    end(runner)
    return told


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", [[PLAIN] * 3, [PENALISED, PLAIN, PENALISED], [QUIET] * 3])
def test_what_is_known_changes_no_draw_and_is_told_as_if_drawn(device: str, params: list[SamplingParams]) -> None:
    wanted = one_by_one(runner_on(device), params)
    got = at_once(runner_on(device), params)
    for mine, theirs in zip(got, wanted, strict=True):
        assert [token.token_id for token in mine] == [token.token_id for token in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None and other.logprob is not None:
                assert abs(one.logprob.logprob - other.logprob.logprob) < CHUNKING_LOGPROB_ATOL
                assert [token_id for token_id, _ in one.logprob.top] == [token_id for token_id, _ in other.logprob.top]


def test_both_lanes_have_places_of_their_own_for_known_tokens() -> None:
    runner = runner_on("cpu")
    params = [PLAIN] * 3
    told = [[token.token_id for token in at_once(runner, params, lane)[2]] for lane in Lane]
    assert told[0] == told[1]
    first = runner.limits.max_running
    tokens = runner._last_tokens.tolist()
    assert tokens[first : first + 4] == tokens[2 * first : 2 * first + 4]


def test_a_step_of_more_rows_than_there_are_is_refused() -> None:
    runner = runner_on("cpu")
    begin(runner, [PLAIN] * 3)
    with pytest.raises(AssertionError, match="a step of 17 rows; have 16"):
        runner.launch(StepPlan(decode=[DecodeGroup([0], [10], [17], runs=[[1] * 16])]))
    end(runner)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_in_host_memory_is_read_for_each_known_token_and_all_of_it_is(device: str, parts: int) -> None:
    """Coverage is counted in every layer; a run may be cut between two half batches."""
    twins = Twins(device=device, check_coverage=True, max_running=16)
    twins.prefill([document_prompt(length, length) for length in (300, 190, 411)])
    twins.offloading.decode_steps.host_reader.halving.always = parts
    for _ in range(12):
        twins.step([0, 1, 2])
    known = [[5, 6, 7, 8], [], [301]]
    group = replace(twins.group([0, 1, 2]), samples=[5, 1, 2], runs=known)
    assert group.host_reads[0] is not None
    writes, exact_writes = [], []
    for slot, run in enumerate(known):
        sequence = twins.sequences[slot]
        while len(sequence.pages) * 16 <= sequence.num_tokens + len(run):
            sequence.pages.append(twins._free.pop())
            writes.append(PageWrite(slot, len(sequence.pages) - 1, sequence.pages[-1:]))
            first = (len(sequence.pages) - 1) * 16
            exact_writes.append(PageWrite(slot, first // 16, list(range(*twins._exact_pages(slot, first, first + 16)))))
    last = twins.exact._last_tokens.clone()
    twins.offloading._last_tokens.copy_(last)
    twins.offloading.launch(StepPlan(page_writes=writes, decode=[group])).collect()
    twins.exact.launch(StepPlan(page_writes=exact_writes)).collect()
    for slot, run in enumerate(known):
        for step, token_id in enumerate([int(last[slot]), *run]):
            twins.exact._last_tokens[slot] = token_id
            alone = DecodeGroup([slot], [group.positions[slot] + step], [1])
            twins.exact.launch(StepPlan(decode=[alone])).collect()
        mine, oracle = twins.logits(slot)
        assert (mine - oracle).abs().max() <= HOP_LOGITS_FLOAT32
        assert torch.isfinite(mine).all()


def test_rows_of_a_slot_see_those_in_front_on_any_number_of_threads() -> None:
    """One thread attends while another has yet to write: pages are NaN until somebody has."""
    runner = runner_on("cpu")
    run = list(range(40, 54))
    wanted = None
    before = torch.get_num_threads()
    try:
        for threads in [1] + [2] * 6:
            torch.set_num_threads(threads)
            poison_pool(runner.pool)
            begin(runner, [PLAIN] * 3)
            group = DecodeGroup([1], [len(PROMPTS[1])], [15], runs=[run])
            told = runner.launch(StepPlan(decode=[group])).collect().tokens
            end(runner)
            wanted = wanted or told
            assert told == wanted
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
def test_known_tokens_are_counted_as_drawn_ones_are(device: str) -> None:
    """Each as often as it comes, also twice in a run."""
    runner = runner_on(device)
    first = [told[0].token_id for told in begin(runner, [PENALISED, PLAIN, PENALISED])]
    runs = [[301, 17, 301], [5], []]
    group = DecodeGroup([0, 1, 2], [len(prompt) for prompt in PROMPTS], [4, 2, 1], runs=runs)
    told = runner.launch(StepPlan(decode=[group])).collect().tokens
    for slot in (0, 2):
        state = runner._sampler._slots[slot]
        own = [first[slot], *(token.token_id for token in told if token.slot == slot)]
        wanted = np.bincount(own, minlength=runner.limits.vocab_size)
        assert runner._sampler._penalties.counts[state.penalty_row].tolist() == wanted.tolist()
    end(runner)
