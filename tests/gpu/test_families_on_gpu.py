"""Tiny models of every family on the GPU: float32 text as the CPU has it, bf16 text as plain torch has it."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from bench.agreement import require_agreement
from bench.decode_loop import build_runner, decode
from bench.engine_steps import draw_prompts
from bench.plain_decode import PlainDecode
from gpu.model.architecture import NAMED_SHAPES, LayerSpec, named_shape
from gpu.model.matrix_formats import rounded
from gpu.operations.recurrent.delta_net import RecurrentWeights
from gpu.weights.drawing import random_weights
from gpu.weights.weights import ExpertWeights, Weights, unpacked

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = [name for name in NAMED_SHAPES if name.startswith("tiny-")]
BIASED = LayerSpec(qkv_bias=True, output_bias=True, mlp_bias=True)
SHAPES = {name: named_shape(name) for name in NAMES} | {
    "tiny with biases": replace(named_shape("tiny"), layer_pattern=(BIASED,))
}
PROMPT_TOKENS, STEPS = 200, 12  # beyond the windows
FLOAT32_OF_STATES = ("decay", "time_bias", "skip")  # which every family keeps so


def moved(weights: Weights, dtype: torch.dtype, wide_norms: bool) -> Weights:
    """On the GPU; what a family keeps in float32 stays so, and what two layers share is there twice."""

    def move(held: Any) -> Any:
        if isinstance(held, torch.Tensor):
            return held.to(CUDA, torch.float32 if wide_norms and held.ndim == 1 else dtype)
        if isinstance(held, list):
            return [move(one) for one in held]
        if not is_dataclass(held):
            return held
        made = replace(held, **{part.name: move(getattr(held, part.name)) for part in fields(held)})
        if isinstance(held, RecurrentWeights):
            wide = {name: getattr(held, name) for name in FLOAT32_OF_STATES}
            made = replace(made, **{name: None if one is None else one.to(CUDA) for name, one in wide.items()})
        if isinstance(held, ExpertWeights) and held.correction is not None:
            made = replace(made, correction=held.correction.to(CUDA))
        return made

    found = move(weights)
    return replace(found, logits=found.embedding) if weights.logits is weights.embedding else found


def parts_of(weights: Weights) -> list[torch.Tensor]:
    """All tensors of all layers that there are."""
    holders = [*weights.layers, *(layer.experts for layer in weights.layers if layer.experts is not None)]
    found = (getattr(holder, part.name) for holder in holders for part in fields(holder))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("name", SHAPES)
def test_texts_on_the_gpu_are_those_of_the_cpu_and_of_plain_torch(name: str) -> None:
    shape, context = SHAPES[name], PROMPT_TOKENS + STEPS + 2
    weights = random_weights(shape, 5, torch.float32, CPU, lambda fraction: None)
    prompts = draw_prompts(2, PROMPT_TOKENS, shape.vocab_size)
    wanted = decode(build_runner(shape, weights, 2, context, torch.float32, CPU), prompts, STEPS).tokens
    for dtype in (torch.float32, torch.bfloat16):
        own = moved(weights, dtype, shape.has_wide_norms)
        tokens = decode(build_runner(shape, own, 2, context, dtype, CUDA), prompts, STEPS).tokens
        if dtype == torch.float32:
            assert (tokens == wanted).mean() >= 0.99 - 1 / tokens.size  # one near-tie
        require_agreement(PlainDecode(shape, own, 2, context, CUDA).follow(prompts, tokens), dtype)


@pytest.mark.parametrize("asked", ["int4", "int8", "fp8"])
def test_biases_are_added_to_products_of_few_bits_on_the_gpu(asked: str) -> None:
    shape, context = rounded(SHAPES["tiny with biases"], asked, "weights"), PROMPT_TOKENS + STEPS + 2
    weights = random_weights(shape, 5, torch.bfloat16, CUDA, lambda fraction: None)
    prompts = draw_prompts(2, PROMPT_TOKENS, shape.vocab_size)
    tokens = decode(build_runner(shape, weights, 2, context, torch.bfloat16, CUDA), prompts, STEPS).tokens
    plain = unpacked(replace(weights, layers=list(weights.layers)))
    require_agreement(PlainDecode(shape, plain, 2, context, CUDA).follow(prompts, tokens), torch.bfloat16)
