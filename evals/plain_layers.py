"""Compute the parts of the reference decoder's layers: norms, MLPs, experts, latent attention, recurrence."""

import torch
from torch.nn import functional

from gpu.model.spec import Activation, Experts, Latent, LayerSpec, Recurrent
from gpu.operations.kv.latent_write import LATENT_EPS
from gpu.weights.weights import ExpertWeights, LayerWeights
from transfer.model_constants import CLAMPED_GAIN, CLAMPED_LIMIT


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scaled = hidden.float()
    scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != hidden.dtype:  # a float32 weight: multiply in float32, then round
        return (scaled * weight).to(hidden.dtype)
    return scaled.to(hidden.dtype) * weight


def gate_linear(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activated product of an MLP. gate_up: gate and up in two halves, or up alone for `relu2`."""
    if activation == "relu2":
        return functional.relu(gate_up) ** 2
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * torch.sigmoid(CLAMPED_GAIN * gate) * (up + 1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


def mix_experts(tokens: torch.Tensor, to_route: torch.Tensor, weights: ExpertWeights, spec: LayerSpec) -> torch.Tensor:
    """Return the output of a mixture of experts for `[tokens, hidden]`, computed expert by expert.

    to_route: the tokens as the router reads them, which may have another norm.
    """
    experts = spec.experts
    assert experts is not None, "the layer has experts"
    bias = None if weights.router_bias is None else weights.router_bias.float()
    logits = functional.linear(to_route.float(), weights.router.float(), bias)
    shares, ids = choose_experts(logits, experts, weights.correction)
    gate_ups = weights.gate_up.view(experts.num_experts, -1, tokens.shape[1])
    downs = weights.down.view(experts.num_experts, tokens.shape[1], -1)
    mixed = torch.zeros_like(tokens, dtype=torch.float32)
    for expert in range(experts.num_experts):
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate_up_bias, down_bias = (
            None if bias is None else bias.view(experts.num_experts, -1)[expert]
            for bias in (weights.gate_up_bias, weights.down_bias)
        )  # fmt: skip
        product = functional.linear(tokens[token], gate_ups[expert], gate_up_bias)
        made = functional.linear(gate_linear(product, spec.activation), downs[expert], down_bias)
        if weights.beside is not None:
            made = made * weights.beside.gains[expert]
        mixed.index_add_(0, token, made.float() * shares[token, place, None])
    return mixed.to(tokens.dtype)


def choose_experts(
    logits: torch.Tensor, experts: Experts, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shares and ids of the experts that each token is routed to, `[tokens, taken]`.

    correction: added to the scores of a router with sigmoids when experts are ranked, or None.
    """
    scores = torch.sigmoid(logits) if experts.is_sigmoid else torch.softmax(logits, 1)
    wanted = (scores if correction is None else scores + correction).unflatten(1, (experts.groups, -1))
    if experts.groups > 1:
        sums = wanted.topk(experts.group_best, 2).values.sum(2)
        least = sums.topk(experts.groups_taken, 1).values[:, -1:]
        wanted = wanted.masked_fill((sums < least)[..., None], -torch.inf)
    ids = wanted.flatten(1).topk(experts.per_token, 1).indices
    shares = scores.gather(1, ids)
    if experts.is_normalised:
        shares = shares / shares.sum(1, keepdim=True)
    return shares * experts.gain, ids


def project_latent(
    normed: torch.Tensor, weights: LayerWeights, latent: Latent, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys of latent attention before rotation, and values.

    normed: hidden states `[requests, tokens, hidden]` after the norm. Each result is `[requests, heads, tokens, dim]`,
    where dim is the larger of the widths of keys and values. Channels are ordered so that the two halves are rotated
    against each other (`latent_tables`). Queries are multiplied by the gain of logits.
    """
    own, (rank, plain, width) = weights.latent, (latent.rank, latent.plain, latent_width(latent))
    assert own is not None, "the layer has latent attention"
    first, row = functional.linear(normed, weights.qkv).tensor_split([latent.first_columns(num_heads)], -1)
    if own.query_up is not None and own.query_norm is not None:
        first = functional.linear(rms_norm(first, own.query_norm, LATENT_EPS), own.query_up)
    query = first.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    made = functional.linear(rms_norm(row[..., :rank], own.norm, LATENT_EPS), own.up)
    made = made.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    turned = row[:, None, :, rank:].expand(-1, num_heads, -1, -1)

    def in_halves(plain_part: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        first, second = (rotated[..., ::2], rotated[..., 1::2]) if latent.has_neighbour_pairs else rotated.chunk(2, -1)
        front, back = plain_part.tensor_split([width // 2 - first.shape[-1]], -1)
        missing = width // 2 - second.shape[-1] - back.shape[-1]
        return torch.cat([first, front, second, functional.pad(back, (0, missing))], -1)

    key = in_halves(made[..., :plain], turned)
    gain = latent.scale * width**0.5
    query = in_halves(query[..., :plain], query[..., plain:]) * gain
    return query, key, functional.pad(made[..., plain:], (0, width - latent.value))


def latent_width(latent: Latent) -> int:
    """Return the dim of heads that queries, keys and values are all padded to."""
    return max(latent.query_dim, latent.value)


def latent_tables(table: torch.Tensor, latent: Latent, still: float) -> torch.Tensor:
    """Pad a table of cosines or sines for heads that are rotated only in part. still: the value of channels that are
    not rotated.
    """
    return functional.pad(table, (0, latent_width(latent) // 2 - table.shape[1]), value=still)


def recur(
    hidden: torch.Tensor, weights: LayerWeights, own: Recurrent, eps: float,
    state: tuple[torch.Tensor, torch.Tensor] | None, lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Compute a recurrent layer, token by token.

    own: the layer's shape. lengths: of prompts, behind which the state does not change; None: all tokens count.
    Returns the output `[requests, tokens, value_width]`, and the new state: `[requests, value_heads, key_dim,
    value_dim]` with the last inputs of the convolution, which the next token needs.
    """
    more = weights.recurrent
    assert more is not None, "the layer is recurrent"
    normed = rms_norm(hidden, weights.attention_norm, eps)
    mixed, gates = functional.linear(normed, weights.qkv), functional.linear(normed, more.gates).float()
    if own.is_short:
        return _recur_shortly(mixed, more.conv, state, lengths)
    if own.is_mamba:
        gates = mixed[..., own.projected_width :].float()
    inputs, z = mixed[..., : own.projected_width].split([own.conv_width, own.value_width], -1)
    if state is None:
        zeros = torch.zeros(len(hidden), own.value_heads, own.key_dim, own.value_dim, device=hidden.device)
        state = zeros, inputs.new_zeros(len(hidden), own.conv_tokens - 1, own.conv_width)
    held, before = state
    rows, outs, count = torch.cat([before, inputs], 1), [], own.conv_tokens
    shares, times = gates[..., : own.value_heads], gates[..., -own.value_heads :]
    times = functional.softplus(times + more.time_bias.float())
    decays = torch.exp(-more.decay.float().exp() * times)
    for token in range(hidden.shape[1]):
        taps = rows[:, token : token + count].float()
        convolved = (taps * more.conv[:, 0].float().T).sum(1)
        made = functional.silu(convolved if more.conv_bias is None else convolved + more.conv_bias.float())
        query, key, value = made.split([own.key_width, own.key_width, own.value_width], -1)
        query, key = (part.unflatten(-1, (own.key_heads, -1)) for part in (query, key))
        value = value.unflatten(-1, (own.value_heads, -1))
        if not own.is_mamba:
            query, key = (part / torch.sqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
            query = query * own.key_dim**-0.5
        shared = own.value_heads // own.key_heads
        query, key = (
            part.repeat(1, shared, 1) if own.is_tiled else part.repeat_interleave(shared, 1) for part in (query, key)
        )
        new = held * decays[:, token, :, None, None]
        if own.is_mamba:
            written = value * times[:, token, :, None]
        else:
            missing = value - torch.einsum("rhk,rhkv->rhv", key, new)
            written = missing * shares[:, token, :, None].sigmoid()
        new = new + torch.einsum("rhk,rhv->rhkv", key, written)
        out = torch.einsum("rhk,rhkv->rhv", query, new)
        outs.append(out if more.skip is None else out + more.skip.float()[:, None] * value)
        is_there = None if lengths is None else (token < lengths)[:, None, None, None]
        held = new if is_there is None else torch.where(is_there, new, held)
    out = torch.stack(outs, 1)
    if own.is_mamba:
        gated = (out.flatten(2) * functional.silu(z.float())).unflatten(2, (own.key_heads, -1))
        gated = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + (own.norm_eps or eps))
        return (gated.flatten(2) * more.norm.float()).to(hidden.dtype), (held, _last_inputs(rows, count, lengths))
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * more.norm.float()
    out = out.flatten(2) * functional.silu(z.float())
    return out.to(hidden.dtype), (held, _last_inputs(rows, count, lengths))


def _last_inputs(rows: torch.Tensor, taps: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """Return the convolution's inputs before each request's next token, `[requests, taps - 1, width]`."""
    ends = torch.full((len(rows),), rows.shape[1] - taps + 1, device=rows.device) if lengths is None else lengths
    last = ends[:, None] + torch.arange(taps - 1, device=rows.device)
    return rows.gather(1, last[:, :, None].expand(-1, -1, rows.shape[2]))


def _recur_shortly(
    mixed: torch.Tensor, conv: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Compute a gated short convolution. Returns its output, and its last inputs with an empty state, as `recur`."""
    front, gate, back = mixed.chunk(3, -1)
    taps, inputs = conv.shape[2], front * back
    held, before = (inputs[:0], inputs.new_zeros(len(mixed), taps - 1, inputs.shape[2])) if state is None else state
    rows = torch.cat([before, inputs], 1)
    made = functional.conv1d(rows.transpose(1, 2).float(), conv.float(), groups=rows.shape[2]).transpose(1, 2)
    return (made * gate).to(mixed.dtype), (held, _last_inputs(rows, taps, lengths))
