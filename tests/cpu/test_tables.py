"""Hash tables hold every token once, in order, in its bucket; building in pieces or on threads changes nothing."""

import numpy as np
import pytest

from cpu.tables import build_tables, codes_from_tables
from transfer.host_memory import STRIPE_TOKENS, num_offsets


def tables_of(
    codes: np.ndarray, bits: int, pieces: list[tuple[int, int]], threads: int
) -> tuple[np.ndarray, np.ndarray]:
    tables, tokens = codes.shape
    entries, offsets = codes.copy(), np.full((tables, num_offsets(bits, tokens)), -1, np.int32)
    for begin, end in pieces:
        build_tables(entries, offsets, bits, begin, end, threads)
    return entries, offsets


def random_codes(bits: int, tables: int, tokens: int) -> np.ndarray:
    generator = np.random.default_rng(tokens + bits)
    codes = generator.integers(0, 1 << bits, (tables, tokens)).astype(np.uint16)
    codes[0] = codes[0, 0]  # one bucket holds all
    return codes


SIZES = [(1, 1), (10, 5000), (4, STRIPE_TOKENS), (6, STRIPE_TOKENS + 1), (16, 40_001), (10, 2 * STRIPE_TOKENS)]


@pytest.mark.parametrize(("bits", "tokens"), SIZES)
def test_a_bucket_lists_its_tokens_in_order(bits: int, tokens: int) -> None:
    codes = random_codes(bits, 3, tokens)
    entries, offsets = tables_of(codes, bits, [(0, 3)], 1)
    stripes = -(-tokens // STRIPE_TOKENS)
    for table in range(3):
        bounds = offsets[table]
        assert bounds[0] == 0
        assert bounds[-1] == tokens
        assert (np.diff(bounds) >= 0).all()
        order = np.argsort(codes[table], kind="stable")  # by bucket, then by token
        lists = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        token = entries[table].astype(np.int64) + lists % stripes * STRIPE_TOKENS
        assert np.array_equal(token, order)
        assert np.array_equal(lists // stripes, codes[table][order])


@pytest.mark.parametrize(("bits", "tokens"), SIZES)
def test_codes_come_back_from_tables(bits: int, tokens: int) -> None:
    codes = random_codes(bits, 3, tokens)
    entries, offsets = tables_of(codes, bits, [(0, 3)], 1)
    room = np.full((3, tokens + 9), 7, np.uint16)
    codes_from_tables(entries, offsets, bits, 1, 3, room[:, 5 : tokens + 5])
    assert np.array_equal(room[1:, 5 : tokens + 5], codes[1:])
    assert (room[0] == 7).all()
    assert (room[:, :5] == 7).all()
    assert (room[:, tokens + 5 :] == 7).all()


def test_pieces_and_threads_change_nothing() -> None:
    codes = random_codes(8, 9, 40_000)
    whole = tables_of(codes, 8, [(0, 9)], 1)
    for pieces, threads in (([(0, 4), (4, 5), (5, 9)], 1), ([(0, 9)], 2)):
        entries, offsets = tables_of(codes, 8, pieces, threads)
        assert np.array_equal(entries, whole[0])
        assert np.array_equal(offsets, whole[1])
    entries, offsets = tables_of(codes, 8, [(2, 5)], 1)
    assert np.array_equal(entries[:2], codes[:2])
    assert np.array_equal(entries[5:], codes[5:])
    assert (offsets[5:] == -1).all()


def test_what_is_no_table_is_refused() -> None:
    codes = np.zeros((2, 2 * STRIPE_TOKENS + 1), np.uint16)
    with pytest.raises(ValueError, match="room for 1 to 65536"):
        tables_of(codes, 4, [(0, 2)], 1)
    with pytest.raises(ValueError, match="offsets: got shape"):
        build_tables(codes[:, :100], np.zeros((2, 16), np.int32), 4, 0, 2, 1)
    with pytest.raises(ValueError, match="rows of uint16"):
        build_tables(codes[:, :100].astype(np.int32), np.zeros((2, 17), np.int32), 4, 0, 2, 1)
