"""Drafted tokens take rows of one step: what is drawn and told is what steps of one token draw, whatever was drafted,
and nothing is left of what was refused.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from gpu.runner import Runner
from gpu.sampling.sampler import Sampler, count_equal
from gpu.sampling_params import SamplingParams
from gpu.step import NOT_FINITE, DecodeGroup, SampledToken, StepPlan
from tests.gpu.reference_model import document_prompt, prefill_plans, prefill_prompts, reference_runner
from tests.tolerances import CHI_SQUARE_P, CHI_SQUARE_POWER_P, CHUNKING_LOGPROB_ATOL

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [document_prompt(length, length) for length in (10, 47, 120)]
NUM_TOKENS = 14
QUIET = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=0.0, num_logprobs=2)
DRAWN = SamplingParams(temperature=1.0, seed=3, top_p=0.9, logit_bias={7: 1.5}, num_logprobs=1)
PENALISED = SamplingParams(
    temperature=1.0, seed=5, num_logprobs=0, repetition_penalty=1.3, frequency_penalty=0.9, presence_penalty=0.4
)
PARAMS = [[QUIET] * 3, [PENALISED, PLAIN, PENALISED], [DRAWN, PENALISED, DRAWN]]
Guess = Callable[[int, int, list[int]], tuple[int, ...]]  # by slot, number of the draw, and what would be drawn


@cache
def runner_on(device: str) -> Runner:
    return reference_runner("float32", device, max_running=16, num_pages=64, max_context_tokens=512,
                            graph_batch_sizes=(4, 8, 16) if device == "cuda" else ())  # fmt: skip


def begin(runner: Runner, params: list[SamplingParams]) -> list[list[SampledToken]]:
    """PROMPTS in slots 0 .. 2, and their first draws."""
    prompts = [replace(one, sampling=own) for one, own in zip(prefill_prompts(PROMPTS), params, strict=True)]
    return [[*runner.launch(plan).collect().tokens] for plan in prefill_plans(runner, prompts, 2 * NUM_TOKENS)]


def serve(
    runner: Runner, params: list[SamplingParams], guess: Guess | None, record: list[list[int]], runs: bool = False
) -> list[list[SampledToken]]:
    """Every slot's NUM_TOKENS; guess: None: no slot drafts. runs: slot 1 has a known token in place of a draft."""
    told = begin(runner, params)
    while slots := [slot for slot in range(3) if len(told[slot]) < NUM_TOKENS]:
        numbers = [len(told[slot]) for slot in slots]
        drafts = [guess(slot, at, record[slot][at:]) if guess else () for slot, at in zip(slots, numbers, strict=True)]
        known: list[tuple[int, ...]] = [()] * len(slots)
        if runs and 1 in slots and numbers[slots.index(1)] < NUM_TOKENS - 1:
            place = slots.index(1)
            drafts[place], known[place] = (), (record[1][numbers[place]],)
        places = [len(PROMPTS[slot]) + number - 1 for slot, number in zip(slots, numbers, strict=True)]
        group = DecodeGroup(
            slots, places, [number + len(run) for number, run in zip(numbers, known, strict=True)],
            runs=known if any(known) else None, drafts=drafts if guess else None,
        )  # fmt: skip
        for token in runner.launch(StepPlan(decode=[group])).collect().tokens:
            told[token.slot].append(token)
    runner.launch(StepPlan(released_slots=[0, 1, 2])).collect()
    return [one[:NUM_TOKENS] for one in told]


def ids(told: list[list[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in one] for one in told]


def right_up_to(num_right: int, num_tokens: int) -> Guess:
    """Draft so many tokens, of which the first ones are right."""

    def guess(slot: int, number: int, follow: list[int]) -> tuple[int, ...]:
        most = min(num_tokens, NUM_TOKENS - number - 1)
        return tuple(token if place < num_right else (token + 1) % 300 for place, token in enumerate(follow[:most]))

    return guess


def one_slot_alone(slot: int, number: int, follow: list[int]) -> tuple[int, ...]:
    return tuple(follow[: min(3 + slot, NUM_TOKENS - number - 1)]) if slot != 1 else ()


@cache
def undrafted(device: str, number: int) -> list[list[SampledToken]]:
    return serve(runner_on(device), PARAMS[number], None, [])


GUESSES: dict[str, Guess] = {
    **{f"{right} of {total}": right_up_to(right, total) for total in (1, 4) for right in range(total + 1)},
    "some slots, of several lengths": one_slot_alone,
}
# Between none, two and all of four that are right: the same lines once more.
LONG = ("1 of 4", "3 of 4")
CASES = [
    pytest.param(guess, id=name, marks=pytest.mark.long if name in LONG else ()) for name, guess in GUESSES.items()
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("guess", CASES)
@pytest.mark.parametrize("params", PARAMS)
def test_a_draft_changes_no_token_and_no_logprob_whatever_is_right_of_it(
    device: str, guess: Guess, params: list[SamplingParams]
) -> None:
    runner = runner_on(device)
    wanted = undrafted(device, PARAMS.index(params))
    for runs in (False, True):
        got = serve(runner, params, guess, ids(wanted), runs)
        assert ids(got) == ids(wanted)
        for mine, theirs in zip(got, wanted, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert (one.logprob is None) == (other.logprob is None)
                if one.logprob is not None and other.logprob is not None:
                    assert abs(one.logprob.logprob - other.logprob.logprob) < CHUNKING_LOGPROB_ATOL
                    assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_goes_on_from_its_last_accepted_token(device: str) -> None:
    """The next step reads it on the device."""
    runner = runner_on(device)
    wanted = ids(serve(runner, [QUIET] * 3, None, []))
    begin(runner, [QUIET] * 3)
    drafts = [tuple(wanted[0][1:4]), (wanted[1][1], 299), (299, 298)]
    places = [len(prompt) for prompt in PROMPTS]
    told = runner.launch(StepPlan(decode=[DecodeGroup([0, 1, 2], places, [1] * 3, drafts=drafts)])).collect().tokens
    assert [token.token_id for token in told if token.slot == 0] == wanted[0][1:5]
    assert [token.token_id for token in told if token.slot == 1] == wanted[1][1:3]
    assert [token.token_id for token in told if token.slot == 2] == wanted[2][1:2]
    assert runner._last_tokens[:3].tolist() == [wanted[0][4], wanted[1][2], wanted[2][1]]
    runner.launch(StepPlan(released_slots=[0, 1, 2])).collect()


def test_what_has_no_finite_logits_ends_where_a_step_of_its_own_would_end_it() -> None:
    logits = torch.zeros(4, 40)
    logits[:, 3] = 9.0
    logits[2] = torch.nan
    for draft, wanted in (((3, 3, 3), [3, 3, NOT_FINITE]), ((3, 4, 3), [3, 3]), ((4, 3, 3), [3])):
        sampler = Sampler(1, 40, torch.device("cpu"))
        sampler.assign(0, QUIET, np.zeros(0, np.int32), np.zeros(0, np.int32))
        sampled = sampler.verify(logits, [0], [0], [draft])
        sampled.copy_to_host()
        assert [token.token_id for token in sampled.to_host()] == wanted
        assert sampled.tokens.tolist() == [max(wanted[-1], 0)]


def test_what_is_refused_is_not_counted_for_penalties() -> None:
    """The table of a slot is a recount of its tokens after each step."""
    vocab, draw = 30, np.random.default_rng(2)
    prompt = np.array([1, 2], np.int32)
    sampler = Sampler(2, vocab, torch.device("cpu"))
    texts: list[list[int]] = [[], []]
    for slot, params in enumerate((PENALISED, replace_seed(PENALISED, 8))):
        sampler.assign(slot, params, prompt, np.zeros(0, np.int32))
    accepted = 0
    for _ in range(60):
        drafts = [tuple(draw.integers(0, 6, draw.integers(0, 4)).tolist()) for _ in range(2)]
        logits = torch.full((2 + sum(map(len, drafts)), vocab), -30.0)
        logits[:, :6] = torch.from_numpy(draw.normal(size=(len(logits), 6))).float()
        sampled = sampler.verify(logits, [0, 1], [len(text) for text in texts], drafts)
        sampled.copy_to_host()
        for text, own in zip(texts, sampled.by_slot(), strict=True):
            text += [token.token_id for token in own]
            accepted += len(own) - 1
        for slot, text in enumerate(texts):
            row = sampler._slots[slot].penalty_row
            assert sampler._penalties.counts[row].tolist() == np.bincount(text, minlength=vocab).tolist()
    assert accepted > 10


def test_what_the_device_drafts_is_judged_as_what_the_host_says() -> None:
    """And a guess is the draw that would come, which counts for no penalty."""
    draw, vocab = np.random.default_rng(4), 50
    params = [SamplingParams(temperature=0.8, seed=1, frequency_penalty=0.9), SamplingParams(temperature=0.0)]
    samplers = [Sampler(2, vocab, torch.device("cpu")) for _ in range(2)]
    for sampler in samplers:
        for slot, one in enumerate(params):
            sampler.assign(slot, one, np.zeros(3, np.int32), np.zeros(0, np.int32))
    told, numbers = [], [0, 0]
    for _ in range(20):
        lengths = [int(one) for one in draw.integers(0, 4, 2)]
        logits = torch.from_numpy(draw.normal(0, 2, (2 + sum(lengths), vocab)).astype(np.float32))
        firsts = [0, 1 + lengths[0]]
        guess = samplers[1].guess(logits[firsts], [0, 1], numbers)
        drafts = [tuple(draw.integers(0, vocab, length).tolist()) for length in lengths]
        drafts = [(int(guess[place]), *draft[1:]) if draft else () for place, draft in enumerate(drafts)]
        blind = [(-4,) * length for length in lengths]
        drafted = torch.tensor([token_id for draft in drafts for token_id in draft], dtype=torch.int64)
        both = [samplers[0].verify(logits, [0, 1], numbers, drafts),
                samplers[1].verify(logits, [0, 1], numbers, blind, drafted=drafted)]  # fmt: skip
        for sampled in both:
            sampled.copy_to_host()
        mine, theirs = ([[token.token_id for token in own] for own in one.by_slot()] for one in both)
        assert mine == theirs
        assert torch.equal(both[0].tokens, both[1].tokens)
        assert all(len(own) > 1 for own, draft in zip(mine, drafts, strict=True) if draft), "the guess was drawn"
        numbers = [number + len(own) for number, own in zip(numbers, mine, strict=True)]
        told.append(mine)
    assert torch.equal(samplers[0]._penalties.counts, samplers[1]._penalties.counts)


@pytest.mark.parametrize("params", [QUIET, DRAWN, PENALISED, SamplingParams(temperature=0.9, min_p=0.02, top_k=9)])
def test_each_row_of_a_draft_draws_from_its_own_mask(params: SamplingParams) -> None:
    """As steps of one token do: one slot has a mask for each row, one has none, and one has a mask and no draft."""
    vocab, draw = 70, np.random.default_rng(6)
    held, alone = (Sampler(3, vocab, torch.device("cpu")) for _ in range(2))
    for sampler in (held, alone):
        for slot in range(3):
            sampler.assign(slot, replace_seed(params, slot), np.array([1, 2], np.int32), np.zeros(0, np.int32))
    numbers, refused, accepted = [0] * 3, 0, 0
    for _ in range(40):
        logits = torch.from_numpy(draw.normal(0, 2, (3, 4, vocab)).astype(np.float32))
        masks = draw.integers(0, 2**32, (3, 4, -(-vocab // 32)), dtype=np.uint64).astype(np.uint32)
        lengths = [int(draw.integers(1, 4)), int(draw.integers(1, 4)), 0]
        told: list[list[int]] = []
        for slot, length in enumerate(lengths):
            told.append([])
            for step in range(1 + length):
                mask = {} if slot == 1 else {slot: masks[slot, step]}
                one = alone.sample(logits[slot, step : step + 1], [slot], [numbers[slot] + step], mask)
                told[slot].append(int(one.tokens[0]))
                if draw.random() < 0.4:
                    break  # the draft is wrong from here on
        drafts = []
        for length, own in zip(lengths, told, strict=True):
            wrong = [(own[-1] + 1) % vocab] * (length - len(own) + 1)
            drafts.append(tuple([*own, *wrong[1:]][:length] if len(own) > length else [*own[:-1], *wrong]))
        rows = torch.cat([logits[slot, : 1 + length] for slot, length in enumerate(lengths)])
        given = {0: masks[0, : 1 + lengths[0]], 2: masks[2, 0]}
        sampled = held.verify(rows, [0, 1, 2], numbers, drafts, given)
        sampled.copy_to_host()
        assert [[token.token_id for token in own] for own in sampled.by_slot()] == told
        refused += sum(len(own) <= length for own, length in zip(told, lengths, strict=True))
        accepted += sum(len(own) - 1 for own in told)
        numbers = [number + len(own) for number, own in zip(numbers, told, strict=True)]
    assert min(refused, accepted) > 20


def replace_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | {"seed": seed})


AT_ONCE = 100


def texts_of(draft: tuple[int, ...], logits: torch.Tensor, seeds: range) -> list[list[int]]:
    """Steps of AT_ONCE slots, each with a seed of its own."""
    sampler, slots = Sampler(AT_ONCE, logits.shape[1], torch.device("cpu")), list(range(AT_ONCE))
    nothing, texts = np.zeros(0, np.int32), []
    for begin in range(0, len(seeds), AT_ONCE):
        for slot in slots:
            sampler.assign(slot, SamplingParams(seed=seeds[begin + slot]), nothing, nothing)
        sampled = sampler.verify(logits.repeat(AT_ONCE, 1), slots, [0] * AT_ONCE, [draft] * AT_ONCE)
        sampled.copy_to_host()
        told: list[list[int]] = [[] for _ in slots]
        for token in sampled.to_host():
            told[token.slot].append(token.token_id)
        texts += told
    return texts


def chi_square_p(tokens: list[int], chances: np.ndarray) -> float:
    return float(stats.chisquare(np.bincount(tokens, minlength=len(chances)), len(tokens) * chances).pvalue)


def test_drawn_text_has_its_distribution_with_drafts_and_a_wrong_rule_is_seen() -> None:
    """Of each place, over all seeds: the first token as its logits say, whatever is drafted; the next, where the draft
    is drawn, as theirs say. A rule that keeps a draft by its chance and draws again where it does not favours it.
    """
    logits = torch.tensor([[1.2, 0.0, 0.5, -0.3, 0.2], [0.1, 1.0, -0.7, 0.4, 0.0]])
    chances = torch.softmax(logits.double(), 1).numpy()
    count = 12_000
    for draft in (0, 3):
        texts = texts_of((draft,), logits, range(count))
        assert chi_square_p([text[0] for text in texts], chances[0]) > CHI_SQUARE_P
        second = [text[1] for text in texts if len(text) == 2]
        assert all(len(text) == 1 + count_equal(text, (draft,)) for text in texts)
        assert len(second) == sum(text[0] == draft for text in texts)
        assert chi_square_p(second, chances[1]) > CHI_SQUARE_P
        draw = np.random.default_rng(draft)
        kept = draw.random(count) < chances[0, draft]
        wrong = [draft if keep else text[0] for keep, text in zip(kept, texts, strict=True)]
        assert chi_square_p(wrong, chances[0]) < CHI_SQUARE_POWER_P
