"""What the tier draws, how it weighs it and what it answers are the paper's, where most keys are left unread."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.naming_tier import DIM, NAMING, Row, Witness, new_naming_tier, new_witness
from tests.cpu.sampling_oracle import Answer
from tests.cpu.tier_answers import assert_drawn, assert_same, expect
from tests.tolerances import SAMPLED_WEIGHT_BFLOAT16
from transfer.host_memory import STRIPE_TOKENS, TAIL_TOKENS

FEW, MORE, MOST = ("bfloat16", 6, 20), ("int8", 8, 60), ("bfloat16", 10, 150)
OFFLOAD_BLOCK = 128


@pytest.mark.parametrize("setting", [FEW, MORE, MOST])
def test_a_segment_is_sampled_and_its_open_tail_is_read(setting: tuple[str, int, int]) -> None:
    with new_witness(setting, 2400) as witness:
        witness.open(1)
        witness.offload(1, 2100)
        assert_drawn(witness, {1: range(0)})
        share = expect(witness, Row(1, 2100), 0, {}).rows / (4 * 2100)
        assert (share < 0.2).all(), "a setting that leaves most keys unread"
        for tokens in (130, 1, 99):
            witness.offload(1, tokens)
        assert_drawn(witness, {1: range(2100, 2330)})


@pytest.mark.parametrize("setting", [FEW, MORE])
def test_each_segment_is_drawn_about_its_own_centre_in_a_ragged_batch(setting: tuple[str, int, int]) -> None:
    with new_witness(setting, 4400) as witness:
        for context_id, offloads in ((1, (300,)), (2, (2050, 2150, 200)), (3, (2048,))):
            witness.open(context_id)
            for tokens in offloads:
                witness.offload(context_id, tokens)
        assert_drawn(witness, {1: range(300), 2: range(4200, 4400), 3: range(0)})
        assert_drawn(witness, {3: range(0), 2: range(4200, 4400)})


@pytest.mark.parametrize("setting", [FEW, MORE])
def test_full_tails_are_drawn_and_go_on_being_so_when_they_are_merged(setting: tuple[str, int, int]) -> None:
    begin = 2070
    with new_witness(setting, 4900) as witness:
        witness.open(1)
        for tokens in (begin, *[TAIL_TOKENS // 4] * 4):
            witness.offload(1, tokens)
        full = begin + TAIL_TOKENS
        assert_drawn(witness, {1: range(begin, full)})  # a full tail is drawn from when the context grows again
        witness.offload(1, OFFLOAD_BLOCK)
        assert_drawn(witness, {1: range(full, full + OFFLOAD_BLOCK)})
        for _ in range(5):
            witness.offload(1, OFFLOAD_BLOCK)
        assert witness.tier.stats().merges == 1
        assert_drawn(witness, {1: range(full, witness.stored[1].tokens)})
        witness.fork(1, 2, begin + 700)
        assert_drawn(witness, {2: range(0), 1: range(full, witness.stored[1].tokens)})


@pytest.mark.parametrize("setting", [FEW, MORE])
def test_forks_draw_from_their_own_first_tokens(setting: tuple[str, int, int]) -> None:
    with new_witness(setting, 2900) as witness:
        witness.open(1)
        witness.offload(1, 2100)
        witness.offload(1, 333)
        witness.fork(1, 2, 1501)  # inside the segment
        witness.fork(1, 3, 2300)  # inside the tail, of which it gets a copy
        witness.offload(3, 190)
        witness.offload(1, 70)
        witness.offload(2, 400)
        witness.fork(3, 4, 2450)
        tails = {1: range(2100, 2503), 2: range(1501, 1901), 3: range(2100, 2490), 4: range(2100, 2450)}
        assert_drawn(witness, tails)
        witness.close(1)
        del tails[1]
        assert_drawn(witness, tails)


def test_a_tail_that_was_sealed_half_full_is_drawn() -> None:
    """The fork's is a copy, which has no more room than its tokens."""
    with new_witness(FEW, 4900) as witness:
        witness.open(1)
        witness.offload(1, 2048)
        witness.offload(1, 700)
        witness.fork(1, 2, 2048 + 600)
        for context_id in (1, 2):
            witness.offload(context_id, 2100)
        assert_drawn(witness, {1: range(0), 2: range(0)})


def test_a_segment_of_two_stripes_is_drawn_from_both() -> None:
    with new_witness(FEW, DIM) as witness:
        witness.open(1)
        witness.offload(1, STRIPE_TOKENS + 700)
        assert_drawn(witness, {1: range(0)})
        witness.fork(1, 2, STRIPE_TOKENS + 300)
        assert_drawn(witness, {1: range(0), 2: range(0)})


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(TAIL_TOKENS, 2600), st.lists(st.integers(1, 300), max_size=6), st.floats(0, 1), st.booleans())
def test_whatever_was_offloaded_and_forked(bulk: int, blocks: list[int], share: float, grows: bool) -> None:
    tier = new_naming_tier(*FEW, 1)
    with Witness(tier, bulk) as witness:
        witness.open(1)
        for tokens in (bulk, *blocks):
            witness.offload(1, tokens)
        whole = witness.stored[1].tokens
        witness.fork(1, 2, forked := int(share * whole))
        if grows:
            witness.offload(2, 100)
        tail = range(min(bulk, forked), witness.stored[2].tokens)
        assert_drawn(witness, {1: range(bulk, whole), 2: tail})
    tier.shutdown()


def test_the_comparison_sees_one_id_one_weight_and_one_table() -> None:
    with new_witness(MOST, 2200) as witness:
        witness.open(1)
        witness.offload(1, 2100)
        witness.offload(1, 90)
        exact, row = {1: range(2100, 2190)}, Row(1, 2190)
        (got,), _ = witness.attend([row])
        stored, want = witness.stored[1], expect(witness, row, 0, exact)
        assert_same("bfloat16", got, want)

        def assert_seen(wrong: Answer) -> None:
            with pytest.raises(AssertionError):
                assert_same("bfloat16", got, wrong)

        token = int((want.weights[NAMING, 0, :2100] == 0).argmax())
        codes = stored.codes.copy()
        codes[NAMING, 0, token, :2] = witness.codes_of(witness.queries[NAMING, 0])[0, :2]
        witness.stored[1] = stored.with_codes(codes)
        assert_seen(more := expect(witness, row, 0, exact))
        assert (more.rows - want.rows).tolist() == [1, 0]
        for head, drawn in enumerate(want.weights[NAMING] > 0):
            weights = want.weights.copy()
            weights[NAMING, head, drawn.argmax()] *= 1 + 10 * SAMPLED_WEIGHT_BFLOAT16
            assert_seen(replace(want, weights=weights))
        for table in range(stored.codes.shape[-1]):
            codes = stored.codes.copy()
            codes[..., table] ^= 1
            witness.stored[1] = stored.with_codes(codes)
            assert_seen(expect(witness, row, 0, exact))
        witness.stored[1] = stored
        assert_seen(expect(witness, row, 0, {1: range(2100, 2189)}))
        witness.stored[1] = replace(stored, centre=0 * stored.centre)
        assert_seen(expect(witness, row, 0, exact))
