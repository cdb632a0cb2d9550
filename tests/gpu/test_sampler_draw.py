"""Integer masses and the filters at their edges, where sums and comparisons go wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.sampling.draw import distances, keep_top_k, keep_top_p, weigh
from tests.tolerances import DRAW_CDF, FLOAT32_CDF_ERROR

VOCAB = 128_256


def cdf_error(measured: np.ndarray, logits: torch.Tensor) -> float:
    exact = np.exp(logits.double().numpy() - float(logits.max()))
    exact = np.cumsum(exact) / np.sum(exact)
    return float(np.abs(measured - exact).max())


def long_tail() -> torch.Tensor:
    """One likely token, then a vocabulary of unlikely ones that hold half of the mass together."""
    logits = torch.full((VOCAB,), -12.0)
    logits[0] = 0.0
    return logits


@pytest.mark.parametrize("seed", [None, 0], ids=["long tail", "normal"])
def test_integer_weights_keep_the_cdf_of_a_large_vocabulary(seed: int | None) -> None:
    logits = long_tail() if seed is None else torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    weights = weigh(distances(logits[None], logits.max()[None], torch.ones(1)))[0].cumsum(0)
    assert cdf_error(weights.double().numpy() / float(weights[-1]), logits) < DRAW_CDF


def test_a_float32_sum_would_not() -> None:
    """Power of the one above: after a likely token every step of the tail is rounded the same way."""
    logits = long_tail()
    summed = np.cumsum(np.exp(logits.numpy() - float(logits.max())), dtype=np.float32)
    error = cdf_error(summed / summed[-1], logits)
    assert error > FLOAT32_CDF_ERROR
    assert error > DRAW_CDF


def test_weights_of_equal_logits_fill_the_integers_without_overflow() -> None:
    weights = weigh(torch.zeros((2, VOCAB)))
    assert 2**61 < VOCAB * int(weights[0, 0]) < 2**62
    assert int(weights.sum(1)[0]) == VOCAB * int(weights[0, 0])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e-30, 7.25, 80.0, 3e38]), min_size=1, max_size=40), st.data())
def test_top_k_keeps_exactly_k_and_ties_go_to_lower_ids(values: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(values)))
    kept = keep_top_k(torch.tensor([values], dtype=torch.float32), torch.tensor([top_k]))[0]
    ranked = sorted(range(len(values)), key=lambda token: (values[token], token))
    assert sorted(kept.nonzero()[:, 0].tolist()) == sorted(ranked[:top_k])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.25]), min_size=1, max_size=40), st.floats(0, 1))
def test_top_p_keeps_the_fewest_tokens_that_reach_it(values: list[float], top_p: float) -> None:
    distance = torch.tensor([values], dtype=torch.float32)
    weights = weigh(distance)
    kept = keep_top_p(distance, weights, torch.tensor([top_p], dtype=torch.float64))[0].tolist()
    listed = weights[0].tolist()
    ranked = sorted(range(len(values)), key=lambda token: (values[token], token))
    nucleus = [token for token in ranked if kept[token]]
    assert nucleus == ranked[: len(nucleus)]
    target = top_p * sum(listed)
    assert sum(listed[token] for token in nucleus) >= int(target) or len(nucleus) == len(values)
    assert len(nucleus) == 1 or top_p == 1 or sum(listed[token] for token in nucleus[:-1]) < target + 1


def test_top_p_1_keeps_what_is_too_unlikely_for_a_weight_whatever_the_other_rows_ask() -> None:
    distance = torch.tensor([[0.0, 50.0, 60.0]] * 2)
    weights = weigh(distance)
    assert weights[0].tolist()[1:] == [0, 0]  # exp(-42) is the least that 60 bits hold
    kept = keep_top_p(distance, weights, torch.tensor([1.0, 0.9], dtype=torch.float64))
    assert kept.tolist() == [[True, True, True], [True, False, False]]


def test_a_token_at_minus_infinity_has_no_weight() -> None:
    scores = torch.tensor([[0.0, float("-inf"), -1.0]])
    assert weigh(distances(scores, scores.amax(1), torch.ones(1)))[0].tolist()[1] == 0
