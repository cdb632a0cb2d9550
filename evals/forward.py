"""Run the reference decoder, in which methods are judged: plain batched torch over full, contiguous KV.

The caller passes in a step's attention, except for layers with a window, which methods do not handle. Only the layout
of weights and the rotary tables are shared with the server's decoder. Rows are padded on the right. So positions are
indices, causal attention needs no mask, and a new token is written at its row's length. Any torch device, bf16 or
float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from evals.methods.attention_method import PromptLayer, Step, StepResult
from evals.plain_attention import attend_causal, attend_window, rotate
from evals.plain_layers import gate_linear, latent_tables, latent_width, mix_experts, project_latent, recur, rms_norm
from gpu.layers.decoder import parted_gates
from gpu.layers.rope import layer_rope_tables
from gpu.model.architecture import Architecture, read_architecture
from gpu.model.spec import Recurrent
from gpu.weights.checkpoint import load_weights
from gpu.weights.weights import Weights, unpacked

CHUNK_TOKENS = 1 << 17
"""Tokens whose MLP activations are held at once in a prefill."""

AttendStep = Callable[[Step], StepResult]
"""Computes the attention of a step: its output and mass, without sinks."""

WatchPrompt = Callable[[PromptLayer], None]
"""Called with each layer of a prompt that has no window, after its prefill."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The keys and values of a batch, one tensor a layer, `[requests, kv_heads, capacity, dim]`. Rows beyond a
    request's length are stale. A recurrent layer has its state instead, and a layer without a mixer nothing.
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
        cache, kept = KvCache([], []), _Kept({})
        hidden = self._embed(tokens)  # [requests, tokens, hidden]
        inputs = self._inputs(tokens, hidden)
        for layer, weights in enumerate(self.weights.layers):
            cos, sin = (table[:longest] for table in self.rope_tables[layer])
            window = self.architecture.layers[layer].window_tokens
            if not self.architecture.layers[layer].has_mixer:
                cache.keys.append(hidden[:0])
                cache.values.append(hidden[:0])
                hidden = self._finish(hidden, None, layer, inputs)
                continue
            if weights.recurrent is not None:
                out, state = recur(hidden, weights, self._recurrent, self.architecture.rms_norm_eps, None, lengths)
                cache.keys.append(state[0])
                cache.values.append(state[1])
                hidden = self._finish(hidden, out, layer, inputs)
                continue
            plain_q, plain_k, v = self._project(hidden, layer, kept)  # [requests, heads, tokens, dim]
            positions = torch.arange(longest, device=self.device)
            query, key = rotate(plain_q, cos, sin) * self._growth(positions), rotate(plain_k, cos, sin)
            cache.keys.append(functional.pad(key, (0, 0, 0, capacity - longest)))
            cache.values.append(functional.pad(v, (0, 0, 0, capacity - longest)))
            if window is None:
                watch(PromptLayer(layer, query, plain_q, cache.keys[-1], cache.values[-1], lengths, longest))
            out = attend_causal(query, key, v, window, weights.sinks, self._scale)
            out = out * self._output_gates(hidden, layer)
            del plain_q, plain_k, query, key, v
            for request in range(0, len(tokens), max(1, CHUNK_TOKENS // longest)):
                rows = slice(request, request + max(1, CHUNK_TOKENS // longest))
                own = None if inputs is None else inputs[rows]
                hidden[rows] = self._finish(hidden[rows], out[rows].transpose(1, 2), layer, own)
        last = hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        return cache, last

    @torch.inference_mode()
    def step(
        self, cache: KvCache, tokens: torch.Tensor, lengths: torch.Tensor, longest: int, attend: AttendStep
    ) -> torch.Tensor:
        """Compute one token of each request. Writes its keys and values; returns float32 logits `[requests, vocab]`.

        tokens, lengths: int64 `[requests]`; lengths count the new token, whose position is length - 1.
        """
        requests = torch.arange(len(tokens), device=tokens.device)
        position = lengths - 1
        kept, hidden = _Kept({}), self._embed(tokens)[:, None]  # [requests, 1, hidden]
        inputs = self._inputs(tokens[:, None], hidden)
        for layer, weights in enumerate(self.weights.layers):
            cos, sin = (table[position][:, None, None] for table in self.rope_tables[layer])
            window = self.architecture.layers[layer].window_tokens
            if not self.architecture.layers[layer].has_mixer:
                hidden = self._finish(hidden, None, layer, inputs)
                continue
            if weights.recurrent is not None:
                held = cache.keys[layer], cache.values[layer]
                out, state = recur(hidden, weights, self._recurrent, self.architecture.rms_norm_eps, held, None)
                cache.keys[layer], cache.values[layer] = state
                hidden = self._finish(hidden, out, layer, inputs)
                continue
            plain_q, key, v = self._project(hidden, layer, kept)
            cache.keys[layer][requests, :, position] = rotate(key, cos, sin)[:, :, 0]
            cache.values[layer][requests, :, position] = v[:, :, 0]
            keys, values = cache.keys[layer][:, :, :longest], cache.values[layer][:, :, :longest]
            query = (rotate(plain_q, cos, sin) * self._growth(position[:, None, None]))[:, :, 0]
            if window is None:
                result = attend(Step(layer, query, plain_q[:, :, 0], keys, values, lengths, longest))
                out = result.out
                if weights.sinks is not None:
                    out = out * torch.sigmoid(result.lse - weights.sinks.float())[..., None]
            else:
                out = attend_window(query, keys, values, lengths, window, weights.sinks, self._scale)
            out = out[:, None] * self._output_gates(hidden, layer).transpose(1, 2)
            hidden = self._finish(hidden, out.to(hidden.dtype), layer, inputs)
        return self.logits(hidden[:, 0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[requests, vocab]` of final hidden states `[requests, hidden]`."""
        normed = rms_norm(hidden, self.weights.final_norm, self.architecture.rms_norm_eps)
        logits, cap = functional.linear(normed, self.weights.logits).float(), self.architecture.logit_cap
        logits = logits * self.architecture.logit_gain
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _growth(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the factors of rotated queries, `[..., 1]`."""
        growth = self.architecture.query_growth
        if growth is None:
            return torch.ones(1, device=positions.device, dtype=self.weights.embedding.dtype)
        scale = 1 + growth.beta * torch.log(1 + positions // growth.tokens)
        return scale.to(self.weights.embedding.dtype)[..., None]

    @property
    def _scale(self) -> float:
        latent = self.architecture.latent
        return (self.architecture.dim if latent is None else latent_width(latent)) ** -0.5

    @property
    def _recurrent(self) -> Recurrent:
        own = self.architecture.recurrent
        assert own is not None, "the model has recurrent layers"
        return own

    def _output_gates(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the gates of attention's output, `[requests, heads, tokens, dim]`, or 1."""
        shape, weights = self.architecture, self.weights.layers[layer]
        if not shape.layers[layer].output_gate:
            return torch.ones(1, 1, 1, 1, dtype=hidden.dtype, device=hidden.device)
        normed = rms_norm(hidden, weights.attention_norm, shape.rms_norm_eps)
        both = functional.linear(normed, weights.qkv[: 2 * shape.num_heads * shape.dim])
        gates = parted_gates(both, shape.num_heads, shape.layers[layer].has_gate_apart)[1]
        return gates.unflatten(-1, (shape.num_heads, -1)).transpose(1, 2).sigmoid()

    def _project(
        self, hidden: torch.Tensor, layer: int, kept: "_Kept"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys before rotation, and values, each `[requests, heads, tokens, dim]`."""
        shape, weights, spec = self.architecture, self.weights.layers[layer], self.architecture.layers[layer]
        if shape.latent is not None:
            normed = rms_norm(hidden, weights.attention_norm, shape.rms_norm_eps)
            return project_latent(normed, weights, shape.latent, shape.num_heads)
        heads, eps = shape.heads_of(spec), shape.rms_norm_eps
        normed = hidden if weights.attention_norm is None else rms_norm(hidden, weights.attention_norm, eps)
        mixed = functional.linear(normed, weights.qkv, weights.qkv_bias)
        if spec.output_gate:
            queries, others = mixed.split([2 * shape.num_heads * shape.dim, 2 * heads.count * heads.dim], -1)
            mixed = torch.cat([parted_gates(queries, shape.num_heads, spec.has_gate_apart)[0], others], -1)
        if spec.wide_qk_norm:
            query, key = shape.num_heads * heads.dim, heads.count * heads.dim
            rows = mixed.split([query, key, key], dim=-1)
            norms = (weights.query_norm, weights.key_norm)
            normed_rows = [rms_norm(part, norm, eps) for part, norm in zip(rows, norms, strict=False)]
            mixed = torch.cat([*normed_rows, rows[2]], -1)
        mixed = mixed.view(*hidden.shape[:2], -1, heads.dim).transpose(1, 2)
        query, own = mixed[:, : shape.num_heads], mixed[:, shape.num_heads :]
        if spec.qk_norm:
            query = rms_norm(query, weights.query_norm, eps)
        if spec.kv_of is not None:
            return query, *kept.rows[spec.kv_of]
        key, value = own[:, : heads.count], own[:, -heads.count :]  # the same, where values are keys
        if spec.qk_norm:
            key = rms_norm(key, weights.key_norm, eps)
        if spec.value_norm:
            value = rms_norm(value, torch.ones(heads.dim, device=value.device), eps)
        kept.rows[layer] = key, value
        return query, key, value

    def _inputs(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """Return the layers' inputs besides hidden states, `[requests, tokens, layers, width]`; None: there are
        none.
        """
        own, shape = self.weights.inputs, self.architecture
        if own is None:
            return None
        width, scale = len(own.norm), shape.hidden**-0.5
        made = functional.linear(embedded, own.projection).unflatten(-1, (-1, width)) * scale
        rows = functional.embedding(tokens, own.table).unflatten(-1, (-1, width)) * width**0.5
        return (rms_norm(made, own.norm, shape.rms_norm_eps) + rows) * 2**-0.5

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = functional.embedding(tokens, self.weights.embedding)
        scale = self.architecture.embedding_scale
        return rows if scale == 1 else rows * torch.tensor(scale, dtype=rows.dtype)

    def _finish(
        self, hidden: torch.Tensor, out: torch.Tensor | None, layer: int, inputs: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a layer's output: its output projection and its MLP.

        hidden: `[requests, tokens, hidden]`. out: attention's, `[requests, tokens, heads, dim]`; None: the layer has no
        mixer. inputs: see `_inputs`.
        """
        weights, eps, latent = self.weights.layers[layer], self.architecture.rms_norm_eps, self.architecture.latent
        post_eps = eps if self.architecture.post_norm_eps is None else self.architecture.post_norm_eps
        if out is not None:
            out = out if latent is None else out[..., : latent.value]
            output = functional.linear(out.flatten(2), weights.output, weights.output_bias)
            if weights.attention_post_norm is not None:
                output = rms_norm(output, weights.attention_post_norm, post_eps)
            hidden = hidden + output
        spec = self.architecture.layers[layer]
        if not spec.has_mlp:
            return hidden
        normed = hidden if weights.mlp_norm is None else rms_norm(hidden, weights.mlp_norm, eps)
        beside = None if weights.experts is None else weights.experts.beside
        mixed = None
        if weights.experts is not None and beside is None:
            mixed = mix_experts(normed.flatten(0, 1), normed.flatten(0, 1), weights.experts, spec).view_as(hidden)
            if weights.gate_up is None:
                return hidden + mixed
        gate_up, down = weights.mlp
        product = gate_linear(functional.linear(normed, gate_up, weights.gate_up_bias), spec.activation)
        product = functional.linear(product, down, weights.down_bias)
        if weights.experts is not None and mixed is not None:
            share = weights.experts.shared_share
            product = mixed + (product if share is None else functional.linear(normed, share).sigmoid() * product)
        if weights.experts is not None and beside is not None:
            to_route, normed = rms_norm(hidden, beside.router_norm, eps), rms_norm(hidden, beside.norm, eps)
            mixed = mix_experts(normed.flatten(0, 1), to_route.flatten(0, 1), weights.experts, spec).view_as(hidden)
            product = rms_norm(product, beside.mlp_post_norm, eps) + rms_norm(mixed, beside.post_norm, eps)
        if weights.mlp_post_norm is not None:
            product = rms_norm(product, weights.mlp_post_norm, post_eps)
        hidden = hidden + product
        if weights.inputs is not None and inputs is not None:
            gate = functional.gelu(functional.linear(hidden, weights.inputs.gate), approximate="tanh")
            made = functional.linear(gate * inputs[:, :, layer], weights.inputs.projection)
            hidden = hidden + rms_norm(made, weights.inputs.norm, eps)
        return hidden if weights.scale is None else hidden * weights.scale


@dataclass(frozen=True, slots=True)
class _Kept:
    """Keys and values of the layers computed so far, by layer, after their norm and before rotation."""

    rows: dict[int, tuple[torch.Tensor, torch.Tensor]]


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> ReferenceDecoder:
    """Load a Hugging Face folder. Raises ModelError for a model that is not served, or for files that do not fit it."""
    architecture = read_architecture(folder)
    weights = unpacked(load_weights(folder, architecture, dtype, device, lambda _: None))
    tables = layer_rope_tables(architecture, architecture.max_context_tokens, device)
    latent = architecture.latent
    if latent is not None:
        tables = [(latent_tables(cos, latent, 1.0), latent_tables(sin, latent, 0.0)) for cos, sin in tables]
    return ReferenceDecoder(architecture, weights, tables)
