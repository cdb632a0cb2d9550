"""Answers of a tier whose keys are named, held against the oracle: ids drawn, weights, lse, out, and counts."""

from collections.abc import Mapping, Sequence

import numpy as np

from tests.cpu.naming_tier import NAMING, PLAIN, Row, Witness
from tests.cpu.sampling_oracle import Answer
from tests.tolerances import SAMPLED_WEIGHT_BFLOAT16, SAMPLED_WEIGHT_INT8, TIER_FLOAT32, TIER_INT8


def assert_drawn(witness: Witness, exact: dict[int, range]) -> None:
    """As `assert_answered`, all of each context being asked for."""
    assert_answered(witness, [Row(context_id, witness.stored[context_id].tokens) for context_id in exact], exact)


def assert_answered(witness: Witness, rows: Sequence[Row], exact: Mapping[int, range]) -> None:
    """Ask, and hold each answer against the oracle; exact: tokens of contexts that are read whoever asks, if
    any.
    """
    got, counted = witness.attend(rows)
    wanted = [expect(witness, row, place, exact) for place, row in enumerate(rows)]
    for answer, want in zip(got, wanted, strict=True):
        assert_same(witness.tier.shape.rows, answer, want)
    of_layers = np.zeros(2, int)
    of_layers[NAMING], of_layers[PLAIN] = witness.naming, 1
    assert counted.rows_read == sum(of_layers @ want.rows for want in wanted)
    assert counted.keys_scored == sum(of_layers @ want.keys for want in wanted)
    assert counted.tokens_covered == sum(of_layers.sum() * want.covered.sum() for want in wanted)


def expect(witness: Witness, row: Row, place: int, exact: Mapping[int, range]) -> Answer:
    tokens, read = np.arange(row.tokens), exact.get(row.context_id, range(0))
    return witness.expect(row, place, (tokens >= read.start) & (tokens < read.stop))


def assert_same(rows: str, got: Answer, want: Answer) -> None:
    is_int8 = rows == "int8"
    named = want.weights[NAMING][:, : got.weights.shape[2]]
    np.testing.assert_array_equal(got.weights[0] != 0, named != 0)
    of_weights = SAMPLED_WEIGHT_INT8 if is_int8 else SAMPLED_WEIGHT_BFLOAT16
    np.testing.assert_allclose(got.weights[0], named, rtol=of_weights, atol=0)
    atol = TIER_INT8 if is_int8 else TIER_FLOAT32
    np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=atol)
    np.testing.assert_allclose(got.out[0], want.out[PLAIN], rtol=0, atol=atol)
    np.testing.assert_array_equal(got.covered, want.covered)
