"""Host attention equals eq. (10) and (11) in float64 for any batch, rows and threads; over draws it is unbiased."""

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from cpu.host_attention import Compiled, HostAttention, HostPartial
from cpu.tables import build_tables
from cpu.tile_products import Products
from cpu.workspace import PART_ROWS, PART_SAMPLES
from tests.cpu.rows_model import (
    EXACT,
    ROW_TYPES,
    SAMPLED,
    Context,
    Mask,
    all_of,
    attention_oracle,
    covered_oracle,
    from_bf16,
    make_mask,
    make_rows,
    reads_oracle,
    table_of,
    to_bf16,
)
from tests.narrow_vectors import run_with_narrow_vectors, where_vectors_are_wide
from tests.tolerances import (
    HOST_ATTENTION_FLOAT32,
    HOST_ATTENTION_INT8,
    HOST_THREADS,
    UNBIASED_SIGMAS,
)
from transfer.simd.features import missing_features

BITS, TABLES = 4, 12
THREADS = int(os.environ.get("NUMBA_NUM_THREADS", "2"))
TOLERANCES = {
    "bf16": HOST_ATTENTION_FLOAT32,
    "float32": HOST_ATTENTION_FLOAT32,
    "int8": HOST_ATTENTION_INT8,
    "int4": HOST_ATTENTION_FLOAT32,
}
SHAPES = [  # (rows, queries, heads, kv_heads, dim)
    ("bf16", "bf16", 8, 2, 128),
    ("int8", "float32", 6, 2, 64),
    ("int4", "float32", 6, 2, 64),
    pytest.param("bf16", "float32", 8, 2, 96, marks=pytest.mark.long),  # each takes half a minute to compile
    pytest.param("int8", "bf16", 8, 1, 128, marks=pytest.mark.long),
    pytest.param("int8", "bf16", 16, 1, 96, marks=pytest.mark.long),
    pytest.param("bf16", "bf16", 16, 1, 256, marks=pytest.mark.long),
    pytest.param("int4", "bf16", 6, 2, 64, marks=pytest.mark.long),
    pytest.param("int4", "float32", 8, 1, 96, marks=pytest.mark.long),
    pytest.param("int4", "bf16", 16, 1, 256, marks=pytest.mark.long),
    pytest.param("int8", "bf16", 16, 1, 256, marks=pytest.mark.long),
    pytest.param("float32", "float32", 8, 4, 256, marks=pytest.mark.long),
    pytest.param("float32", "float32", 7, 1, 64, marks=pytest.mark.long),  # no deployment has such rows
]


@cache
def attention(
    kind: str, query_kind: str, heads: int, kv_heads: int, dim: int, bits: int, tables: int,
    products: Products | None = None,
) -> HostAttention:  # fmt: skip
    types = ROW_TYPES[kind], ROW_TYPES[query_kind]
    compiled = Compiled(heads, kv_heads, dim, *types, bits, tables, dim**-0.5)
    return HostAttention(compiled, THREADS, products=products)


def make_queries(generator: np.random.Generator, query_kind: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """As given to the kernel, and as float64."""
    queries = generator.standard_normal(shape).astype(np.float32)
    if query_kind == "bf16":
        bits = to_bf16(queries)
        return bits, from_bf16(bits).astype(np.float64)
    return queries, queries.astype(np.float64)


def make_codes(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.integers(0, 1 << BITS, shape).astype(np.uint16)


def ragged_batch(generator: np.random.Generator, kind: str, kv_heads: int, dim: int) -> list[Context]:
    """Shared and own segments, exact and sampled, whole and cut, of one token and of more than a part; one is empty."""
    small, large, one = (
        make_rows(generator, kind, kv_heads, tokens, dim, BITS, TABLES) for tokens in (700, 3 * PART_SAMPLES + 5, 1)
    )
    return [
        Context([(large, SAMPLED, 0, 3 * PART_SAMPLES + 5), (small, EXACT, 0, 700)]),
        Context(),
        Context([(small, SAMPLED, 64, 641), (large, EXACT, 3, PART_ROWS + 9), (one, EXACT, 0, 1)]),
        Context([(one, SAMPLED, 0, 1), (small, SAMPLED, 5, 6), (small, EXACT, 9, 9)]),
        Context([(large, SAMPLED, 100, 130)]),
    ]


def assert_equal(got: HostPartial, out: np.ndarray, lse: np.ndarray, atol: float) -> None:
    np.testing.assert_allclose(got.out, out, rtol=0, atol=atol)
    np.testing.assert_allclose(got.lse, lse, rtol=0, atol=atol)


@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("kind", "query_kind", "heads", "kv_heads", "dim"), SHAPES)
def test_a_ragged_batch_equals_the_oracle(
    kind: str, query_kind: str, heads: int, kv_heads: int, dim: int, is_masked: bool
) -> None:
    generator = np.random.default_rng(3)
    batch = ragged_batch(generator, kind, kv_heads, dim)
    queries, real = make_queries(generator, query_kind, len(batch), heads, dim)
    codes = make_codes(generator, len(batch), heads, TABLES)
    kernel = attention(kind, query_kind, heads, kv_heads, dim, BITS, TABLES)
    mask = make_mask(generator, len(batch), heads, kv_heads, 4) if is_masked else all_of(len(batch), heads)
    asked = (mask.wanted, mask.excluded) if is_masked else ()
    got = kernel.attend(table_of(batch), queries, codes, THREADS, *asked)
    out, lse, read = attention_oracle(batch, real, codes, BITS, TABLES, dim**-0.5, mask)
    assert_equal(got, out, lse, TOLERANCES[kind])
    assert got.rows == read
    assert (got.keys, got.index_bytes) == reads_oracle(batch, codes, TABLES, mask)
    assert (got.covered == covered_oracle(batch, mask)).all()


def test_results_are_the_same_on_any_number_of_threads() -> None:
    generator = np.random.default_rng(4)
    batch = ragged_batch(generator, "bf16", 2, 128)
    queries, _ = make_queries(generator, "bf16", len(batch), 8, 128)
    codes = make_codes(generator, len(batch), 8, TABLES)
    kernel = attention("bf16", "bf16", 8, 2, 128, BITS, TABLES)
    mask = make_mask(generator, len(batch), 8, 2, 4)
    for asked in ((), (mask.wanted, mask.excluded)):
        alone = kernel.attend(table_of(batch), queries, codes, 1, *asked)
        out, lse = alone.out.copy(), np.nan_to_num(alone.lse)
        for threads in range(2, THREADS + 1):
            for _ in range(5):
                alone.out[:] = np.nan
                got = kernel.attend(table_of(batch), queries, codes, threads, *asked)
                assert got.rows == alone.rows
                assert np.abs(got.out - out).max() <= HOST_THREADS
                assert np.abs(np.nan_to_num(got.lse) - lse).max() <= HOST_THREADS


def test_more_threads_than_cores_compute_the_same() -> None:
    names = "any_number_of_threads or (ragged_batch and bf16-bf16)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", names],
        env=os.environ | {"NUMBA_NUM_THREADS": str(2 * (os.cpu_count() or 1))}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[100%]" in done.stdout


def test_a_batch_of_few_requests_and_many_pieces_leaves_room_for_many_requests() -> None:
    """Rooms grow apart: what the largest batch needed of one is kept when another grows."""
    generator = np.random.default_rng(15)
    rows = make_rows(generator, "bf16", 1, 200, 64, BITS, TABLES)
    kernel = HostAttention(Compiled(4, 1, 64, np.uint16, np.float32, BITS, TABLES, 0.125), 1)
    for requests, num_pieces in ((40, 0), (1, 60), (40, 1), (41, 1)):
        batch = [Context([(rows, SAMPLED, at, at + 3) for at in range(num_pieces)]) for _ in range(requests)]
        queries, real = make_queries(generator, "float32", requests, 4, 64)
        codes = make_codes(generator, requests, 4, TABLES)
        got = kernel.attend(table_of(batch), queries, codes, 1)
        out, lse, read = attention_oracle(batch, real, codes, BITS, TABLES, 0.125)
        assert_equal(got, out, lse, HOST_ATTENTION_FLOAT32)
        assert got.rows == read


def test_when_every_key_is_sampled_the_result_is_dense_attention() -> None:
    """One bucket holds all keys, and so many tables that u is 1."""
    bits, tables, generator = 1, 300, np.random.default_rng(5)
    rows = make_rows(generator, "bf16", 2, 1500, 64, bits, tables)
    queries, real = make_queries(generator, "float32", 1, 4, 64)
    codes = np.zeros((1, 4, tables), np.uint16)
    rows.entries[:] = np.arange(1500, dtype=np.uint16)
    rows.offsets[:] = [0, 1500, 1500]
    kernel = attention("bf16", "float32", 4, 2, 64, bits, tables)
    got = kernel.attend(table_of([Context([(rows, SAMPLED, 0, 1500)])]), queries, codes, 1)
    dense, lse, _ = attention_oracle([Context([(rows, EXACT, 0, 1500)])], real, codes, bits, tables, 64**-0.5)
    assert_equal(got, dense, lse, HOST_ATTENTION_FLOAT32)
    assert got.rows == 4 * 1500


@pytest.mark.parametrize("mode", [EXACT, SAMPLED])
def test_the_comparison_sees_one_lost_token_and_one_centre_forgotten(mode: int) -> None:
    generator = np.random.default_rng(6)
    rows = make_rows(generator, "bf16", 1, 3000, 64, BITS, TABLES)
    queries, real = make_queries(generator, "float32", 1, 4, 64)
    codes = make_codes(generator, 1, 4, TABLES)
    codes[0] = rows.codes[0, :, 0]  # of a quarter of the keys
    kernel = attention("bf16", "float32", 4, 1, 64, BITS, TABLES)
    got = kernel.attend(table_of([Context([(rows, mode, 0, 3000)])]), queries, codes, 1)
    for end in (3000, 2999):
        shorter = [Context([(rows, mode, 3000 - end, 3000)])]
        out, lse, _ = attention_oracle(shorter, real, codes, BITS, TABLES, 64**-0.5)
        is_near = np.abs(got.lse - lse).max() <= HOST_ATTENTION_FLOAT32
        assert is_near == (end == 3000)
        assert (np.abs(got.out - out).max() <= HOST_ATTENTION_FLOAT32) == (end == 3000)
    rows.centre[:] = 0.0
    _, lse, _ = attention_oracle([Context([(rows, mode, 0, 3000)])], real, codes, BITS, TABLES, 64**-0.5)
    assert np.abs(got.lse - lse).max() > HOST_ATTENTION_FLOAT32


def test_more_tables_than_a_counter_counts() -> None:
    """A key that shares 256 buckets with the query is not one that shares none."""
    bits, tables, generator = 6, 512, np.random.default_rng(7)
    rows = make_rows(generator, "bf16", 1, 600, 64, bits, tables)
    codes = generator.integers(0, 1 << bits, (1, 4, tables)).astype(np.uint16)
    shared = np.arange(600) % tables + 1
    for token in range(0, 600, 7):
        rows.codes[0, : shared[token], token] = codes[0, 0, : shared[token]]
    rows.codes[0, :256, 511] = codes[0, 0, :256]
    rows.codes[0, 256:, 511] = codes[0, 0, 256:] ^ 1
    rows.entries[:] = rows.codes
    build_tables(rows.entries[0], rows.offsets[0], bits, 0, tables, 1)
    queries, real = make_queries(generator, "float32", 1, 4, 64)
    kernel = attention("bf16", "float32", 4, 1, 64, bits, tables)
    context = [Context([(rows, SAMPLED, 0, 600)])]
    got = kernel.attend(table_of(context), queries, codes, 1)
    out, lse, read = attention_oracle(context, real, codes, bits, tables, 64**-0.5)
    assert got.rows == read
    assert_equal(got, out, lse, HOST_ATTENTION_FLOAT32)


@pytest.mark.parametrize("tokens", [pytest.param(32_768, marks=pytest.mark.long), 40_000])
def test_a_long_segment_is_looked_up_stripe_by_stripe(tokens: int) -> None:
    generator = np.random.default_rng(8)
    rows = make_rows(generator, "bf16", 1, tokens, 64, 9, 16)
    queries, real = make_queries(generator, "float32", 1, 4, 64)
    codes = generator.integers(0, 1 << 9, (1, 4, 16)).astype(np.uint16)
    kernel = attention("bf16", "float32", 4, 1, 64, 9, 16)
    for begin, end in ((0, tokens), (32_700, min(tokens, 32_900)), (tokens - 100, tokens), (1, 30_000)):
        context = [Context([(rows, SAMPLED, begin, end)])]
        got = kernel.attend(table_of(context), queries, codes, 2)
        out, lse, read = attention_oracle(context, real, codes, 9, 16, 64**-0.5)
        assert got.rows == read
        assert_equal(got, out, lse, HOST_ATTENTION_FLOAT32)
        behind = Context([(rows, EXACT, 0, 7), *context[0].pieces])  # so that blocks stick out of stripes on both sides
        mask = make_mask(generator, 1, 4, 1, tokens // 512)
        got = kernel.attend(table_of([behind]), queries, codes, 2, mask.wanted, mask.excluded)
        out, lse, read = attention_oracle([behind], real, codes, 9, 16, 64**-0.5, mask)
        assert got.rows == read
        assert_equal(got, out, lse, HOST_ATTENTION_FLOAT32)


@pytest.mark.parametrize("mode", [EXACT, SAMPLED])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(("kind", "query_kind", "dim"), [("bf16", "bf16", 128), ("int8", "float32", 64)])
def test_a_poisoned_query_stays_with_its_head(kind: str, query_kind: str, dim: int, poison: float, mode: int) -> None:
    generator = np.random.default_rng(9)
    rows = make_rows(generator, kind, 2, 900, dim, BITS, TABLES)
    context = [Context([(rows, mode, 0, 900)])] * 2
    queries, _ = make_queries(generator, query_kind, 2, 8, dim)
    codes = np.broadcast_to(rows.codes[1, :, 0], (2, 8, TABLES)).copy()
    kernel = attention(kind, query_kind, 8, 2, dim, BITS, TABLES)
    clean = kernel.attend(table_of(context), queries, codes, 2)
    clean = clean._replace(out=clean.out.copy(), lse=clean.lse.copy())
    queries[1, 5, 3:4] = to_bf16(np.array([poison])) if query_kind == "bf16" else poison
    got = kernel.attend(table_of(context), queries, codes, 2)
    others = np.ones((2, 8), bool)
    others[1, 5] = False
    assert np.array_equal(got.out[others], clean.out[others])
    assert np.array_equal(got.lse[others], clean.lse[others])
    assert np.isnan(got.lse[1, 5])
    assert np.isnan(got.out[1, 5]).all()


def test_a_nan_in_a_key_makes_only_its_kv_head_nan() -> None:
    generator = np.random.default_rng(10)
    rows = make_rows(generator, "bf16", 2, 900, 64, BITS, TABLES)
    rows.keys[1, 17, 5] = 0x7FC0
    queries, _ = make_queries(generator, "float32", 1, 8, 64)
    codes = np.broadcast_to(rows.codes[1, :, 0], (1, 8, TABLES)).copy()
    kernel = attention("bf16", "float32", 8, 2, 64, BITS, TABLES)
    for mode in (EXACT, SAMPLED):
        got = kernel.attend(table_of([Context([(rows, mode, 0, 900)])]), queries, codes, 1)
        assert np.isnan(got.lse[0, 4:]).all()
        assert np.isfinite(got.out[0, :4]).all()


def test_codes_beyond_the_buckets_read_one_of_them() -> None:
    generator = np.random.default_rng(11)
    rows = make_rows(generator, "bf16", 1, 900, 64, BITS, TABLES)
    queries, _ = make_queries(generator, "float32", 1, 4, 64)
    kernel = attention("bf16", "float32", 4, 1, 64, BITS, TABLES)
    table = table_of([Context([(rows, SAMPLED, 0, 900)])])
    wild = np.full((1, 4, TABLES), 0xFFFF, np.uint16)
    got = kernel.attend(table, queries, wild, 1)
    read = got.rows
    assert kernel.attend(table, queries, wild & ((1 << BITS) - 1), 1).rows == read


def test_no_samples_and_no_pieces_are_the_empty_partial() -> None:
    generator = np.random.default_rng(12)
    rows = make_rows(generator, "bf16", 1, 200, 64, BITS, TABLES)
    rows.codes[:] = 1
    rows.entries[:] = np.arange(200, dtype=np.uint16)
    rows.offsets[:] = np.where(np.arange(rows.offsets.shape[2]) > 1, 200, 0)
    queries, _ = make_queries(generator, "float32", 2, 4, 64)
    kernel = attention("bf16", "float32", 4, 1, 64, BITS, TABLES)
    context = [Context([(rows, SAMPLED, 0, 200)]), Context()]
    got = kernel.attend(table_of(context), queries, np.zeros((2, 4, TABLES), np.uint16), 1)
    assert (got.out == 0).all()
    assert (got.lse == -np.inf).all()
    assert (got.covered == [[200] * 4, [0] * 4]).all()


def test_a_table_that_is_none_is_refused() -> None:
    rows = make_rows(np.random.default_rng(13), "bf16", 1, 200, 64, BITS, TABLES)
    kernel = attention("bf16", "float32", 4, 1, 64, BITS, TABLES)
    table = table_of([Context([(rows, EXACT, 0, 200)]), Context([(rows, EXACT, 0, 200)])])
    queries = np.zeros((2, 4, 64), np.float32)
    for name, value in (("request", 2), ("end", 201), ("begin", -1)):
        wrong = table.copy()
        wrong[name][1] = value
        with pytest.raises(ValueError, match="pieces"):
            kernel.attend(wrong, queries, None, 1)
    with pytest.raises(ValueError, match="groups of 1 to 16"):
        attention("bf16", "float32", 17, 1, 64, BITS, TABLES)
    with pytest.raises(ValueError, match="groups of 1 to 16"):
        attention("bf16", "float32", 4, 1, 80, BITS, TABLES)


@pytest.mark.parametrize("excluded", [0b0000000000, 0b0100110010], ids=["all", "some blocks"])
def test_mass_and_weighted_values_are_unbiased_over_projections(excluded: int) -> None:
    """Sampled mass has the true mass for its mean over draws of the projections, and so has the weighted sum, of all
    keys or of those that no bit drops; without the weights (every sample counted once) it has not: the comparison can
    fail."""
    bits, tables, tokens, dim, draws = 5, 16, 300, 64, 400
    generator = np.random.default_rng(14)
    rows = make_rows(generator, "bf16", 1, tokens, dim, bits, tables)
    direction = generator.standard_normal(dim)
    rows.keys[0] = to_bf16(from_bf16(rows.keys[0]) + (0.5 * direction).astype(np.float32))  # cosines around 0.4
    rows.centre[:] = 0.0
    queries = direction[None, None].astype(np.float32)
    logits = rows.real_keys()[0] @ queries[0, 0].astype(np.float64) * dim**-0.5
    mask = Mask(np.ones((1, 1), np.uint8), np.full((1, 1, 1), excluded, np.int32))
    truth = np.exp(logits) * mask.covered(0, 0, 0, tokens)
    numerator = truth @ rows.real_values()[0]
    kernel = attention("bf16", "float32", 1, 1, dim, bits, tables)
    masses, sums, counted = np.empty(draws), np.empty((draws, dim)), np.empty(draws)
    for draw in range(draws):
        planes = generator.standard_normal((tables, bits, dim))
        places = 1 << np.arange(bits)
        codes = ((np.einsum("tbd,nd->tnb", planes, rows.real_keys()[0]) > 0) @ places).astype(np.uint16)
        asked = ((planes @ queries[0, 0].astype(np.float64) > 0) @ places).astype(np.uint16)
        rows.entries[0] = codes
        build_tables(rows.entries[0], rows.offsets[0], bits, 0, tables, 1)
        table = table_of([Context([(rows, SAMPLED, 0, tokens)])])
        got = kernel.attend(table, queries, asked[None, None], 1, mask.wanted, mask.excluded)
        masses[draw] = np.exp(np.float64(got.lse[0, 0]))
        sums[draw] = masses[draw] * got.out[0, 0].astype(np.float64)
        counted[draw] = truth[(codes == asked[:, None]).sum(0) >= 2].sum()

    def sigmas(samples: np.ndarray, mean: np.ndarray | float) -> np.ndarray:
        return np.abs(samples.mean(0) - mean) / (samples.std(0, ddof=1) / np.sqrt(draws))

    assert sigmas(masses, truth.sum()) < UNBIASED_SIGMAS
    assert (sigmas(sums, numerator) < UNBIASED_SIGMAS).all()
    assert sigmas(counted, truth.sum()) > UNBIASED_SIGMAS


NARROW = [
    "(ragged_batch or poisoned) and bf16-bf16",
    pytest.param("int8-float32 or every_key or stripe_by_stripe", marks=pytest.mark.long),  # half a minute each type
]


@where_vectors_are_wide
@pytest.mark.parametrize("names", NARROW, ids=["bf16", "other types"])
def test_the_narrow_vectors_compute_the_same(names: str) -> None:
    assert not missing_features("avx2")
    run_with_narrow_vectors(__file__, names)


def test_an_unknown_vector_width_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import transfer.simd.features"],
        env=os.environ | {"TANDEM_SIMD": "neon"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "asked 'neon', have avx2, avx512" in done.stderr
