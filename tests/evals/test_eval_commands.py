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


def test_datasets_run_like_tasks_shortened_and_resumed(tmp_path: Path) -> None:
    rows = [{"context": "word " * 900, "input": f"{n}?", "answers": ["x"], "_id": str(n)} for n in range(3)]
    book = {"id": 0, "context": "word " * 900, "input": "Which?", "answer": ["12345"], "options": []}
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "passkey.jsonl").write_text("\n".join([json.dumps(book)] * 2))
    files = [f"longbench/hotpotqa={tmp_path / 'qa.jsonl'}", f"infinitebench/passkey={tmp_path / 'passkey.jsonl'}"]
    out = tmp_path / "out.json"
    command = [
        *RUN,
        "--dataset",
        files[0],
        "--dataset",
        files[1],
        "--lengths",
        "256",
        "--samples",
        "2",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(app, [*command, "--resume", str(tmp_path / "store")])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["rows"]
    assert [(row["task"], row["samples"], row["failures"]) for row in found] == [
        ("longbench/hotpotqa", 2, 0),
        ("infinitebench/passkey", 2, 0),
    ]
    assert CliRunner().invoke(app, [*command, "--as", "completion"]).exit_code == 0
    assert CliRunner().invoke(app, [*command, "--as", "letters"]).exit_code == 1
    assert CliRunner().invoke(app, [*RUN, "--dataset", "gsm9k=x"]).exit_code == 1


def test_one_page_is_made_of_several_runs(tmp_path: Path) -> None:
    tasks, lost, page = tmp_path / "tasks.json", tmp_path / "lost.json", tmp_path / "page.html"
    method = ["--method", "topk:budget=0.2", "--lengths", "256", "--samples", "2"]
    assert CliRunner().invoke(app, [*RUN, "--method", "full", *method, "--json", str(tasks)]).exit_code == 0
    fidelity = ["fidelity", *RUN[1:], *method, "--forced", "4", "--json", str(lost)]
    assert CliRunner().invoke(app, fidelity).exit_code == 0
    result = CliRunner().invoke(app, ["page", str(tasks), str(lost), "--html", str(page)])
    assert result.exit_code == 0, result.output
    html = page.read_text()
    for heading in (
        "Quality against what is read",
        "Where the needle stands",
        "Error a layer",
        "Beside full attention",
    ):
        assert f"<h2>{heading}" in html
    assert html.count("<svg") == 4
