"""The runner against Hugging Face transformers on the reference model: same tokens, same logprobs.

Greedy equality is checked with one transformers forward over prompt and output: if its most likely token after every
prefix is the token that we drew, its own greedy loop would have drawn the same ones.
"""

from collections.abc import Iterator

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
from tests.tolerances import BF16_AGREEMENT_LOSS, PROMPT_LOGPROB_ATOL

NUM_STEPS = 256
LENGTHS = [8000, 6000, 4000, 3000] + [2000] * 2 + [1000] * 4 + [500] * 4 + [200] * 4 + [60, 1]
NUM_AGREEMENT_PROMPTS = 6
WITH_LOGPROBS = SamplingParams(temperature=0.0, num_prompt_logprobs=1)


def make_prompts() -> list[np.ndarray]:
    builders = (needle_prompt, needle_prompt, document_prompt)
    prompts = [builders[seed % 3](length, seed) for seed, length in enumerate(LENGTHS[:-1])]
    return [*prompts, np.array([0], dtype=np.int32)]


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    return make_prompts()


@pytest.fixture(scope="module")
def generated(prompts: list[np.ndarray]) -> Generated:
    return generate(reference_runner(), prompts, NUM_STEPS, WITH_LOGPROBS)


def transformers_logits(dtype: torch.dtype, sequences: list[list[int]]) -> Iterator[torch.Tensor]:
    """Logits float32 `[tokens, vocab]` of each sequence."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    with torch.inference_mode():
        for sequence in sequences:
            yield model(torch.tensor(sequence)[None]).logits[0].float()


@pytest.fixture(scope="module")
def wanted(prompts: list[np.ndarray], generated: Generated) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each prompt with its output: transformers' most likely tokens, and the logprobs of the actual next ones."""
    sequences = [[*ids.tolist(), *tokens] for ids, tokens in zip(prompts, generated.tokens, strict=True)]
    answers = []
    for sequence, logits in zip(sequences, transformers_logits(torch.float32, sequences), strict=True):
        following = torch.tensor(sequence[1:])[:, None]
        logprobs = logits[:-1].gather(1, following)[:, 0] - logits[:-1].logsumexp(1)
        answers.append((logits.argmax(1), logprobs))
    return answers


@pytest.mark.timeout(900)
def test_greedy_tokens_equal_transformers_for_256_steps(
    prompts: list[np.ndarray], generated: Generated, wanted: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    assert len(prompts) == 20
    for ids, tokens, (best, _) in zip(prompts, generated.tokens, wanted, strict=True):
        assert len(tokens) == NUM_STEPS
        assert tokens == best[len(ids) - 1 : -1].tolist()


def test_prompt_logprobs_equal_transformers(
    prompts: list[np.ndarray], generated: Generated, wanted: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for slot, (ids, (best, logprobs)) in enumerate(zip(prompts, wanted, strict=True)):
        got = generated.prompt_logprobs[slot]
        assert len(got) == len(ids) - 1
        np.testing.assert_allclose(
            [entry.logprob for entry in got], logprobs[: len(ids) - 1], rtol=0, atol=PROMPT_LOGPROB_ATOL
        )
        assert [entry.top[0][0] for entry in got] == best[: len(ids) - 1].tolist()


def test_the_logprob_comparison_sees_a_shift_of_one_position(
    prompts: list[np.ndarray], wanted: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    shifted = wanted[0][1][1:] - wanted[0][1][:-1]
    assert (shifted.abs() > PROMPT_LOGPROB_ATOL).float().mean() > 0.9


def test_the_reference_model_finds_the_needle(prompts: list[np.ndarray], generated: Generated) -> None:
    asked = [index for index in range(len(LENGTHS) - 2) if index % 3 == 0 and index % 2 == 0]
    for index in asked:
        prompt = tokenizer().decode(prompts[index].tolist(), skip_special_tokens=False)
        answer = tokenizer().decode(generated.tokens[index], skip_special_tokens=False).split("<|end|>")[0]
        assert f" is {answer}." in prompt


@pytest.mark.timeout(900)
def test_bf16_agrees_with_float32_as_much_as_transformers_bf16_does(
    prompts: list[np.ndarray], wanted: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    chosen = range(4, 4 + NUM_AGREEMENT_PROMPTS)
    sequences = [prompts[index].tolist() for index in chosen]
    runner = reference_runner(dtype="bfloat16")
    ours = generate(runner, [prompts[index] for index in chosen], 1, WITH_LOGPROBS).prompt_logprobs
    agree_ours, agree_theirs, total = 0, 0, 0
    for slot, (index, logits) in enumerate(zip(chosen, transformers_logits(torch.bfloat16, sequences), strict=True)):
        best = wanted[index][0][: len(sequences[slot]) - 1]
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
