"""The JSON behind lab/RESULTS.md says what its tables say, and its intervals follow from its counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from evals.paired import clopper_pearson, interval_of_counts
from evals.score_rows import FED, column_of
from lab.quality.results import MARKERS, render_run, render_table
from tests.tolerances import POINTS_STORED

LAB = Path(__file__).parents[1]
FRACTIONAL = (*FED, "lines", "words_edit")
SCORED = ("full-h200.json", "sampled-16k-h200.json", "momo-16k-h200.json", "momo-16k-more-h200.json", "layers-cpu.json")


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((LAB / "results" / name).read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("name", SCORED)
def test_exact_intervals_follow_from_the_losses_and_gains_beside_them(name: str) -> None:
    rows = rows_of(name)
    exact = {(column_of(row), row["length"]): row for row in rows if row["method"] == "full"}
    checked = 0
    for row in rows:
        if row.get("interval") != "exact":
            assert row["metric"] in FRACTIONAL
            continue
        num, full = row["samples"], exact.get((column_of(row), row["length"]))
        if full is None or full["samples"] != num:
            assert row["method"].startswith("profile:"), "served on fewer prompts, which alone are compared"
            continue
        hits = round(row["score"] * num / 100)
        assert hits == round(full["score"] * num / 100) - row["losses"] + row["gains"]
        wanted = interval_of_counts(row["losses"], row["gains"], num)
        assert (row["difference"], row["difference_low"], row["difference_high"]) == pytest.approx(
            (wanted.mean, wanted.low, wanted.high), abs=POINTS_STORED
        )
        low, high = clopper_pearson(hits, num, 0.95)
        assert (row["low"], row["high"]) == pytest.approx((100 * low, 100 * high), abs=POINTS_STORED)
        checked += 1
    assert checked > len(rows) / 2


@pytest.mark.parametrize("name", SCORED[:4])
def test_every_line_of_the_tables_is_in_the_page(name: str) -> None:
    page = (LAB / "RESULTS.md").read_text(encoding="utf-8")
    rows = rows_of(name)
    for length in sorted({row["length"] for row in rows}):
        for line in render_table([row for row in rows if row["length"] == length]):
            assert line in page


@pytest.mark.parametrize(
    ("name", "file", "table", "column"),
    [("predicted", "predicted-h100.json", "errors", "log_mass_within"), ("mac", "mac-h200.json", "rows", "score")],
    ids=["predicted", "mac"],
)
def test_tables_between_markers_are_those_of_their_rows(name: str, file: str, table: str, column: str) -> None:
    page = (LAB / "RESULTS.md").read_text(encoding="utf-8")
    run = json.loads((LAB / "results" / file).read_text(encoding="utf-8"))
    begin, end = (marker.format(name=name) for marker in MARKERS)
    assert page[page.index(begin) + len(begin) : page.index(end)].strip() == render_run(run)
    run[table][0][column] -= 0.1
    assert render_run(run) not in page


def test_tables_of_few_bits_are_those_of_their_rows() -> None:
    """A layer's matrices, the output matrix, and a prompt's."""
    page = (LAB / "RESULTS.md").read_text(encoding="utf-8")
    part = page[page.index("## Weights and rows of few bits") : page.index("**By a library**")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:2] == "| "]
    kinds = {"bfloat16": "bf16", "fp8": "FP8", "int8": "int8", "int4": "int4", "Q4_K": "GGUF's Q4_K"}
    rows = json.loads((LAB / "results" / "matrices-h200.json").read_text(encoding="utf-8"))
    for row in rows:
        config, floors = row["config"], f"{row['ms'] / row['floor_ms']:.2f}"
        if row["name"] == "output matrix":
            stored = (
                row["shape"].removeprefix("llama-3.1-8b ").partition(", batch")[0].replace(" in groups", ", groups")
            )
            wanted = [str(config["batch"]), f"{1e3 * row['ms']:.0f}", f"{1e3 * row['floor_ms']:.0f}", floors,
                      f"{1e3 * row['peer_ms']:.0f}", f"{row['peer_ms'] / row['ms']:.2f}"]  # fmt: skip
            assert [stored.replace(" in groups", ", groups"), *wanted] in shown
            continue
        if "batch" in config:
            torch_ms = row["extras"].get(f"torch_{config['kind']}_ms")
            wanted = [str(config["batch"]), f"{1e3 * row['ms']:.1f}", f"{1e3 * row['floor_ms']:.1f}", floors,
                      f"{1e3 * row['peer_ms']:.1f}", f"{row['peer_ms'] / row['ms']:.2f}",
                      "" if torch_ms is None else f"{1e3 * torch_ms:.1f}"]  # fmt: skip
        else:
            wanted = [f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", floors, f"{row['ms'] / row['peer_ms']:.3f}",
                      f"{row['extras']['widening_ms']:.2f}"]  # fmt: skip
        (own,) = [cells for cells in shown if cells[1 : len(wanted) + 1] == wanted]
        assert own[0].startswith(kinds[config["kind"]])
    assert len(shown) == len(rows) + 3  # heads


def test_the_table_of_products_by_a_library_is_of_its_rows() -> None:
    """A layer's matrices by rows, and of a unit of a prompt."""
    page = (LAB / "RESULTS.md").read_text(encoding="utf-8")
    part = page[page.index("**By a library**") : page.index("**Whole steps**")]
    shown = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:2] == "| "
    ]
    rows = json.loads((LAB / "results" / "matrices-library-h100.json").read_text(encoding="utf-8"))
    wanted = []
    for kind in ("bfloat16", "int4", "humming-int4", "fp8", "humming-fp8"):
        own = [row for row in rows if row["config"].get("kind") == kind]
        *steps, unit = (row["ms"] for row in own)
        assert [row["config"].get("batch", row["config"].get("tokens")) for row in own] == [1, 4, 16, 64, 2048]
        wanted.append([f"{1e3 * own[0]['floor_ms']:.1f}", *(f"{1e3 * ms:.1f}" for ms in steps), f"{unit:.2f}"])
    assert [cells[1:] for cells in shown if cells[0] != shown[2][0]] == [shown[0][1:], *wanted]
    bare = [row["peer_ms"] for row in rows if row["config"].get("kind") == "bfloat16" and "batch" in row["config"]]
    assert shown[2][2:6] == [f"{1e3 * ms:.0f}" for ms in bare]


def test_the_table_of_steps_over_predicted_blocks_is_of_its_rows() -> None:
    page = (LAB / "RESULTS.md").read_text(encoding="utf-8")
    part = page[page.index("`tandem bench kernel predicted-steps`") : page.index("- **Against systems")]
    shown = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:2] == "| "
    ]
    rows = json.loads((LAB / "results" / "predicted-steps-h100.json").read_text(encoding="utf-8"))["rows"]
    wanted = []
    for across in (row for row in rows if row["way"] == "across"):
        cell, turnover = [across[name] for name in ("context", "budget", "batch")], across["turnover"]
        own = [row for row in rows if [row[name] for name in ("context", "budget", "batch")] == cell]
        once = {
            row["way"]: row["median_ms"] for row in own if row["way"] in ("read", "predict") and row["turnover"] == 0.05
        }
        times = once | {row["way"]: row["median_ms"] for row in own if row["turnover"] == turnover}
        ways = [f"{times[way]:.2f}" for way in ("read", "predict", "across", "refetch", "layer", "demand")]
        change = "as recorded" if turnover == "replayed" else f"{turnover:.0%}"
        name = f"{cell[0] // 1024}K, {cell[1]:,}, {cell[2]}"
        wanted.append([name, change, *ways, f"{across['link_bytes'] / 1e6:.0f}", f"{across['hidden']:.0%}"])
    assert shown[1:] == wanted


def test_the_table_of_tasks_over_predicted_blocks_is_of_its_rows() -> None:
    page = (LAB / "RESULTS.md").read_text(encoding="utf-8")
    part = page[page.index("**Tasks at 16,384 tokens**") : page.index("Aim: within a point of full attention")]
    shown = [
        [float(cell.strip(" *%")) for cell in line.strip("|").split("|")[1:]] for line in part.splitlines()[4:] if line
    ]
    tasks = [
        *("needle", "word_needle", "many_needles", "four_values"),
        *("several_keys", "facts_one_hop", "facts_two_hops", "variables"),
    ]
    rows = rows_of("predicted-tasks-16k-h100.json")
    wanted = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["task"]: row for row in rows if row["method"] == method}
        assert all(row["samples"] == 8 and row["failures"] == 0 for row in own.values())
        read = [
            100 * sum(own[task][name] for task in tasks) / len(tasks) for name in ("head_fraction", "bytes_fraction")
        ]
        scores = [own[task]["score"] for task in tasks]
        wanted.append([round(number, 1) for number in (*read, *scores, sum(scores) / len(scores))])
    assert shown == wanted


def test_recovery_on_the_card_is_of_its_cells() -> None:
    page = (LAB / "RESULTS.md").read_text(encoding="utf-8")
    cells = json.loads((LAB / "results" / "predicted-recovery-h100.json").read_text(encoding="utf-8"))
    four = ["Quest, shared", "H2O, last 64, shared", "SnapKV, shared", "StreamingLLM"]
    means = {name: 100 * sum(cell["recovered"][name] for cell in cells) / len(cells) for name in cells[0]["recovered"]}
    best = sum(cell["recovered"]["predicted"] >= max(cell["recovered"][name] for name in four) for cell in cells)
    shown = page[page.index("settings that serve (with a sink of 64)") : page.index("**Tasks at 16,384 tokens**")]
    names = ["predicted", "predicted, before", *four, "Quest, moments, shared", "best blocks, shared"]
    assert all(f"{means[name]:.2f}" in shown for name in names)
    assert f"in {best} of {len(cells)} cells" in shown


def test_one_loss_more_would_be_noticed() -> None:
    row = next(row for row in rows_of(SCORED[1]) if row.get("losses"))
    other = interval_of_counts(row["losses"] + 1, row["gains"], row["samples"])
    assert abs(other.low - row["difference_low"]) > 1_000 * POINTS_STORED
