"""MOMO's prefill as a whole: Algorithm 1 in float64, what makes it dense, and what it may not depend on."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from gpu.attention.prefill_attention import prefill_attention_reference
from gpu.methods.device_side import Site
from gpu.methods.momo.query_blocks import Momo, make_prefill_side, sparse_attention
from gpu.methods.momo.query_sparse import query_sparse_reference
from gpu.methods.momo.settings import MomoSettings
from gpu.model.architecture import ModelError, named_shape
from tests.gpu import momo_oracles as oracle
from tests.gpu.kernel_oracles import DEVICES, DTYPES, random, wide
from tests.tolerances import MOMO_BFLOAT16, MOMO_FLOAT32

SMALL = MomoSettings(gamma=4, key_block=16, query_block=32, k=2, k_trim=6, dense_until_tokens=0)
WHOLE = MomoSettings(gamma=4, key_block=16, query_block=32, k=16, k_trim=20, dense_until_tokens=0)
HEADS, KV_HEADS, DIM = 4, 2, 64


def tensors(context: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of all tokens, keys and values."""
    generator = np.random.default_rng(7)
    query = random(generator, (context, HEADS, DIM), dtype, device) * 2
    keys, values = random(generator, (2, KV_HEADS, context, DIM), dtype, device)
    return query, keys, values


def attend(query: Tensor, keys: Tensor, values: Tensor, begin: int, end: int, settings: MomoSettings) -> Tensor:
    """Positions `[begin, end)`; what stands behind them is NaN."""
    keys, values = keys.clone(), values.clone()
    keys[:, end:], values[:, end:] = torch.nan, torch.nan
    return sparse_attention(query[begin:end], keys, values, begin, settings, DIM**-0.5)


def oracle_head(query: np.ndarray, keys: np.ndarray, values: np.ndarray, s: MomoSettings) -> np.ndarray:
    """Algorithm 1 of one head; query, keys, values `[context, dim]`."""
    scale, out = DIM**-0.5, np.empty_like(query)
    for begin in range(0, len(query), s.query_block):
        sparse = range(begin, begin + s.query_block, s.gamma)
        dense = [oracle.attend_row(query[i], keys[: i + 1], values[: i + 1], s.key_block, scale) for i in sparse]
        chosen = [{block: row.scores[block] for block in oracle.top(row.scores, s.k)} for row in dense]
        most = s.k_trim - s.query_block // s.key_block
        blocks = oracle.unite(chosen, [row.lse for row in dense], begin // s.key_block, most)
        own = [
            oracle.attend_listed(query[i], keys, values, i, blocks, s.query_block, s.key_block, scale)[0]
            for i in range(begin, begin + s.query_block)
        ]
        for i in range(s.query_block):
            window = i // s.gamma
            out[begin + i] = own[i] + dense[window].out - own[window * s.gamma]
    return out


def test_it_is_algorithm_1_in_float64():
    query, keys, values = tensors(160, torch.float64, "cpu")
    got = wide(attend(query, keys, values, 0, 160, SMALL))
    for head in range(HEADS):
        wanted = oracle_head(query[:, head].numpy(), keys[head // 2].numpy(), values[head // 2].numpy(), SMALL)
        np.testing.assert_allclose(got[:, head], wanted, atol=1e-12, rtol=0)
    dense = prefill_attention_reference(query, keys, values, DIM**-0.5).out
    assert np.abs(got - wide(dense)).max() > MOMO_BFLOAT16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_every_block_it_is_dense(dtype, device):
    query, keys, values = tensors(160, dtype, device)
    got = attend(query, keys, values, 64, 160, WHOLE)
    wanted = prefill_attention_reference(query[64:].double(), keys.double(), values.double(), DIM**-0.5).out
    atol = MOMO_FLOAT32 if dtype == torch.float32 else 2 * MOMO_BFLOAT16  # three outputs are added
    np.testing.assert_allclose(wide(got), wide(wanted), atol=atol, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_query_of_a_window_is_dense(device):
    query, keys, values = tensors(160, torch.float32, device)
    got = attend(query, keys, values, 64, 160, SMALL)
    wanted = prefill_attention_reference(query[64:].double(), keys.double(), values.double(), DIM**-0.5).out
    error = np.abs(wide(got) - wide(wanted)).max((1, 2))
    assert error[:: SMALL.gamma].max() < MOMO_FLOAT32
    assert np.delete(error[32:], np.s_[:: SMALL.gamma]).min() > MOMO_FLOAT32  # the first 32 have all blocks in reach


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_units_nor_what_comes_behind_change_it(dtype, device):
    query, keys, values = tensors(256, dtype, device)
    whole = attend(query, keys, values, 64, 256, SMALL)
    for cuts in ([64, 96, 256], [64, 128, 160, 256], [128, 256], [192, 224]):
        pieces = [attend(query, keys, values, *cut, SMALL) for cut in pairwise(cuts)]
        wanted, got = whole[cuts[0] - 64 : cuts[-1] - 64], torch.cat(pieces)
        if device == "cuda" and dtype == torch.bfloat16:
            assert torch.equal(got, wanted)
        else:  # torch's products of few rows may add in another order than those of many
            np.testing.assert_allclose(got.cpu(), wanted.cpu(), atol=MOMO_FLOAT32, rtol=0)


def test_the_references_rows_lie_as_the_kernel_of_the_union_reads_them():
    query, keys, values = tensors(64, torch.float32, "cpu")
    rows = query_sparse_reference(query, keys, values, 0, 4, 16, 4, DIM**-0.5)
    assert rows.blocks.is_contiguous()
    assert rows.lse.is_contiguous()
    assert rows.scores.stride(-1) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gamma": 12}, "gamma is 12; wanted a power of two"),
        ({"query_block": 32}, r"query_block is 32; wanted at least key_block \(64\) and gamma \(16\)"),
        ({"k": 256}, "less than or equal to 128"),
        ({"selection": "estimated"}, "Extra inputs"),
        ({"k_trim": 2}, "k_trim is 2; wanted more than a query block's own 2"),
        ({"k_trims": 2}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_be_are_named(given, words):
    with pytest.raises(ValidationError, match=words):
        MomoSettings(**given)


def test_heads_of_256_are_refused_on_a_gpu_in_one_line():
    def site(dim: int, device: str) -> Site:
        shape = replace(named_shape("tiny"), dim=dim)
        return Site(shape, None, 0, 1, torch.bfloat16, torch.bfloat16, torch.device(device))

    for dim, device in ((64, "cuda"), (96, "cuda"), (128, "cuda"), (256, "cpu")):
        assert isinstance(make_prefill_side(SMALL, site(dim, device), None), Momo)
    with pytest.raises(ModelError, match="momo: heads of 256; on a GPU served: 64, 96, 128: take `prefill: momo` out"):
        make_prefill_side(SMALL, site(256, "cuda"), None)
