"""Filter distributions to draw from: temperature, top-k, top-p and min-p, for all rows of a batch at once.

A distribution is the distance of each token below the best one, in nats: 0 for the best token, `inf` for tokens that
may not be drawn; `race` draws from it. The result of a row depends on that row alone, on any device: the masses of
top-p are **integers**, so that sums are exact and the same in any order. A float32 cumulative sum over 128K tokens is
off by up to 3e-3 of the mass. Masses are `exp(-distance)` in units of `2**-(62 - bits of the vocabulary)` of the most
likely token's: 2**-45 for 128K tokens.

Nothing is sorted: a threshold is found digit by digit (a radix select over the bits of the distance, by mass), in three
passes that each read 12 bytes a token. Ties at a threshold go to the lower token id.
"""

import torch

_DIGITS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of the 31 bits of a float32 >= 0, most significant first


def distances(scores: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return how far each token is below the best one, in nats after temperature: float32 `[rows, vocab]`, all >= 0.

    `scores` float32 `[rows, vocab]`, `best` its row maxima `[rows]`, `temperature` float32 `[rows]`, > 0. A row whose
    maximum is not finite gives zeros or huge values, never NaN; its draw is void.
    """
    return (best[:, None] - scores).div_(temperature[:, None]).nan_to_num_(nan=0.0)


def weigh(distance: torch.Tensor) -> torch.Tensor:
    """Return integer weights, int64 `[rows, vocab]`, in proportion to `exp(-distance)`; a row's sum is below 2**62."""
    bits = 62 - (distance.shape[1] - 1).bit_length()
    return torch.exp(-distance).mul_(2.0**bits).long()


def keep_top_k(distance: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return a mask `[rows, vocab]` of the `top_k` nearest tokens, exactly; `top_k` int64 `[rows]` in `[1, vocab]`."""
    ones = torch.ones((1, 1), dtype=torch.int64, device=distance.device).expand(distance.shape)
    return _keep_nearest(distance, ones, top_k)


def keep_top_p(distance: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return a mask `[rows, vocab]` of the fewest nearest tokens that hold `top_p` (float64 `[rows]`) of the sum of
    `weights`.

    At least one token is kept. With `top_p` 1 every token is, those too that are too unlikely for a weight.
    """
    total = weights.sum(1)
    target = torch.minimum(torch.ceil(top_p * total.double()).long(), total).clamp_(min=1)
    return _keep_nearest(distance, weights, target) | (top_p >= 1.0)[:, None]


def _keep_nearest(distance: torch.Tensor, mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a mask of the fewest tokens, nearest first and lower ids first, whose `mass` reaches `target` (int64
    `[rows]`).

    Tokens at one distance must have one mass, or none. The bits of a float >= 0 order as its value does.
    """
    key = distance.view(torch.int32)
    threshold = torch.zeros_like(target)
    alive = mass
    for shift, bits in _DIGITS:
        digit = ((key >> shift) & ((1 << bits) - 1)).long()
        histogram = torch.zeros((len(target), 1 << bits), dtype=torch.int64, device=key.device)
        histogram.scatter_add_(1, digit, alive)
        reached = histogram.cumsum(1)
        found = torch.searchsorted(reached, target[:, None])  # [rows, 1]
        target = target - (reached.gather(1, found) - histogram.gather(1, found))[:, 0]
        threshold = threshold | (found[:, 0] << shift)
        alive = torch.where(digit == found, alive, 0)
        del digit, histogram, reached  # 8 bytes a token, which the next digit and the sums need
    return (key < threshold[:, None]) | ((alive > 0) & ((alive.cumsum(1) - alive) < target[:, None]))
