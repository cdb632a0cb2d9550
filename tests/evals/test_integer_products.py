"""A real chat model as a CPU serves it by default, in integers and over rows in bf16, beside floats and float32 rows.

Needs TANDEM_REAL_MODEL, a Llama's GGUF file, and takes a minute.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.tokenizer import load_tokenizer
from gpu.cpu_step.cpu_step import CpuStep
from gpu.kv.pool import KvPool, PoolShape
from gpu.layers.decoder import Decoder
from gpu.model.architecture import read_architecture
from gpu.model.humming_formats import multiplied
from gpu.page_layout import KvFormat
from gpu.weights.checkpoint import load_weights
from tests.evals.test_real_model import ANSWER_TOKENS, QUESTIONS, TEXT, encode_turn
from tests.tolerances import INTEGERS_KL, INTEGERS_PARTING, INTEGERS_PERPLEXITY

MODEL = os.environ.get("TANDEM_REAL_MODEL")
CPU, ROWS, ROW_TOKENS, PAGE_TOKENS = torch.device("cpu"), 8, 128, 16


@contextmanager
def step_of(file: Path, products: str, kv: KvFormat) -> Iterator[CpuStep]:
    """The compiled step over pages of its own, a slot a row."""
    shape = multiplied(read_architecture(file), products, "products")
    weights = load_weights(file, shape, torch.float32, CPU, lambda fraction: None)
    pages = 256 // PAGE_TOKENS
    pool = KvPool(shape, PoolShape(ROWS * pages, (), PAGE_TOKENS, ROWS, 256, torch.float32, kv=kv), CPU)
    pool.page_table.copy_(torch.arange(ROWS * pages).view(ROWS, pages))
    yield CpuStep(Decoder(shape, weights, pool, 256))


def logprobs_of(step: CpuStep, rows: np.ndarray) -> torch.Tensor:
    """Log probabilities behind each token of `[rows, tokens]`, fed a token at a time: `[tokens, rows, vocab]`."""
    slots = np.arange(len(rows), dtype=np.int32)
    columns = enumerate(np.ascontiguousarray(rows.T))
    return torch.stack([step.run(slots, np.full(len(rows), place), one).log_softmax(-1) for place, one in columns])


def greedy(step: CpuStep, prompt: list[int]) -> tuple[list[int], list[float]]:
    """ANSWER_TOKENS tokens, and how far each one's log probability is above the second's."""
    text, gaps = [], []
    for place in range(len(prompt) + ANSWER_TOKENS - 1):
        token = prompt[place] if place < len(prompt) else text[-1]
        logits = step.run(np.zeros(1, np.int32), np.array([place]), np.array([token]))[0]
        if place >= len(prompt) - 1:
            best = logits.topk(2)
            text.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
    return text, gaps


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(MODEL is None, reason="needs TANDEM_REAL_MODEL: a Llama's GGUF file")
@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_probabilities_and_greedy_texts_are_those_of_products_of_floats(kv: KvFormat) -> None:
    assert MODEL is not None
    tokenizer = load_tokenizer(Path(MODEL))
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[: ROWS * ROW_TOKENS]
    rows = np.array(tokens).reshape(ROWS, ROW_TOKENS)
    prompts = [encode_turn(tokenizer, question) for question in QUESTIONS]
    said, texts, gaps = {}, {}, {}
    for products in ("own", "integers"):
        with step_of(Path(MODEL), products, "float32" if products == "own" else kv) as step:
            said[products] = logprobs_of(step, rows)
            answers = [greedy(step, prompt) for prompt in prompts]
            texts[products], gaps[products] = [text for text, _ in answers], [gap for _, gap in answers]
    right, ours = said["own"].double(), said["integers"].double()
    assert not torch.equal(right, ours), "power: the two are different products"
    kl = (right.exp() * (right - ours)).sum(-1)
    behind = torch.from_numpy(rows.T[1:].copy())[..., None]
    perplexity = [float(one[:-1].gather(-1, behind).mean().neg().exp()) for one in (right, ours)]
    parted = []
    for number, (theirs, mine) in enumerate(zip(texts["own"], texts["integers"], strict=True)):
        place = next((at for at, pair in enumerate(zip(theirs, mine, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            parted.append(gaps["own"][number][place])
    alike = float((right.argmax(-1) == ours.argmax(-1)).double().mean())
    print(
        f"\n{kl.numel()} tokens: KL {kl.mean():.1e}, at most {kl.max():.1e}; perplexity {perplexity}; likeliest tokens "
        f"alike {alike:.4f}; gaps where texts part: {parted}"
    )
    assert kl.mean() <= INTEGERS_KL
    assert abs(perplexity[1] / perplexity[0] - 1) <= INTEGERS_PERPLEXITY
    assert all(gap < INTEGERS_PARTING for gap in parted)
