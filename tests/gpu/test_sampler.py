"""The sampler against a float64 oracle that sorts, sums and races one row at a time."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gpu.sampling.sampler import NO_MASKS, KeyStream, Masks, Sampled, Sampler
from gpu.sampling_params import SamplingParams
from gpu.step import NOT_FINITE, NOTHING_LEFT, SampledToken
from tests.gpu.sampler_oracle import distribution, draw_key, edit_scores, race_winner
from tests.tolerances import CHI_SQUARE_P, CHI_SQUARE_POWER_P

NOTHING = np.zeros(0, np.int32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTION_ROWS = 160  # one draw each: enough that every option changes one, though few change by design
OPTIONS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=7),
    "top_k 1": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=10**6),
    "top_p": SamplingParams(top_p=0.8),
    "tiny top_p": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.1),
    "all filters": SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
    "bias": SamplingParams(logit_bias={3: 2.5, 50: -100.0, 7: 1.0}),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.6),
    "everything": SamplingParams(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2,
                                 presence_penalty=0.3, frequency_penalty=-0.4, logit_bias={1: 1.0}),
    "greedy": SamplingParams(temperature=0.0),
    "greedy with penalties": SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=1.0),
    "greedy with bias": SamplingParams(temperature=0.0, logit_bias={5: 30.0}),
}  # fmt: skip


def make_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | {"seed": seed})


def read(
    sampler: Sampler, logits: torch.Tensor, slots: list[int], samples: list[int], masks: Masks = NO_MASKS
) -> list[SampledToken]:
    return arrived(sampler.sample(logits.to(sampler.device), slots, samples, masks))


def mask_of(banned: Iterable[int], vocab: int) -> np.ndarray:
    """Every token but these; bits beyond the vocabulary mean nothing, and are set."""
    words = [0xFFFFFFFF] * -(-vocab // 32)
    for token in banned:
        words[token // 32] -= 1 << (token % 32)
    return np.array(words, np.uint32)


def arrived(sampled: Sampled) -> list[SampledToken]:
    """What was drawn, once it has been copied."""
    sampled.copy_to_host()
    if sampled.tokens.is_cuda:
        torch.cuda.synchronize()
    return sampled.to_host()


def draw_once(logits: torch.Tensor, params: list[SamplingParams], samples: list[int], device: str = "cpu") -> list[int]:
    """One draw of a row each, slots without a past."""
    sampler = Sampler(len(params), logits.shape[1], torch.device(device))
    for slot, one in enumerate(params):
        sampler.assign(slot, one, NOTHING, NOTHING)
    return [token.token_id for token in read(sampler, logits, list(range(len(params))), samples)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_draws_what_its_definition_draws(params: SamplingParams, device: str) -> None:
    rows, vocab = OPTION_ROWS, 80
    logits = make_logits(rows, vocab, seed=11)
    prompt, output = [3, 4, 9, 9, 70], [9, 9, 9, 21, 3]
    sampler = Sampler(rows, vocab, torch.device(device))
    for slot in range(rows):
        sampler.assign(slot, with_seed(params, slot), ints(*prompt), ints(*output))
    drawn = read(sampler, logits, list(range(rows)), [5] * rows)
    for slot in range(rows):
        scores = edit_scores(logits[slot].numpy(), params, prompt, output)
        if params.is_greedy:
            expected = int(scores.argmax())
        else:
            expected = race_winner(distribution(scores, params), draw_key(slot, 5))
        assert drawn[slot].token_id == expected


def test_the_oracle_comparison_sees_each_option() -> None:
    """Power: leaving any one option out changes what is drawn from the same logits and seeds."""
    rows, vocab = OPTION_ROWS, 80
    logits = make_logits(rows, vocab, seed=11)
    plain = SamplingParams()
    for name, params in OPTIONS.items():
        if name == "top_k beyond the vocabulary":
            continue
        without = SamplingParams(temperature=0.0) if params.is_greedy and name != "greedy" else plain
        tokens = []
        for one in (params, without):
            sampler = Sampler(rows, vocab, torch.device("cpu"))
            for slot in range(rows):
                sampler.assign(slot, with_seed(one, slot), ints(3, 4, 9, 9, 70), ints(9, 9, 9, 21, 3))
            tokens.append([token.token_id for token in read(sampler, logits, list(range(rows)), [5] * rows)])
        assert tokens[0] != tokens[1], name


def chi_square(params: SamplingParams, claimed: SamplingParams, num_draws: int, device: str) -> float:
    """The p-value of draws under `params`, of many seeds, against the distribution of `claimed`."""
    vocab, rows = 24, 2000
    logits = make_logits(1, vocab, seed=5)[0]
    counts = np.zeros(vocab)
    sampler = Sampler(rows, vocab, torch.device(device))
    for slot in range(rows):
        sampler.assign(slot, with_seed(params, slot), NOTHING, NOTHING)
    for number in range(num_draws // rows):
        tokens = read(sampler, logits.expand(rows, vocab), list(range(rows)), [number] * rows)
        counts += np.bincount([token.token_id for token in tokens], minlength=vocab)
    expected = distribution(logits.numpy().astype(np.float64), claimed) * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    common = expected >= 5  # the rule of thumb for the statistic; rarer tokens are one class
    seen, wanted = counts[common], expected[common]
    if expected[~common].sum() > 0:
        seen, wanted = np.append(seen, counts[~common].sum()), np.append(wanted, expected[~common].sum())
    return float(stats.chisquare(seen, wanted).pvalue)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "all filters"])
def test_draws_of_many_seeds_follow_the_distribution(name: str, device: str) -> None:
    assert chi_square(OPTIONS[name], OPTIONS[name], 20_000, device) > CHI_SQUARE_P


@pytest.mark.parametrize(
    ("params", "claimed"),
    [
        (SamplingParams(temperature=0.7), SamplingParams(temperature=0.75)),
        (SamplingParams(top_k=7), SamplingParams(top_k=6)),
        (SamplingParams(top_k=6), SamplingParams(top_k=7)),
        (SamplingParams(top_p=0.8), SamplingParams(top_p=0.95)),
    ],
    ids=["temperature", "one more in top_k", "one less in top_k", "top_p"],
)
def test_the_distribution_test_sees_a_wrong_setting(params: SamplingParams, claimed: SamplingParams) -> None:
    assert chi_square(params, claimed, 20_000, "cpu") < CHI_SQUARE_POWER_P


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("logits", "min_p", "drawn"),
    [
        ([math.log(2), 0.0, -1.0], 0.5, {0, 1}),  # half as likely as the best one, exactly
        ([math.log(2), 0.0, -1.0], 0.500001, {0}),
        ([1.0, 1.0, 0.999], 1.0, {0, 1}),
    ],
)
def test_a_token_at_the_bound_of_min_p_may_be_drawn_and_one_below_it_may_not(
    logits: list[float], min_p: float, drawn: set[int], device: str
) -> None:
    rows = 64
    params = [SamplingParams(min_p=min_p, seed=seed) for seed in range(rows)]
    assert set(draw_once(torch.tensor([logits] * rows), params, [0] * rows, device)) == drawn


def test_number_n_of_a_stream_is_the_nth_philox_number_in_any_order() -> None:
    stream = KeyStream(123)
    for number in (0, 1, 63, 64, 65, 500, 2, 127, 128):
        assert stream[number] % 2**64 == draw_key(123, number)
    assert KeyStream(-1)[0] % 2**64 == draw_key(2**64 - 1, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(device: str) -> None:
    vocab = 5000
    logits = make_logits(len(OPTIONS), vocab, seed=3).bfloat16()
    params = [with_seed(one, 100 + row) for row, one in enumerate(OPTIONS.values())]
    numbers = list(range(len(params)))
    together = draw_once(logits, params, numbers, device)
    for row in numbers:
        assert draw_once(logits[row : row + 1], [params[row]], [numbers[row]], device) == [together[row]]
    shuffled = np.random.default_rng(0).permutation(len(params))
    assert draw_once(logits[shuffled], [params[row] for row in shuffled], shuffled.tolist(), device) == [
        together[row] for row in shuffled
    ]


def run_steps(sampler: Sampler, slots: list[int], logits: torch.Tensor, first: int, steps: int) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in slots]
    for step in range(first, first + steps):
        for row, token in enumerate(read(sampler, logits[step], slots, [step] * len(slots))):
            outputs[row].append(token.token_id)
    return outputs


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_across_steps_equal_a_recomputation(device: str) -> None:
    vocab, steps = 30, 25
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)
    params = [penalised, SamplingParams(temperature=0.0), with_seed(OPTIONS["everything"], 9)]
    prompts = [[1, 2, 3], [4], [2, 2]]
    logits = torch.stack([make_logits(3, vocab, seed=7) for _ in range(steps)])
    sampler = Sampler(3, vocab, torch.device(device))
    for slot in range(3):
        sampler.assign(slot, params[slot], ints(*prompts[slot]), NOTHING)
    outputs = run_steps(sampler, [0, 1, 2], logits, 0, steps)
    for slot in range(3):
        for step in range(steps):
            scores = edit_scores(logits[step, slot].numpy(), params[slot], prompts[slot], outputs[slot][:step])
            if params[slot].is_greedy:
                expected = int(scores.argmax())
            else:
                expected = race_winner(distribution(scores, params[slot]), draw_key(9, step))
            assert outputs[slot][step] == expected
    assert len(set(outputs[0])) > 1  # power: without penalties the same logits give one token forever
    assert len(set(outputs[1])) == 1


def test_a_preempted_sequence_draws_on_as_if_it_had_stayed() -> None:
    vocab, steps, cut = 40, 20, 8
    params = with_seed(OPTIONS["everything"], 77)
    logits = torch.stack([make_logits(1, vocab, seed=step) for step in range(steps)])
    sampler = Sampler(4, vocab, torch.device("cpu"))
    sampler.assign(0, params, ints(5, 6), NOTHING)
    whole = run_steps(sampler, [0], logits, 0, steps)[0]
    sampler.assign(1, OPTIONS["repetition"], ints(1), NOTHING)
    sampler.assign(0, params, ints(5, 6), NOTHING)
    begun = run_steps(sampler, [0], logits, 0, cut)[0]
    sampler.release(0)
    sampler.assign(2, OPTIONS["presence"], ints(8), NOTHING)
    sampler.assign(3, params, ints(5, 6), ints(*begun))
    assert begun + run_steps(sampler, [3], logits, cut, steps - cut)[0] == whole


def test_memory_for_counts_stays_where_it_is_while_slots_come_and_go() -> None:
    """Steps in flight read it."""
    sampler = Sampler(3, 100, torch.device("cpu"))
    place = sampler._penalties.counts.data_ptr()
    for _ in range(10):
        for slot in range(3):
            sampler.assign(slot, OPTIONS["presence"], ints(1), NOTHING)
    assert sampler._penalties.counts.data_ptr() == place
    assert sorted(state.penalty_row for state in sampler._slots) == [0, 1, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_finite_logits_say_so_and_disturb_no_other(device: str) -> None:
    vocab = 50
    good = make_logits(1, vocab, seed=1)[0]
    bad = [torch.full((vocab,), float("nan")), torch.full((vocab,), float("-inf")), torch.full((vocab,), float("inf"))]
    bad += [good.clone(), good.clone()]
    bad[3][17], bad[4][17] = float("nan"), float("inf")
    for name in ("greedy", "temperature", "all filters", "everything", "greedy with penalties"):
        params = OPTIONS[name]
        alone = draw_once(good[None], [params], [0], device)[0]
        logits = torch.stack([row for one in bad for row in (good, one)] + [good])
        sampler = Sampler(len(logits), vocab, torch.device(device))
        for slot in range(len(logits)):
            sampler.assign(slot, params, NOTHING, NOTHING)
        sampled = sampler.sample(logits.to(device), list(range(len(logits))), [0] * len(logits))
        assert [token.token_id for token in arrived(sampled)] == [alone, -1] * len(bad) + [alone]
        assert sampled.tokens.tolist() == [alone, 0] * len(bad) + [alone]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_that_leave_nothing_are_told_from_logits_that_are_not_finite(temperature: float, device: str) -> None:
    """The model's logits decide: of a row whose own options spoil them, and of one that has both."""
    vocab = 30
    good = make_logits(1, vocab, seed=1)[0]
    spoilt = torch.full((vocab,), float("nan"))
    overflows = SamplingParams(temperature=temperature, repetition_penalty=1e-39)
    plain = SamplingParams(temperature=temperature)
    rows = [(good, plain), (good, plain), (good, overflows), (spoilt, plain), (spoilt, plain)]
    masks = {1: mask_of(range(vocab), vocab), 3: mask_of(range(vocab), vocab)}
    sampler = Sampler(len(rows), vocab, torch.device(device))
    for slot, (_, params) in enumerate(rows):
        sampler.assign(slot, params, np.arange(vocab, dtype=np.int32), NOTHING)
    logits = torch.stack([row for row, _ in rows]).to(device)
    sampled = sampler.sample(logits, list(range(len(rows))), [0] * len(rows), masks)
    drawn = [token.token_id for token in arrived(sampled)]
    assert drawn[0] >= 0
    assert drawn[1:] == [NOTHING_LEFT, NOTHING_LEFT, NOT_FINITE, NOT_FINITE]
    assert sampled.tokens.tolist() == [drawn[0], 0, 0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [80, 96, 1])
@pytest.mark.parametrize("name", ["greedy", "temperature", "all filters", "everything", "greedy with penalties"])
def test_a_masked_row_draws_from_its_tokens_alone(name: str, vocab: int, device: str) -> None:
    """Against the definition: a token that may not be drawn has a score of minus infinity, after bias and penalties.

    Rows without a mask, beside it and alone, draw what they draw.
    """
    rows = 64 if vocab > 1 else 2
    logits = make_logits(rows, vocab, seed=4)
    params = OPTIONS[name] if vocab > 70 else with_seed(OPTIONS["greedy" if OPTIONS[name].is_greedy else "hot"], 0)
    past = [3, 4, 9] if vocab > 70 else [0]
    random = np.random.default_rng(6)
    banned = {slot: random.permutation(vocab)[: max(0, vocab - 1 - 3 * slot)].tolist() for slot in range(0, rows, 2)}
    sampler = Sampler(rows, vocab, torch.device(device))
    plain = Sampler(rows, vocab, torch.device(device))
    for slot in range(rows):
        for one in (sampler, plain):
            one.assign(slot, with_seed(params, slot), ints(*past), NOTHING)
    masks = {slot: mask_of(tokens, vocab) for slot, tokens in banned.items()}
    slots, zeros = list(range(rows)), [0] * rows
    drawn = [token.token_id for token in read(sampler, logits, slots, zeros, masks)]
    unmasked = [token.token_id for token in read(plain, logits, slots, zeros)]
    for slot in range(rows):
        scores = edit_scores(logits[slot].numpy(), params, past, [], banned.get(slot, ()))
        if params.is_greedy:
            assert drawn[slot] == int(scores.argmax())
        else:
            assert drawn[slot] == race_winner(distribution(scores, params), draw_key(slot, 0))
    assert drawn[1::2] == unmasked[1::2]
    assert vocab == 1 or drawn[::2] != unmasked[::2]  # power: other tokens are what is drawn otherwise


def test_a_failed_row_has_no_logprob_and_the_next_keeps_its_own() -> None:
    logits = make_logits(2, 10, seed=0)
    logits[0, 0] = float("nan")
    sampler = Sampler(2, 10, torch.device("cpu"))
    for slot in range(2):
        sampler.assign(slot, SamplingParams(num_logprobs=2), NOTHING, NOTHING)
    failed, fine = read(sampler, logits, [0, 1], [0, 0])
    assert failed.logprob is None
    assert fine.logprob.top[0][0] == int(logits[1].argmax())


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted 0 to 9"):
        Sampler(1, 10, torch.device("cpu")).assign(0, SamplingParams(logit_bias={10: 1.0}), NOTHING, NOTHING)


def test_the_logits_are_left_as_they_are() -> None:
    logits = make_logits(len(OPTIONS), 80, seed=2)
    before = logits.clone()
    draw_once(logits, list(OPTIONS.values()), [0] * len(OPTIONS))
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_sampling_never_waits_for_the_device() -> None:
    rows, vocab = len(OPTIONS), 1000
    logits = make_logits(rows, vocab, seed=2).cuda()
    sampler = Sampler(rows, vocab, torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            for slot, params in enumerate(OPTIONS.values()):
                if number != 1:
                    sampler.assign(slot, params, ints(1, 2), ints(3))
            masks = {slot: mask_of([3], vocab) for slot in range(0, rows, 2)} if number else {}
            sampler.sample(logits, list(range(rows)), [number] * rows, masks).copy_to_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")


finite = st.floats(-60, 60, width=16).map(lambda value: value + 0.0)  # a tie with -0.0 may go either way
drawn_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(finite | st.just(float("-inf")), min_size=2, max_size=20), drawn_params, st.integers(0, 1000))
def test_a_draw_always_lies_in_the_allowed_set(values: list[float], params: SamplingParams, number: int) -> None:
    """Ties and minus infinities included. The oracle's set is widened by what float32 may round either way."""
    logits = torch.tensor([values])
    token = draw_once(logits, [params], [number])[0]
    if max(values) == float("-inf"):
        assert token == NOT_FINITE
        return
    ranked = sorted(range(len(values)), key=lambda one: (-values[one], one))
    assert values[token] > float("-inf")
    if params.top_k:
        assert token in ranked[: params.top_k]
    loose = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=min(1.0, params.top_p * 1.00001),
                           min_p=params.min_p * 0.99999)  # fmt: skip
    assert distribution(np.array(values, np.float64), loose)[token] > 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=20, unique=True), st.integers(0, 2**32))
def test_greedy_is_the_limit_of_a_vanishing_temperature(values: list[int], seed: int) -> None:
    logits = torch.tensor([values, values, values], dtype=torch.float32)
    cold = [SamplingParams(temperature=temperature, seed=seed) for temperature in (1e-2, 1e-40)]
    assert len(set(draw_once(logits, [SamplingParams(temperature=0.0), *cold], [0, 0, 0]))) == 1
