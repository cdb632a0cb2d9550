"""Slots of an index hold what may be chosen, and are no more than that."""

from hypothesis import given
from hypothesis import strategies as st

from gpu.methods.indexed.settings import SLOT_STEP, IndexedSettings

SETTINGS = st.builds(
    IndexedSettings,
    budget_share=st.floats(0.0005, 1.0),
    least_tokens=st.integers(16, 512),
    budget_tokens=st.integers(1, 128).map(lambda steps: SLOT_STEP * steps),
)


@given(SETTINGS, st.integers(1, 300_000), st.floats(0, 1))
def test_slots_hold_the_choice_of_every_context_up_to_the_longest(
    settings: IndexedSettings, most: int, part: float
) -> None:
    slots = settings.num_slots(most)
    assert settings.count_chosen(int(most * part)) <= slots <= settings.budget_tokens
    assert slots - settings.count_chosen(most) < SLOT_STEP or slots == settings.budget_tokens
    assert slots % SLOT_STEP == 0


def test_budgets_that_may_double_have_all_slots() -> None:
    settings = IndexedSettings(errors={"epsilon": 0.1})
    assert settings.num_slots(10_000) == settings.budget_tokens == 2048
    assert IndexedSettings().num_slots(10_000) == 256
    assert IndexedSettings().num_slots(98_304) == 1984
