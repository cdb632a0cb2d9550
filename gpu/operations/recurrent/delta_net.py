"""Compute a gated delta net between its projections: convolution, gates, the delta rule, and the gated output norm.

Yang, Kautz, Hatamizadeh: Gated Delta Networks (arXiv 2412.06464), section 3.4. A token's projected x (queries, keys and
values side by side) goes through a causal convolution of each channel by itself and a SiLU. Queries and keys are then
normed, `x / sqrt(|x|^2 + 1e-6)`, and queries scaled by key_dim ** -0.5. The projected gates b, a become

    share = sigmoid(b)      decay = -exp(decay_log) * softplus(a + time_bias)

Outputs are normed head by head and multiplied: `norm * o / sqrt(mean(o^2) + eps) * silu(z)`. The state is that of
`delta_rule`. The inputs of the convolution that later tokens need are kept in a ring, each at its position modulo the
ring's length. Everything is computed in float32, or in float64 if x is float64.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.model.spec import Recurrent
from gpu.operations.recurrent.delta_rule import chunked_delta_rule, delta_rule_reference
from gpu.operations.recurrent.mamba2 import chunked_state_space, gated_norm_reference, state_space_reference
from gpu.operations.recurrent.short_conv import convolve, run_short_segment
from gpu.operations.recurrent.state_arrays import SEGMENT_TOKENS

HEAD_EPS = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The weights of a recurrent layer beside its two matrices.

    gates: `[2 * value_heads, hidden]`: how much a token writes, and how much of the state it forgets.
    conv: `[conv_width, 1, conv_tokens]`, the last column for the token itself.
    decay, time_bias: float32 `[value_heads]`.
    norm: `[value_dim]`; for Mamba-2 `[value_heads * value_dim]`.
    conv_bias: `[conv_width]`, for Mamba-2 only.
    skip: float32 `[value_heads]`, shares of values in the output, for Mamba-2 only.
    """

    gates: Tensor
    conv: Tensor
    decay: Tensor
    time_bias: Tensor
    norm: Tensor
    conv_bias: Tensor | None = None
    skip: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer.

    states: `[count, value_heads, key_dim, value_dim]`, float32 or bf16.
    rings: `[count, ring_length, conv_width]`, in the compute dtype.
    drafts: `[slots, MOST_STEP_ROWS - 1, 2 * value_heads]`, in the compute dtype: gates of drafted tokens.
    """

    states: Tensor
    rings: Tensor
    drafts: Tensor


def run_segment(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, own: Recurrent, eps: float, held: LayerStates, number: int,
    begin: int, is_chunked: bool = True,
) -> Tensor:  # fmt: skip
    """Compute consecutive tokens of one sequence, and update state `number` in place.

    Returns `[tokens, value_heads * value_dim]` in mixed's dtype. mixed: `[tokens, projected_width]`: projected queries,
    keys, values and z. gates: `[tokens, gate_rows]`: b and a; for Mamba-2 its time steps. begin: the position of the
    first token; 0 starts a new state, whatever was there before.
    """
    outs = []
    for first in range(0, len(mixed), SEGMENT_TOKENS):
        part = slice(first, first + SEGMENT_TOKENS)
        if own.is_short:
            outs.append(run_short_segment(mixed[part], weights.conv, held.rings, number, begin + first))
            continue
        run = _run_mamba if own.is_mamba else _run
        outs.append(run(mixed[part], gates[part], weights, own, eps, held, number, begin + first, is_chunked))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _run(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, own: Recurrent, eps: float, held: LayerStates, number: int,
    begin: int, is_chunked: bool,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(mixed.dtype, torch.float32)
    inputs, z = mixed.split([own.conv_width, own.value_width], 1)
    convolved = F.silu(convolve(inputs, weights.conv[:, 0].to(wide), held.rings[number], begin))
    query, key, value = convolved.split([own.key_width, own.key_width, own.value_width], 1)
    shared = own.value_heads // own.key_heads
    query, key = (_normed(rows.unflatten(1, (own.key_heads, -1))) for rows in (query, key))
    query, key = (
        rows.repeat(1, shared, 1) if own.is_tiled else rows.repeat_interleave(shared, 1) for rows in (query, key)
    )
    share, time = gates.to(wide).chunk(2, 1)
    decay = -weights.decay.to(wide).exp() * F.softplus(time + weights.time_bias.to(wide))
    state = held.states[number].to(wide) if begin else torch.zeros_like(held.states[number], dtype=wide)
    rule = chunked_delta_rule if is_chunked else delta_rule_reference
    out, state = rule(
        query * own.key_dim**-0.5, key, value.unflatten(1, (own.value_heads, -1)), decay, share.sigmoid(), state
    )
    held.states[number] = state
    normed = out * (out.square().mean(2, keepdim=True) + eps).rsqrt() * weights.norm.to(wide)
    return normed.flatten(1).mul_(F.silu(z.to(wide))).to(mixed.dtype)


def _run_mamba(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, own: Recurrent, eps: float, held: LayerStates, number: int,
    begin: int, is_chunked: bool,
) -> Tensor:  # fmt: skip
    assert weights.conv_bias is not None, "a Mamba-2 layer has it"
    assert weights.skip is not None, "a Mamba-2 layer has it"
    wide = torch.promote_types(mixed.dtype, torch.float32)
    inputs, z = mixed.split([own.conv_width, own.value_width], 1)
    convolved = convolve(inputs, weights.conv[:, 0].to(wide), held.rings[number], begin)
    convolved = F.silu(convolved + weights.conv_bias.to(wide))
    query, key, value = convolved.split([own.key_width, own.key_width, own.value_width], 1)
    shared = own.value_heads // own.key_heads
    query, key = (rows.unflatten(1, (own.key_heads, -1)).repeat_interleave(shared, 1) for rows in (query, key))
    value = value.unflatten(1, (own.value_heads, -1))
    time = F.softplus(gates.to(wide) + weights.time_bias.to(wide))
    state = held.states[number].to(wide) if begin else torch.zeros_like(held.states[number], dtype=wide)
    rule = chunked_state_space if is_chunked else state_space_reference
    out, state = rule(query, key, value * time[..., None], -weights.decay.to(wide).exp() * time, state)
    held.states[number] = state
    out = out + weights.skip.to(wide)[:, None] * value
    return gated_norm_reference(out.flatten(1), z, weights.norm, own.key_heads, eps)


def _normed(rows: Tensor) -> Tensor:
    return rows * (rows.square().sum(-1, keepdim=True) + HEAD_EPS).rsqrt()
