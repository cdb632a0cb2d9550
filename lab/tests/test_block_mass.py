"""Mass that block selections hold: by definition in numpy, the best choice above all, all of it with every block."""

import numpy as np
import pytest
import torch

from evals.forward import attend_causal, load_decoder
from evals.methods.method import PromptLayer
from gpu.methods.momo.settings import MomoSettings
from lab.quality.block_mass import QueryBlock, look_at, measure_block, measure_prompt, pool_layers, vertical_slash
from tests.gpu.reference_model import FOLDER
from tests.tolerances import METHOD_FLOAT32

SETTINGS = MomoSettings(gamma=4, key_block=16, query_block=32, k=4, k_trim=6, dense_until_tokens=0)
ALL = SETTINGS.model_copy(update={"k": 32, "k_trim": 64})
SHARES = ("oracle", "momo", "momo_group", "mean_pool", "vertical_slash")


def layer(tokens: int, seed: int = 0) -> PromptLayer:
    generator = torch.Generator().manual_seed(seed)
    queries = 3 * torch.randn(1, 4, tokens, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, tokens, 16, generator=generator)
    return PromptLayer(0, queries, queries, keys, values, torch.tensor([tokens]), tokens)


def last_block(prompt: PromptLayer) -> tuple[QueryBlock, torch.Tensor]:
    """Return the last query block, and weights of the last 64 queries."""
    return look_at(prompt, prompt.longest - 32, 32), look_at(prompt, prompt.longest - 64, 64).weights


def test_a_look_is_exact_attention() -> None:
    prompt = layer(160)
    block, _ = last_block(prompt)
    whole = attend_causal(prompt.queries, prompt.keys, prompt.values, None)
    torch.testing.assert_close(block.out, whole[0, :, 128:].transpose(0, 1), atol=METHOD_FLOAT32, rtol=0)
    np.testing.assert_allclose(block.weights.sum(-1), 1, atol=METHOD_FLOAT32)


def test_the_best_choice_holds_the_heaviest_blocks() -> None:
    block, observed = last_block(layer(320))
    found = measure_block(block, observed, SETTINGS)
    wanted = []
    for weights in block.weights.numpy():
        masses = weights.mean(0).reshape(-1, 16).sum(1)
        rest = np.sort(masses[1:-2])[::-1]
        wanted.append(masses[0] + masses[-2:].sum() + rest[: SETTINGS.k_trim - 3].sum())
    assert found["oracle"] == pytest.approx(np.mean(wanted), abs=METHOD_FLOAT32)
    for name in ("momo", "momo_group", "mean_pool"):
        assert 0 < found[name] < found["oracle"]
    assert found["cosine_sparse"] < 1 - METHOD_FLOAT32


def test_with_every_block_all_hold_everything() -> None:
    block, observed = last_block(layer(320))
    found = measure_block(block, observed, ALL)
    for name in (*SHARES, "cosine_sparse", "cosine_delta"):
        assert found[name] == pytest.approx(1, abs=METHOD_FLOAT32), name


def test_columns_and_diagonals_are_the_heaviest_of_the_last_queries() -> None:
    prompt = layer(160)
    prompt.queries.zero_()  # every key weighs alike but those that are made to stand out
    prompt.queries[..., 0] = 8.0
    prompt.keys[:, :, 37, 0] = 40.0
    block, observed = last_block(prompt)
    chosen = vertical_slash(block, observed, SETTINGS.model_copy(update={"k_trim": 3}))
    assert chosen[:, :, 37].all()
    assert not chosen.all()


def test_every_layer_is_looked_at_and_pooled() -> None:
    decoder = load_decoder(FOLDER, torch.device("cpu"), torch.float32)
    grid = [SETTINGS, ALL]
    rows = measure_prompt(decoder, list(range(100, 260)), grid, 3, lambda: None)
    assert [(row["layer"], row["setting"]) for row in rows] == [
        (layer, number) for layer in range(decoder.architecture.num_layers) for number in range(2)
    ]
    few, every = pool_layers(rows, grid)
    assert every["momo"] == pytest.approx(1, abs=METHOD_FLOAT32)
    assert 0 <= few["oracle"] - few["momo"] <= few["furthest"]
    with pytest.raises(ValueError, match="160 tokens: no query block of 32 lies behind dense_until_tokens"):
        measure_prompt(decoder, list(range(160)), [SETTINGS.model_copy(update={"dense_until_tokens": 170})], 3, int)
