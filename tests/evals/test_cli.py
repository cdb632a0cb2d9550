"""The `tandem eval` commands: what they write, and errors in one line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evals.cli import app

MODEL = "deploy/models/reference"
RUN = ["tasks", "--model", MODEL, "--device", "cpu"]


def test_tasks_writes_rows_with_what_was_read(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ["--method", "full", "--method", "topk:budget=0.1", "--tasks", "needle", "--lengths", "256"]
    files = ["--samples", "2", "--json", str(out), "--html", str(page)]
    result = CliRunner().invoke(app, [*RUN, *arguments, *files])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    full, topk = document["rows"]
    assert (full["method"], full["head_fraction"], full["bytes_fraction"]) == ("full", 1.0, 1.0)
    assert topk["settings"]["budget"] == "0.1"
    assert topk["bytes_fraction"] == pytest.approx(4 * topk["head_fraction"])
    assert document["configuration"]["lengths"] == [256]
    assert "<html" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "haystacks"], "unknown 'haystacks'"),
        (["--lengths", "4k"], "4096,16384"),
        (["--method", "quest:page=0"], "page"),
        (["--method", "nothing"], "known: full"),
        (["--text", "missing.txt"], "missing.txt"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, [*RUN, "--samples", "1", "--lengths", "256", *arguments])
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]


def test_results_wants_one_of_its_ways() -> None:
    result = CliRunner().invoke(app, ["results"])
    assert result.exit_code == 1
    assert "--quick, --full and --from" in result.stderr


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
