"""Hold the sets of runs and the tables of lab/RESULTS.md to what they are made of."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evals.report.document import describe_run
from evals.score_rows import summarize
from evals.served_method import served_method
from evals.store import Record
from lab.cli import app
from lab.methods import parse_method
from lab.quality.results import (
    cells_of,
    estimate_seconds,
    read_runs,
    render_run,
    render_table,
    replace_between_markers,
)
from lab.quality.served_results import served_cells, served_methods
from tests.evals.test_run import record
from tests.evals.test_served import DEPLOYMENT, SAMPLED


def test_a_table_says_that_a_method_did_not_apply() -> None:
    cell = {"settings": {}, "task": "needle", "length": 512, "metric": "exact_match"}
    records = [
        Record(f"{method}{number}", cell | {"method": method}, str(number), 1.0, "", None, None, {"applied": applied})
        for method, applied in (("full", 0.0), ("mac", 0.0), ("quest", 1.0))
        for number in range(3)
    ]
    lines = render_table(summarize(records))
    told = [next(line for line in lines if f"`{name}`" in line) for name in ("full", "mac", "quest")]
    assert ["did not apply" in line for line in told] == [False, True, False]


def test_the_set_of_served_rows_has_full_attention_and_both_settings() -> None:
    cells = served_cells([4096, 16384], None, [])
    assert {cell.methods for cell in cells} == {("profile:exact", SAMPLED + "150", SAMPLED + "200")}
    assert {(cell.length_tokens, cell.num_samples) for cell in cells} == {(4096, 400), (16384, 200)}
    tasks = {length: [cell.task for cell in cells if cell.length_tokens == length] for length in (4096, 16384)}
    assert len(tasks[4096]) == 12
    assert tasks[16384] == tasks[4096][:11], "all but the common word"
    assert [cell.task for cell in served_cells([512], 3, ["needle"])] == ["needle"]
    rows = [{"method": method, "task": "needle", "metric": "m", "score": 1.0, "difference": None, "head_fraction": 0.1,
             "bytes_fraction": 0.2} for method in cells[0].methods]  # fmt: skip
    assert len(render_table(rows)) == 2 + 3, "a line each"


def test_methods_of_the_set_of_served_rows_are_served() -> None:
    assert all(served_method(name, DEPLOYMENT) is not None for name in served_methods())


def test_the_full_set_holds_every_baseline_budget_and_length() -> None:
    cells = cells_of("full", (4096, 8192, 16384), None, (), ())
    assert {cell.length_tokens for cell in cells} == {4096, 8192, 16384}
    assert all(cell.num_samples == 400 for cell in cells)
    families = {label.partition(":")[0] for cell in cells for label in cell.methods}
    assert len(families) == 8
    for label in {label for cell in cells for label in cell.methods}:
        parse_method(label)
    assert 60 < estimate_seconds("full", cells) < 2400
    assert 60 < estimate_seconds("quick", cells_of("quick", (4096,), None, (), ())) < 3600


def test_a_part_of_a_set_keeps_full_attention_beside_it() -> None:
    cells = cells_of("full", (4096,), None, ("sampled*", "topk*half"), ())
    assert {cell.methods[0] for cell in cells} == {"full"}
    assert {label.partition(":")[0] for cell in cells for label in cell.methods} == {"full", "sampled", "topk"}
    assert len(cells) == 13
    whole = estimate_seconds("full", cells_of("full", (4096,), None, (), ()))
    assert estimate_seconds("full", cells) < whole
    with pytest.raises(ValueError, match="nothing"):
        cells_of("full", (4096,), None, ("nothing",), ())


def test_a_part_of_a_set_can_be_chosen_by_task() -> None:
    cells = cells_of("full", (4096, 8192), None, ("sampled*",), ("only_needles", "list"))
    assert [(cell.task, cell.length_tokens) for cell in cells] == [
        (task, length) for length in (4096, 8192) for task in ("only_needles", "list")
    ]
    with pytest.raises(ValueError, match="tasks: nothing not in the set full"):
        cells_of("full", (4096,), None, (), ("nothing",))


def test_a_table_says_what_is_read_over_all_layers_where_some_are_dense() -> None:
    reads = {"head_fraction": 0.05, "head_fraction_all_layers": 0.24, "bytes_fraction": 0.1,
             "bytes_fraction_all_layers": 0.1}  # fmt: skip
    lines = render_table([{**row, **reads} for row in summarize([record("topk", 0, 1.0), record("topk", 1, 1.0)])])
    assert lines[2].startswith("| `topk` | 5.0 % (all layers 24.0 %) | 10.0 % |")


def test_intervals_of_before_are_told_from_exact_ones() -> None:
    rows = summarize([record("full", 0, 1.0), record("full", 1, 1.0), record("topk", 0, 1.0), record("topk", 1, 0.0)])
    old = [{name: value for name, value in row.items() if name != "interval"} for row in rows]
    assert "50.0 (-50.0 ± 93.8)" in "\n".join(render_table(old))


def test_tables_replace_what_stands_between_their_markers_only(tmp_path: Path) -> None:
    rows = summarize([record("full", 0, 1.0), record("full", 1, 1.0), record("topk", 0, 1.0), record("topk", 1, 0.0)])
    made = describe_run("quick", "python -m lab results --quick", 0, 90.0, "a machine", rows)
    text = render_run(made)
    assert "| `topk` | 50.0 % |" in text
    assert "50.0, -50.0 (-99.4 … +88.2)" in text
    page = "before\n<!-- quick: begin -->\nold\n<!-- quick: end -->\nafter <!-- full: begin --> x <!-- full: end -->"
    new = replace_between_markers(page, "quick", text)
    assert new.startswith("before\n<!-- quick: begin -->\n`python")
    assert new.endswith("<!-- quick: end -->\nafter <!-- full: begin --> x <!-- full: end -->")
    assert "old" not in new
    with pytest.raises(ValueError, match="markers"):
        replace_between_markers("nothing here", "quick", text)


def test_files_of_two_sets_are_not_put_together(tmp_path: Path) -> None:
    for name in ("quick", "full"):
        (tmp_path / name).write_text(f'{{"set": "{name}", "rows": [], "seconds": 1, "command": "x"}}')
    with pytest.raises(ValueError, match="full, quick"):
        read_runs([tmp_path / "quick", tmp_path / "full"])
    assert read_runs([tmp_path / "quick", tmp_path / "quick"])["seconds"] == 2


def test_results_wants_one_of_its_ways() -> None:
    result = CliRunner().invoke(app, ["results"])
    assert result.exit_code == 1
    assert "--quick, --full, --served and --from" in result.stderr


def test_results_renders_a_run_that_was_made_elsewhere(tmp_path: Path) -> None:
    page, run = tmp_path / "page.md", tmp_path / "run.json"
    page.write_text("<!-- full: begin -->\n<!-- full: end -->\n")
    row = {
        "method": "full", "settings": {}, "task": "needle", "length": 4096, "metric": "exact_match", "samples": 400,
        "failures": 0, "score": 99.5, "low": 99.0, "high": 100.0, "difference": 0.0, "difference_low": -0.75,
        "difference_high": 0.75, "head_fraction": 1.0, "bytes_fraction": 1.0,
    }  # fmt: skip
    run.write_text(json.dumps({"set": "full", "command": "c", "machine": "m", "date": "d", "seconds": 60, "seed": 0,
                               "rows": [row]}))  # fmt: skip
    result = CliRunner().invoke(app, ["results", "--from", str(run), "--page", str(page)])
    assert result.exit_code == 0, result.output
    assert "| `full` | 100.0 % | 100.0 % | 99.5 |" in page.read_text()


def test_runs_on_the_users_text_have_tables_of_their_own(tmp_path: Path) -> None:
    page, run, mixed = tmp_path / "page.md", tmp_path / "run.json", tmp_path / "mixed.json"
    page.write_text(
        "<!-- full: begin -->\nkept\n<!-- full: end -->\n<!-- full-text: begin -->\n<!-- full-text: end -->\n"
    )
    row = {
        "method": "full", "settings": {}, "task": "needle", "length": 4096, "metric": "exact_match", "samples": 400,
        "failures": 0, "score": 99.5, "low": 99.0, "high": 100.0, "difference": None, "difference_low": None,
        "difference_high": None, "head_fraction": 1.0, "bytes_fraction": 1.0, "text": "heldout.txt",
    }  # fmt: skip
    head = {"set": "full", "command": "c", "machine": "m", "date": "d", "seconds": 60, "seed": 0}
    run.write_text(json.dumps({**head, "rows": [row]}))
    result = CliRunner().invoke(app, ["results", "--from", str(run), "--page", str(page)])
    assert result.exit_code == 0, result.output
    before, after = page.read_text().split("<!-- full-text: begin -->")
    assert before == "<!-- full: begin -->\nkept\n<!-- full: end -->\n"
    assert "Text around the needles: heldout.txt." in after
    mixed.write_text(json.dumps({**head, "rows": [{**row, "text": "chronicle"}]}))
    result = CliRunner().invoke(app, ["results", "--from", str(run), "--from", str(mixed), "--page", str(page)])
    assert result.exit_code == 1
    assert "give files of one text" in result.stderr
