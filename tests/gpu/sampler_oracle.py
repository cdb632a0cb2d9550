"""The sampler by definition: one row at a time, in float64 numpy, with a sort. Shares nothing with gpu/."""

import math
from collections.abc import Sequence

import numpy as np

from gpu.sampling_params import SamplingParams


def edit_scores(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], banned: Sequence[int] = ()
) -> np.ndarray:
    scores = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in set(prompt) | set(output):
        scores[token] = (
            scores[token] / params.repetition_penalty
            if scores[token] > 0
            else scores[token] * params.repetition_penalty
        )
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    scores[list(banned)] = -np.inf
    return scores


def distribution(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, renormalised."""
    scaled = scores / params.temperature
    masses = np.exp(scaled - scaled.max())
    order = sorted(range(len(masses)), key=lambda token: (-masses[token], token))
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        total, reached, nucleus = sum(masses[kept]), 0.0, []
        for token in kept:
            if nucleus and reached >= params.top_p * total:
                break
            nucleus.append(token)
            reached += masses[token]
        kept = nucleus
    kept = [token for token in kept if masses[token] >= params.min_p * masses.max()]
    result = np.zeros_like(masses)
    result[kept] = masses[kept]
    return result / result.sum()


def draw_key(seed: int, number: int) -> int:
    """The key of a draw, in `[0, 2**64)`: the number-th output of Philox with the seed as its key."""
    return int(np.random.Philox(key=seed).random_raw(number + 1)[number])


def split_mix_64(seed: int, number: int) -> int:
    """Output `number` (from 0) of SplitMix64 with that seed, in `[0, 2**64)`: Steele, Lea, Flood 2014, figure 17."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def race_winner(probabilities: np.ndarray, key: int) -> int:
    """The token whose exponential clock of rate `probabilities[token]` rings first."""
    rings = [
        -math.log1p(-((split_mix_64(key, token) >> 12) + 0.5) / 2**52) / probability if probability > 0 else math.inf
        for token, probability in enumerate(probabilities)
    ]
    return int(np.argmin(rings))


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).sum() / 2)


def race_flip_rate(first: np.ndarray, second: np.ndarray) -> float:
    """Chance that races of the same clocks under two sets of positive probabilities have different winners.

    Token i wins both if every other clock rings after i's under both: 1 / sum over j of max(p_j / p_i, q_j / q_i).
    """
    slower = np.maximum(first[None, :] / first[:, None], second[None, :] / second[:, None])
    return float(1 - (1 / slower.sum(1)).sum())
