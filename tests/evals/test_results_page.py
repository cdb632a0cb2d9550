"""The page of results on a real model says what its rows say."""

import json
import re
from pathlib import Path

import pytest

from bench.soak.requests import EXACT_PROFILES
from evals import aims
from evals.fusion_report import render_policies
from evals.report.verdicts import render_cells, render_verdicts
from evals.score_rows import Row
from evals.served_method import served_method
from gpu.methods.kept import Kept
from gpu.methods.registry import list_methods
from gpu.model.architecture import named_shape
from server.deployment import Deployment
from transfer.settings_model import Settings

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
README = (RESULTS.parents[1] / "README.md").read_text()
ANY = aims.Aim(("",), (), None, None, ())
BEGIN = "profile:"
OLD_INDEX = "profile:indexed:budget_share=0.005,dense_layers=0+15"
MAY_BE_DEFAULT = [name for name, method in list_methods().items() if method.is_default_if_faster]


def read_rows(name: str) -> list[Row]:
    return json.loads((RESULTS / name).read_text())["rows"]


def table(name: str) -> str:
    """Return what stands between a table's markers."""
    page = (RESULTS / "real-model.md").read_text()
    return page.partition(f"<!-- {name}: begin -->\n")[2].partition(f"\n<!-- {name}: end -->")[0]


@pytest.mark.parametrize("prefix", ["", "indexed-", "indexed-now-", "indexed-sparse-", "indexed-budgets-"])
def test_verdicts_and_cells_are_those_of_the_rows(prefix: str) -> None:
    rows = read_rows(f"{prefix}real-model-h200.json")
    methods = aims.meant(rows, ANY)
    assert table(f"{prefix}verdicts") == "\n".join(render_verdicts(rows, ANY, methods))
    assert table(f"{prefix}cells") == "\n".join(render_cells(rows, methods))


def test_the_pooled_verdict_is_that_of_old_and_new_rows() -> None:
    rows = [row for name in ("indexed", "indexed-now") for row in read_rows(f"{name}-real-model-h200.json")]
    assert table("indexed-pooled-verdicts") == "\n".join(render_verdicts(rows, ANY, [OLD_INDEX]))


def read_files() -> list[list[Row]]:
    return [read_rows(path.name) for path in sorted(RESULTS.glob("*real-model-h200.json"))]


def judge_all(label: str) -> aims.Judgement:
    """Judge a method with the settings of its label by the rows of all files that have it."""
    rows = [row for of_file in read_files() if label in {row.get("method") for row in of_file} for row in of_file]
    return aims.judge(rows, label, ANY)


def settings_of(label: str, name: str) -> tuple[Settings, Kept]:
    """Return the settings of the method `name` that a label means, and what the method by itself keeps on the card."""
    tree = {"model": {"random_weights": "smollm2-135m"}, "host": {}, "profiles": {name: {"host": name}}}
    found = served_method(label, Deployment.model_validate(tree))
    part = found.profile.host_part
    return part.settings, part.method.find_kept(part.settings, found.deployment.host, named_shape("smollm2-135m"))


def rows_by_default(name: str) -> str:
    """Return the one label of rows that were made with a method's default settings.

    Labels name their settings, since a bare one would mean other rows as soon as the defaults change.
    """
    bare = BEGIN + name
    labels = {row.get("method", "") for of_file in read_files() for row in of_file}
    assert bare not in labels
    named = [label for label in labels if label.startswith(f"{bare}:")]
    (label,) = (one for one in named if settings_of(one, name) == settings_of(bare, name))
    return label


@pytest.mark.parametrize("name", MAY_BE_DEFAULT)
def test_a_method_that_may_be_the_default_holds_by_the_rows_of_its_default_settings(name: str) -> None:
    judged = judge_all(rows_by_default(name))
    assert judged.verdict == aims.HOLDS
    assert len(judged.tasks) > 5


def test_rows_of_another_share_or_with_dense_layers_are_not_taken_for_the_defaults() -> None:
    default = settings_of("profile:indexed", "indexed")
    others = "budget_share=0.005,dense_layers=none", "budget_share=0.02,dense_layers=0+15", "budget_share=0.02"
    assert [settings_of(f"profile:indexed:{text}", "indexed") == default for text in others] == [False, False, True]


@pytest.mark.parametrize("name", MAY_BE_DEFAULT)
def test_readme_and_plans_quote_the_verdict_on_the_default_settings(name: str) -> None:
    pooled = judge_all(rows_by_default(name)).pooled
    assert pooled is not None
    (line,) = (line for line in README.splitlines() if f"[`{name}`](docs/methods/{name}.md): " in line)
    gap = f"{pooled.mean:+.1f} points [{pooled.low:+.1f}, {pooled.high:+.1f}]"
    assert f"**holds** over {pooled.num_prompts:,} prompts: {gap}" in line
    told = list_methods()[name].measured
    assert f"gains {pooled.mean:.1f} points (a loss of {-pooled.low:.1f} to a gain of {pooled.high:.1f})" in told
    assert f"over {pooled.num_prompts:,} prompts" in told


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
    labels = {name: rows_by_default(name) if name in MAY_BE_DEFAULT else BEGIN + name for name in to_judge(README)}
    verdicts = {name: judge_all(label).verdict for name, label in labels.items()}
    assert [name for name, verdict in verdicts.items() if verdict != aims.HOLDS] == []


def test_a_method_that_fails_would_be_noticed_in_that_column() -> None:
    assert to_judge(README.replace("[`offloaded`]", "`offloaded`, `reuse: mac`, `sampled`", 1)) == ["mac", "sampled"]


INDEX_STEP = "decode step over 98,304 tokens, 8B bf16, 23 GiB, `indexed`, 2 % of keys read (H200)"
WHOLE_STEP = "decode step over 98,304 tokens, 8B bf16, 23 GiB, `offloaded`, all of it read (H200)"
SAMPLED_STEP = "decode step over 98,304 tokens, 8B bf16, 23 GiB, `sampled` (H200)"
TIMED = [
    ("offloaded", "profile:offloaded", "", WHOLE_STEP),
    ("indexed", "profile:indexed:budget_share=0.02,dense_layers=none", "indexed-sparse-", INDEX_STEP),
    ("sampled", "profile:sampled", "", SAMPLED_STEP),
]
"""Profile, label and prefix of its rows, and the row of docs/results/performance-h200.json with its time."""


def test_quality_stands_beside_times_and_bytes_as_they_were_measured() -> None:
    recorded = {row["row"]: row for row in json.loads((RESULTS / "performance-h200.json").read_text())["rows"]}
    lines = []
    for name, label, prefix, step in TIMED:
        line = render_verdicts(read_rows(f"{prefix}real-model-h200.json"), ANY, [label])[-1]
        _, verdict, pairs, gap, kl, _, read = (cell.strip() for cell in line.strip("|").split("|"))
        date = recorded[step]["source"].split(", ")[1]
        judged = json.loads((RESULTS / f"{prefix}real-model-h200.json").read_text())["date"]
        cells = [f"`{name}`", judged, verdict, f"{gap} ({pairs})", kl, read, f"{recorded[step]['measured'][0]:g}", date]
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
