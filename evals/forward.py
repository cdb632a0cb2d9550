"""Decode in plain batched torch over full, contiguous KV: what the methods are judged in.

Attention of a step is handed in, but for layers with a window, which no method has a part in. It shares the weights'
layout and the rotary tables with the server's decoder and nothing else. Rows are padded on the right, so positions are
indices, causal attention needs no mask, and a new token goes to its row's length. Any torch device, bf16 or float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from evals.methods.method import PromptLayer, Step, StepResult
from gpu.layers.rope import layer_rope_tables
from gpu.model.architecture import Architecture, read_architecture
from gpu.model.spec import CLAMPED_GAIN, CLAMPED_LIMIT, Activation, LayerSpec
from gpu.weights.checkpoint import load_weights
from gpu.weights.weights import ExpertWeights, LayerWeights, Weights, unpacked

CHUNK_TOKENS = 1 << 17
"""Tokens whose MLP activations are held at once in a prefill."""

WINDOW_QUERIES = 1024
"""Of a prompt, to their windows at once."""

AttendStep = Callable[[Step], StepResult]
"""A step to its output and mass, without sinks."""

WatchPrompt = Callable[[PromptLayer], None]
"""Called with each layer of a prompt that has no window, as the prefill leaves it."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The keys and values of a batch, one tensor a layer, `[requests, kv_heads, capacity, dim]`. Rows beyond a
    request's length are stale.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class ReferenceDecoder:
    """Weights and each layer's rotary tables `[max_context, dim / 2]` on one device."""

    architecture: Architecture
    weights: Weights
    rope_tables: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @torch.inference_mode()
    def prefill(
        self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int, capacity: int, watch: WatchPrompt
    ) -> tuple[KvCache, torch.Tensor]:
        """Run prompts through all layers.

        tokens: int64 `[requests, longest]`, padded on the right; lengths: int64 `[requests]`; capacity: KV rows to
        hold, decode steps included. Returns the cache and the last tokens' hidden states `[requests, hidden]`.
        """
        cache = KvCache([], [])
        hidden = self._embed(tokens)  # [requests, tokens, hidden]
        for layer, weights in enumerate(self.weights.layers):
            cos, sin = (table[:longest] for table in self.rope_tables[layer])
            window = self.architecture.layers[layer].window_tokens
            plain_q, plain_k, v = self._project(hidden, weights)  # [requests, heads, tokens, dim]
            query, key = rotate(plain_q, cos, sin), rotate(plain_k, cos, sin)
            cache.keys.append(functional.pad(key, (0, 0, 0, capacity - longest)))
            cache.values.append(functional.pad(v, (0, 0, 0, capacity - longest)))
            if window is None:
                watch(PromptLayer(layer, query, plain_q, cache.keys[-1], cache.values[-1], lengths, longest))
            out = attend_causal(query, key, v, window, weights.sinks)
            del plain_q, plain_k, query, key, v
            for request in range(0, len(tokens), max(1, CHUNK_TOKENS // longest)):
                rows = slice(request, request + max(1, CHUNK_TOKENS // longest))
                hidden[rows] = self._finish(hidden[rows], out[rows].transpose(1, 2), layer)
        last = hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        return cache, last

    @torch.inference_mode()
    def step(
        self, cache: KvCache, tokens: torch.Tensor, lengths: torch.Tensor, longest: int, attend: AttendStep
    ) -> torch.Tensor:
        """Run one token a request. tokens, lengths: int64 `[requests]`, the new token counted, its position length - 1.

        Writes the token's keys and values; returns float32 logits `[requests, vocab]`.
        """
        requests = torch.arange(len(tokens), device=tokens.device)
        position = lengths - 1
        hidden = self._embed(tokens)[:, None]  # [requests, 1, hidden]
        for layer, weights in enumerate(self.weights.layers):
            cos, sin = (table[position][:, None, None] for table in self.rope_tables[layer])
            window = self.architecture.layers[layer].window_tokens
            plain_q, key, v = self._project(hidden, weights)
            cache.keys[layer][requests, :, position] = rotate(key, cos, sin)[:, :, 0]
            cache.values[layer][requests, :, position] = v[:, :, 0]
            keys, values = cache.keys[layer][:, :, :longest], cache.values[layer][:, :, :longest]
            query = rotate(plain_q, cos, sin)[:, :, 0]
            if window is None:
                result = attend(Step(layer, query, plain_q[:, :, 0], keys, values, lengths, longest))
                out = result.out
                if weights.sinks is not None:
                    out = out * torch.sigmoid(result.lse - weights.sinks.float())[..., None]
            else:
                out = attend_window(query, keys, values, lengths, window, weights.sinks)
            hidden = self._finish(hidden, out.to(hidden.dtype)[:, None], layer)
        return self.logits(hidden[:, 0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[requests, vocab]` of final hidden states `[requests, hidden]`."""
        normed = rms_norm(hidden, self.weights.final_norm, self.architecture.rms_norm_eps)
        return functional.linear(normed, self.weights.logits).float()

    def _project(self, hidden: torch.Tensor, weights: LayerWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys before rotation, and values, each `[requests, heads, tokens, dim]`."""
        shape = self.architecture
        normed = rms_norm(hidden, weights.attention_norm, shape.rms_norm_eps)
        mixed = functional.linear(normed, weights.qkv, weights.qkv_bias)
        mixed = mixed.view(*hidden.shape[:2], -1, shape.dim).transpose(1, 2)
        query, key, value = mixed.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if weights.query_norm is not None and weights.key_norm is not None:
            query = rms_norm(query, weights.query_norm, shape.rms_norm_eps)
            key = rms_norm(key, weights.key_norm, shape.rms_norm_eps)
        return query, key, value

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = functional.embedding(tokens, self.weights.embedding)
        scale = self.architecture.embedding_scale
        return rows if scale == 1 else rows * torch.tensor(scale, dtype=rows.dtype)

    def _finish(self, hidden: torch.Tensor, out: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the rest of a layer. hidden `[requests, tokens, hidden]`, out `[requests, tokens, heads, dim]`."""
        weights, eps = self.weights.layers[layer], self.architecture.rms_norm_eps
        output = functional.linear(out.flatten(2), weights.output, weights.output_bias)
        if weights.attention_post_norm is not None:
            output = rms_norm(output, weights.attention_post_norm, eps)
        hidden = hidden + output
        normed, spec = rms_norm(hidden, weights.mlp_norm, eps), self.architecture.layers[layer]
        if weights.experts is not None and spec.experts is not None:
            return hidden + _mix(normed.flatten(0, 1), weights.experts, spec).view_as(hidden)
        gate_up, down = weights.mlp
        product = gate_linear(functional.linear(normed, gate_up, weights.gate_up_bias), spec.activation)
        product = functional.linear(product, down, weights.down_bias)
        if weights.mlp_post_norm is not None:
            product = rms_norm(product, weights.mlp_post_norm, eps)
        return hidden + product


def gate_linear(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return an MLP's activated product of gate and up, whose halves `gate_up` has."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * torch.sigmoid(CLAMPED_GAIN * gate) * (up + 1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


def _mix(tokens: torch.Tensor, weights: ExpertWeights, spec: LayerSpec) -> torch.Tensor:
    """Return a mixture's output of `[tokens, hidden]`, expert by expert."""
    experts = spec.experts
    assert experts is not None, "the layer has experts"
    bias = None if weights.router_bias is None else weights.router_bias.float()
    shares, ids = torch.softmax(functional.linear(tokens.float(), weights.router.float(), bias), 1).topk(
        experts.per_token, 1
    )
    if experts.is_normalised:
        shares = shares / shares.sum(1, keepdim=True)
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
        mixed.index_add_(0, token, made.float() * shares[token, place, None])
    return mixed.to(tokens.dtype)


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> ReferenceDecoder:
    """Read a Hugging Face folder. Raises ModelError for a model that is not served or files that do not fit it."""
    architecture = read_architecture(folder)
    weights = unpacked(load_weights(folder, architecture, dtype, device, lambda _: None))
    tables = layer_rope_tables(architecture, architecture.max_context_tokens, device)
    return ReferenceDecoder(architecture, weights, tables)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scaled = hidden.float()
    scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != hidden.dtype:  # float32: times the weight, then rounded
        return (scaled * weight).to(hidden.dtype)
    return scaled.to(hidden.dtype) * weight


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return RoPE on `[requests, heads, tokens, dim]`, halves rotated against each other, in float32, back in rows'
    dtype.
    """
    first, second = rows.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(rows.dtype)


def attend_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return attention `[requests, heads, queries, dim]` to keys where `mask`, bool, is set. sinks: `[heads]`, logits
    of one more key for each head, of value 0.
    """
    if sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    key, value = functional.pad(key, (0, 0, 0, 1)), functional.pad(value, (0, 0, 0, 1))
    unseen = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    unseen = unseen.expand(len(query), len(sinks), query.shape[2], -1)
    more = sinks.to(query.dtype).view(1, -1, 1, 1).expand(*unseen.shape[:3], 1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=torch.cat([unseen, more], -1))


def attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Return exact causal attention `[requests, heads, tokens, dim]`, of a window's tokens or all; KV heads are
    repeated, so any flash kernel serves. sinks: see `attend_masked`.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if window is None and sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    window, outs = window or query.shape[2], []
    for begin in range(0, query.shape[2], WINDOW_QUERIES):
        rows = torch.arange(begin, min(begin + WINDOW_QUERIES, query.shape[2]), device=query.device)
        seen = torch.arange(max(0, begin - window + 1), begin + len(rows), device=query.device)
        mask = (seen <= rows[:, None]) & (seen > rows[:, None] - window)
        keys, values = key[:, :, seen[0] : begin + len(rows)], value[:, :, seen[0] : begin + len(rows)]
        own = query[:, :, begin : begin + len(rows)]
        outs.append(attend_masked(own, keys, values, mask[None, None], sinks))
    return torch.cat(outs, dim=2)


def attend_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, window: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return a step's queries `[requests, heads, dim]` to the last `window` of each request's `lengths` tokens. sinks:
    see `attend_masked`.
    """
    group = query.shape[1] // keys.shape[1]
    places = torch.arange(keys.shape[2], device=query.device)
    mask = (places < lengths[:, None]) & (places >= lengths[:, None] - window)  # [requests, tokens]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    return attend_masked(query[:, :, None], keys, values, mask[:, None, None], sinks)[:, :, 0]
