"""Estimated errors equal the jackknife over groups of tables in float64 and are calibrated over draws of hyperplanes;
a head that reads in full is exact, and says what sampling would have cost it without looking at a table."""

from functools import cache

import numpy as np
import pytest

from cpu.host_attention import Compiled, HostAttention
from cpu.sample_errors import GROUPS, LARGEST, LOG_MASS, OUTPUT, draw_direction
from cpu.tables import build_tables
from cpu.workspace import PART_SAMPLES
from tests.cpu.rows_model import EXACT, ROW_TYPES, SAMPLED, Context, Mask, Rows, make_mask, make_rows, table_of, to_bf16
from tests.tolerances import ESTIMATED_ERROR_INT8, ESTIMATED_ERROR_RTOL, HOST_ATTENTION_FLOAT32

HEADS, KV_HEADS, DIM, BITS, TABLES = 4, 2, 64, 4, 12
THREADS = 2


@cache
def kernel(kind: str, estimates: bool, bits: int, tables: int) -> HostAttention:
    compiled = Compiled(HEADS, KV_HEADS, DIM, ROW_TYPES[kind], np.float32, bits, tables, DIM**-0.5)
    return HostAttention(compiled, THREADS, estimates)


def chance(cosine: np.ndarray, bits: int, tables: int) -> np.ndarray:
    p = (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** bits
    return 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)


def errors_oracle(
    context: Context, query: np.ndarray, codes: np.ndarray, head: int, covered: np.ndarray, is_full: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(errors `[3]`, output) of one head. Tables t, t + 15, .. are a group."""
    weights, values, shares, odds, run = [], [], [], [], 0
    for rows, mode, begin, end in context.pieces:
        kv_head, at, run = head // (HEADS // KV_HEADS), run, run + end - begin
        keys = rows.real_keys()[kv_head, begin:end]
        same = (rows.codes[kv_head, :, begin:end] == codes[:, None]).T  # [tokens, tables]
        u = chance(keys @ query / np.linalg.norm(keys, axis=1) / np.linalg.norm(query), BITS, TABLES)
        e = np.exp((keys + rows.centre[kv_head]) @ query * DIM**-0.5) * covered[at:run]
        sampled = mode == SAMPLED
        weights.append(np.where(same.sum(1) >= 2, e / u, 0) if sampled and not is_full else e)
        groups = np.zeros((end - begin, GROUPS))
        for table in range(TABLES):
            groups[:, table % GROUPS] += same[:, table]
        shares.append(groups * (same.sum(1) == 2)[:, None] * sampled)
        odds.append(np.where(u < 1, (1 - u) / u, 0) * sampled)
        values.append(rows.real_values()[kv_head, begin:end])
    w, v, share, odd = (np.concatenate(parts) for parts in (weights, values, shares, odds))
    mass = w.sum()
    out = w @ v / mass
    z = w[:, None] / mass * np.stack([np.ones(len(w)), (v - out) @ draw_direction(DIM)], 1)
    if is_full:
        variance = (z**2 * odd[:, None]).sum(0)
    else:
        of_groups = (share.T @ z)[: min(GROUPS, TABLES)]
        variance = ((of_groups - of_groups.mean(0)) ** 2).sum(0) * len(of_groups) / (len(of_groups) - 1)
    mode_of = np.concatenate([np.full(end - begin, mode) for _, mode, begin, end in context.pieces])
    largest = (w * (mode_of == SAMPLED)).max() / mass
    return np.array([np.sqrt(variance[0]), np.sqrt(variance[1]) / np.linalg.norm(out), largest]), out


def batch(generator: np.random.Generator, kind: str) -> list[Context]:
    large, small = (make_rows(generator, kind, KV_HEADS, tokens, DIM, BITS, TABLES)
                    for tokens in (3 * PART_SAMPLES + 5, 700))  # fmt: skip
    for rows in (large, small):
        rows.codes[:, :, : rows.codes.shape[2] // 4] = rows.codes[:, :, -1:]  # a run that is drawn as one
        rows.entries[:] = rows.codes
        for head in range(KV_HEADS):
            build_tables(rows.entries[head], rows.offsets[head], BITS, 0, TABLES, 1)
    return [
        Context([(large, SAMPLED, 0, 3 * PART_SAMPLES + 5), (small, SAMPLED, 64, 641), (small, EXACT, 0, 300)]),
        Context([(small, SAMPLED, 3, 690)]),
        Context([(small, EXACT, 0, 700)]),
        Context(),
    ]


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_errors_equal_the_oracle_and_change_no_answer(kind: str) -> None:
    generator = np.random.default_rng(5)
    contexts = batch(generator, kind)
    queries = generator.standard_normal((len(contexts), HEADS, DIM)).astype(np.float32)
    codes = generator.integers(0, 1 << BITS, (len(contexts), HEADS, TABLES)).astype(np.uint16)
    mask = make_mask(generator, len(contexts), HEADS, KV_HEADS, 2)
    mask.wanted[0] = 1
    full = np.zeros((len(contexts), HEADS), np.uint8)
    full[0, 1] = full[1, 2] = 1
    table = table_of(contexts)
    estimating, plain = (kernel(kind, estimates, BITS, TABLES) for estimates in (True, False))
    got = estimating.attend(table, queries, codes, THREADS, mask.wanted, mask.excluded, full)
    errors, out, lse = got.errors.copy(), got.out.copy(), got.lse.copy()
    without = plain.attend(table, queries, codes, 1, mask.wanted, mask.excluded, full)
    assert (out == without.out).all()
    assert (lse == without.lse).all()
    assert without.errors is None
    rtol = ESTIMATED_ERROR_INT8 if kind == "int8" else ESTIMATED_ERROR_RTOL
    for request, context in enumerate(contexts):
        run = sum(end - begin for _, _, begin, end in context.pieces)
        for head in range(HEADS):
            if not mask.wanted[request, head] or request > 1:
                assert (errors[request, head] == 0).all()
                continue
            real, covered = queries[request, head].astype(np.float64), mask.covered(request, head, 0, run)
            asked = context, real, codes[request, head], head, covered
            wanted, answer = errors_oracle(*asked, is_full=bool(full[request, head]))
            np.testing.assert_allclose(errors[request, head], wanted, rtol=rtol)
            np.testing.assert_allclose(out[request, head], answer, atol=10 * HOST_ATTENTION_FLOAT32)
            other, _ = errors_oracle(*asked, is_full=not full[request, head])
            assert (np.abs(other / wanted - 1)[:2] > rtol).any(), "one for the other is seen"


def draw_tables(generator: np.random.Generator, rows: Rows, query: np.ndarray, bits: int, tables: int) -> np.ndarray:
    """New hyperplanes: the rows' tables, and the codes of queries `[heads, dim]`."""
    planes, places = generator.standard_normal((tables, bits, DIM)), 1 << np.arange(bits)
    for head in range(KV_HEADS):
        above = np.einsum("tbd,nd->tnb", planes, rows.real_keys()[head]) > 0
        rows.entries[head] = rows.codes[head] = (above @ places).astype(np.uint16)
        build_tables(rows.entries[head], rows.offsets[head], bits, 0, tables, 1)
    return ((np.einsum("tbd,hd->htb", planes, query) > 0) @ places).astype(np.uint16)


def clustered(generator: np.random.Generator, tokens: int, bits: int, tables: int) -> tuple[Rows, np.ndarray]:
    """Keys in clusters, which fall into buckets together: what keys drawn one by one would hide."""
    rows = make_rows(generator, "bf16", KV_HEADS, tokens, DIM, bits, tables)
    query = generator.standard_normal((HEADS, DIM))
    middles = generator.standard_normal((KV_HEADS, tokens // 20, DIM)) + 0.4 * query[:: HEADS // KV_HEADS, None]
    keys = middles.repeat(20, axis=1)[:, :tokens] + 0.4 * generator.standard_normal((KV_HEADS, tokens, DIM))
    rows.keys[:] = to_bf16(0.7 * keys.astype(np.float32))
    rows.centre[:] = 0.0
    return rows, query


def test_two_estimated_errors_hold_nine_answers_in_ten_and_more_over_draws() -> None:
    bits, tables, tokens, draws = 5, 40, 800, 150
    generator = np.random.default_rng(8)
    rows, query = clustered(generator, tokens, bits, tables)
    asked, estimating = query[None].astype(np.float32), kernel("bf16", True, bits, tables)
    group, direction, inside = HEADS // KV_HEADS, draw_direction(DIM), []
    logits = [rows.real_keys()[head // group] @ query[head] * DIM**-0.5 for head in range(HEADS)]
    lse = np.array([np.log(np.exp(one).sum()) for one in logits])
    out = np.stack([np.exp(one - top) @ rows.real_values()[head // group]
                    for head, (one, top) in enumerate(zip(logits, lse, strict=True))])  # fmt: skip
    alone = []
    for _ in range(draws):
        codes = draw_tables(generator, rows, query, bits, tables)
        table = table_of([Context([(rows, SAMPLED, 0, tokens)])])
        got = estimating.attend(table, asked, codes[None], 1)
        errors, wrong = got.errors[0].copy(), np.abs(got.lse[0] - lse)
        along = np.abs((got.out[0] - out) @ direction) / np.linalg.norm(got.out[0], axis=1)
        inside.append([wrong < 2 * errors[:, LOG_MASS], along < 2 * errors[:, OUTPUT]])
        assert (errors[:, LARGEST] < 1).all()
        full = estimating.attend(table, asked, codes[None], 1, full=np.ones((1, HEADS), np.uint8))
        alone.append(full.errors[0, :, LOG_MASS].copy())
        np.testing.assert_allclose(full.lse[0], lse, atol=HOST_ATTENTION_FLOAT32)
        np.testing.assert_allclose(full.out[0], out, atol=HOST_ATTENTION_FLOAT32)
    assert all(0.9 <= share <= 0.99 for share in np.mean(inside, axis=(0, 2))), np.mean(inside, axis=(0, 2))
    assert (np.ptp(alone, axis=0) == 0).all(), "what is noted of a full reading depends on no draw"


def test_an_answer_without_samples_has_no_error() -> None:
    rows = make_rows(np.random.default_rng(1), "bf16", KV_HEADS, 40, DIM, BITS, TABLES)
    nowhere = np.full((1, HEADS, TABLES), 7, np.uint16)
    rows.codes[:] = 3
    rows.entries[:] = rows.codes
    for head in range(KV_HEADS):
        build_tables(rows.entries[head], rows.offsets[head], BITS, 0, TABLES, 1)
    queries = np.ones((1, HEADS, DIM), np.float32)
    got = kernel("bf16", True, BITS, TABLES).attend(
        table_of([Context([(rows, SAMPLED, 0, 40)])]),
        queries,
        nowhere,
        1,
        Mask(np.ones((1, HEADS), np.uint8), None).wanted,
    )
    assert (got.lse == -np.inf).all()
    assert (got.errors == 0).all()
