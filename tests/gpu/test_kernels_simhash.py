"""SimHash codes of keys and queries against signs counted in numpy, on numbers whose products are exact."""

import numpy as np
import pytest
import torch

from gpu.methods.sampled.encode import Hyperplanes, arrange, encode_keys, encode_queries
from gpu.methods.sampled.hyperplanes import Projections
from tests.gpu.kernel_oracles import DEVICES, DTYPES
from tests.tolerances import SAME_CODES

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
MARK = 40_404  # stands where nothing may be written


def integers(generator: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Small whole numbers: exact in every dtype, and so are their sums of products, zero among them."""
    return torch.from_numpy(generator.integers(-4, 5, shape)).to(device, dtype)


def hyperplanes(dim: int, bits: int, tables: int, dtype: torch.dtype, device: str) -> tuple[Hyperplanes, np.ndarray]:
    matrix = integers(np.random.default_rng(bits), (dim, tables * bits), dtype, device)
    return arrange(Projections(matrix, bits, tables)), matrix.cpu().double().numpy()


def oracle_codes(rows: torch.Tensor, matrix: np.ndarray, bits: int) -> np.ndarray:
    """Rows `[..., dim]` -> `[..., tables]`."""
    above = rows.cpu().double().numpy() @ matrix > 0
    tables = above.reshape(*above.shape[:-1], -1, bits)
    return sum(tables[..., bit].astype(np.int64) << bit for bit in range(bits))


def numbers(codes: torch.Tensor) -> np.ndarray:
    return codes.cpu().numpy().astype(np.int64)


@pytest.mark.parametrize(
    ("kv_heads", "tokens", "dim", "bits", "tables"),
    [(1, 1, 64, 10, 150), (2, 129, 96, 9, 33), (8, 40, 128, 16, 3), (2, 8193, 64, 1, 5)],
)
def test_codes_of_keys_are_the_signs_by_head_and_table(kv_heads, tokens, dim, bits, tables, dtype, device):
    planes, matrix = hyperplanes(dim, bits, tables, dtype, device)
    wide = integers(np.random.default_rng(0), (kv_heads, tokens + 3, dim + 16), dtype, device)
    keys = wide[:, 2 : tokens + 2, :dim]
    room = torch.full((kv_heads, tables + 1, tokens + 5), MARK, dtype=torch.uint16, device=device)
    encode_keys(keys, planes, room[:, :tables, 4 : tokens + 4])
    wanted = np.full(room.shape, MARK)
    wanted[:, :tables, 4 : tokens + 4] = oracle_codes(keys, matrix, bits).swapaxes(1, 2)
    np.testing.assert_array_equal(numbers(room), wanted)
    other = oracle_codes(keys, np.roll(matrix, 1, axis=1), bits).swapaxes(1, 2)
    assert (numbers(room)[:, :tables, 4 : tokens + 4] != other).any()


def test_int8_keys_have_the_codes_of_their_numbers(dtype, device):
    planes, matrix = hyperplanes(64, 10, 20, dtype, device)
    keys = torch.from_numpy(np.random.default_rng(1).integers(-127, 128, (2, 70, 64))).to(device, torch.int8)
    codes = torch.empty(2, 20, 70, dtype=torch.uint16, device=device)
    encode_keys(keys, planes, codes)
    np.testing.assert_array_equal(numbers(codes), oracle_codes(keys, matrix, 10).swapaxes(1, 2))


@pytest.mark.parametrize(("requests", "heads", "bits", "tables"), [(1, 32, 10, 150), (5, 3, 8, 17), (16, 8, 16, 2)])
def test_a_query_has_the_code_that_a_key_like_it_has(requests, heads, bits, tables, dtype, device):
    planes, matrix = hyperplanes(64, bits, tables, dtype, device)
    queries = integers(np.random.default_rng(2), (requests, heads, 64), dtype, device)
    codes = encode_queries(queries, planes)
    assert codes.shape == (requests, heads, tables)
    assert codes.dtype == torch.uint16
    np.testing.assert_array_equal(numbers(codes), oracle_codes(queries, matrix, bits))
    as_keys = torch.empty(requests, tables, heads, dtype=torch.uint16, device=device)
    encode_keys(queries, planes, as_keys)
    np.testing.assert_array_equal(numbers(as_keys).swapaxes(1, 2), numbers(codes))


def test_random_rows_have_the_same_codes_at_every_run_and_nearly_those_as_queries(dtype, device):
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(64, 1500, generator=generator).to(device, dtype)
    planes = arrange(Projections(matrix, 10, 150))
    rows = torch.randn(1, 300, 64, generator=generator).to(device, dtype)
    first, second = (torch.empty(1, 150, 300, dtype=torch.uint16, device=device) for _ in range(2))
    encode_keys(rows, planes, first)
    encode_keys(rows, planes, second)
    np.testing.assert_array_equal(numbers(first), numbers(second))
    as_queries = numbers(encode_queries(rows, planes))[0]
    assert (as_queries == numbers(first)[0].T).mean() > SAME_CODES
    assert (np.roll(as_queries, 1, axis=0) == numbers(first)[0].T).mean() < SAME_CODES


def test_wrong_rows_and_codes_are_named(dtype, device):
    planes, _ = hyperplanes(64, 10, 20, dtype, device)
    codes = torch.empty(2, 20, 7, dtype=torch.uint16, device=device)
    with pytest.raises(ValueError, match=r"encode_keys: keys is \(2, 7, 32\).*wanted \(2, 7, 64\)"):
        encode_keys(torch.zeros(2, 7, 32, dtype=dtype, device=device), planes, codes)
    with pytest.raises(ValueError, match=r"encode_keys: codes is \(2, 20, 7\).*wanted \(2, 20, 8\)"):
        encode_keys(torch.zeros(2, 8, 64, dtype=dtype, device=device), planes, codes)
    with pytest.raises(ValueError, match=r"encode_queries: queries is \(2, 7, 32\)"):
        encode_queries(torch.zeros(2, 7, 32, dtype=dtype, device=device), planes)
