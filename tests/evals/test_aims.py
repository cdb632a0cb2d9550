"""A default holds only by what was measured: paired losses pooled over the tasks that full attention can do."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from evals.aims import FAILS, HOLDS, UNDECIDED, Aim, Judgement, judge, meant, told_of
from evals.cli import app
from evals.score_rows import summarize
from evals.store import Record
from tests.tolerances import SCORE_ROUNDING

ANY = Aim(("",), (), None, None, ())
METHOD = "profile:sampled"
Row = dict[str, Any]


def row(method: str, task: str, score: float, **more: Any) -> Row:
    return {"method": method, "task": task, "length": 4096, "metric": "exact_match", "text": "chronicle", "seed": 1,
            "samples": 1000, "score": score, "head_fraction": 0.03, "applied": True} | more  # fmt: skip


def pair(task: str, losses: int, gains: int, num: int, exact: float = 90.0, **more: Any) -> list[Row]:
    """Full attention's row and the method's, of a task with answers that are right or wrong."""
    differences = [[-100.0, losses], [0.0, num - losses - gains], [100.0, gains]]
    own = row(METHOD, task, exact + 100 * (gains - losses) / num, differences=differences, **more)
    return [row("profile:exact", task, exact, **more) | {"applied": None}, own]


def fed(task: str, kl: float | None, **more: Any) -> list[Row]:
    """Rows of full attention's answers, compared token by token."""
    return [row(method, task, 95.0, metric="agreement", kl=value, **more)
            for method, value in (("profile:exact", 0.0), (METHOD, kl))]  # fmt: skip


def judged(rows: Sequence[Row], aim: Aim = ANY) -> Judgement:
    return judge(rows, METHOD, aim)


@pytest.mark.parametrize(
    ("losses", "gains", "num", "verdict"),
    [
        (20, 0, 2000, HOLDS),  # 1.0 points exactly
        (21, 0, 2000, FAILS),
        (0, 0, 2000, HOLDS),
        (0, 0, 1999, UNDECIDED),  # a pair too few
        (500, 0, 1999, FAILS),  # so large a loss needs no more pairs
        (40, 0, 400, FAILS),
        (8, 2, 400, UNDECIDED),  # 1.5 points, but perhaps less than 1
        (110, 100, 2000, UNDECIDED),  # loses half a point, but 2.9 may be
        (110, 100, 20000, HOLDS),
        (0, 40, 2000, HOLDS),
    ],
)
def test_mean_interval_and_number_of_pairs_decide(losses: int, gains: int, num: int, verdict: str) -> None:
    assert judged(pair("needle", losses, gains, num)).verdict == verdict


def test_tasks_are_pooled_prompt_by_prompt() -> None:
    """One task alone loses 4 points: the other, of nine times as many prompts, nothing."""
    found = judged([*pair("vt", 10, 0, 250), *pair("needle", 0, 0, 2250)])
    assert (found.verdict, found.pooled.num_prompts, found.pooled.mean) == (HOLDS, 2500, pytest.approx(-0.4))
    assert set(found.tasks) == {"vt", "needle"}


def test_a_weak_task_is_judged_by_the_kl_of_its_answers_and_not_by_its_score() -> None:
    strong = pair("needle", 0, 0, 2000)
    weak = pair("vt", 150, 0, 1000, exact=19.9)
    assert judged([*strong, *weak]).verdict == UNDECIDED, "its KL was not measured"
    assert judged([*strong, *weak, *fed("vt", None)]).verdict == UNDECIDED
    assert judged([*strong, *weak, *fed("vt", 0.01)]).verdict == HOLDS
    assert judged([*strong, *weak, *fed("vt", 0.0101)]).verdict == FAILS
    assert judged([*strong, *weak, *fed("vt", 0.001, length=8192)]).verdict == UNDECIDED, "of another length"
    assert judged([*strong, *pair("vt", 150, 0, 1000, exact=20.0), *fed("vt", 0.001)]).verdict == FAILS


def test_what_was_not_measured_never_holds() -> None:
    rows = [*pair("needle", 0, 0, 2000), row("profile:exact", "vt", 80.0)]
    assert judged(rows).verdict == UNDECIDED
    assert judged(pair("needle", 0, 0, 2000), Aim(("",), ("needle", "vt"), None, None, ())).verdict == UNDECIDED
    assert judged(pair("needle", 0, 0, 2000)[1:]).verdict == UNDECIDED, "full attention did not run"
    assert judged([]).verdict == UNDECIDED


def test_cells_in_which_the_method_did_nothing_count_for_nothing() -> None:
    """At 4,096 tokens it read all: no loss there says anything of it."""
    nothing, something = pair("needle", 0, 0, 2000), pair("needle", 10, 0, 1000, length=8192)
    nothing[1]["applied"] = False
    found = judged([*nothing, *something])
    assert (found.verdict, found.pooled.num_prompts) == (UNDECIDED, 1000)
    assert found.left_out == {"needle at 4,096, seed 1": "did not apply"}


def test_prompts_of_a_seed_on_which_settings_were_chosen_count_for_nothing() -> None:
    rows = [*pair("needle", 0, 0, 2000, seed=1), *pair("needle", 400, 0, 2000, seed=7)]
    assert judged(rows).verdict == FAILS
    assert judged(rows, Aim(("",), (), None, None, (7,))).verdict == HOLDS
    assert judged(rows, Aim(("",), (), None, None, (1,))).verdict == FAILS
    assert judged(rows, Aim(("",), (), None, None, (1, 7))).verdict == UNDECIDED


@pytest.mark.parametrize(("read", "verdict"), [(0.05, HOLDS), (0.051, FAILS), (None, UNDECIDED)])
def test_too_many_reads_or_unknown_ones_do_not_hold(read: float | None, verdict: str) -> None:
    rows = pair("needle", 0, 0, 2000, head_fraction=read)
    assert judged(rows, Aim(("",), (), None, 0.05, ())).verdict == verdict


CELLS = st.lists(
    st.tuples(
        st.sampled_from(["needle", "vt", "qa_1", "cwe"]), st.sampled_from([4096, 8192]), st.integers(1, 4),  # seeds
        st.integers(0, 60), st.integers(0, 60), st.integers(200, 3000), st.sampled_from([5.0, 19.9, 20.0, 88.0]),
        st.booleans(), st.sampled_from([None, 0.0, 0.009, 0.5]),
    ),
    max_size=6, unique_by=lambda cell: cell[:3],
)  # fmt: skip


def rows_of(cells: Sequence[Any]) -> list[Row]:
    rows: list[Row] = []
    for task, length, seed, losses, gains, num, exact, applied, kl in cells:
        place = {"length": length, "seed": seed}
        both = pair(task, losses, gains, num, exact, **place)
        both[1]["applied"] = applied
        rows += [*both, *(fed(task, kl, **place) if kl is not None else [])]
    return rows


@given(cells=CELLS)
@settings(deadline=None)
def test_a_verdict_is_the_rule_written_out(cells: Sequence[Any]) -> None:
    """By another hand: from prompts, one by one."""
    found = judged(rows_of(cells))
    strong = [cell for cell in cells if cell[6] >= 20 and cell[7]]
    points = [
        one for cell in strong for one in [-100] * cell[3] + [100] * cell[4] + [0] * (cell[5] - cell[3] - cell[4])
    ]
    weak = [cell[8] for cell in cells if cell[6] < 20]
    assert (0 if found.pooled is None else found.pooled.num_prompts) == len(points)
    if found.pooled is not None:
        assert found.pooled.mean == pytest.approx(np.mean(points), abs=SCORE_ROUNDING)
    mean_holds = len(points) >= 2000 and np.mean(points) >= -1
    if found.verdict == HOLDS:
        assert mean_holds
        assert found.pooled.low > -2
        assert all(kl is not None and kl <= 0.01 for kl in weak)
    else:
        wide = found.pooled is not None and found.pooled.low <= -2
        assert not mean_holds or wide or any(kl is None or kl > 0.01 for kl in weak)
    if len(points) < 2000:
        assert found.verdict != HOLDS


@given(cells=CELLS, order=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_and_repetition_of_rows_change_nothing(cells: Sequence[Any], order: Any) -> None:
    rows = rows_of(cells)
    mixed = rows + rows
    order.shuffle(mixed)
    one, other = judged(rows), judged(mixed)
    assert (one.verdict, one.pooled, one.weak) == (other.verdict, other.pooled, other.weak)


@given(counts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=5))
@settings(deadline=None)
def test_a_task_in_parts_is_judged_as_in_one(counts: list[tuple[int, int]]) -> None:
    parts = [one for seed, (losses, gains) in enumerate(counts) for one in pair("vt", losses, gains, 1000, seed=seed)]
    whole = pair("vt", sum(one for one, _ in counts), sum(one for _, one in counts), 1000 * len(counts))
    assert (judged(parts).verdict, judged(parts).pooled) == (judged(whole).verdict, judged(whole).pooled)


@given(cells=CELLS, place=st.integers(0, 20))
@settings(deadline=None)
def test_less_measured_never_makes_a_default_hold(cells: Sequence[Any], place: int) -> None:
    """Without one of the method's rows; with full attention's row alone it is known what lacks."""
    rows = rows_of(cells)
    own = [number for number, one in enumerate(rows) if one["method"] == METHOD and one["applied"]]
    if own and judged(rows).verdict != HOLDS:
        left = [one for number, one in enumerate(rows) if number != own[place % len(own)]]
        assert judged(left).verdict != HOLDS


def test_rows_keep_the_paired_differences_that_are_pooled() -> None:
    exact, mine = [1.0, 0.75, 0.5, 0.0, 1.0], [0.5, 0.75, 0.0, 0.25, 0.5]
    cell = {"settings": {}, "task": "niah_multivalue", "length": 512, "metric": "string_match_all"}
    records = [
        Record(f"{method}{number}", cell | {"method": method}, str(number), score, "", None, None,
               {"applied": float(number == 3)})
        for method, scores in (("full", exact), ("quest", mine)) for number, score in enumerate(scores)
    ]  # fmt: skip
    full, quest = summarize(records)
    assert quest["differences"] == [[-50.0, 3], [0.0, 1], [25.0, 1]]
    assert (full["applied"], quest["applied"]) == (None, True), "once in a cell is enough; full attention has nothing"
    untouched = summarize([Record("k", cell | {"method": "quest"}, "0", 1.0, "", None, None, {"applied": 0.0})])
    assert untouched[0]["applied"] is False


def test_fractional_scores_are_pooled_by_bootstrap() -> None:
    wide = [[-75.0, 60], [0.0, 1880], [75.0, 60]]
    rows = [row("full", "vt", 60.0), row(METHOD, "vt", 60.0, differences=wide)]
    found = judged(rows)
    spread = 75 * math.sqrt(120 / 2000) / math.sqrt(2000)
    assert found.pooled.low == pytest.approx(-1.96 * spread, rel=0.1)
    assert found.verdict == HOLDS


def test_rows_of_before_differences_were_kept_count_where_scores_are_whole() -> None:
    rows = pair("needle", 5, 1, 2400)
    del rows[1]["differences"]
    assert judged(rows).verdict == UNDECIDED
    old = rows[1] | {"losses": 5, "gains": 1, "samples": 2400}
    found = judged([rows[0], old])
    assert (found.verdict, found.pooled.losses, found.pooled.gains) == (HOLDS, 5, 1)


def test_what_is_told_says_what_was_pooled_and_why_it_does_not_hold() -> None:
    rows = pair("needle", 5, 1, 400)
    verdict, pairs, difference, tasks, why = told_of(judge(rows, METHOD, ANY))
    assert (verdict, pairs, tasks, why) == ("undecided", "400", "1", "400 pairs, 2,000 are wanted")
    assert difference.startswith("-1.00 (")
    assert meant(rows, ANY) == [METHOD]
    assert meant(rows, Aim(("mac",), (), None, None, ())) == []


def test_the_command_pools_files_and_its_status_tells_whether_all_hold(tmp_path: Path) -> None:
    for number in range(2):
        rows = pair("needle", 3, 0, 1000, seed=number)
        (tmp_path / f"{number}.json").write_text(json.dumps({"rows": rows}))
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    for arguments, status, verdict in ((files, 0, HOLDS), (files[:1], 1, UNDECIDED), ([*files, "--chosen-on", "1"], 1,
                                       UNDECIDED)):  # fmt: skip
        ran = CliRunner().invoke(app, ["judge", *arguments, "--json", str(tmp_path / "out.json")])
        assert ran.exit_code == status, ran.output
        told = json.loads((tmp_path / "out.json").read_text())["methods"][METHOD]
        assert told["verdict"] == verdict
    assert Counter(told["left_out"].values()) == {"settings were chosen on its seed": 1}
