"""Mixtures of experts, drawn, and what they compute in float64 numpy, expert by expert, from the formula."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from gpu.model.spec import Activation, Experts
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights.weights import BesideWeights, ExpertWeights
from tests.gpu.kernel_oracles import clamped_swiglu, random, rms_norm, squared_relu, swiglu, wide
from tests.gpu.packed_oracle import draw_packed, poisoned

# kind of matrices, group, row_block, has_zeros, columns of a run
KINDS = {
    "plain": None,
    "int4": ("int4", 32, 1, True, None),
    "int8": ("int8", 64, 1, False, None),
    "fp8": ("fp8", 32, 8, False, None),
    "fp4": ("fp4", 32, 1, False, None),
    "fp4-halves": ("fp4", 16, 1, False, None),
    "int4-runs": ("int4", 32, 1, False, 64),
    "int8-halves": ("int8", 16, 1, False, 32),
}


@dataclass(frozen=True)
class Mixture:
    """gate_up `[experts, 2 * intermediate, hidden]`, or without gates half as many rows, down `[experts, hidden,
    intermediate]`, router: float64. Experts with biases have the activation that comes with them in gpt-oss.
    """

    experts: Experts
    weights: ExpertWeights
    router: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray

    @property
    def activation(self) -> Activation:
        if self.gate_up.shape[1] == self.experts.intermediate:
            return "relu2"
        return "clamped_swiglu" if self.experts.has_biases else "silu"

    def bias(self, name: str) -> np.ndarray:
        """Of every expert, `[experts, rows]`; zero where there is none."""
        bias = getattr(self.weights, f"{name}_bias")
        return np.zeros((self.experts.num_experts, 1)) if bias is None else wide(bias).reshape(len(self.gate_up), -1)


def draw_mixture(
    experts: Experts, hidden: int, kind: str, dtype: torch.dtype, device: str, is_gated: bool = True
) -> Mixture:
    """Matrices stand in buffers of NaN."""
    generator = np.random.default_rng(experts.num_experts * hidden + experts.intermediate)
    count, width, first = experts.num_experts, experts.intermediate, (1 + is_gated) * experts.intermediate
    router = random(generator, (count, hidden), dtype, device) * (2 * hidden**-0.5)
    shapes = {"gate_up": (count * first, hidden), "down": (count * hidden, width)}
    stored: dict[str, torch.Tensor | Packed] = {}
    numbers = {}
    for name, (rows, inner) in shapes.items():
        asked = KINDS[kind]
        if asked is None:
            plain = poisoned(random(generator, (rows, inner), dtype, device) * inner**-0.5, float("nan"))
            stored[name], numbers[name] = plain, wide(plain)
        else:
            name_of, group, block, has_zeros, run = asked
            drawn = draw_packed(name_of, rows, inner, group, block, has_zeros, False, dtype, device, run)
            stored[name], numbers[name] = drawn.packed, drawn.wanted
    weights = ExpertWeights(router, stored["gate_up"], stored["down"])
    if experts.beside_mlp:
        norms = [random(generator, (hidden,), torch.float32, device) for _ in range(4)]
        weights = replace(weights, beside=BesideWeights(*norms, random(generator, (count,), torch.float32, device)))
    if experts.has_biases:
        biases = {"router_bias": count, "gate_up_bias": count * first, "down_bias": count * hidden}
        drawn = {name: 4 * poisoned(random(generator, (rows,), dtype, device), float("nan"))
                 for name, rows in biases.items()}  # fmt: skip
        weights = replace(weights, **drawn)
    return Mixture(
        experts, weights, wide(router), numbers["gate_up"].reshape(count, first, hidden),
        numbers["down"].reshape(count, hidden, width),
    )  # fmt: skip


def choose(logits: np.ndarray, experts: Experts) -> tuple[np.ndarray, np.ndarray]:
    """ids and weights `[tokens, per_token]`: of equal logits the lower expert first."""
    ids = np.array([sorted(range(len(row)), key=lambda expert: (-row[expert], expert)) for row in logits])
    ids = ids[:, : experts.per_token]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    taken = np.take_along_axis(shares, ids, 1)
    return ids, taken / taken.sum(1, keepdims=True) if experts.is_normalised else taken


def mix(normed: np.ndarray, ids: np.ndarray, weights: np.ndarray, mixture: Mixture) -> np.ndarray:
    """What the experts make of tokens behind the norm."""
    activations = {"silu": swiglu, "clamped_swiglu": clamped_swiglu, "relu2": squared_relu}
    out, activate = np.zeros_like(normed), activations[mixture.activation]
    gate_up_bias, down_bias = mixture.bias("gate_up"), mixture.bias("down")
    beside = mixture.weights.beside
    gains = np.ones(len(mixture.down)) if beside is None else wide(beside.gains)
    for token, (taken, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, share in zip(taken, shares, strict=True):
            made = activate(mixture.gate_up[expert] @ normed[token] + gate_up_bias[expert])
            out[token] += share * gains[expert] * (mixture.down[expert] @ made + down_bias[expert])
    return out


def layer(x: np.ndarray, norm: np.ndarray, eps: float, mixture: Mixture) -> np.ndarray:
    normed, beside = rms_norm(x, norm, eps), mixture.weights.beside
    to_route = normed if beside is None else rms_norm(x, wide(beside.router_norm), eps)
    logits = to_route @ mixture.router.T + mixture.bias("router").T
    return (x if beside is None else 0) + mix(normed, *choose(logits, mixture.experts), mixture)
