"""Plans are frozen in deed, and empty only if all of their fields are."""

from dataclasses import fields

import pytest

from gpu.step import DecodeGroup, Lane, PageWrite, StepPlan


def test_what_a_plan_is_made_of_cannot_be_changed() -> None:
    group = DecodeGroup([1], [5], [0], runs=[[7, 8]])
    write = PageWrite(0, 0, [3, 4])
    plan = StepPlan(page_writes=[write], decode=[group])
    assert (plan.page_writes, plan.decode) == ((write,), (group,))
    assert (write.page_ids, group.slots, group.runs) == ((3, 4), (1,), ((7, 8),))


@pytest.mark.parametrize("name", [each.name for each in fields(StepPlan) if each.name != "lane"])
def test_a_plan_is_empty_only_if_all_of_its_fields_are(name: str) -> None:
    assert StepPlan(Lane.HOST).is_empty
    assert not StepPlan(Lane.HOST, **{name: True if name in ("is_fenced", "gives_way") else (1,)}).is_empty
