"""Budgets: what may be read of each context, and of the longest one without asking the device."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evals.methods.budget import Budget, parse_budget

budgets = st.one_of(
    st.builds(Budget, st.floats(1e-3, 1.0), st.none()), st.builds(Budget, st.none(), st.integers(1, 10_000))
)


@given(budget=budgets, lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_the_most_is_what_the_longest_context_has_and_nobody_has_more_than_there_is(
    budget: Budget, lengths: list[int]
) -> None:
    read = budget.of(torch.tensor(lengths)).tolist()
    assert all(1 <= tokens <= length for tokens, length in zip(read, lengths, strict=True))
    assert max(read) == budget.most(max(lengths))


@pytest.mark.parametrize(("text", "wanted"), [("0.05", 5), ("5%", 5), ("512", 100), ("7", 7), ("0.001", 1)])
def test_a_budget_is_read_as_it_is_written(text: str, wanted: int) -> None:
    assert parse_budget(text).of(torch.tensor([100])).tolist() == [wanted]
    assert parse_budget(text).most(100) == wanted


@pytest.mark.parametrize("text", ["", "0.0", "1.5", "120%", "-1", "many", str(math.nan)])
def test_what_is_no_budget_is_refused_with_what_was_wanted(text: str) -> None:
    with pytest.raises(ValueError, match="wanted a fraction with a point"):
        parse_budget(text)


@pytest.mark.parametrize("both", [(None, None), (0.5, 10)])
def test_a_budget_is_a_fraction_or_tokens(both: tuple[float | None, int | None]) -> None:
    with pytest.raises(AssertionError, match="budget: "):
        Budget(*both)
