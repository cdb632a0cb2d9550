"""An answer stands for what was asked, no more and no less: a cut of the run, some heads, all but excluded blocks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.cpu.naming_tier import BLOCK, DIM, HEADS, KV_HEADS, Row, Witness, new_witness
from tests.cpu.sampling_oracle import Answer
from tests.cpu.tier_answers import assert_answered, assert_same, expect
from tests.cpu.tier_model import HEADS as MODEL_HEADS
from tests.cpu.tier_model import Device, new_tier, tier_shape
from tests.reference_tier import ReferenceTier
from tests.tolerances import TIER_FLOAT32
from transfer.copies import PASSED
from transfer.exchange import new_slot
from transfer.host_tier import ContextRead
from transfer.reading import Reading
from transfer.slot_shape import SlotShape

FEW, MORE = ("bfloat16", 6, 20), ("int8", 8, 60)
LONG, SHORT = 1, 2  # contexts: segments that begin at 0, 2,050 and 4,200, the last of them open; one segment
PIECES, TOKENS = (0, 2050, 4200, 4400), 4400
SHORT_TOKENS = 2100
EXACT = {LONG: range(4200, TOKENS)}
BLOCKS = -(-TOKENS // BLOCK)
STRADDLING = 2050 // BLOCK  # a block of two pieces
NOT_YET_S = 0.1


@pytest.fixture(scope="module", params=[FEW, MORE], ids=["bfloat16", "int8"])
def witness(request: pytest.FixtureRequest) -> Iterator[Witness]:
    with new_witness(request.param, TOKENS) as witness:
        for context_id, offloads in ((LONG, np.diff(PIECES)), (SHORT, (SHORT_TOKENS,))):
            witness.open(context_id)
            for tokens in offloads:
                witness.offload(context_id, int(tokens))
        yield witness


def blocks_of(*chosen: range) -> np.ndarray:
    """Of every KV head the same."""
    excluded = np.zeros((KV_HEADS, BLOCKS), bool)
    for blocks in chosen:
        excluded[:, blocks.start : blocks.stop] = True
    return excluded


def some_blocks(seed: int, share: float) -> np.ndarray:
    return np.random.default_rng(seed).random((KV_HEADS, BLOCKS)) < share


NOTHING = Row(None, 0)
ODD, ONE, NO_HEAD = (False, True) * 2, (False, False, True, False), (False,) * HEADS
WHOLE_PIECES = blocks_of(range(STRADDLING + 1), range(4200 // BLOCK, BLOCKS))
ONE_STRADDLES = np.arange(BLOCKS) == [[STRADDLING], [-1]]  # of the first KV head alone
ASKED = {
    "cuts": [Row(LONG, 2051), Row(LONG, 1), Row(SHORT, 1999), Row(LONG, TOKENS)],
    "cuts in a tail": [Row(LONG, 4200), Row(LONG, 4201), NOTHING, Row(LONG, 4333)],
    "heads": [Row(LONG, TOKENS, ODD), Row(SHORT, SHORT_TOKENS, ONE), Row(LONG, TOKENS, NO_HEAD), Row(LONG, 4300, ONE)],
    "blocks": [
        Row(LONG, TOKENS, excluded=some_blocks(1, 0.3)),
        Row(LONG, TOKENS, excluded=WHOLE_PIECES),
        Row(LONG, TOKENS, excluded=blocks_of(range(BLOCKS))),
        Row(LONG, TOKENS, excluded=ONE_STRADDLES),
    ],
    "few bits": [Row(LONG, TOKENS, excluded=some_blocks(2, 0.5)[:, :37]), Row(SHORT, SHORT_TOKENS)],
    "all of it": [
        Row(SHORT, 2000, ODD, some_blocks(3, 0.1)),
        Row(LONG, 4301, ONE, some_blocks(4, 0.5)),
        NOTHING,
        Row(LONG, 3333, (True, True, True, False), some_blocks(5, 0.9)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rows", ASKED.values(), ids=ASKED)
def test_answers_stand_for_what_is_asked(witness: Witness, rows: list[Row]) -> None:
    assert_answered(witness, rows, EXACT)


def test_a_fork_is_cut_and_excluded_as_its_source_is(witness: Witness) -> None:
    witness.fork(LONG, 3, 3000)
    rows = [Row(3, 2999, ODD, some_blocks(6, 0.2)), Row(3, 2049), Row(LONG, 3000, excluded=some_blocks(6, 0.2))]
    assert_answered(witness, rows, EXACT)
    witness.close(3)


def test_the_comparison_sees_what_covers_too_much_or_too_little(witness: Witness) -> None:
    excluded, rows = some_blocks(7, 0.3), witness.tier.shape.rows
    asked = Row(LONG, 4301, (True, True, True, False), excluded)
    (got,), _ = witness.attend([asked])
    right = expect(witness, asked, 0, EXACT)
    assert_same(rows, got, right)
    one_more, one_counts = excluded.copy(), excluded.copy()
    one_more[0, np.flatnonzero(~excluded[0])[50]] = True
    one_counts[1, np.flatnonzero(excluded[1])[50]] = False
    wrong = {
        "an off-by-one block": replace(asked, excluded=np.roll(excluded, 1, axis=1)),
        "a block more": replace(asked, excluded=one_more),
        "an excluded block that counts": replace(asked, excluded=one_counts),
        "heads in each other's place": replace(asked, excluded=excluded[::-1]),
        "a head that is not wanted": replace(asked, wanted=None),
        "no head of a group": replace(asked, wanted=(True, True, False, False)),
        "a token less": replace(asked, tokens=4300),
        "a token more": replace(asked, tokens=4302),
    }
    answers = {name: expect(witness, row, 0, EXACT) for name, row in wrong.items()}
    grown = 4301 / np.maximum(right.covered, 1)
    answers["what is left standing for what was dropped"] = replace(right, lse=right.lse + np.log(grown))
    assert [name for name, answer in answers.items() if is_same(rows, padded(got), padded(answer))] == []


def is_same(rows: str, got: Answer, wrong: Answer) -> bool:
    try:
        assert_same(rows, got, wrong)
    except AssertionError:
        return False
    return True


def padded(answer: Answer) -> Answer:
    """With weights of all tokens, 0 beyond the cut."""
    missing = TOKENS - answer.weights.shape[2]
    return replace(answer, weights=np.pad(answer.weights, ((0, 0), (0, 0), (0, missing))))


def test_a_step_that_asks_for_nothing_is_answered_and_reads_nothing(witness: Witness) -> None:
    for rows in ([NOTHING] * 3, [Row(LONG, 0)], [Row(LONG, TOKENS, NO_HEAD)] * 2):
        got, counted = witness.attend(rows)
        for answer in got:
            assert not answer.out.any()
            assert not answer.covered.any()
            assert (answer.lse == -np.inf).all()
        assert counted.host_requests == witness.naming + 1
        assert (counted.rows_read, counted.bytes_read, counted.keys_scored, counted.tokens_covered) == (0, 0, 0, 0)


def test_more_than_there_is_and_tokens_of_no_context_are_refused(witness: Witness) -> None:
    for ask in (ContextRead(LONG, TOKENS + 1), ContextRead(LONG, -1), ContextRead(None, 1)):
        with pytest.raises(AssertionError, match="asked"):
            witness.tier.attention([ask])


def test_tables_are_kept_while_the_cut_and_the_context_stay(witness: Witness) -> None:
    def table_of(asks: list[ContextRead]) -> np.ndarray:
        attention = witness.tier.attention(asks)
        attention.give_up()
        return attention.table

    asks = [ContextRead(LONG, 3000), ContextRead(None, 0), ContextRead(SHORT, 1)]
    table = table_of(asks)
    assert table_of(list(asks)) is table
    assert table_of([ContextRead(LONG, 3001), *asks[1:]]) is not table
    assert table_of(asks) is table
    witness.fork(SHORT, 3, 1)
    with_fork = [ContextRead(3, 1)]
    before = table_of(with_fork)
    witness.offload(3, 5)
    assert table_of(with_fork) is not before
    witness.close(3)


@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_only_what_is_asked_for_must_have_landed(reading: Reading) -> None:
    tier = new_tier(tier_shape())
    with Device(tier, 2) as device, ThreadPoolExecutor(1) as aside:
        device.open(1, reading, 2100)
        lates = device.offload_late(1, 2100)
        out, lse, queries = device.attend([1], cuts=[1500])
        wanted_out, wanted_lse = device.expect([1], queries, cuts=[1500])
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=TIER_FLOAT32)
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=TIER_FLOAT32)
        device.attend([1], cuts=[2100])
        further = aside.submit(tier.attention, [ContextRead(1, 2101)])
        with pytest.raises(NotYet):
            further.result(NOT_YET_S)
        for late in lates:
            late.arrive()
        further.result(20).give_up()
    tier.shutdown()


def test_a_slot_that_does_not_count_is_answered_alike() -> None:
    """And one whose bits are all clear, or that has none."""
    tier = new_tier(tier_shape(bits=6, tables=20))
    with Device(tier, 3) as device:
        device.open(1, Reading.SAMPLE, 2500)
        answers = []
        for more in ({}, {"is_counted": True}, {"kv_heads": 1, "exclusion_blocks": 200}):
            slot = new_slot(2, SlotShape(MODEL_HEADS, DIM, 20, "float32", **more), torch.device("cpu"))
            out, lse, _ = device.attend([1], slot=slot)
            answers.append((out, lse))
        for out, lse in answers[1:]:
            np.testing.assert_array_equal(out, answers[0][0])
            np.testing.assert_array_equal(lse, answers[0][1])
    tier.shutdown()


def test_the_tests_own_tier_answers_the_same() -> None:
    """The double that tests of the device side use, over the same rows, whatever part of them is asked for."""
    shape, tokens, rows = replace(tier_shape(), num_tables=0), 300, 3
    generator = torch.Generator().manual_seed(4)
    keys, values = torch.randn(2, len(shape.layers), shape.num_kv_heads, tokens, DIM, generator=generator)
    slots = []
    tier = new_tier(shape)
    for one in (tier, ReferenceTier(shape, 1000, 2048, 2048)):
        slot = new_slot(
            rows,
            SlotShape(MODEL_HEADS, DIM, 0, "float32", kv_heads=1, exclusion_blocks=19, is_counted=True),
            torch.device("cpu"),
        )
        one.open(1, Reading.WHOLE)
        for reservation in one.reserve(1, tokens):
            for layer in range(len(shape.layers)):
                down = reservation.layer(layer)
                down.centre.copy_(keys[layer].mean(1))
                down.keys.copy_(keys[layer] - down.centre[:, None])
                down.values.copy_(values[layer])
            one.fill(reservation, range(len(shape.layers)), PASSED)
        attention = one.attention([ContextRead(1, 300), ContextRead(None, 0), ContextRead(1, 200)])
        slot.advance(rows)
        slot.queries.copy_(torch.linspace(-2, 2, slot.queries.numel()).view(slot.queries.shape))
        slot.wanted[0, 1] = 0
        slot.excluded[:, 0, 0] = torch.tensor([0b11 << 12, -1, 0b1010])
        slot.flags.fill_(slot.stamp)
        attention.run(0, slot)
        attention.give_up()
        slots.append(slot)
        one.close(1)
    tier.shutdown()
    assert slots[0].covered.tolist() == slots[1].covered.tolist() == [[268, 0], [0, 0], [168, 168]]
    torch.testing.assert_close(slots[0].out, slots[1].out, rtol=0, atol=TIER_FLOAT32)
    torch.testing.assert_close(slots[0].lse, slots[1].lse, rtol=0, atol=TIER_FLOAT32)
