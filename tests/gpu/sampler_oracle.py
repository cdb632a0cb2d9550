"""The sampler by definition: one row at a time, in float64 numpy, with a sort. Shares nothing with gpu/."""

import numpy as np

from gpu.sampling_params import SamplingParams


def edit_scores(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
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


def inverse_cdf(probabilities: np.ndarray, uniform: float) -> int:
    reached = 0.0
    for token, probability in enumerate(probabilities):
        reached += probability
        if uniform < reached:
            return token
    return int(np.flatnonzero(probabilities)[-1])


def uniform_number(seed: int, number: int) -> float:
    return float(np.random.Generator(np.random.Philox(key=seed)).random(number + 1)[number])
