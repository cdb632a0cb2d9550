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
from gpu.model.spec import Activation, Experts, Latent, LayerSpec
from gpu.operations.kv.latent_write import LATENT_EPS
from gpu.weights.checkpoint import load_weights
from gpu.weights.weights import ExpertWeights, LayerWeights, Weights, unpacked
from transfer.model_constants import CLAMPED_GAIN, CLAMPED_LIMIT

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
        cache, kept = KvCache([], []), _Kept({})
        hidden = self._embed(tokens)  # [requests, tokens, hidden]
        inputs = self._inputs(tokens, hidden)
        for layer, weights in enumerate(self.weights.layers):
            cos, sin = (table[:longest] for table in self.rope_tables[layer])
            window = self.architecture.layers[layer].window_tokens
            if weights.recurrent is not None:
                out, state = self._recur(hidden, layer, None, lengths)
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
        """Run one token a request. tokens, lengths: int64 `[requests]`, the new token counted, its position length - 1.

        Writes the token's keys and values; returns float32 logits `[requests, vocab]`.
        """
        requests = torch.arange(len(tokens), device=tokens.device)
        position = lengths - 1
        kept, hidden = _Kept({}), self._embed(tokens)[:, None]  # [requests, 1, hidden]
        inputs = self._inputs(tokens[:, None], hidden)
        for layer, weights in enumerate(self.weights.layers):
            cos, sin = (table[position][:, None, None] for table in self.rope_tables[layer])
            window = self.architecture.layers[layer].window_tokens
            if weights.recurrent is not None:
                out, state = self._recur(hidden, layer, (cache.keys[layer], cache.values[layer]), None)
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
        """Return what rotated queries are multiplied by, `[..., 1]`."""
        growth = self.architecture.query_growth
        if growth is None:
            return torch.ones(1, device=positions.device, dtype=self.weights.embedding.dtype)
        scale = 1 + growth.beta * torch.log(1 + positions // growth.tokens)
        return scale.to(self.weights.embedding.dtype)[..., None]

    @property
    def _scale(self) -> float:
        latent = self.architecture.latent
        return (self.architecture.dim if latent is None else latent_width(latent)) ** -0.5

    def _output_gates(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Return what attention's output is multiplied by, `[requests, heads, tokens, dim]`, or 1."""
        shape, weights = self.architecture, self.weights.layers[layer]
        if not shape.layers[layer].output_gate:
            return torch.ones(1, 1, 1, 1, dtype=hidden.dtype, device=hidden.device)
        normed = rms_norm(hidden, weights.attention_norm, shape.rms_norm_eps)
        both = functional.linear(normed, weights.qkv[: 2 * shape.num_heads * shape.dim])
        return both.unflatten(-1, (shape.num_heads, 2, -1))[..., 1, :].transpose(1, 2).sigmoid()

    def _recur(
        self, hidden: torch.Tensor, layer: int, state: tuple[torch.Tensor, torch.Tensor] | None,
        lengths: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        """Return a gated delta net's output `[requests, tokens, value_width]`, token by token, and its state
        `[requests, value_heads, key_dim, value_dim]` with the inputs of its convolution that come before the next
        token. lengths: of prompts, behind which nothing is written; None: all tokens are.
        """
        shape, weights = self.architecture, self.weights.layers[layer]
        own, more, eps = shape.recurrent, weights.recurrent, shape.rms_norm_eps
        assert own is not None
        assert more is not None
        normed = rms_norm(hidden, weights.attention_norm, eps)
        mixed, gates = functional.linear(normed, weights.qkv), functional.linear(normed, more.gates).float()
        inputs, z = mixed.split([own.conv_width, own.value_width], -1)
        if state is None:
            zeros = torch.zeros(len(hidden), own.value_heads, own.key_dim, own.value_dim, device=hidden.device)
            state = zeros, inputs.new_zeros(len(hidden), own.conv_tokens - 1, own.conv_width)
        held, before = state
        rows, outs, count = torch.cat([before, inputs], 1), [], own.conv_tokens
        shares, times = gates[..., : own.value_heads], gates[..., own.value_heads :]
        decays = torch.exp(-more.decay.float().exp() * functional.softplus(times + more.time_bias.float()))
        for token in range(hidden.shape[1]):
            taps = rows[:, token : token + count].float()
            made = functional.silu((taps * more.conv[:, 0].float().T).sum(1))
            query, key, value = made.split([own.key_width, own.key_width, own.value_width], -1)
            query, key = (
                part / torch.sqrt(part.square().sum(-1, keepdim=True) + 1e-6)
                for part in (query.unflatten(-1, (own.key_heads, -1)), key.unflatten(-1, (own.key_heads, -1)))
            )
            shared = own.value_heads // own.key_heads
            query, key = (
                part.repeat(1, shared, 1) if own.is_tiled else part.repeat_interleave(shared, 1)
                for part in (query, key)
            )
            new = held * decays[:, token, :, None, None]
            missing = value.unflatten(-1, (own.value_heads, -1)) - torch.einsum("rhk,rhkv->rhv", key, new)
            new = new + torch.einsum("rhk,rhv->rhkv", key, missing * shares[:, token, :, None].sigmoid())
            outs.append(torch.einsum("rhk,rhkv->rhv", query * own.key_dim**-0.5, new))
            is_there = None if lengths is None else (token < lengths)[:, None, None, None]
            held = new if is_there is None else torch.where(is_there, new, held)
        out = torch.stack(outs, 1)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * more.norm.float()
        out = out.flatten(2) * functional.silu(z.float())
        ends = torch.full((len(hidden),), hidden.shape[1], device=hidden.device) if lengths is None else lengths
        last = ends[:, None] + torch.arange(count - 1, device=hidden.device)
        return out.to(hidden.dtype), (held, rows.gather(1, last[:, :, None].expand(-1, -1, rows.shape[2])))

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
            queries = queries.unflatten(-1, (shape.num_heads, 2, -1))[..., 0, :].flatten(-2)
            mixed = torch.cat([queries, others], -1)
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
        """Return what layers get beside hidden states, `[requests, tokens, layers, width]`; None: nothing."""
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

    def _finish(self, hidden: torch.Tensor, out: torch.Tensor, layer: int, inputs: torch.Tensor | None) -> torch.Tensor:
        """Return the rest of a layer. hidden `[requests, tokens, hidden]`, out `[requests, tokens, heads, dim]`, inputs
        of `_inputs`.
        """
        weights, eps, latent = self.weights.layers[layer], self.architecture.rms_norm_eps, self.architecture.latent
        out = out if latent is None else out[..., : latent.value]
        output = functional.linear(out.flatten(2), weights.output, weights.output_bias)
        if weights.attention_post_norm is not None:
            output = rms_norm(output, weights.attention_post_norm, eps)
        hidden = hidden + output
        normed = hidden if weights.mlp_norm is None else rms_norm(hidden, weights.mlp_norm, eps)
        spec = self.architecture.layers[layer]
        beside = None if weights.experts is None else weights.experts.beside
        mixed = None
        if weights.experts is not None and beside is None:
            mixed = _mix(normed.flatten(0, 1), normed.flatten(0, 1), weights.experts, spec).view_as(hidden)
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
            mixed = _mix(normed.flatten(0, 1), to_route.flatten(0, 1), weights.experts, spec).view_as(hidden)
            product = rms_norm(product, beside.mlp_post_norm, eps) + rms_norm(mixed, beside.post_norm, eps)
        if weights.mlp_post_norm is not None:
            product = rms_norm(product, weights.mlp_post_norm, eps)
        hidden = hidden + product
        if weights.inputs is not None and inputs is not None:
            gate = functional.gelu(functional.linear(hidden, weights.inputs.gate), approximate="tanh")
            made = functional.linear(gate * inputs[:, :, layer], weights.inputs.projection)
            hidden = hidden + rms_norm(made, weights.inputs.norm, eps)
        return hidden if weights.scale is None else hidden * weights.scale


@dataclass(frozen=True, slots=True)
class _Kept:
    """Keys and values of the layers so far, by layer, normed and before rotation."""

    rows: dict[int, tuple[torch.Tensor, torch.Tensor]]


def gate_linear(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return an MLP's activated product of gate and up, whose halves `gate_up` has."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * torch.sigmoid(CLAMPED_GAIN * gate) * (up + 1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


def _mix(tokens: torch.Tensor, to_route: torch.Tensor, weights: ExpertWeights, spec: LayerSpec) -> torch.Tensor:
    """Return a mixture's output of `[tokens, hidden]`, expert by expert. to_route: the same tokens, by another norm."""
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
    """Return weights and numbers of the experts that tokens take, `[tokens, taken]`. correction: of a router by
    sigmoids, None: it is one by softmax.
    """
    if correction is None:
        shares, ids = torch.softmax(logits, 1).topk(experts.per_token, 1)
    else:
        scores = torch.sigmoid(logits)
        wanted = (scores + correction).unflatten(1, (experts.groups, -1))
        if experts.groups > 1:
            sums = wanted.topk(2, 2).values.sum(2)
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
    """Return queries and keys of latent attention before rotation, and values, each `[requests, heads, tokens, dim]` of
    the wider of keys and values, from normed hidden states `[requests, tokens, hidden]`. Keys are in an order in which
    halves are rotated against each other (`latent_tables`); queries have the gain of logits.
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
    """Return the numbers of heads of queries, keys and values, all alike."""
    return max(latent.query_dim, latent.value)


def latent_tables(table: torch.Tensor, latent: Latent, still: float) -> torch.Tensor:
    """Return a table of cosines or sines of heads that are rotated in part. still: of what is not."""
    return functional.pad(table, (0, latent_width(latent) // 2 - table.shape[1]), value=still)


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> ReferenceDecoder:
    """Read a Hugging Face folder. Raises ModelError for a model that is not served or files that do not fit it."""
    architecture = read_architecture(folder)
    weights = unpacked(load_weights(folder, architecture, dtype, device, lambda _: None))
    tables = layer_rope_tables(architecture, architecture.max_context_tokens, device)
    latent = architecture.latent
    if latent is not None:
        tables = [(latent_tables(cos, latent, 1.0), latent_tables(sin, latent, 0.0)) for cos, sin in tables]
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention `[requests, heads, queries, dim]` to keys where `mask`, bool, is set. sinks: `[heads]`, logits
    of one more key for each head, of value 0; scale: of logits, None: dim ** -0.5.
    """
    if sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    key, value = functional.pad(key, (0, 0, 0, 1)), functional.pad(value, (0, 0, 0, 1))
    unseen = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    unseen = unseen.expand(len(query), len(sinks), query.shape[2], -1)
    more = sinks.to(query.dtype).view(1, -1, 1, 1).expand(*unseen.shape[:3], 1)
    unseen = torch.cat([unseen, more], -1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=unseen, scale=scale)


def attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return exact causal attention `[requests, heads, tokens, dim]`, of a window's tokens or all; KV heads are
    repeated, so any flash kernel serves. sinks, scale: see `attend_masked`.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if window is None and sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    window, outs = window or query.shape[2], []
    for begin in range(0, query.shape[2], WINDOW_QUERIES):
        rows = torch.arange(begin, min(begin + WINDOW_QUERIES, query.shape[2]), device=query.device)
        seen = torch.arange(max(0, begin - window + 1), begin + len(rows), device=query.device)
        mask = (seen <= rows[:, None]) & (seen > rows[:, None] - window)
        keys, values = key[:, :, seen[0] : begin + len(rows)], value[:, :, seen[0] : begin + len(rows)]
        own = query[:, :, begin : begin + len(rows)]
        outs.append(attend_masked(own, keys, values, mask[None, None], sinks, scale))
    return torch.cat(outs, dim=2)


def attend_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, window: int,
    sinks: torch.Tensor | None = None, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return a step's queries `[requests, heads, dim]` to the last `window` of each request's `lengths` tokens. sinks,
    scale: see `attend_masked`.
    """
    group = query.shape[1] // keys.shape[1]
    places = torch.arange(keys.shape[2], device=query.device)
    mask = (places < lengths[:, None]) & (places >= lengths[:, None] - window)  # [requests, tokens]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    return attend_masked(query[:, :, None], keys, values, mask[:, None, None], sinks, scale)[:, :, 0]
