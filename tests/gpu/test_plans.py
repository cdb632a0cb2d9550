"""A step's plan: whatever it says is carried out, and nothing changes it once it is made."""

from dataclasses import Field, FrozenInstanceError, fields, replace

import pytest

from gpu.step import DecodeGroup, Lane, PageWrite, StepPlan

FIELDS = {each.name: each for each in fields(StepPlan) if each.name != "lane"}


def some_value(each: Field) -> object:
    """Not what the field is by default."""
    return not each.default if isinstance(each.default, bool) else ["something"]


@pytest.mark.parametrize("lane", Lane)
def test_a_plan_that_says_nothing_is_empty_in_either_lane(lane: Lane) -> None:
    assert StepPlan(lane).is_empty


@pytest.mark.parametrize("name", FIELDS)
def test_a_plan_with_any_one_field_is_not_empty(name: str) -> None:
    """What a plan has was taken from whoever keeps it, and is lost if the plan is not launched."""
    assert not StepPlan(Lane.HOST, **{name: some_value(FIELDS[name])}).is_empty


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_of_a_plan_changes_once_it_is_made(name: str) -> None:
    given = some_value(FIELDS[name])
    plan = StepPlan(**{name: given})
    hash(getattr(plan, name))  # a list has none
    with pytest.raises(FrozenInstanceError):
        setattr(plan, name, given)
    if isinstance(given, list):
        given.append("more")
    assert plan == StepPlan(**{name: some_value(FIELDS[name])}) == replace(plan, lane=Lane.DEVICE)


def test_what_a_plan_is_made_of_cannot_be_changed() -> None:
    group = DecodeGroup([1], [5], [0], runs=[[7, 8]])
    write = PageWrite(0, 0, [3, 4])
    plan = StepPlan(page_writes=[write], decode=[group])
    assert (plan.page_writes, plan.decode) == ((write,), (group,))
    assert (write.page_ids, group.slots, group.runs) == ((3, 4), (1,), ((7, 8),))
