"""Whatever contexts open, fork, grow and close, attention is over their own rows, and the memory comes back."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu import decode_step
from tests.cpu.tier_model import MAX_ROWS, Device, new_tier, tier_shape
from tests.tolerances import TIER_FLOAT32, TIER_INT8
from transfer.exchange import ExchangeError
from transfer.host_memory import TAIL_TOKENS
from transfer.reading import Reading

GROWTH = st.one_of(st.integers(1, 300), st.sampled_from([1, TAIL_TOKENS - 1, TAIL_TOKENS]), st.integers(1, 5000))
STEP = st.tuples(
    st.sampled_from(["open", "fork", "grow", "grow", "grow", "close"]), st.randoms(use_true_random=False), GROWTH
)

_ids = count()


@pytest.fixture(scope="module", params=["bfloat16", "int8", "int4"])
def tier(request):
    tier = new_tier(tier_shape(request.param))
    yield tier
    tier.shutdown()
    assert tier.stats().bytes_held == 0


def assert_dense(device, context_ids):
    out, lse, queries = device.attend(context_ids)
    wanted_out, wanted_lse = device.expect(context_ids, queries)
    tolerance = TIER_INT8 if device.tier.shape.rows == "int8" else TIER_FLOAT32
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=tolerance)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=tolerance)


def draw_reading(random):
    return Reading.SAMPLE if random.random() < 0.7 else Reading.WHOLE


def take_step(device, kind, random, tokens):
    """One call, on a context that is chosen at random."""
    if kind == "open" or not device.keys:
        context_id = next(_ids)
        device.open(context_id, draw_reading(random), tokens)
        return
    chosen = random.choice(list(device.keys))
    if kind == "fork":
        device.fork(chosen, next(_ids), random.randint(0, device.tokens(chosen)), draw_reading(random))
    elif kind == "grow":
        device.offload(chosen, tokens)
    else:
        device.close(chosen)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=14), seed=st.integers(0, 2**32))
def test_contexts_read_their_own_rows_and_their_memory_comes_back(tier, steps, seed):
    with Device(tier, seed) as device:
        for step in steps:
            take_step(device, *step)
            alive = list(device.keys)
            for begin in range(0, len(alive), MAX_ROWS):
                assert_dense(device, alive[begin : begin + MAX_ROWS])
    tier._store.wait_for_doomed()
    assert tier.stats().bytes_in_use == 0
    assert tier.stats().segments == 0


def test_the_comparison_sees_one_row_less(tier):
    with Device(tier, 1) as device:
        device.open(next(_ids), Reading.SAMPLE)
        (context_id,) = device.keys
        device.offload(context_id, 3000)
        assert_dense(device, [context_id])
        for record in (device.keys, device.values):
            record[context_id] = record[context_id][:, :, :-1]
        with pytest.raises(AssertionError):
            assert_dense(device, [context_id])


def test_an_ask_that_comes_late_is_answered_in_the_same_call(tier):
    """The call waits for the flags of every layer; one that did not would answer the host request before."""
    with Device(tier, 1) as device:
        context_id = next(_ids)
        device.open(context_id, Reading.SAMPLE, 700)
        wanted, _, _ = device.attend([context_id])
        waited = tier.stats().attention.wait_s
        got, _, _ = device.attend([context_id], late_s=0.03)
        np.testing.assert_array_equal(got, wanted)
        assert tier.stats().attention.wait_s - waited > 0.02 * len(wanted)


@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_a_step_in_one_call_gives_what_its_layers_give_one_by_one(reading):
    """The second half batch needs more room than the first: the call makes it and goes on where it was."""
    tier = new_tier(tier_shape(bits=7, tables=20), threads=2)
    with Device(tier, 0) as device:
        for context_id, tokens in enumerate((300, 5000, 2500)):
            device.open(context_id, reading, tokens)
        parts = [[0], [1, 2]]
        got = device.attend_by_itself(parts)
        counts = tier.stats().attention
        wanted = [device.attend(part) for part in parts]
        for (out, lse), (wanted_out, wanted_lse, _) in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(out, wanted_out)
            np.testing.assert_array_equal(lse, wanted_lse)
        both = tier.stats().attention
        for name in ("host_requests", "rows_read", "bytes_read", "tokens_covered", "keys_scored"):
            assert 2 * getattr(counts, name) == getattr(both, name) > 0
        for _ in range(50):
            again = device.attend_by_itself(parts)
            for got_part, again_part in zip(got, again, strict=True):
                np.testing.assert_array_equal(again_part[0], got_part[0])
    tier.shutdown()


@pytest.mark.parametrize("asked", [0, 1])
def test_a_step_whose_device_stops_asking_names_the_layer_and_ends(tier, asked, monkeypatch):
    monkeypatch.setattr(decode_step, "HOST_REQUEST_LIMIT_S", 0.1)
    with Device(tier, 1) as device:
        first, second = next(_ids), next(_ids)
        for context_id in (first, second):
            device.open(context_id, Reading.SAMPLE, 700)
        with pytest.raises(ExchangeError, match=f"layer {asked}: row 0 of 2"):
            device.attend_by_itself([[first], [first, second]], asks=asked)
        assert tier._builder.gate[0] == 0
        assert_dense(device, [first, second])


@pytest.mark.parametrize("asked", [0, 1])
def test_an_ask_that_never_comes_is_named_and_the_builder_goes_on(tier, asked, monkeypatch):
    monkeypatch.setattr(decode_step, "HOST_REQUEST_LIMIT_S", 0.1)
    with Device(tier, 1) as device:
        context_id = next(_ids)
        device.open(context_id, Reading.SAMPLE, 700)
        with pytest.raises(ExchangeError, match=f"layer {asked}: row 0 of 1"):
            device.attend([context_id], asks=asked)
        assert tier._builder.gate[0] == 0
