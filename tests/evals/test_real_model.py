"""A real chat model's numbers beside another hand's: log probabilities and greedy texts of transformers.

The oracle is transformers on a folder that tests write from the GGUF file. Needs TANDEM_REAL_MODEL, a Llama's GGUF
file, and takes minutes.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from evals.serving import Answer, DecodeRequest, load_serving_engine
from evals.tokenizer import load_tokenizer
from gpu.model.architecture import read_architecture
from tests.gpu.family_checkpoints import checkpoint
from tests.gpu.float32_folder import write_folder
from tests.gpu.gguf_files import write
from tests.tolerances import REAL_MODEL_LOGPROB_ATOL

MODEL = os.environ.get("TANDEM_REAL_MODEL")
TEXT = Path(__file__).parents[2] / "docs" / "HOST_MEMORY.md"
NUM_TOKENS, ANSWER_TOKENS = 2_000, 24
QUESTIONS = (
    "What is the capital of France?", "Name three colours.", "What is 7 times 8?", "Write a sentence about the sea.",
    "Who wrote Hamlet?", "What do bees make?", "Spell the word orchard.", "Is ice colder than water?",
    "Give me a synonym of happy.", "How many days has a week?", "Say good morning in Spanish.",
    "Write a Python function that adds two numbers.",
)  # fmt: skip


def numbers_of(folder: Path, dtype: torch.dtype = torch.float32) -> Callable[[list[int]], torch.Tensor]:
    """Return the oracle: token ids to log probabilities of the next one, `[tokens, vocab]` in `dtype`."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(dtype)

    @torch.inference_mode()
    def logprobs(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return logprobs


def ask(file: Path, prompts: list[list[int]], max_new_tokens: int, stops: list[int], top: int | None) -> list[Answer]:
    """What the profile `exact` of the engine says of the file's model."""
    asks = [DecodeRequest(str(number), prompt, max_new_tokens, stops, top) for number, prompt in enumerate(prompts)]
    with load_serving_engine(file, "cpu", max(map(len, prompts)) + max_new_tokens, None) as engine:
        return sorted(engine.answer(asks, "exact"), key=lambda answer: int(answer.key))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(MODEL is None, reason="needs TANDEM_REAL_MODEL: a Llama's GGUF file")
def test_numbers_and_greedy_texts_are_those_of_transformers(tmp_path: Path) -> None:
    assert MODEL is not None
    file = Path(MODEL)
    write_folder(file, tmp_path)
    oracle, exact, tokenizer = numbers_of(tmp_path), numbers_of(tmp_path, torch.float64), load_tokenizer(file)
    stops = list(read_architecture(file).eos_token_ids)

    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[:NUM_TOKENS]
    assert len(tokens) == NUM_TOKENS
    (answer,) = ask(file, [tokens], 1, stops, 0)
    mine = np.array([one.logprob for one in answer.prompt_logprobs])
    said = torch.arange(NUM_TOKENS - 1), tokens[1:]
    right, theirs = exact(tokens)[said].numpy(), oracle(tokens)[said].double().numpy()
    off, off_theirs = np.abs(mine - right), np.abs(theirs - right)
    print(
        f"\n{NUM_TOKENS} log probabilities beside float64, at most and in the mean: {off.max():.1e}, {off.mean():.1e}; "
        f"transformers in float32: {off_theirs.max():.1e}, {off_theirs.mean():.1e}; "
        f"perplexity {np.exp(-right.mean()):.4f}"
    )

    prompts = [encode_turn(tokenizer, question) for question in QUESTIONS]
    texts = [answer.token_ids for answer in ask(file, prompts, ANSWER_TOKENS, stops, None)]
    print("\n".join(repr(tokenizer.decode(one)) for one in texts))
    assert off.max() <= REAL_MODEL_LOGPROB_ATOL
    assert off.mean() <= 1.5 * off_theirs.mean(), "no further from float64 than another's float32"
    for prompt, text in zip(prompts, texts, strict=True):
        assert is_greedy(oracle, prompt, text, stops), tokenizer.decode(text)


def encode_turn(tokenizer: Any, question: str) -> list[int]:
    turn = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def is_greedy(
    oracle: Callable[[list[int]], torch.Tensor], prompt: list[int], text: list[int], stops: list[int]
) -> bool:
    """Whether each token of the text is the oracle's likeliest behind those before it, and a stop token behind all of
    them where the text has fewer than ANSWER_TOKENS: then greedy decoding by the oracle is this text.
    """
    likeliest = oracle(prompt + text)[len(prompt) - 1 :].argmax(-1).tolist()
    return likeliest[: len(text)] == text and (len(text) == ANSWER_TOKENS or likeliest[len(text)] in stops)


def test_the_oracles_folder_is_the_checkpoint_that_the_file_means(tmp_path: Path) -> None:
    """Written of a file in blocks of 4 bits: every number, name and row, and what transformers makes of it."""
    file = write(checkpoint("llama2").folder, tmp_path / "small.gguf", lambda name: "Q4_1")
    write_folder(file, tmp_path / "oracle")
    found, meant = (load_file(tmp_path / name / "model.safetensors") for name in ("oracle", "small-plain"))
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    tokens = list(range(3, 60))
    one, other = (numbers_of(tmp_path / name)(tokens) for name in ("oracle", "small-plain"))
    torch.testing.assert_close(one, other, rtol=0, atol=REAL_MODEL_LOGPROB_ATOL)


def test_a_text_that_parts_from_the_oracles_choice_is_no_greedy_one() -> None:
    def oracle(tokens: list[int]) -> torch.Tensor:
        return torch.eye(9)[[min(token + 1, 7) for token in tokens]]  # counts up to 7, the stop token

    assert is_greedy(oracle, [1, 2], [3, 4, 5, 6], [7])
    for wrong in ([3, 4, 6], [3, 4, 5], [4, 5, 6], []):
        assert not is_greedy(oracle, [1, 2], wrong, [7]), wrong


def test_a_number_that_is_off_by_a_bfloat16_rounding_would_be_seen() -> None:
    logits = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 4
    off = (logits.bfloat16().float().log_softmax(-1) - logits.log_softmax(-1)).abs()
    assert off.max() > 100 * REAL_MODEL_LOGPROB_ATOL
