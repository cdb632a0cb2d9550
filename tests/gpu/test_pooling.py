"""Vectors of prompts, as transformers in float32 has the hidden states behind the final norm."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu.config import GpuConfig, ModelConfig
from gpu.pooling import Pooling
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import PrefillJob, PrefillPrompt, StepPlan
from tests.gpu.reference_model import Pages, document_prompt, layer_units, shallow_model
from tests.gpu.small_runner import load_small
from tests.tolerances import POOLED_ATOL

LAYERS = 2
LENGTHS = (40, 1, 323, 17)
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [document_prompt(length, length)[:length] for length in LENGTHS]
KINDS = [Pooling(kind="last"), Pooling(kind="mean"), Pooling(kind="logits", token_ids=(7361, 5, 3444))]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load_small(
        ModelConfig(path=Path(shallow_model(LAYERS).name)),
        GpuConfig(device="cpu", dtype="float32", graph_batch_sizes=()),
    )


@pytest.fixture(scope="module")
def oracle() -> list[dict[str, np.ndarray]]:
    """Of each prompt alone: by the kind of pooling."""
    model = AutoModelForCausalLM.from_pretrained(shallow_model(LAYERS).name, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        with torch.no_grad():
            told = model(torch.tensor(prompt, dtype=torch.int64)[None], output_hidden_states=True)
        hidden = told.hidden_states[-1][0].double()
        logits = told.logits[0, -1, KINDS[2].token_ids]
        found.append({"last": hidden[-1].numpy(), "mean": hidden.mean(0).numpy(), "logits": logits.numpy()})
    return found


def pool(runner: Runner, poolings: list[Pooling | None], chunk_tokens: int) -> dict[int, np.ndarray]:
    """All prompts in one job."""
    prompts = [
        PrefillPrompt(slot, ids, 0, len(ids), GREEDY, "exact", pooling=pooling)
        for slot, (ids, pooling) in enumerate(zip(PROMPTS, poolings, strict=True))
    ]
    job, pages = PrefillJob(1, prompts), Pages(runner)
    writes = [pages.take(prompt.slot, len(prompt.token_ids) + 1) for prompt in prompts]
    units = layer_units(job, chunk_tokens, LAYERS)
    result = runner.launch(StepPlan(page_writes=writes, new_jobs=[job], units=units)).collect()
    runner.launch(StepPlan(released_slots=list(range(len(PROMPTS))))).collect()
    assert [token.slot for token in result.tokens] == list(range(len(PROMPTS))), "the draw is as without"
    return result.pooled


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_vectors_of_packed_prompts_are_those_of_transformers(
    runner: Runner, oracle: list[dict[str, np.ndarray]], chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.prefill.outputs.POOLED_TOKENS", 64)
    for shift in range(3):
        poolings = [None if slot == shift else KINDS[(slot + shift) % 3] for slot in range(len(PROMPTS))]
        pooled = pool(runner, poolings, chunk_tokens)
        assert set(pooled) == {slot for slot, pooling in enumerate(poolings) if pooling is not None}
        for slot, vector in pooled.items():
            wanted = oracle[slot][poolings[slot].kind]
            assert vector.dtype == np.float32
            np.testing.assert_allclose(vector, wanted, atol=POOLED_ATOL * np.abs(wanted).max(), rtol=0)


def test_the_comparison_sees_a_token_more_or_less(oracle: list[dict[str, np.ndarray]]) -> None:
    """Power: the mean without the first of 323 tokens, and the hidden state before the last."""
    model = AutoModelForCausalLM.from_pretrained(shallow_model(LAYERS).name, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(torch.tensor(PROMPTS[2], dtype=torch.int64)[None]).last_hidden_state[0].double()
    for wrong, kind in ((hidden[1:].mean(0), "mean"), (hidden[-2], "last")):
        wanted = oracle[2][kind]
        assert np.abs(wrong.numpy() - wanted).max() > 10 * POOLED_ATOL * np.abs(wanted).max()
