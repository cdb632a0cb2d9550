"""Run about predicted blocks become one document, whose tables are means and counts of its rows."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lab.cli import app
from lab.quality.predicted_report import (
    render_ablations,
    render_errors,
    render_fidelity,
    render_recovery,
    summarise,
    summarise_tasks,
)
from lab.quality.results import render_run

RIVALS = ("H2O, last 64, shared", "Quest, shared", "SnapKV, shared", "StreamingLLM")


def recovered(method: str, budget: int, task: str, share: float) -> dict[str, Any]:
    return {"length": 4096, "task": task, "budget": budget, "method": method, "recovery": share,
            "kv_rows": 1.5 * budget, "prompts": 2, "steps": 8}  # fmt: skip


ROWS = [recovered(method, budget, task, share + budget / 10_000)
        for task, shares in {"a": (0.5, 0.4, 0.45, 0.3, 0.2), "b": (0.5, 0.4, 0.55, 0.3, 0.2)}.items()
        for budget in (256, 512)
        for method, share in zip(("predicted before", *RIVALS), shares, strict=True)]  # fmt: skip


def test_recovery_is_a_mean_over_cells_and_the_best_is_counted_by_cell() -> None:
    lines = render_recovery(ROWS)
    assert "| predicted before | 1.50 | 52.56 | 55.12 | 53.84 |" in lines
    assert "| Quest, shared | 1.50 | 52.56 | 55.12 | 53.84 |" in lines
    rivals = "H2O, last 64, shared 43.84; Quest, shared 53.84; SnapKV, shared 33.84; StreamingLLM 23.84"
    assert f"`predicted before` is best in 2 of 4 cells; on average 53.84 ({rivals})." in lines
    assert any("a at 4,096 (2 of 8 steps), b at 4,096 (2 of 8 steps)" in line for line in lines)


def test_what_was_measured_in_one_way_alone_is_compared_with_those_that_share() -> None:
    alone = [{**row, "method": row["method"].replace(" before", "")} for row in ROWS]
    lines = render_recovery(alone)
    assert [line.partition(";")[0] for line in lines[-1:]] == ["`predicted` is best in 2 of 4 cells"]
    assert sum("is best in" in line for line in render_recovery(ROWS)) == 1


def test_other_tables_have_a_line_a_setting_a_method_and_a_kind_of_heads() -> None:
    varied = [recovered(f"predicted M={steps}", 512, "a", 0.7 - steps / 1_000) for steps in (1, 20)]
    assert render_ablations({"M": [*varied, ROWS[1]]})[2:] == ["| M | M=1: 69.90, M=20: 68.00 |"]
    row = {"method": "full", "prompts": 2, "head_fraction": 1.0, "bytes_fraction": 0.5, "agreement": 0.75, "kl": 0.01,
           "error": 0.1, "worst_error": 0.2}  # fmt: skip
    assert render_fidelity([row])[2] == "| `full` | 2 | 100.0 % | 50.0 % | 75.0 % | 0.0100 | 0.100 / 0.200 |"
    error = {
        "length": 4096, "task": "needle", "excluded": 512, "heads": "all", "answers": 1000, "log_mass_within": 0.95,
        "output_within": 0.96, "other_directions_within": 0.97, "log_mass_error": 0.1, "log_mass_estimate": 0.2,
        "output_error": 0.3, "output_estimate": 0.4,
    }  # fmt: skip
    wanted = "| 4,096 | needle | 512 tokens | all | 1,000 | 95.0 % | 96.0 % | 97.0 % | 0.100 / 0.200 | 0.300 / 0.400 |"
    assert render_errors([error, {**error, "answers": 0}])[2:] == [wanted]


def test_a_terminal_has_a_line_a_method_of_tasks_with_the_one_that_loses_most() -> None:
    row = {"method": "quest", "task": "needle", "length": 4096, "samples": 8, "score": 100.0, "difference": 0.0,
           "head_fraction": 0.1, "bytes_fraction": 0.2}  # fmt: skip
    rows = [
        row,
        {**row, "task": "list", "score": 50.0, "difference": -25.0},
        {**row, "method": "full", "difference": None},
    ]
    assert summarise_tasks(rows)[2:] == [
        "| 4,096 | `quest` | 2 | 16 | 75.0 | -25.0 list | 10.0 % | 20.0 % |",
        "| 4,096 | `full` | 1 | 8 | 100.0 |  | 10.0 % | 20.0 % |",
    ]
    document = {"recovery": [], "fidelity": [], "errors": [], "rows": rows}
    assert summarise(document) == "\n".join(summarise_tasks(rows)), "no headings of what is not there"


def test_the_command_puts_runs_together_and_results_renders_them(tmp_path: Path) -> None:
    made: dict[str, Any] = {"configuration": {"samples": 2, "steps": 8}, "rows": ROWS}
    files = {name: tmp_path / f"{name}.json" for name in ("recovery", "fidelity", "out")}
    files["recovery"].write_text(json.dumps(made))
    layers = [{"length": 4096, "method": "full", "error": error} for error in (0.1, 0.3)]
    row = {"length": 4096, "method": "full", "prompts": 2, "head_fraction": 1.0, "bytes_fraction": 1.0,
           "agreement": 1.0, "kl": 0.0}  # fmt: skip
    files["fidelity"].write_text(json.dumps({"rows": [row], "layers": layers}))
    command = ["predicted", "--out", str(files["out"]), "--machine", "a machine", "--date", "today", "--recovery",
               str(files["recovery"]), "--fidelity", str(files["fidelity"])]  # fmt: skip
    files["errors"] = tmp_path / "errors.json"
    errors = {"length": 4096, "excluded": 0, "heads": "all", "answers": 0}
    made["configuration"] |= {"draws": 4, "tasks": ["needle"]}
    files["errors"].write_text(json.dumps({**made, "rows": [errors]}))
    command += ["--errors", str(files["errors"])]
    done = CliRunner().invoke(app, [*command, "--ablation", f"M={files['recovery']}"])
    assert done.exit_code == 0, done.output
    assert "`predicted before` is best in 2 of 4 cells" in done.output
    document = json.loads(files["out"].read_text())
    assert document["recovery"] == ROWS
    assert document["errors"] == [{**errors, "prompts": 2, "steps": 8, "task": "needle"}]
    scored = {"method": "full", "task": "needle", "length": 4096, "samples": 8, "score": 100.0, "difference": None,
              "head_fraction": 1.0, "bytes_fraction": 1.0}  # fmt: skip
    document["rows"] = [scored, {**scored, "task": "list"}, {**scored, "method": "quest", "samples": 4}]
    text = render_run(document)
    assert "On a machine, today." in text
    assert "4,096 tokens, 8 prompts a task (4 of `quest` on needle):" in text
    assert "| `full` | 2 | 100.0 % | 100.0 % | 100.0 % | 0.0000 | 0.200 / 0.300 |" in text
    done = CliRunner().invoke(app, [*command, "--ablation", "M"])
    assert done.exit_code == 1
    assert "wanted WHAT=FILE" in done.output


def test_rows_that_are_made_again_take_their_places_in_what_was_put_together_before(tmp_path: Path) -> None:
    score = {"method": "full", "length": 4096, "samples": 8, "score": 100.0, "difference": None, "head_fraction": 1.0,
             "bytes_fraction": 1.0, "metric": "exact_match"}  # fmt: skip
    before = [{**score, "task": task, "method": method} for task in ("a", "b") for method in ("full", "quest")]
    again = {**before[1], "score": 50.0}
    files = {name: tmp_path / f"{name}.json" for name in ("recovery", "tasks", "again", "few", "before", "out")}
    files["recovery"].write_text(json.dumps({"configuration": {"samples": 2, "steps": 8}, "rows": ROWS}))
    changed = [{**ROWS[0], "recovery": 0.9}]
    files["few"].write_text(json.dumps({"configuration": {"samples": 2, "steps": 8}, "rows": changed}))
    files["tasks"].write_text(json.dumps({"rows": before}))
    files["again"].write_text(json.dumps({"rows": [again, {**again, "task": "c"}]}))
    command = ["predicted", "--machine", "a machine", "--recovery", str(files["recovery"]), "--tasks"]
    made = [*command, str(files["tasks"]), "--date", "then", "--ablation", f"M={files['few']}"]
    done = CliRunner().invoke(app, [*made, "--out", str(files["before"])])
    assert done.exit_code == 0, done.output
    renewed = ["predicted", "--machine", "a machine", "--date", "now", "--tasks", str(files["again"]), "--served",
               str(files["few"]), "--ablation", f"b={files['few']}", "--onto", str(files["before"])]  # fmt: skip
    done = CliRunner().invoke(app, [*renewed, "--out", str(files["out"])])
    assert done.exit_code == 0, done.output
    document = json.loads(files["out"].read_text())
    assert document["rows"] == [before[0], again, *before[2:], {**again, "task": "c"}]
    assert document["recovery"] == ROWS
    assert document["served"] == changed
    assert document["ablations"] == {"M": changed, "b": changed}
    assert document["date"] == "now"
    text = render_run(document)
    assert text.index("### Attention recovered") < text.index("### With the settings that serve") < text.index("varied")
    assert "| predicted before | 1.50 | 90.00 | 90.00 |" in text
