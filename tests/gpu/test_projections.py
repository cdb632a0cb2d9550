"""Loading tells its progress and refuses what cannot be served; random weights behave like a model."""

import math

import pytest
import torch

from gpu.config import GpuConfig, ModelConfig
from gpu.model.architecture import ModelError, named_shape
from gpu.sampling_params import SamplingParams
from gpu.step import PageWrite, PrefillJob, PrefillPrompt, StepPlan
from tests.gpu.reference_model import layer_units
from tests.gpu.small_runner import load_small

SHAPE = named_shape("tiny")


def load_tiny(max_context_tokens: int | None):
    stages: list[tuple[str, float]] = []
    runner = load_small(
        ModelConfig(random_weights="tiny"),
        GpuConfig(device="cpu"),
        on_progress=lambda stage, fraction: stages.append((stage, fraction)),
        max_running=2,
        max_context_tokens=max_context_tokens,
        chunk_tokens=64,
        max_hidden_tokens=1000,
        num_pages=8,
    )
    return runner, stages


def test_load_tells_its_progress_and_its_limits() -> None:
    runner, stages = load_tiny(100)
    names = [stage for stage, _ in stages]
    assert list(dict.fromkeys(names)) == ["weights", "kernels"], "what follows the weights has a name of its own"
    for name in ("weights", "kernels"):
        fractions = [fraction for stage, fraction in stages if stage == name]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
    limits = runner.limits
    assert (limits.num_pages, limits.page_tokens, limits.max_context_tokens, limits.vocab_size) == (8, 16, 100, 1024)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ModelError, match="asked 262145, tiny has 262144 positions"):
        load_tiny(262_145)


def test_random_weights_give_finite_logits_that_are_not_flat() -> None:
    runner, _ = load_tiny(100)
    ids = torch.randint(0, 1024, (60,), generator=torch.Generator().manual_seed(0)).numpy().astype("int32")
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    job = PrefillJob(0, [PrefillPrompt(0, ids, 0, len(ids), sampling, "exact")])
    units = layer_units(job, len(ids), SHAPE.num_layers)
    plan = StepPlan(page_writes=[PageWrite(0, 0, list(range(7)))], new_jobs=[job], units=units)
    result = runner.launch(plan).collect()
    best = [entry.top[0] for entry in result.prompt_logprobs[0]]
    assert result.tokens[0].token_id >= 0
    assert len({token_id for token_id, _ in best}) > len(best) // 2
    assert all(math.log(1 / SHAPE.vocab_size) < logprob < 0 for _, logprob in best)
    assert max(logprob for _, logprob in best) > math.log(10 / SHAPE.vocab_size)
