"""Decode in plain torch (cuBLAS, SDPA) as one CUDA graph: the peer for shapes without a checkpoint.

It is written from the model's definition. It shares the weights and the RoPE tables with the decoder, and no other
code. KV is one static tensor a layer with a mask over its whole length, as graphs need it.
"""

from dataclasses import astuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.agreement import Agreement, agree
from gpu.layers.rope import layer_rope_tables
from gpu.model.architecture import Architecture
from gpu.model.spec import Activation, Latent, LayerSpec, Recurrent
from gpu.operations.kv.latent_write import LATENT_EPS
from gpu.operations.recurrent.delta_net import RecurrentWeights
from gpu.weights.weights import ExpertWeights, LayerWeights, Weights
from transfer.model_constants import CLAMPED_GAIN, CLAMPED_LIMIT

_WARMUPS = 3


class PlainDecode:
    """Greedy decoding of `batch` sequences together. tokens: int64 `[batch]`, the input of the next step."""

    def __init__(
        self, architecture: Architecture, weights: Weights, batch: int, context: int, device: torch.device
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.device = device
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        shapes = [(batch, own.count, context, own.dim) for own in map(architecture.heads_of, architecture.layers)]
        latent = architecture.latent
        if latent is not None:  # stores keys and values of heads, not latent rows
            shapes = [(batch, architecture.num_heads, context, latent.query_dim) for _ in shapes]
            widths = [(batch, architecture.num_heads, context, latent.value) for _ in shapes]
        dtype = weights.embedding.dtype
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self._values = [
            torch.zeros(shape, dtype=dtype, device=device) for shape in (shapes if latent is None else widths)
        ]
        self._states: dict[int, tuple[Tensor, Tensor]] = {}
        own = architecture.recurrent
        for layer in architecture.recurrent_layers if own is not None else ():
            state = torch.zeros(batch, own.value_heads, own.key_dim, own.value_dim, device=device)
            self._states[layer] = state, torch.zeros(batch, own.conv_tokens, own.conv_width, dtype=dtype, device=device)
        self._columns = torch.arange(context, device=device)
        self._specs = architecture.layers
        self._rope_tables = layer_rope_tables(architecture, context, device)
        self._graph = self._capture() if device.type == "cuda" else None

    def step(self) -> None:
        """Feed `tokens` at `position`, replace them by the most likely next ones, and advance; asynchronous."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()

    @torch.inference_mode()
    def follow(self, prompts: np.ndarray, tokens: np.ndarray) -> Agreement:
        """Return how often this model chooses the same `tokens` `[batch, steps]`, each after all those before it.

        prompts: int32 `[batch, tokens]`.
        """
        text = torch.from_numpy(np.concatenate([prompts, tokens], 1).astype(np.int64)).to(self.device)
        self.position.zero_()
        for held in self._states.values():
            for one in held:
                one.zero_()
        found = []
        for column in range(text.shape[1] - 1):
            self.tokens.copy_(text[:, column])
            self.step()
            if column >= prompts.shape[1] - 1:
                found.append(agree(self._logits, text[:, column + 1]))
        return Agreement(*(float(np.mean(of_steps)) for of_steps in zip(*map(astuple, found), strict=True)))

    @torch.inference_mode()
    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        return graph

    @torch.inference_mode()
    def _compute(self) -> None:
        hidden = F.embedding(self.tokens, self.weights.embedding)
        if self.architecture.embedding_scale != 1:
            hidden = hidden * torch.tensor(self.architecture.embedding_scale, dtype=hidden.dtype)
        inputs = self._inputs(hidden)
        for index, layer in enumerate(self.weights.layers):
            spec = self._specs[index]
            post_eps = self.architecture.post_norm_eps
            if spec.has_mixer:
                normed = self._norm(hidden, layer.attention_norm)
                attended = (self._attend if layer.recurrent is None else self._recur)(index, layer, normed)
                attended = F.linear(attended, layer.output, layer.output_bias)
                hidden = hidden + self._norm(attended, layer.attention_post_norm, post_eps)
            if spec.has_mlp:
                hidden = hidden + self._norm(self._mlp(hidden, layer, spec), layer.mlp_post_norm, post_eps)
            if layer.inputs is not None and inputs is not None:
                gate = F.gelu(F.linear(hidden, layer.inputs.gate), approximate="tanh") * inputs[:, index]
                hidden = hidden + self._norm(F.linear(gate, layer.inputs.projection), layer.inputs.norm)
            if layer.scale is not None:
                hidden = hidden * layer.scale.to(hidden.dtype)
        normed = self._norm(hidden, self.weights.final_norm)
        self._logits = F.linear(normed, self.weights.logits)  # without a cap, which does not change the argmax
        self.tokens.copy_(self._logits.argmax(1))
        self.position.add_(1)

    def _mlp(self, hidden: Tensor, layer: LayerWeights, spec: LayerSpec) -> Tensor:
        normed, experts = self._norm(hidden, layer.mlp_norm), layer.experts
        if experts is not None and experts.beside is None:
            mixed = _mix(normed, normed, experts, spec)
            if layer.gate_up is None:
                return mixed
            product = F.linear(_gate(F.linear(normed, layer.mlp[0]), spec.activation), layer.mlp[1])
            if experts.shared_share is None:
                return mixed + product
            return mixed + F.linear(normed, experts.shared_share).sigmoid() * product
        gate_up, down = layer.mlp
        product = _gate(F.linear(normed, gate_up, layer.gate_up_bias), spec.activation)
        product = F.linear(product, down, layer.down_bias)
        if experts is None or experts.beside is None:
            return product
        beside = experts.beside
        mixed = _mix(self._norm(hidden, beside.norm), self._norm(hidden, beside.router_norm), experts, spec)
        return self._norm(product, beside.mlp_post_norm) + self._norm(mixed, beside.post_norm)

    def _inputs(self, embedded: Tensor) -> Tensor | None:
        """Return the layers' inputs besides hidden states, `[batch, layers, width]`; None: there are none."""
        own = self.weights.inputs
        if own is None:
            return None
        width = len(own.norm)
        made = F.linear(embedded, own.projection).unflatten(1, (-1, width)) * self.architecture.hidden**-0.5
        rows = F.embedding(self.tokens, own.table).unflatten(1, (-1, width)) * width**0.5
        return (self._norm(made, own.norm) + rows) * 2**-0.5

    def _norm(self, rows: Tensor, weight: Tensor | None, eps: float | None = None) -> Tensor:
        if weight is None:
            return rows
        eps = self.architecture.rms_norm_eps if eps is None else eps
        if weight.dtype != rows.dtype:
            return F.rms_norm(rows.float(), weight.shape, weight, eps).to(rows.dtype)
        return F.rms_norm(rows, weight.shape, weight, eps)

    def _attend(self, index: int, layer: LayerWeights, normed: Tensor) -> Tensor:
        a, batch, spec = self.architecture, len(normed), self._specs[index]
        window, own, source = spec.window_tokens, a.heads_of(spec), index if spec.kv_of is None else spec.kv_of
        cos, sin = (table[self.position] for table in self._rope_tables[index])  # [1, dim // 2]
        mask = self._columns <= self.position
        if a.latent is not None:
            return self._attend_latent(index, layer, a.latent, normed, mask)
        if window is not None:
            mask = mask & (self._columns > self.position - window)
        made, gates = F.linear(normed, layer.qkv, layer.qkv_bias), None
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if spec.wide_qk_norm:
            key = own.count * own.dim
            parts = made.split([a.num_heads * own.dim, key, key], 1)
            made = torch.cat([self._norm(parts[0], query_norm), self._norm(parts[1], key_norm), parts[2]], 1)
            query_norm = key_norm = None
        heads = made.view(batch, -1, own.dim)
        if spec.output_gate:
            both = heads[:, : 2 * a.num_heads]
            asked, gates = both.chunk(2, 1) if spec.has_gate_apart else (both[:, ::2], both[:, 1::2])
            gates = gates.reshape(batch, -1).sigmoid()
            heads = torch.cat([asked, heads[:, 2 * a.num_heads :]], 1)
        query = self._norm(heads[:, : a.num_heads], query_norm)
        if spec.kv_of is None:
            rows = heads[:, a.num_heads :]
            key, value = self._norm(rows[:, : own.count], key_norm), rows[:, -own.count :]
            if spec.value_norm:
                value = self._norm(value, torch.ones(own.dim, device=value.device))
            self._keys[index].index_copy_(2, self.position, _rotate(key, cos, sin)[:, :, None])
            self._values[index].index_copy_(2, self.position, value[:, :, None])
        group = a.num_heads // own.count
        query = _rotate(query, cos, sin)
        query = self._grown(query)
        grouped = query.view(batch, own.count, group, own.dim)  # a group's heads as queries
        keys, values, scale = self._keys[source], self._values[source], a.dim**-0.5
        if layer.sinks is None:
            seen = mask[None, None, None]
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scale)
            return attended.reshape(batch, -1) if gates is None else attended.reshape(batch, -1) * gates
        unseen = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, float("-inf"))
        logits = (grouped @ keys.transpose(2, 3)) * scale + unseen  # [batch, kv_heads, group, context]
        sinks = layer.sinks.view(1, a.num_kv_heads, a.group, 1).expand(*logits.shape[:3], 1)
        shares = torch.softmax(torch.cat([logits, sinks], -1).float(), -1)[..., :-1].to(values.dtype)
        return (shares @ values).reshape(batch, -1)

    def _recur(self, index: int, layer: LayerWeights, normed: Tensor) -> Tensor:
        """Feed one token to a gated delta net's state, and return its output."""
        own, more, (state, inputs) = self.architecture.recurrent, layer.recurrent, self._states[index]
        assert own is not None
        assert more is not None
        mixed, gates = F.linear(normed, layer.qkv), F.linear(normed, more.gates).float()
        if own.is_mamba:
            return self._recur_mamba(index, own, more, mixed)
        if own.is_short:
            front, gate, back = mixed.chunk(3, 1)
            inputs.copy_(torch.cat([inputs[:, 1:], (front * back)[:, None]], 1))
            return ((inputs.float() * more.conv[:, 0].float().T).sum(1) * gate).to(mixed.dtype)
        inputs.copy_(torch.cat([inputs[:, 1:], mixed[:, None, : own.conv_width]], 1))
        made = F.silu((inputs.float() * more.conv[:, 0].float().T).sum(1))
        query, key, value = made.split([own.key_width, own.key_width, own.value_width], 1)
        query, key = (F.normalize(one.view(len(one), own.key_heads, -1), dim=2) for one in (query, key))
        assert not own.is_tiled, "heads of a GGUF file, and nobody measures one here"
        query, key = (one.repeat_interleave(own.value_heads // own.key_heads, 1) for one in (query, key))
        share, time = gates.chunk(2, 1)
        state *= torch.exp(-more.decay.exp() * F.softplus(time + more.time_bias))[:, :, None, None]
        missing = value.view(len(value), own.value_heads, -1) - (key[:, :, None] @ state)[:, :, 0]
        state += key[..., None] * (share.sigmoid()[..., None] * missing)[:, :, None]
        out = (query[:, :, None] * own.key_dim**-0.5 @ state)[:, :, 0]
        out = F.rms_norm(out, (own.value_dim,), more.norm.float(), self.architecture.rms_norm_eps).flatten(1)
        return (out * F.silu(mixed[:, own.conv_width :].float())).to(normed.dtype)

    def _recur_mamba(self, index: int, own: Recurrent, more: RecurrentWeights, mixed: Tensor) -> Tensor:
        """Feed one token to a Mamba-2 layer's state, and return its output."""
        assert more.conv_bias is not None
        assert more.skip is not None
        state, inputs = self._states[index]
        inputs.copy_(torch.cat([inputs[:, 1:], mixed[:, None, : own.conv_width]], 1))
        made = F.silu((inputs.float() * more.conv[:, 0].float().T).sum(1) + more.conv_bias.float())
        query, key, value = made.split([own.key_width, own.key_width, own.value_width], 1)
        shared = own.value_heads // own.key_heads
        query, key = (one.view(len(one), own.key_heads, -1).repeat_interleave(shared, 1) for one in (query, key))
        value = value.view(len(value), own.value_heads, -1)
        time = F.softplus(mixed[:, own.projected_width :].float() + more.time_bias)
        state *= torch.exp(-more.decay.exp() * time)[:, :, None, None]
        state += key[..., None] * (time[..., None] * value)[:, :, None]
        out = (query[:, :, None] @ state)[:, :, 0] + more.skip[:, None] * value
        gated = out.flatten(1) * F.silu(mixed[:, own.conv_width : own.projected_width].float())
        eps = own.norm_eps or self.architecture.rms_norm_eps
        normed = F.rms_norm(gated.view(len(gated), own.key_heads, -1), (own.value_width // own.key_heads,), None, eps)
        return (normed.flatten(1) * more.norm.float()).to(mixed.dtype)

    def _grown(self, query: Tensor) -> Tensor:
        """Return a rotated query, scaled by the model's factor for this position."""
        growth = self.architecture.query_growth
        if growth is None:
            return query
        return query * (1 + growth.beta * torch.log(1 + self.position // growth.tokens)).to(query)

    def _attend_latent(self, index: int, layer: LayerWeights, latent: Latent, normed: Tensor, mask: Tensor) -> Tensor:
        """Attend with keys and values of all heads, computed from the token's latent row."""
        own, heads, batch = layer.latent, self.architecture.num_heads, len(normed)
        assert own is not None, "the layer has latent attention"
        cos, sin = (table[self.position] for table in self._rope_tables[index])
        first, row = F.linear(normed, layer.qkv).tensor_split([latent.first_columns(heads)], 1)
        if own.query_up is not None and own.query_norm is not None:
            first = F.linear(F.rms_norm(first, own.query_norm.shape, own.query_norm, LATENT_EPS), own.query_up)
        query = first.view(batch, heads, -1)
        made = F.linear(F.rms_norm(row[:, : latent.rank], own.norm.shape, own.norm, LATENT_EPS), own.up)
        made = made.view(batch, heads, -1)

        def turn(rotated: Tensor) -> Tensor:
            if latent.has_neighbour_pairs:
                rotated = torch.cat([rotated[..., ::2], rotated[..., 1::2]], -1)
            return _rotate(rotated, cos, sin)

        query = self._grown(torch.cat([query[..., : latent.plain], turn(query[..., latent.plain :])], -1))
        turned = turn(row[:, None, latent.rank :]).expand(-1, heads, -1)
        key = torch.cat([made[..., : latent.plain], turned], -1)
        self._keys[index].index_copy_(2, self.position, key[:, :, None])
        self._values[index].index_copy_(2, self.position, made[:, :, None, latent.plain :])
        keys, values = self._keys[index], self._values[index]
        return F.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=mask[None, None, None], scale=latent.scale
        ).reshape(batch, -1)  # fmt: skip


def _gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return an MLP's activated product of gate and up (the halves of `gate_up`), or of up alone."""
    if activation == "relu2":
        return F.relu(gate_up) ** 2
    gate, up = gate_up.chunk(2, -1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * torch.sigmoid(CLAMPED_GAIN * gate) * (up + 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _mix(normed: Tensor, to_route: Tensor, weights: ExpertWeights, spec: LayerSpec) -> Tensor:
    """Compute a mixture of experts by gathering each token's matrices, as a graph needs it.

    to_route: the same tokens with another norm, for the router.
    """
    experts = spec.experts
    assert experts is not None, "the layer has experts"
    bias = None if weights.router_bias is None else weights.router_bias.float()
    logits = F.linear(to_route.float(), weights.router.float(), bias)
    scores = torch.sigmoid(logits) if experts.is_sigmoid else torch.softmax(logits, 1)
    wanted = scores if weights.correction is None else scores + weights.correction
    if experts.groups > 1:
        wanted = wanted.view(len(logits), experts.groups, -1)
        sums = wanted.topk(experts.group_best, 2).values.sum(2)
        least = sums.topk(experts.groups_taken, 1).values[:, -1:]
        wanted = wanted.masked_fill((sums < least)[..., None], float("-inf")).flatten(1)
    ids = wanted.topk(experts.per_token, 1).indices
    shares = scores.gather(1, ids)
    if experts.is_normalised:
        shares = shares / shares.sum(1, keepdim=True)
    shares = shares * experts.gain
    if weights.beside is not None:
        shares = shares * weights.beside.gains[ids]
    gate_up = weights.gate_up.view(experts.num_experts, -1, normed.shape[1])[ids]  # [tokens, taken, rows, hidden]
    product = torch.einsum("th,tkrh->tkr", normed, gate_up)
    if weights.gate_up_bias is not None:
        product = product + weights.gate_up_bias.view(experts.num_experts, -1)[ids]
    down = weights.down.view(experts.num_experts, normed.shape[1], -1)[ids]
    made = torch.einsum("tki,tkhi->tkh", _gate(product, spec.activation), down)
    if weights.down_bias is not None:
        made = made + weights.down_bias.view(experts.num_experts, -1)[ids]
    return (made.float() * shares[:, :, None]).sum(1).to(normed.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)
