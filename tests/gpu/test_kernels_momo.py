"""MOMO's kernels against float64 oracles: sparse queries and what they choose, the union, attention over lists."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.methods.momo.block_sparse import block_sparse_attention
from gpu.methods.momo.query_sparse import SparseRows, query_sparse_attention
from gpu.methods.momo.union import KeyLists, unite
from tests.gpu import momo_oracles as oracle
from tests.gpu.kernel_oracles import DEVICES, DTYPES, random, wide
from tests.tolerances import MOMO_BFLOAT16, MOMO_FLOAT32

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
ATOL = {torch.float32: MOMO_FLOAT32, torch.bfloat16: MOMO_BFLOAT16}
K = 4


def tensors(
    tokens: int, begin: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Query of `tokens` from `begin` on; keys and values cut out of larger ones, NaN behind the last query."""
    generator = np.random.default_rng(tokens * 1000 + begin)
    query = random(generator, (tokens, heads, dim), dtype, device) * 2
    room = torch.full((2, kv_heads, begin + tokens + 70, dim + 16), torch.nan, dtype=dtype, device=device)
    room[:, :, : begin + tokens, :dim] = random(generator, (2, kv_heads, begin + tokens, dim), dtype, device)
    keys, values = room[..., :dim].unbind()
    return query, keys, values


def chosen_sets(rows: SparseRows) -> list[list[set[int]]]:
    kept = [[[block for block in head if block >= 0] for head in row] for row in rows.blocks.tolist()]
    assert all(len(head) == len(set(head)) for row in kept for head in row)
    return [[set(head) for head in row] for row in kept]


def margin_of(scores: np.ndarray, k: int) -> float:
    """How far the k-th largest score is above the next."""
    ordered = np.sort(scores)[::-1]
    return np.inf if len(ordered) <= k else ordered[k - 1] - ordered[k]


@pytest.mark.parametrize(
    ("tokens", "begin", "heads", "kv_heads", "dim"),
    [
        pytest.param(1, 0, 1, 1, 64, id="one"),
        pytest.param(150, 0, 4, 1, 64, id="few"),
        pytest.param(100, 304, 8, 1, 64, id="group8"),
        pytest.param(70, 208, 3, 3, 128, id="group1"),
        pytest.param(330, 256, 6, 2, 128, id="group3"),
        pytest.param(70, 208, 2, 1, 96, id="dim96"),
    ],
)
def test_sparse_queries_attend_and_choose(tokens, begin, heads, kv_heads, dim, dtype, device):
    query, keys, values = tensors(tokens, begin, heads, kv_heads, dim, dtype, device)
    rows = query_sparse_attention(query, keys, values, begin, 16, 32, K, dim**-0.5)
    assert rows.out.shape == (-(-tokens // 16), heads, dim)
    assert rows.out.dtype == rows.lse.dtype == rows.scores.dtype == torch.float32
    sets, out, lse = chosen_sets(rows), wide(rows.out), wide(rows.lse)
    compared = 0
    for row in range(len(rows.out)):
        seen = begin + row * 16 + 1
        for head in range(heads):
            kv = (wide(tensor)[head // (heads // kv_heads), :seen] for tensor in (keys, values))
            wanted = oracle.attend_row(wide(query)[row * 16, head], *kv, 32, dim**-0.5)
            np.testing.assert_allclose(out[row, head], wanted.out, atol=ATOL[dtype], rtol=0)
            np.testing.assert_allclose(lse[row, head], wanted.lse, atol=MOMO_FLOAT32, rtol=0)
            for block, score in zip(rows.blocks[row, head].tolist(), rows.scores[row, head].tolist(), strict=True):
                assert block < 0 or abs(score - wanted.scores[block]) < MOMO_FLOAT32
            if margin_of(wanted.scores, K) > 2 * MOMO_FLOAT32:
                compared += 1
                assert sets[row][head] == oracle.top(wanted.scores, K)
    assert compared > 0.8 * len(rows.out) * heads


def test_as_many_slots_as_blocks_keep_all_blocks(dtype, device):
    query, keys, values = tensors(40, 470, 4, 2, 64, dtype, device)
    rows = query_sparse_attention(query, keys, values, 470, 4, 32, 16, 0.125)
    for row, sets in enumerate(chosen_sets(rows)):
        assert all(one == set(range((470 + 4 * row) // 32 + 1)) for one in sets)


def test_rows_do_not_depend_on_what_is_computed_with_them(dtype, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("float32 is plain torch on CUDA, whose products of few rows may add in another order")
    query, keys, values = tensors(256, 256, 4, 2, 64, dtype, device)
    whole = query_sparse_attention(query, keys, values, 256, 16, 32, K, 0.125)
    parts = [
        query_sparse_attention(query[cut], keys, values, 256 + cut.start, 16, 32, K, 0.125)
        for cut in (slice(0, 64), slice(64, 256))
    ]
    for name in ("out", "lse", "blocks", "scores"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert_same(joined, getattr(whole, name))


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """Bit for bit where the kernel runs; products of few rows of torch and numpy may add in another order."""
    if got.is_cuda:
        assert torch.equal(got, wanted)
    else:
        np.testing.assert_allclose(got, wanted, atol=MOMO_FLOAT32 if got.dtype == torch.float32 else 0, rtol=0)


def made_up_rows(num_rows: int, heads: int, k: int, num_blocks: int, device: str) -> SparseRows:
    """Different blocks in each row, some slots free."""
    generator = np.random.default_rng(k)
    blocks = np.stack([[generator.permutation(num_blocks)[:k] for _ in range(heads)] for _ in range(num_rows)])
    blocks = np.where(generator.random(blocks.shape) < 0.2, -1, blocks)
    scores = np.where(blocks < 0, -np.inf, generator.standard_normal(blocks.shape))
    lse = 3 + generator.standard_normal((num_rows, heads))
    floats = (torch.from_numpy(array).to(device, torch.float32) for array in (lse, scores))
    lse_tensor, score_tensor = floats
    nothing = torch.empty(num_rows, heads, 0, device=device)
    return SparseRows(nothing, lse_tensor, torch.from_numpy(blocks).to(device, torch.int32), score_tensor)


@pytest.mark.parametrize(("k", "per_block", "k_trim"), [(8, 8, 7), (16, 4, 40), (4, 1, 3), (32, 8, 12)])
def test_the_union_is_trimmed_to_the_heaviest(k, per_block, k_trim, dtype, device):
    rows = made_up_rows(per_block * 5, 3, k, 40, device)
    lists = unite(rows, 0, per_block, 2, k_trim)
    for place in range(5):
        own = slice(place * per_block, (place + 1) * per_block)
        for head in range(3):
            pairs = zip(rows.blocks[own, head].tolist(), rows.scores[own, head].tolist(), strict=True)
            chosen = [dict(zip(blocks, scores, strict=True)) for blocks, scores in pairs]
            wanted = oracle.unite(chosen, rows.lse[own, head].tolist(), 2 * place, k_trim - 2)
            assert lists.blocks[place, head, : lists.counts[place, head]].tolist() == wanted


@pytest.mark.parametrize(
    ("num_blocks", "begin", "heads", "kv_heads", "dim"),
    [
        pytest.param(1, 0, 1, 1, 64, id="first"),
        pytest.param(3, 192, 4, 1, 64, id="group4"),
        pytest.param(2, 320, 8, 1, 128, id="group8"),
        pytest.param(2, 64, 3, 3, 128, id="group1"),
        pytest.param(2, 64, 2, 1, 96, id="dim96"),
    ],
)
def test_query_blocks_attend_their_lists(num_blocks, begin, heads, kv_heads, dim, dtype, device):
    tokens = num_blocks * 64
    query, keys, values = tensors(tokens, begin, heads, kv_heads, dim, dtype, device)
    generator = np.random.default_rng(0)
    lists = KeyLists(
        torch.full((num_blocks, heads, 6), 10**6, dtype=torch.int32, device=device),
        torch.zeros(num_blocks, heads, dtype=torch.int32, device=device),
    )
    wanted_lists = {}
    for place in range(num_blocks):
        for head in range(heads):
            below = begin // 32 + 2 * place
            listed = generator.permutation(below)[: generator.integers(0, 7)].tolist()
            lists.blocks[place, head, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
            lists.counts[place, head] = len(listed)
            wanted_lists[place, head] = listed
    read = torch.zeros(keys.shape[:2], dtype=torch.bool)
    for (place, head), listed in wanted_lists.items():
        own = range(begin // 32 + 2 * place, begin // 32 + 2 * place + 2)
        for block in [*listed, *own]:
            read[head // (heads // kv_heads), block * 32 : block * 32 + 32] = True
    keys[~read.to(device)], values[~read.to(device)] = torch.nan, torch.nan
    got = block_sparse_attention(query, keys, values, begin, 64, 32, lists, dim**-0.5)
    assert got.out.dtype == got.lse.dtype == torch.float32
    out, lse = wide(got.out), wide(got.lse)
    wide_query, wide_keys, wide_values = map(wide, (query, keys, values))
    for token in range(tokens):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            wanted = oracle.attend_listed(
                wide_query[token, head], wide_keys[kv_head], wide_values[kv_head], begin + token,
                wanted_lists[token // 64, head], 64, 32, dim**-0.5,
            )  # fmt: skip
            np.testing.assert_allclose(out[token, head], wanted[0], atol=ATOL[dtype], rtol=0)
            np.testing.assert_allclose(lse[token, head], wanted[1], atol=MOMO_FLOAT32, rtol=0)


def test_wrong_arguments_are_named(dtype, device):
    query, keys, values = tensors(64, 64, 4, 2, 64, dtype, device)
    with pytest.raises(ValueError, match=r"query_sparse_attention: keys is \(2, 198, 64\) torch.float16"):
        query_sparse_attention(query, keys.half(), values, 64, 16, 32, K, 0.125)
    with pytest.raises(ValueError, match="queries to position 112 over 100 keys"):
        query_sparse_attention(query, keys[:, :100], values[:, :100], 64, 16, 32, K, 0.125)
    lists = KeyLists(torch.zeros(1, 4, 3, dtype=torch.int32, device=device),
                     torch.zeros(1, 4, dtype=torch.int32, device=device))  # fmt: skip
    with pytest.raises(ValueError, match=r"queries \[32, 96\) over 198 keys; wanted whole blocks of 64"):
        block_sparse_attention(query, keys, values, 32, 64, 32, lists, 0.125)
    with pytest.raises(ValueError, match="3 sparse rows; wanted a multiple of 2"):
        unite(made_up_rows(3, 1, 4, 9, device), 0, 2, 2, 8)
