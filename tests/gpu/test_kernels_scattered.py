"""Attention of queries at any positions against a float64 oracle, over NaN where nothing may be read."""

import numpy as np
import pytest
import torch

from gpu.attention.prefill_attention import scattered_attention
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, distance, random, wide
from tests.tolerances import MERGE_FLOAT32

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
SHAPES = [
    (1, 4, 2, 64),
    (9, 6, 2, 64),
    (150, 4, 1, 128),
    (140, 3, 1, 96),
    (70, 4, 2, 256),
]  # queries, heads, kv_heads, dim
CONTEXT = 300
SCALE = 0.125


def oracle(query, keys, values, positions, window):
    group = query.shape[1] // keys.shape[0]
    keys, values = np.repeat(keys, group, 0), np.repeat(values, group, 0)
    logits = np.einsum("thd,hcd->htc", query, keys) * SCALE
    far = positions[:, None] - np.arange(keys.shape[1])[None, :]
    logits[:, (far < 0) | (far >= (window or CONTEXT))] = -np.inf
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    mass = weights.sum(-1, keepdims=True)
    return np.einsum("htc,hcd->thd", weights / mass, values), (np.log(mass) + top)[..., 0].T


def make(shape, dtype, device, end):
    """Queries at ascending positions up to `end`, behind which keys and values are NaN."""
    tokens, heads, kv_heads, dim = shape
    generator = np.random.default_rng(tokens)
    query = random(generator, (tokens, heads, dim), dtype, device)
    keys, values = (random(generator, (kv_heads, CONTEXT + 20, dim), dtype, device)[:, :CONTEXT] for _ in range(2))
    keys[:, end + 1 :], values[:, end + 1 :] = float("nan"), float("nan")
    others = np.sort(generator.choice(end, tokens - 1, replace=False))
    return query, keys, values, np.append(others, end)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("end", [199, CONTEXT - 1])
def test_queries_see_what_is_in_front_of_them_and_nothing_behind_the_last(shape, window, end, dtype, device):
    query, keys, values, positions = make(shape, dtype, device, end)
    at = torch.from_numpy(positions).to(device)
    got = scattered_attention(query, keys, values, at, SCALE, window)
    own = wide(query), wide(keys)[:, : end + 1], wide(values)[:, : end + 1]
    wanted, lse = oracle(*own, positions, window)
    assert distance(got.out, wanted) < KERNEL_TOLERANCE[dtype]
    np.testing.assert_allclose(wide(got.partial_lse), lse, atol=1e-2 if dtype == torch.bfloat16 else 50 * MERGE_FLOAT32)
    moved, _ = oracle(*own, np.maximum(positions - 1, 0), window)
    assert distance(got.out, moved) > KERNEL_TOLERANCE[dtype], "one key less is seen"
