"""Compute the reference model in plain torch: a Llama with weights stacked over layers, and its loss by class of token.

Tokens are flat everywhere but in attention, so the compiled pieces see one shape for rows of any length. The invariant:
exported weights give the same logits in any implementation of Llama, except for bf16 rounding. The states after a
middle layer can be read through the final norm and the embedding, like those of the last layer; only training does
that.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROPE_BASE = 500_000.0
EPSILON = 1e-5
EMBEDDING_STD = 0.02
HEAD_TOKENS = 1 << 15
"""Tokens whose logits are computed at once."""

SAME_RESULT = 0.02

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab_size: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    positions: int

    def count(self) -> int:
        """Return the number of parameters; the tied embedding counts once."""
        attention = self.hidden * self.dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.vocab_size * self.hidden + self.layers * layer + self.hidden

    @property
    def middle(self) -> int:
        """Return the number of layers before hints are read.

        A search by a name takes seven of twelve layers, and a second search the last four.
        """
        return 2 * self.layers // 3

    def describe(self) -> dict[str, int]:
        return asdict(self)


REFERENCE = Shape(8192, 384, 768, 12, 8, 2, 64, 16_384)
TINY = Shape(8192, 64, 128, 2, 4, 2, 16, 16_384)
SHAPES = {"reference": REFERENCE, "tiny": TINY}


class Llama(nn.Module):
    """Weights `[layers, out, in]`, float32; the forward computes in `compute`."""

    def __init__(self, shape: Shape, compute: torch.dtype) -> None:
        super().__init__()
        self.shape, self.compute = shape, compute
        wide, thin = shape.heads * shape.dim, shape.kv_heads * shape.dim
        hidden, inner = shape.hidden, shape.inner

        def matrix(rows: int, columns: int, gain: float) -> nn.Parameter:
            weights = torch.randn(shape.layers, rows, columns) * (gain / math.sqrt(columns))
            return nn.Parameter(weights)

        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, hidden) * EMBEDDING_STD)
        self.query, self.key, self.value = matrix(wide, hidden, 1), matrix(thin, hidden, 1), matrix(thin, hidden, 1)
        self.output = matrix(hidden, wide, 0.1)
        self.gate, self.up = matrix(inner, hidden, 1), matrix(inner, hidden, 1)
        self.down = matrix(hidden, inner, 0.1)
        self.attention_norm = nn.Parameter(torch.ones(shape.layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(shape.layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        rates = ROPE_BASE ** (-torch.arange(0, shape.dim, 2, dtype=torch.float64) / shape.dim)
        angles = torch.arange(shape.positions, dtype=torch.float64)[:, None] * rates
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self.before: Callable[..., Any] = before
        self.after: Callable[..., Any] = after
        self.score: Callable[..., Any] = score
        self.attend: Attention = attend_by(None, False)

    def matrices(self) -> list[nn.Parameter]:
        """Return the parameters that Muon trains."""
        return [self.query, self.key, self.value, self.output, self.gate, self.up, self.down]

    def rest(self) -> list[nn.Parameter]:
        """Return the parameters that AdamW trains."""
        return [self.embedding, self.attention_norm, self.mlp_norm, self.final_norm]

    def restack(self, order: list[int]) -> None:
        """Move layer `order[i]` to place i, counted from 0. Raises ValueError if the order does not fit the layers."""
        layers = self.shape.layers
        if len(order) != layers or not set(order) <= set(range(layers)):
            raise ValueError(f"order of layers: asked {order}, have {layers} layers from 0; name one for each place")
        with torch.no_grad():
            for weights in [*self.matrices(), self.attention_norm, self.mlp_norm]:
                weights.copy_(weights[order].clone())

    def compile(self) -> None:
        """Compile the pieces before and after attention, and the head; each is compiled once for all layers."""
        self.before = torch.compile(before, dynamic=False, fullgraph=True)
        self.after = torch.compile(after, dynamic=False, fullgraph=True)
        self.score = torch.compile(score, dynamic=False, fullgraph=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute tokens, int64 `[rows, length]`. Returns normed final states `[rows * length, hidden]` in
        `compute`."""
        return self.states(tokens)[0]

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute tokens, int64 `[rows, length]`. Returns normed final states and states after the middle layer, both
        `[rows * length, hidden]` in `compute`.
        """
        rows, length = tokens.shape
        shape = self.shape
        cos, sin = self.cos[:length].repeat(rows, 1), self.sin[:length].repeat(rows, 1)  # [tokens, dim / 2]
        hidden = functional.embedding(tokens.flatten(), self.embedding.to(self.compute))  # [tokens, hidden]
        stacked = [self.attention_norm, self.query, self.key, self.value, self.output]
        stacked += [self.mlp_norm, self.gate, self.up, self.down]
        middle = hidden
        for number, layer in enumerate(zip(*(weights.to(self.compute).unbind(0) for weights in stacked), strict=True)):
            norm, query, key, value, output, mlp_norm, gate, up, down = layer
            q, k, v = self.before(hidden, norm, query, key, value, cos, sin, shape.dim)
            q, k, v = (rows_of.view(rows, length, -1, shape.dim).transpose(1, 2) for rows_of in (q, k, v))
            out = self.attend(q, k, v).transpose(1, 2).reshape(rows * length, -1)
            hidden = self.after(hidden, out, output, mlp_norm, gate, up, down)
            if number + 1 == shape.middle:
                middle = hidden
        return rms_norm(hidden, self.final_norm.to(self.compute)), middle

    def hint_losses(self, middle: Tensor, positions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return `losses` of the middle states `[tokens, hidden]` at some positions.

        positions, targets: int64 `[hints]`.
        """
        states = rms_norm(middle[positions], self.final_norm.to(self.compute))
        return self.score(states, self.embedding.to(self.compute), targets)

    def losses(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the negative log-likelihood of each token, float32, and whether it is the most likely one, bool.

        states: `[tokens, hidden]`. targets: int64 `[tokens]`.
        """
        embedding = self.embedding.to(self.compute)
        pieces = [
            self.score(part, embedding, wanted)
            for part, wanted in zip(states.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True)
        ]
        return torch.cat([nll for nll, _ in pieces]), torch.cat([right for _, right in pieces])


def rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    scaled = hidden.float()
    return (scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + EPSILON)).to(hidden.dtype) * weight


def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `[tokens, heads, dim]`, halves against each other. cos, sin: `[tokens, dim / 2]`."""
    first, second = rows.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(rows.dtype)


def before(
    hidden: Tensor, norm: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a layer up to attention: rotated queries and keys, and values, `[tokens, heads, dim]`."""
    normed = rms_norm(hidden, norm)
    q, k, v = (functional.linear(normed, weight).view(len(hidden), -1, dim) for weight in (query, key, value))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after(hidden: Tensor, out: Tensor, output: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute the rest of a layer from attention's output, `[tokens, heads * dim]`."""
    hidden = hidden + functional.linear(out, output)
    normed = rms_norm(hidden, norm)
    inner = functional.silu(functional.linear(normed, gate)) * functional.linear(normed, up)
    return hidden + functional.linear(inner, down)


def score(states: Tensor, embedding: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each token, and whether it is the most likely one."""
    logits = functional.linear(states, embedding).float()
    return functional.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


def attend_by(backend: SDPBackend | None, repeat: bool) -> Attention:
    """Return causal attention by one of torch's kernels. repeat: copy KV heads, for kernels that cannot share them."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if repeat:
            group = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        call = partial(
            functional.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=not repeat
        )
        if backend is None:
            return call()
        with sdpa_kernel(backend):
            return call()

    return attend


def choose_attention(
    shape: Shape, device: torch.device, num_tokens: int, lengths: tuple[int, ...]
) -> tuple[str, Attention]:
    """Return the kernel that is fastest at the longest of the (ascending) lengths.

    Kernels count only if they run forwards and backwards at all lengths, and agree with flash attention over repeated
    heads. Raises RuntimeError if none does.
    """
    if device.type != "cuda":
        return "default", attend_by(None, False)
    choices = {
        "flash, heads repeated": attend_by(SDPBackend.FLASH_ATTENTION, True),
        "flash": attend_by(SDPBackend.FLASH_ATTENTION, False),
        "cudnn": attend_by(SDPBackend.CUDNN_ATTENTION, False),
    }
    torch.manual_seed(0)
    wanted: dict[int, list[Tensor]] = {}
    timed: dict[str, float] = {}
    for name, attend in choices.items():
        try:
            for length in lengths:
                drawn = draw_heads(shape, device, num_tokens, length)
                found = differentiate(attend, *drawn)
                if not all(agree(a, b) for a, b in zip(found, wanted.setdefault(length, found), strict=True)):
                    raise RuntimeError(f"{name}: another result at length {length}")
            torch.cuda.synchronize()
            begun = time.perf_counter()
            differentiate(attend, *drawn)
            torch.cuda.synchronize()
            timed[name] = time.perf_counter() - begun
        except RuntimeError as error:
            print(f"attention: {name} is left out: {str(error).splitlines()[0]}", flush=True)
    if not timed:
        raise RuntimeError("attention: no kernel of torch ran forwards and backwards; wanted flash or cuDNN")
    fastest = min(timed, key=lambda name: timed[name])
    return " ".join(f"{name}={1e3 * took:.1f}ms" for name, took in timed.items()) + f" -> {fastest}", choices[fastest]


def draw_heads(shape: Shape, device: torch.device, num_tokens: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, keys and values `[rows, heads, length, dim]`, the same for the same length."""
    torch.manual_seed(length)
    query, key, value = (
        torch.randn(num_tokens // length, length, heads, shape.dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return query, key, value


def agree(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two results differ by no more than bf16's rounding of sums; NaN never agrees."""
    return bool(((found - wanted).norm() < SAME_RESULT * wanted.norm()).item())


def differentiate(attend: Attention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return the output and the gradients of its mean square."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    out = attend(*leaves)
    gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    return [out.detach().float(), *(gradient.float() for gradient in gradients)]
