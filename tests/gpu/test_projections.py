"""Packed products equal fused ones, for one row and for many; and load refuses what cannot be served."""

import math

import pytest
import torch

from gpu.architecture import ModelError, named_shape
from gpu.config import GpuConfig, ModelConfig
from gpu.load import load_runner
from gpu.projections import FusedProjections, PackedProjections, Projections, projections_for
from gpu.sampling_params import SamplingParams
from gpu.step import PageWrite, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan
from gpu.weights import random_weights
from tests.tolerances import ATTENTION_F32_ATOL

SHAPE = named_shape("tiny")
CPU = torch.device("cpu")


@torch.inference_mode()
def outputs(projections: Projections, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, SHAPE.hidden, generator=generator)
    attended = torch.randn(rows, SHAPE.num_heads * SHAPE.dim, generator=generator)
    return [
        projections.qkv(1, hidden),
        projections.output(1, attended, hidden),
        projections.mlp(1, hidden),
        projections.logits(hidden),
    ]


@pytest.mark.parametrize("rows", [1, 2, 8, 100])
def test_packed_products_equal_fused_ones(rows: int) -> None:
    weights = random_weights(SHAPE, 1, torch.float32, CPU, lambda fraction: None)
    packed, fused = PackedProjections(weights, 1e-5), FusedProjections(weights, 1e-5)
    for got, wanted in zip(outputs(packed, rows), outputs(fused, rows), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=ATTENTION_F32_ATOL)


def test_the_comparison_sees_another_layer() -> None:
    weights = random_weights(SHAPE, 1, torch.float32, CPU, lambda fraction: None)
    projections = FusedProjections(weights, 1e-5)
    hidden = torch.ones(1, SHAPE.hidden)
    assert (projections.qkv(0, hidden) - projections.qkv(1, hidden)).abs().max() > ATTENTION_F32_ATOL


def test_bf16_is_not_packed() -> None:
    weights = random_weights(SHAPE, 1, torch.bfloat16, CPU, lambda fraction: None)
    assert isinstance(projections_for(SHAPE, weights), FusedProjections)


def load_tiny(max_context_tokens: int | None):
    stages: list[tuple[str, float]] = []
    runner = load_runner(
        ModelConfig(random_weights="tiny"), GpuConfig(device="cpu"), max_running=2,
        max_context_tokens=max_context_tokens, chunk_tokens=64, max_hidden_tokens=1000, num_pages=8,
        on_progress=lambda stage, fraction: stages.append((stage, fraction)),
    )  # fmt: skip
    return runner, stages


def test_load_tells_its_progress_and_its_limits() -> None:
    runner, stages = load_tiny(100)
    assert stages[-1] == ("weights", 1.0)
    assert [fraction for _, fraction in stages] == sorted(fraction for _, fraction in stages)
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
    units = [PrefillUnit(0, layer, 0, len(ids)) for layer in range(SHAPE.num_layers)]
    plan = StepPlan(page_writes=[PageWrite(0, 0, list(range(7)))], new_jobs=[job], units=units)
    result = runner.launch(plan).collect()
    best = [entry.top[0] for entry in result.prompt_logprobs[0]]
    assert result.tokens[0].token_id >= 0
    assert len({token_id for token_id, _ in best}) > len(best) // 2
    assert all(math.log(1 / SHAPE.vocab_size) < logprob < 0 for _, logprob in best)
    assert max(logprob for _, logprob in best) > math.log(10 / SHAPE.vocab_size)
