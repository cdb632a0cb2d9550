"""Requests that share exact pieces read them once, and get what each gets alone, bit for bit."""

import numpy as np
import pytest

from cpu.pieces import FOLLOWERS, REQUEST, as_columns
from cpu.tile_products import Products
from tests.cpu.rows_model import (
    EXACT,
    SAMPLED,
    Context,
    Mask,
    all_of,
    attention_oracle,
    covered_oracle,
    make_mask,
    make_rows,
    reads_oracle,
    table_of,
)
from tests.cpu.test_host_attention import (
    BITS,
    TABLES,
    THREADS,
    TOLERANCES,
    assert_equal,
    attention,
    make_codes,
    make_queries,
)

SHAPES = [  # (rows, queries, heads, kv_heads, dim, products)
    ("bf16", "bf16", 8, 2, 128, None),
    ("int8", "float32", 6, 2, 64, None),
    pytest.param("bf16", "bf16", 16, 1, 256, None, marks=pytest.mark.long),
    pytest.param("bf16", "bf16", 8, 2, 128, Products.EMULATED, marks=pytest.mark.long),
    pytest.param("bf16", "bf16", 16, 1, 256, Products.EMULATED, marks=pytest.mark.long),
    pytest.param("int8", "bf16", 8, 2, 96, Products.EMULATED, marks=pytest.mark.long),
]


def shared_table(contexts: list[Context], sizes: list[int]) -> np.ndarray:
    """Return the table of pieces in which `sizes[i]` requests, one behind another, read context i together."""
    table = table_of(contexts)
    columns = as_columns(table)
    firsts = np.cumsum([0, *sizes[:-1]])
    owners = columns[:, REQUEST].copy()
    columns[:, REQUEST], columns[:, FOLLOWERS] = firsts[owners], np.array(sizes)[owners] - 1
    return table


@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(("kind", "query_kind", "heads", "kv_heads", "dim", "products"), SHAPES)
def test_requests_that_share_pieces_get_what_the_oracle_has(
    kind: str, query_kind: str, heads: int, kv_heads: int, dim: int, products: Products | None, size: int,
    is_masked: bool,
) -> None:  # fmt: skip
    generator = np.random.default_rng(size)
    size = min(size, 128 * kv_heads // heads)
    large, small = (make_rows(generator, kind, kv_heads, tokens, dim, BITS, TABLES) for tokens in (1300, 70))
    contexts = [
        Context([(small, SAMPLED, 0, 70)]),
        Context([(large, EXACT, 0, 1300), (small, EXACT, 3, 70)]),
        Context(),
        Context([(small, EXACT, 0, 65)]),
    ]
    sizes = [1, size, 2, 2]
    flat = [context for context, count in zip(contexts, sizes, strict=True) for _ in range(count)]
    queries, real = make_queries(generator, query_kind, len(flat), heads, dim)
    codes = make_codes(generator, len(flat), heads, TABLES)
    kernel = attention(kind, query_kind, heads, kv_heads, dim, BITS, TABLES, products)
    if products is not None:
        assert kernel._work != attention(kind, query_kind, heads, kv_heads, dim, BITS, TABLES)._work
    mask = make_mask(generator, len(flat), heads, kv_heads, 3) if is_masked else all_of(len(flat), heads)
    if is_masked:  # those that exclude the same share, and one that asks for nothing is among them
        mask.excluded[2 : 1 + size] = mask.excluded[1]
        mask.wanted[min(2, size)] = 0
        if size > 4:
            mask.excluded[5] = 0
    asked = (mask.wanted, mask.excluded) if is_masked else ()
    got = kernel.attend(shared_table(contexts, sizes), queries, codes, THREADS, *asked)
    shared = got.out.copy(), got.lse.copy(), got.covered.copy()
    out, lse, read = attention_oracle(flat, real, codes, BITS, TABLES, dim**-0.5, mask)
    assert_equal(got, out, lse, TOLERANCES[kind])
    assert (got.covered == covered_oracle(flat, mask)).all()
    assert got.keys == reads_oracle(flat, codes, TABLES, mask)[0]
    if not is_masked:
        _, _, once = attention_oracle(contexts, real[np.cumsum([0, *sizes[:-1]])], codes[: len(contexts)], BITS, TABLES,
                                      dim**-0.5)  # fmt: skip
        assert got.rows < read or size == 1
        assert once <= got.rows
    alone = kernel.attend(table_of(flat), queries, codes, 1, *asked)
    for mine, theirs in zip(shared, (alone.out, alone.lse, alone.covered), strict=True):
        if kernel._products is Products.VECTORS:
            np.testing.assert_array_equal(mine, theirs)
        else:  # few queries are read for by vectors
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=2 * TOLERANCES[kind])


def test_rows_that_are_shared_are_read_once_and_one_of_many_queries_is_seen() -> None:
    """A query that another request's takes the place of is far beyond the tolerance."""
    generator = np.random.default_rng(5)
    rows = make_rows(generator, "bf16", 2, 1200, 128, BITS, TABLES)
    context = Context([(rows, EXACT, 0, 1200)])
    queries, real = make_queries(generator, "bf16", 5, 8, 128)
    kernel = attention("bf16", "bf16", 8, 2, 128, BITS, TABLES)
    got = kernel.attend(shared_table([context], [5]), queries, None, THREADS)
    assert got.rows == 2 * 1200
    codes = make_codes(generator, 5, 8, TABLES)
    for moved in (False, True):
        own = real[[0, 1, 1, 3, 4]] if moved else real
        out, _, _ = attention_oracle([context] * 5, own, codes, BITS, TABLES, 128**-0.5)
        assert (np.abs(got.out - out).max() <= TOLERANCES["bf16"]) is not moved


def test_a_nan_of_one_request_stays_its_own() -> None:
    generator = np.random.default_rng(6)
    rows = make_rows(generator, "bf16", 2, 300, 128, BITS, TABLES)
    queries, _ = make_queries(generator, "bf16", 4, 8, 128)
    queries[2] = 0x7FC0
    kernel = attention("bf16", "bf16", 8, 2, 128, BITS, TABLES)
    got = kernel.attend(shared_table([Context([(rows, EXACT, 0, 300)])], [4]), queries, None, THREADS)
    assert np.isnan(got.out[2]).all()
    assert np.isfinite(got.out[[0, 1, 3]]).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda columns: columns[:, FOLLOWERS].__setitem__(0, 5),  # beyond the last request
        lambda columns: columns[:, FOLLOWERS].__setitem__(0, -1),
        lambda columns: columns[:, FOLLOWERS].__setitem__(0, 0),  # its second piece has others
        lambda columns: columns[:, REQUEST].__setitem__(2, 2),  # somebody else's already
    ],
)
def test_a_table_in_which_requests_share_what_they_cannot_is_refused(spoil: object) -> None:
    generator = np.random.default_rng(7)
    rows = make_rows(generator, "bf16", 2, 300, 128, BITS, TABLES)
    table = shared_table(
        [Context([(rows, EXACT, 0, 90), (rows, EXACT, 90, 99)]), Context([(rows, EXACT, 0, 9)])], [3, 1]
    )
    spoil(as_columns(table))  # type: ignore[operator]
    queries, _ = make_queries(generator, "bf16", 4, 8, 128)
    kernel = attention("bf16", "bf16", 8, 2, 128, BITS, TABLES)
    with pytest.raises(ValueError, match="followers"):
        kernel.attend(table, queries, None, THREADS)


def test_sampled_pieces_and_more_requests_than_there_is_room_for_are_not_shared() -> None:
    generator = np.random.default_rng(8)
    rows = make_rows(generator, "bf16", 2, 300, 128, BITS, TABLES)
    kernel = attention("bf16", "bf16", 8, 2, 128, BITS, TABLES)
    for mode, count in ((SAMPLED, 2), (EXACT, kernel.most_sharing + 1)):
        queries, _ = make_queries(generator, "bf16", count, 8, 128)
        table = shared_table([Context([(rows, mode, 0, 300)])], [count])
        with pytest.raises(ValueError, match="followers"):
            kernel.attend(table, queries, make_codes(generator, count, 8, TABLES), THREADS)


def test_masks_are_kept_apart() -> None:
    """A mask of one request, given for all: the oracle sees it."""
    generator = np.random.default_rng(9)
    rows = make_rows(generator, "bf16", 2, 700, 128, BITS, TABLES)
    context = Context([(rows, EXACT, 0, 700)])
    queries, real = make_queries(generator, "bf16", 3, 8, 128)
    mask = make_mask(generator, 3, 8, 2, 2)
    kernel, codes = attention("bf16", "bf16", 8, 2, 128, BITS, TABLES), make_codes(generator, 3, 8, TABLES)
    got = kernel.attend(shared_table([context], [3]), queries, None, THREADS, mask.wanted, mask.excluded)
    for wrong in (False, True):
        excluded = mask.excluded[[0, 0, 0]] if wrong else mask.excluded
        out, _, _ = attention_oracle([context] * 3, real, codes, BITS, TABLES, 128**-0.5, Mask(mask.wanted, excluded))
        assert (np.abs(got.out - out).max() <= TOLERANCES["bf16"]) is not wrong
