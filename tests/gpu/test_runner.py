"""The runner against Hugging Face transformers on the reference model: same tokens, same logprobs.

Greedy equality is checked with one transformers forward over prompt and output: if its most likely token after every
prefix is the token that we drew, its own greedy loop would have drawn the same ones. Where two tokens are equally
likely but for float32's rounding, either is right: ours must be as likely as its best, within the tolerance.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu.sampling_params import SamplingParams
from gpu.step import PrefillJob, StepPlan
from tests.gpu.reference_model import (
    FOLDER,
    Generated,
    decode,
    document_prompt,
    generate,
    needle_prompt,
    prefill_prompts,
    reference_runner,
    tokenizer,
)
from tests.tolerances import BF16_AGREEMENT_LOSS, BF16_LOGPROB_ATOL, PROMPT_LOGPROB_ATOL, SECOND_BEST_SEEN

NUM_STEPS = 64
FEW_LENGTHS = [2100] + [500] * 2 + [200] * 4 + [60, 1]  # the first is of two chunks
LENGTHS = [8000] + [2000] * 2 + [1000] * 4 + [500] * 4 + [200] * 7 + [60, 1]
AGREEMENT_PROMPTS = range(1, 7)  # of 2,000 and 1,000 tokens, where all are asked
LOGPROBS_PROMPT = -3  # of 200 tokens, since bf16 without its instructions takes a CPU twenty times as long
WITH_LOGPROBS = SamplingParams(temperature=0.0, num_prompt_logprobs=1)


@pytest.fixture(scope="module", params=[FEW_LENGTHS, pytest.param(LENGTHS, marks=pytest.mark.long)], ids=["few", "all"])
def prompts(request: pytest.FixtureRequest) -> list[np.ndarray]:
    builders = (needle_prompt, needle_prompt, document_prompt)
    made = [builders[seed % 3](length, seed) for seed, length in enumerate(request.param[:-1])]
    return [*made, np.array([0], dtype=np.int32)]


@pytest.fixture(scope="module")
def generated(prompts: list[np.ndarray]) -> Generated:
    return generate(reference_runner(), prompts, NUM_STEPS, WITH_LOGPROBS)


def transformers_logits(dtype: torch.dtype, sequences: list[list[int]]) -> Iterator[torch.Tensor]:
    """Logits float32 `[tokens, vocab]` of each sequence."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    with torch.inference_mode():
        for sequence in sequences:
            yield model(torch.tensor(sequence)[None]).logits[0].float()


@dataclass(frozen=True)
class Wanted:
    """transformers' word on a sequence, `[tokens - 1]`: float32 logprobs of the actual next token, of the one that is
    most likely to us, of the most likely and the second; and which is the most likely.
    """

    following: torch.Tensor
    ours: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    best: torch.Tensor


@pytest.fixture(scope="module")
def wanted(prompts: list[np.ndarray], generated: Generated) -> list[Wanted]:
    """For each prompt with its output."""
    sequences = [[*ids.tolist(), *tokens] for ids, tokens in zip(prompts, generated.tokens, strict=True)]
    answers = []
    for slot, logits in enumerate(transformers_logits(torch.float32, sequences)):
        ours = [entry.top[0][0] for entry in generated.prompt_logprobs[slot]] + generated.tokens[slot]
        asked = torch.tensor([sequences[slot][1:], ours]).T  # [tokens - 1, 2]
        mass, best = logits[:-1].logsumexp(1, keepdim=True), logits[:-1].topk(2)
        logprobs = torch.cat((logits[:-1].gather(1, asked), best.values), 1) - mass
        answers.append(Wanted(*logprobs.unbind(1), best.indices[:, 0]))
    return answers


@pytest.mark.timeout(900)
def test_greedy_tokens_equal_transformers(
    prompts: list[np.ndarray], generated: Generated, wanted: list[Wanted]
) -> None:
    for ids, tokens, peer in zip(prompts, generated.tokens, wanted, strict=True):
        assert len(tokens) == NUM_STEPS
        drawn = slice(len(ids) - 1, None)
        assert (peer.first - peer.ours)[drawn].max() <= PROMPT_LOGPROB_ATOL


def test_prompt_logprobs_equal_transformers(
    prompts: list[np.ndarray], generated: Generated, wanted: list[Wanted]
) -> None:
    for slot, (ids, peer) in enumerate(zip(prompts, wanted, strict=True)):
        got, size = generated.prompt_logprobs[slot], len(ids) - 1
        assert len(got) == size
        logprobs, best = [entry.logprob for entry in got], [entry.top[0][1] for entry in got]
        np.testing.assert_allclose(logprobs, peer.following[:size], rtol=0, atol=PROMPT_LOGPROB_ATOL)
        np.testing.assert_allclose(best, peer.first[:size], rtol=0, atol=PROMPT_LOGPROB_ATOL)
        np.testing.assert_allclose(best, peer.ours[:size], rtol=0, atol=PROMPT_LOGPROB_ATOL)


def test_the_comparisons_see_a_shift_of_one_position_and_a_second_best_token(wanted: list[Wanted]) -> None:
    shifted = wanted[0].following[1:] - wanted[0].following[:-1]
    assert (shifted.abs() > PROMPT_LOGPROB_ATOL).float().mean() > 0.9
    lead = torch.cat([peer.first - peer.second for peer in wanted])
    assert (lead > PROMPT_LOGPROB_ATOL).float().mean() > SECOND_BEST_SEEN


def test_the_reference_model_finds_the_needle(prompts: list[np.ndarray], generated: Generated) -> None:
    asked = [index for index in range(len(prompts) - 2) if index % 3 == 0 and index % 2 == 0]
    assert len(asked) >= 2
    for index in asked:
        prompt = tokenizer().decode(prompts[index].tolist(), skip_special_tokens=False)
        answer = tokenizer().decode(generated.tokens[index], skip_special_tokens=False).split("<|end|>")[0]
        assert f" is {answer}." in prompt


def test_bf16_logprobs_are_those_of_float32_but_for_rounding(prompts: list[np.ndarray], wanted: list[Wanted]) -> None:
    runner, index = reference_runner(dtype="bfloat16"), LOGPROBS_PROMPT
    (ours,) = generate(runner, [prompts[index]], 1, WITH_LOGPROBS).prompt_logprobs.values()
    following = wanted[index].following[: len(ours)]
    apart = torch.tensor([entry.logprob for entry in ours]) - following
    assert apart.abs().mean() <= BF16_LOGPROB_ATOL
    assert (following[1:] - following[:-1]).abs().mean() > BF16_LOGPROB_ATOL, "a shift would be noticed"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_bf16_agrees_with_float32_as_much_as_transformers_bf16_does(
    prompts: list[np.ndarray], wanted: list[Wanted]
) -> None:
    sequences = [prompts[index].tolist() for index in AGREEMENT_PROMPTS]
    runner = reference_runner(dtype="bfloat16")
    ours = generate(runner, [prompts[index] for index in AGREEMENT_PROMPTS], 1, WITH_LOGPROBS).prompt_logprobs
    agree_ours, agree_theirs, total = 0, 0, 0
    theirs = transformers_logits(torch.bfloat16, sequences)
    for slot, (index, logits) in enumerate(zip(AGREEMENT_PROMPTS, theirs, strict=True)):
        best = wanted[index].best[: len(sequences[slot]) - 1]
        agree_ours += sum(entry.top[0][0] == token for entry, token in zip(ours[slot], best.tolist(), strict=True))
        agree_theirs += int((logits.argmax(1)[:-1] == best).sum())
        total += len(best)
    print(f"agreement with float32 at {total} positions: {agree_ours / total:.4f}, theirs {agree_theirs / total:.4f}")
    assert agree_ours / total >= agree_theirs / total - BF16_AGREEMENT_LOSS


def test_a_sequence_that_is_not_finite_hurts_no_other() -> None:
    prompts = [document_prompt(100, seed) for seed in range(3)]
    lengths = [len(ids) for ids in prompts]
    clean = generate(reference_runner(num_pages=100), prompts, 4).tokens
    runner = reference_runner(num_pages=100)
    broken = generate(runner, prompts, 1)
    runner.launch(StepPlan(new_jobs=[PrefillJob(9, prefill_prompts(prompts))])).collect()
    runner.pool.value_pages[4][runner.pool.page_table[1, 2]] = torch.nan
    decode(runner, broken, lengths, 4)
    assert broken.tokens[1] == [clean[1][0], -1, -1, -1]
    assert [broken.tokens[0], broken.tokens[2]] == [clean[0], clean[2]]
