"""The page of results on a real model says what its rows say."""

import json
import re
from pathlib import Path

import pytest

from bench.soak.requests import EXACT_PROFILES
from evals import aims
from evals.fusion_report import render_policies
from evals.report.verdicts import render_cells, render_verdicts
from evals.score_rows import BASELINES, FED, Row
from gpu.methods.registry import list_methods

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
README = (RESULTS.parents[1] / "README.md").read_text()
ANY = aims.Aim(("",), (), None, None, ())


def read_rows(name: str) -> list[Row]:
    return json.loads((RESULTS / name).read_text())["rows"]


def table(name: str) -> str:
    """Return what stands between a table's markers."""
    page = (RESULTS / "real-model.md").read_text()
    return page.partition(f"<!-- {name}: begin -->\n")[2].partition(f"\n<!-- {name}: end -->")[0]


@pytest.mark.parametrize("prefix", ["", "indexed-", "indexed-now-", "indexed-budgets-"])
def test_verdicts_and_cells_are_those_of_the_rows(prefix: str) -> None:
    rows = read_rows(f"{prefix}real-model-h200.json")
    methods = aims.meant(rows, ANY)
    assert table(f"{prefix}verdicts") == "\n".join(render_verdicts(rows, ANY, methods))
    assert table(f"{prefix}cells") == "\n".join(render_cells(rows, methods))


def test_the_pooled_verdict_is_that_of_old_and_new_rows() -> None:
    rows = [row for name in ("indexed", "indexed-now") for row in read_rows(f"{name}-real-model-h200.json")]
    assert table("indexed-pooled-verdicts") == "\n".join(render_verdicts(rows, ANY, ["profile:indexed"]))


def judge_all(method: str) -> aims.Judgement:
    """Judge a method by the rows of all files that have it.

    A cell on which full attention scores too little counts by its KL. One without KL is left out if another seed of the
    same task is pooled.
    """
    files = [read_rows(path.name) for path in sorted(RESULTS.glob("*real-model-h200.json"))]
    rows = [row for of_file in files if method in {row.get("method") for row in of_file} for row in of_file]
    exact = [row for row in rows if row["method"] in BASELINES]
    strong = {row["task"] for row in exact if row["score"] >= aims.STRONG_SCORE and row["metric"] not in FED}
    fed = {(row["task"], row["seed"]) for row in exact if row["metric"] in FED}
    weak = {(row["task"], row["seed"]) for row in exact if row["score"] < aims.STRONG_SCORE} - fed
    return aims.judge(
        [one for one in rows if one["task"] not in strong or (one["task"], one["seed"]) not in weak], method, ANY
    )


@pytest.mark.parametrize("name", [name for name, method in list_methods().items() if method.is_default_if_faster])
def test_a_method_that_may_be_the_default_holds_by_the_rows_of_the_page(name: str) -> None:
    assert judge_all(f"profile:{name}").verdict == aims.HOLDS


def test_a_method_that_loses_by_the_rows_of_the_page_may_not_be_the_default() -> None:
    assert {judge_all(f"profile:{name}").verdict for name in ("mac", "sampled", "predicted")} == {aims.FAILS}


def to_judge(readme: str) -> list[str]:
    """Return the methods in the column *choose* of README's table that are not exact by construction.

    Exact are profiles that read every token, and drafts, each token of which the model verifies.
    """
    part = readme.partition("<!-- choices: begin.")[2].partition("<!-- choices: end -->")[0]
    cells = [line.split("|")[2] for line in part.splitlines()[1:] if line.startswith("| ")][1:]
    assert len(cells) > 3
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert {"exact", "offloaded"} <= set(names)
    return [name.partition(": ")[2] or name for name in names if not (name in EXACT_PROFILES or name[:6] == "draft:")]


def test_what_readme_chooses_is_exact_or_holds() -> None:
    verdicts = {name: judge_all(f"profile:{name}").verdict for name in to_judge(README)}
    assert [name for name, verdict in verdicts.items() if verdict != aims.HOLDS] == []


def test_a_method_that_fails_would_be_noticed_in_that_column() -> None:
    assert to_judge(README.replace("[`offloaded`]", "`offloaded`, `reuse: mac`, `sampled`", 1)) == ["mac", "sampled"]


INDEX_STEP = "decode step over 98,304 tokens, 8B bf16, 23 GiB, `indexed`, 2 % of keys read (H200)"
SAMPLED_STEP = "decode step over it, `sampled`, batch 1"
TIMED = [
    ("offloaded", "", INDEX_STEP, "peer"),
    ("indexed", "indexed-", INDEX_STEP, "measured"),
    ("indexed", "indexed-now-", INDEX_STEP, "measured"),
    ("sampled", "", SAMPLED_STEP, "measured"),
]
"""Profile, prefix of its rows' file, and row and field of docs/results/performance-h200.json with its time."""


def test_quality_stands_beside_times_and_bytes_as_they_were_measured() -> None:
    recorded = {row["row"]: row for row in json.loads((RESULTS / "performance-h200.json").read_text())["rows"]}
    lines = []
    for name, prefix, step, field in TIMED:
        line = render_verdicts(read_rows(f"{prefix}real-model-h200.json"), ANY, [f"profile:{name}"])[-1]
        _, verdict, pairs, gap, kl, _, read = (cell.strip() for cell in line.strip("|").split("|"))
        date = recorded[step]["source"].split(", ")[1]
        judged = json.loads((RESULTS / f"{prefix}real-model-h200.json").read_text())["date"]
        cells = [f"`{name}`", judged, verdict, f"{gap} ({pairs})", kl, read, f"{recorded[step][field][0]:g}", date]
        lines.append("| " + " | ".join(cells) + " |")
    assert table("times").splitlines()[2:] == lines


@pytest.mark.parametrize(("name", "length"), [("three", 1400), ("nine", 3900)])
def test_policies_are_those_of_the_rows(name: str, length: int) -> None:
    rows = read_rows("fusion-real-model-h200.json")
    assert table(name) == "\n".join(render_policies([row for row in rows if row["length"] == length]))


def test_a_cell_without_effect_says_so_and_one_that_was_not_run_stays_empty() -> None:
    base = {"task": "vt", "length": 4096, "seed": 0, "metric": "recall", "samples": 20, "score": 50.0}
    gap = {"difference": -5.0, "difference_low": -9.0, "difference_high": -1.0}
    rows = [
        base | {"method": "profile:exact"}, base | gap | {"method": "a", "applied": True},
        base | gap | {"method": "b", "applied": False}, base | {"method": "profile:exact", "length": 8192},
    ]  # fmt: skip
    assert render_cells(rows, ["a", "b", "c"])[2:] == [
        "| vt | 4,096 | 0 | 50.0 | -5.0 [-9.0, -1.0] (20) | did not apply |"
    ]
