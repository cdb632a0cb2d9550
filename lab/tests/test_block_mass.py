"""Mass that block selections hold: by definition in numpy, the best choice above all, all of it with every block."""

import numpy as np
import pytest
import torch

from evals.forward import load_decoder
from evals.methods.method import PromptLayer
from evals.methods.registry import parse_method
from evals.methods.sparse_prefill import attend_masked
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
    """The last query block, and weights of the last 64 queries."""
    return look_at(prompt, prompt.longest - 32, 32), look_at(prompt, prompt.longest - 64, 64).weights


def test_a_look_is_exact_attention() -> None:
    prompt = layer(160)
    block, _ = last_block(prompt)
    whole = attend_masked(prompt, lambda begin, end: torch.ones(1, 4, end - begin, end, dtype=torch.bool))
    torch.testing.assert_close(block.out, whole.out[0, :, 128:].transpose(0, 1), atol=METHOD_FLOAT32, rtol=0)
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


def test_momo_is_a_method_of_the_evals_and_close_to_exact_with_every_block() -> None:
    prompt = layer(200)
    every = "momo:gamma=4,key_block=16,query_block=32,k=16,k_trim=32,dense_until=40"
    few = "momo:gamma=4,key_block=16,query_block=32,k=2,k_trim=4,dense_until=40"
    whole = attend_masked(prompt, lambda begin, end: torch.ones(1, 4, end - begin, end, dtype=torch.bool)).out
    exact, sparse = (parse_method(label).attend(prompt) for label in (every, few))
    torch.testing.assert_close(exact.out, whole, atol=METHOD_FLOAT32, rtol=0)
    dense = (sparse.out - whole).abs().amax((0, 1, 3)) < METHOD_FLOAT32
    assert dense[:64].all(), "query blocks that begin below dense_until"
    assert dense[192:].all(), "the prompt's last query block"
    assert dense[64:192:4].all(), "the first of each window"
    assert not dense[64:192].all()
    assert float(sparse.head_fraction) < float(exact.head_fraction) < 1.3


def test_prompts_of_a_batch_do_not_see_each_other() -> None:
    first, second = layer(200, 1), layer(120, 2)
    queries, keys, values = (
        torch.cat(
            [getattr(first, name), torch.nn.functional.pad(getattr(second, name), (0, 0, 0, 80), value=torch.nan)]
        )
        for name in ("queries", "keys", "values")
    )
    method = parse_method("momo:gamma=4,key_block=16,query_block=32,k=2,k_trim=4,dense_until=0")
    both = method.attend(PromptLayer(0, queries, queries, keys, values, torch.tensor([200, 120]), 200)).out
    torch.testing.assert_close(both[:1], method.attend(first).out, atol=METHOD_FLOAT32, rtol=0)
    torch.testing.assert_close(both[1:, :, :120], method.attend(second).out, atol=METHOD_FLOAT32, rtol=0)


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
