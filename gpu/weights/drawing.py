"""Draw random weights for a named shape, so that activations stay of order one and logits have a spread."""

import math

import torch

from gpu.model.matrix_formats import LATENT_UP, OF_EXPERTS
from gpu.model.spec import Architecture
from gpu.operations.linear.packed_matrix import EXPONENT_BIAS, Packed, Stored
from gpu.operations.linear.word_layout import pack_words
from gpu.weights.weight_allocation import allocate_weights
from gpu.weights.weights import LayerWeights, Progress, Weights, served
from transfer.model_constants import FP4_NUMBERS

RANDOM_LOGIT_SPREAD = 3.0  # standard deviation of random weights' logits: neither flat nor one-hot

RANDOM_ROUTER_SPREAD = 3.0  # of random routers' logits: an expert that is taken by a hair counts for little

DRAWN_ROWS = 65_536  # of a matrix in host memory, drawn on the device at once and copied down

RANDOM_BIAS_SPREAD = 0.1  # of random weights' biases: seen in every result, and no larger than what they are added to

# Of random recurrent layers' steps, before softplus: states fade within some ten to some thousand tokens.
RANDOM_TIME_BIAS = (-7.0, -2.0)

# Of random numbers of few bits: the standard deviation of what a scale multiplies.
RANDOM_STEPS = {"int4": 2.7, "int8": 40.0, "fp8": 16.0}


def random_weights(architecture: Architecture, seed: int, dtype: torch.dtype, device: torch.device,
                   on_progress: Progress, experts_on_card: int | None = None) -> Weights:  # fmt: skip
    """Draw weights as `random_packed_weights` does, and lay them out as `served` does."""
    return served(
        random_packed_weights(architecture, seed, dtype, device, on_progress, experts_on_card), architecture, device
    )


def random_packed_weights(architecture: Architecture, seed: int, dtype: torch.dtype, device: torch.device,
                          on_progress: Progress, experts_on_card: int | None) -> Weights:  # fmt: skip
    """Draw weights on the device. Activations stay of order one, and logits have a spread of RANDOM_LOGIT_SPREAD.
    Matrices of few bits are drawn packed, with equal scales.
    """
    weights = allocate_weights(architecture, dtype, device, torch.bfloat16, experts_on_card)
    generator = torch.Generator(device=device).manual_seed(seed)
    share, split = architecture.share, generator
    if share is not None:  # a device's own weights have a generator of their own, so shared ones are equal on all
        split = torch.Generator(device=device).manual_seed(seed + 1 + share.rank)
    residual_scale = (2 * architecture.main_layers) ** -0.5
    sum_scale = residual_scale * architecture.devices**-0.5  # for matrices whose products are added over devices

    def draw(matrix: Stored, scale: float, generator: torch.Generator = generator) -> None:
        if isinstance(matrix, Packed):
            return draw_packed(matrix, scale * matrix.inner**-0.5, generator)
        for rows in matrix.split(len(matrix) if matrix.device == device else DRAWN_ROWS) if len(matrix) else ():
            drawn = rows if rows.device == device else torch.empty_like(rows, device=device)
            drawn.normal_(0.0, scale * matrix.shape[-1] ** -0.5, generator=generator)
            if drawn is not rows:
                rows.copy_(drawn)
        return None

    def draw_layer(layer: LayerWeights, is_plain: bool) -> None:
        beside = layer.experts and layer.experts.beside
        ones = () if beside is None else (beside.router_norm, beside.norm, beside.post_norm, beside.mlp_post_norm)
        for norm in (layer.attention_norm, layer.mlp_norm, layer.key_norm, *ones):
            if norm is not None:
                norm.fill_(1.0)
        if beside is not None:
            beside.gains.normal_(1.0, RANDOM_BIAS_SPREAD, generator=generator)
        if layer.scale is not None:
            layer.scale.fill_(1.0 - RANDOM_BIAS_SPREAD)
        if layer.inputs is not None:
            draw(layer.inputs.gate, 1.0)
            draw(layer.inputs.projection, 1.0)
        if layer.query_norm is not None and not is_plain:
            layer.query_norm.fill_(1.0)  # without `query_gain`: a trained norm makes up for it, or attention is one-hot
        for norm in (layer.attention_post_norm, layer.mlp_post_norm, layer.inputs and layer.inputs.norm):
            if norm is not None:
                norm.fill_(residual_scale)
        router_bias = layer.experts and layer.experts.router_bias
        for bias in (*layer.biases.values(), router_bias, layer.sinks):
            if bias is not None:
                bias.normal_(0.0, RANDOM_BIAS_SPREAD, generator=generator)
        if layer.recurrent is not None:
            own = layer.recurrent
            draw(own.gates, 1.0)
            own.conv.normal_(0.0, own.conv.shape[2] ** -0.5, generator=generator)
            own.decay.uniform_(0.01, 16.0, generator=generator).log_()
            own.time_bias.uniform_(*RANDOM_TIME_BIAS, generator=generator)
            own.norm.fill_(1.0)
            if own.conv_bias is not None and own.skip is not None:
                own.conv_bias.normal_(0.0, RANDOM_BIAS_SPREAD, generator=generator)
                own.skip.fill_(1.0)
        if layer.latent is not None:
            for norm in (layer.latent.norm, layer.latent.query_norm):
                if norm is not None:
                    norm.fill_(1.0)
            for name in (LATENT_UP, "query_up"):
                if name in layer.matrices:
                    draw(layer.matrices[name], 1.0)
        if layer.experts is not None and layer.experts.correction is not None:
            layer.experts.correction.normal_(0.0, RANDOM_BIAS_SPREAD, generator=generator)
        for first, last in (("qkv", "output"), ("gate_up", "down"), OF_EXPERTS):
            for name, gain in ((first, 1.0), (last, sum_scale)):
                for stack in layer.stacks(name) if name in layer.matrices else ():
                    draw(stack, gain, split)
        if layer.experts is not None:
            draw(layer.experts.router, RANDOM_ROUTER_SPREAD)
            if layer.experts.shared_share is not None:
                draw(layer.experts.shared_share, 1.0)

    main = architecture.main_layers
    is_plain = [spec.plain_qk_norm for spec in architecture.layers]  # whose norms of heads have no weights
    for index, layer in enumerate(weights.layers[:main]):
        draw_layer(layer, is_plain[index])
        on_progress((index + 1) / (main + 1))
    scale = architecture.embedding_scale
    gain = 1.0 if scale == 1 else RANDOM_LOGIT_SPREAD * scale  # or a token's own embedding would be what comes next
    weights.final_norm.fill_(gain)
    is_split = not architecture.tied_embeddings and architecture.logit_rows < architecture.vocab_size
    output = weights.embedding if architecture.tied_embeddings else weights.logits
    draw(output, RANDOM_LOGIT_SPREAD / gain, split if is_split else generator)
    if weights.inputs is not None:
        assert architecture.layer_inputs is not None, "weights are of the architecture"
        weights.inputs.table.normal_(0.0, architecture.layer_inputs.width**-0.5, generator=generator)
        draw(weights.inputs.projection, 1.0)
        weights.inputs.norm.fill_(1.0)
    if not architecture.tied_embeddings:
        weights.embedding.normal_(0.0, 1.0, generator=generator)
    if weights.draft is not None:  # drawn last, so that the model is the same with and without it
        for index, layer in enumerate(weights.layers[main:], main):
            draw_layer(layer, is_plain[index])
        for norm in (weights.draft.embedding_norm, weights.draft.hidden_norm, weights.draft.norm):
            norm.fill_(1.0)
        draw(weights.draft.mix, 1.0)
    on_progress(1.0)
    return weights


def draw_packed(matrix: Packed, spread: float, generator: torch.Generator) -> None:
    """Draw normally distributed numbers of this standard deviation, rounded to the matrix's format."""
    if matrix.kind == "fp4":
        _draw_fp4(matrix, spread, generator)
        return
    step = RANDOM_STEPS[matrix.kind]
    for words in matrix.words.split(4096):
        drawn = torch.empty(len(words), matrix.inner, device=generator.device).normal_(0.0, step, generator=generator)
        if matrix.kind == "fp8":
            numbers = drawn.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            numbers = drawn.add_(matrix.middle).round_().clamp_(0, 2**matrix.bits - 1).to(torch.uint8)
        words.copy_(pack_words(numbers, matrix.bits))
    if matrix.runs is not None:
        _fill_runs(matrix, spread / step)
        return
    matrix.scales.fill_(spread / step)
    if matrix.zeros is not None:
        matrix.zeros.fill_(matrix.middle)


def _draw_fp4(matrix: Packed, spread: float, generator: torch.Generator) -> None:
    """Draw FP4 numbers: one power of two for all groups, times numbers with a standard deviation near 2."""
    exponent = round(math.log2(spread / 2))
    numbers = torch.tensor(FP4_NUMBERS, device=generator.device)
    for words in matrix.words.split(4096):
        drawn = torch.empty(len(words), matrix.inner, device=generator.device)
        drawn.normal_(0.0, spread / 2**exponent, generator=generator)
        nearest = torch.bucketize(drawn.abs(), (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)
        words.copy_(pack_words(nearest | (drawn < 0).to(torch.uint8) << 3, matrix.bits))
    matrix.scales.fill_(EXPONENT_BIAS + exponent if matrix.scales.dtype == torch.uint8 else 2.0**exponent)


def _fill_runs(matrix: Packed, step: float) -> None:
    """Set one scale for all groups, and the offset that makes the middle number 0."""
    assert matrix.runs is not None, "the caller has seen them"
    sign = 1 if matrix.middle < 128 else -1
    pair = torch.tensor([1, sign * matrix.middle], dtype=torch.int8)
    run = torch.tensor([step, sign * step], dtype=torch.float16)
    matrix.scales.fill_(int(pair.view(torch.int16)))
    matrix.runs.fill_(int(run.view(torch.int32)))
