"""An aim is met only by what was measured: every task it names, by intervals, at the reads that it allows."""

from typing import Any

import pytest

from evals.aims import MET, MISSED, NO_AIM, NOT_MEASURED, NOT_SHOWN, SAMPLED_AIM, Aim, is_met, judge_method, render_aim

AIM = Aim(2.0, ("needle", "list"), 16_384, 0.05, 50.0, ("sampled",))
METHOD = "sampled:num_tables=150"


def row(method: str, task: str, score: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {"method": method, "task": task, "length": 16_384, "score": score, "difference_low": low,
            "difference_high": high, "interval": "exact", "head_fraction": 0.03}  # fmt: skip


FULL = [row("full", task, 100.0, None, None) for task in AIM.tasks]
GOOD = [row(METHOD, task, 99.5, -2.0, 1.0) for task in AIM.tasks]


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return judge_method(rows, METHOD, AIM)


def test_all_tasks_within_the_points_meet_the_aim() -> None:
    assert set(verdicts(FULL + GOOD).values()) == {MET}
    assert is_met(verdicts(FULL + GOOD), 0.03, AIM)


def test_a_task_that_the_table_lacks_is_not_met() -> None:
    for rows in (FULL + GOOD[:1], FULL[:1] + GOOD, GOOD, FULL):
        found = verdicts(rows)
        assert found["list"] == NOT_MEASURED
        assert not is_met(found, 0.03, AIM)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(-2.9, 1.0, MET), (-3.0, 1.0, NOT_SHOWN), (-9.0, -3.5, MISSED), (None, None, NOT_MEASURED)],
)
def test_one_task_decides(low: float | None, high: float | None, wanted: str) -> None:
    found = verdicts([*FULL, GOOD[0], row(METHOD, "list", 99.0, low, high)])
    assert found == {"needle": MET, "list": wanted}
    assert is_met(found, 0.03, AIM) == (wanted == MET)


def test_an_interval_of_before_shows_nothing() -> None:
    old = {name: value for name, value in GOOD[1].items() if name != "interval"}
    assert verdicts([*FULL, GOOD[0], old])["list"] == NOT_SHOWN


def test_no_aim_is_set_where_full_attention_is_wrong_too_often() -> None:
    weak = [FULL[0], row("full", "list", 49.0, None, None)]
    found = verdicts([*weak, GOOD[0], row(METHOD, "list", 10.0, -50.0, -30.0)])
    assert found["list"] == NO_AIM
    assert is_met(found, 0.03, AIM)
    assert not is_met({"needle": NO_AIM, "list": NO_AIM}, 0.03, AIM)


@pytest.mark.parametrize("read", [0.051, None])
def test_too_many_reads_or_unknown_ones_do_not_meet_it(read: float | None) -> None:
    assert not is_met(verdicts(FULL + GOOD), read, AIM)


def test_another_length_is_not_this_one() -> None:
    assert NOT_MEASURED in verdicts([*FULL, GOOD[0], {**GOOD[1], "length": 4_096}]).values()


def test_the_table_names_what_was_not_measured() -> None:
    lines = render_aim(FULL + GOOD[:1], AIM)
    assert lines[-1] == f"| `{METHOD}` | 3.0 % | not met | needle |  |  | list |  |"
    assert render_aim(FULL, AIM) == []


def test_the_aim_of_sampling_names_the_hard_needles() -> None:
    assert {"only_needles", "crossed_needles", "four_values", "four_keys", "several_keys"} <= set(SAMPLED_AIM.tasks)
