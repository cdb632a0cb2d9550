"""The cost model learns what a machine takes for a unit, from units of other shapes, and plans units by it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from gpu.model.architecture import NAMED_SHAPES
from gpu.step import DENSE, PrefillUnit
from scheduler.prefill.cost_model import CostModel, fit_non_negative
from scheduler.sequences.lane_fences import Rows
from tests.tolerances import COST_MODEL, COST_MODEL_FIT

SHAPE = NAMED_SHAPES["tiny"]
UNIT_S, PROJECTION_S, ATTENTION_S = 3e-4, 1e-6, 2e-9  # of the machine below: a unit, a token, a pair of tokens


def machine_seconds(num_tokens: int, context: int) -> float:
    """Of a causal unit that ends at `context`: each token attends to all before it and itself."""
    pairs = sum(range(context - num_tokens + 1, context + 1))
    return UNIT_S + PROJECTION_S * num_tokens + ATTENTION_S * pairs


@pytest.fixture
def model() -> CostModel:
    model = CostModel(SHAPE)
    draw = np.random.default_rng(0)
    for _ in range(64):
        tokens = int(draw.integers(16, 2048))
        context = tokens + int(draw.integers(0, 20_000))
        model.observe_units([PrefillUnit(0, 0, 0, tokens)], [context], machine_seconds(tokens, context))
    return model


@pytest.mark.parametrize(("tokens", "context"), [(64, 64), (2048, 2048), (512, 16_000), (2048, 60_000)])
def test_units_of_any_length_and_context_take_what_the_machine_takes(
    model: CostModel, tokens: int, context: int
) -> None:
    assert model.unit_seconds(tokens, context, DENSE) == pytest.approx(machine_seconds(tokens, context), rel=COST_MODEL)


def test_the_comparison_sees_attention_over_the_end_of_the_context(model: CostModel) -> None:
    """Power of the test above: half a unit's length more or less of context is seen."""
    off = model.unit_seconds(2048, 2048 + 1024, DENSE)
    assert off != pytest.approx(machine_seconds(2048, 2048), rel=10 * COST_MODEL)


@pytest.mark.parametrize("tokens", [64, 500, 2000, 8191])
def test_units_of_one_length_alone_leave_it_known_what_others_take(tokens: int) -> None:
    """Of theirs alone it cannot be told what is of a unit and what of its tokens; rehearsed ones stay."""
    model = CostModel(SHAPE)
    for rehearsed in (64, 8191):
        model.learn_units([PrefillUnit(0, 0, 0, rehearsed)], [rehearsed], machine_seconds(rehearsed, rehearsed))
    for _ in range(300):
        model.observe_units([PrefillUnit(0, 0, 0, 1000)], [1000], machine_seconds(1000, 1000))
    assert model.unit_seconds(tokens, tokens, DENSE) == pytest.approx(machine_seconds(tokens, tokens), rel=0.05)


@pytest.mark.parametrize(("begin", "seconds"), [(0, 0.004), (30_000, 0.02)])
def test_a_unit_is_the_longest_that_fits_the_time_from_where_it_begins(
    model: CostModel, begin: int, seconds: float
) -> None:
    fits = [tokens for tokens in (64, 128, 256, 512, 1024, 2048) if machine_seconds(tokens, begin + tokens) <= seconds]
    assert 64 < fits[-1] < 2048, "the test means something"
    assert model.tokens_within(seconds, begin, 2048, 64, DENSE) == fits[-1]


def test_a_unit_has_the_least_tokens_where_nothing_fits_and_all_where_all_do(model: CostModel) -> None:
    assert model.tokens_within(0.0, 0, 2048, 64, DENSE) == 64
    assert model.tokens_within(1e9, 0, 2000, 64, DENSE) == 2000
    assert model.tokens_within(1e9, 0, 40, 64, DENSE) == 40


def test_a_decode_steps_time_follows_the_machine_without_jumping() -> None:
    model = CostModel(SHAPE)
    device = Rows.DEVICE
    model.observe_decode(device, 0.010, 0)
    assert model.decode_seconds == {device: 0.010, Rows.HOST: 0.0, Rows.JOINT: 0.0}
    model.observe_decode(device, 0.020, 0)
    assert 0.010 < model.decode_seconds[device] < 0.015
    model.observe_decode(device, 0.0, 0)  # a step without decode says nothing
    for _ in range(20):
        model.observe_decode(device, 0.020, 0)
    assert model.decode_seconds[device] == pytest.approx(0.020, rel=COST_MODEL)


def test_steps_without_units_or_time_teach_nothing() -> None:
    model = CostModel(SHAPE)
    before = model.unit_seconds(512, 512, DENSE)
    model.observe_units([], [], 1.0)
    model.observe_units([PrefillUnit(0, 0, 0, 512)], [512], 0.0)
    assert model.unit_seconds(512, 512, DENSE) == before
    assert model.familiar_tokens(DENSE) == 0


def test_units_of_the_last_layer_alone_teach_nothing_of_others(model: CostModel) -> None:
    """It may compute keys and values alone, in a quarter of the time."""
    last, wanted = SHAPE.main_layers - 1, model.unit_seconds(2048, 2048, DENSE)
    model.observe_units([PrefillUnit(0, last, 0, 2048)], [2048], wanted / 4)
    assert model.unit_seconds(2048, 2048, DENSE) == wanted
    model.observe_units([PrefillUnit(0, last - 1, 0, 2048)], [2048], wanted / 4)
    assert model.unit_seconds(2048, 2048, DENSE) < wanted, "the test can fail"


def test_what_is_familiar_is_twice_the_most_that_a_step_had() -> None:
    model = CostModel(SHAPE)
    model.observe_units([PrefillUnit(0, 0, 0, 100), PrefillUnit(1, 0, 0, 50)], [100, 50], 0.01)
    model.observe_units([PrefillUnit(0, 0, 0, 20)], [20], 0.01)
    assert model.familiar_tokens(DENSE) == 300


def test_what_rows_of_known_tokens_add_is_learnt_beside_what_steps_take_without() -> None:
    """And bounds how many there are; one that hangs is forgotten."""
    model, device, draw = CostModel(SHAPE), Rows.DEVICE, np.random.default_rng(3)
    assert model.room_for_runs(device, 8, 1000, 0.1)[0] > 1000, "nothing is known"
    for _ in range(400):
        num_known = int(draw.choice([0, 0, 1, 4, 9, 20]))
        model.observe_decode(device, 5e-3 + 0.1e-3 * num_known, num_known)
    assert model.decode_seconds[device] == pytest.approx(5e-3, rel=0.05)
    assert model.room_for_runs(device, 8, 1000, 0.1)[0] == pytest.approx(0.25 * 5e-3 / 0.1e-3, abs=1)
    alone = model.room_for_runs(device, 1, 1000, 0.1)[0]
    assert alone == pytest.approx((0.1 - 5e-3) / 0.1e-3, rel=0.1)
    model.observe_decode(device, 30.0, 2)
    for _ in range(200):
        model.observe_decode(device, 5e-3, 0)
    assert model.room_for_runs(device, 8, 1000, 0.1)[0] > 12


def test_what_runs_may_read_is_a_share_of_what_a_step_reads() -> None:
    """Weights count as the cells that have as many numbers."""
    model = CostModel(SHAPE)
    cells = (4 * (256 * 512 + 256 * 256 + 3 * 256 * 512) + 256 * 1024) / (2 * 4 * 2 * 64)
    for own in (0, 10_000, 1_000_000):
        assert model.room_for_runs(Rows.DEVICE, 4, own, 0.1)[1] == pytest.approx(0.25 * (cells + own), abs=2)
    assert model.room_for_runs(Rows.DEVICE, 1, 1000, 0.1)[1] == pytest.approx(cells + 1000, abs=4)


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 20), num_terms=st.integers(1, 3), rank=st.integers(1, 3))
def test_costs_are_those_of_scipys_non_negative_least_squares(seed: int, steps: int, num_terms: int, rank: int) -> None:
    """By their errors, since of terms that say the same either may have the cost."""
    draw = np.random.default_rng(seed)
    terms = draw.random((steps, rank)) @ draw.random((rank, num_terms)) * draw.choice([1.0, 1e-3], num_terms)
    sums = draw.random(steps)
    costs, wanted = fit_non_negative(terms, sums), nnls(terms, sums)[1]
    assert (costs >= 0).all()
    assert np.linalg.norm(terms @ costs - sums) == pytest.approx(wanted, rel=COST_MODEL_FIT, abs=COST_MODEL_FIT)


def test_the_comparison_sees_costs_that_are_cut_off_at_zero() -> None:
    """Power of the test above."""
    terms, sums = np.array([[1.0, 2.0], [1.0, 1.0], [1.0, 0.0]]), np.array([0.0, 1.0, 1.5])
    cut = np.linalg.lstsq(terms, sums)[0].clip(0.0)
    assert np.linalg.norm(terms @ cut - sums) > nnls(terms, sums)[1] + COST_MODEL_FIT
    assert fit_non_negative(terms, sums) == pytest.approx(nnls(terms, sums)[0])
