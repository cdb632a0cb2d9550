"""Runs that end early keep what is finished and say what is missing: by time, at a signal, in a batch or a cell."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import evals.run
from evals.cells import Cell
from evals.cli import app
from evals.run import Prompt, run_cells
from evals.samples import Sample
from evals.score_rows import summarize
from evals.session import CUT, FAILED, exit_status, missing_rows, open_ledger
from evals.stopping import RunCut, Stop, stopping
from evals.store import Record
from tests.evals.test_run import MODEL, SETTINGS


class AfterChecks(Stop):
    """Cuts at check number `count`."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self.left = count

    def check(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.cut("the test said so")


def test_time_cuts_when_it_is_over_and_not_before() -> None:
    patient = Stop(60.0)
    patient.check()
    assert patient.reason is None
    hasty = Stop(0.001)
    time.sleep(0.002)
    with pytest.raises(RunCut):
        hasty.check()
    assert hasty.reason == "--seconds 0.001 are over"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_once_and_the_next_one_acts_as_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stopping(None) as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) == before
        with pytest.raises(RunCut, match=number.name.removeprefix("SIG")):
            stop.check()
    assert signal.getsignal(number) == before


def make_cell(task: str) -> tuple[Cell, list[Prompt]]:
    samples = [
        Sample(task, str(number), f"{task} {number}", ["7"], "string_match_all", 4, 4, None) for number in range(3)
    ]
    return Cell(task, 256, 3, ("full",), 0), [Prompt(sample, np.zeros(4, np.int32)) for sample in samples]


@pytest.mark.parametrize(("checks", "left"), [(2, (2, 0)), (3, (3, 0)), (5, (3, 3))])
def test_a_run_that_is_cut_keeps_what_is_finished_and_says_what_is_missing(
    checks: int, left: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked before each batch of two; the last case ends before it is cut."""
    monkeypatch.setattr(evals.run, "run_batch", lambda _, __, cell, prompts, keys: [
        keys.record(cell.methods[0], prompt.sample, "7", 1.0, {}, None) for prompt in prompts
    ])  # fmt: skip
    decoder: Any = SimpleNamespace(architecture=SimpleNamespace(name="model"))
    made, stop = [make_cell("needle"), make_cell("word_needle")], AfterChecks(checks)
    cells = [cell for cell, _ in made]
    left_behind: list[int] = []
    with open_ledger(cells, 2, None, lambda records, _: left_behind.append(len(records)), stop) as (ledger, records):
        run_cells(decoder, None, made, SETTINGS, 2 * 256, ledger)
    rows = {row["task"]: row["samples"] for row in summarize(records.values())}
    assert [rows.get(cell.task, 0) for cell in cells] == list(left)
    assert left_behind == [3, 6][: left.count(3)], "after each cell"
    assert missing_rows(cells, list(records.values()), stop.reason) == [
        {"task": cell.task, "length": 256, "method": "full", "samples": samples, "asked": 3}
        for cell, samples in zip(cells, left, strict=True)
        if samples < 3
    ]
    assert missing_rows(cells, [], None) == [], "a data set may have fewer prompts than were asked"


def test_a_cell_that_takes_long_leaves_what_it_has_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.session.LEAVE_EVERY_S", -1.0)
    left_behind: list[tuple[int, int]] = []
    with open_ledger([], 1, None, lambda some, done: left_behind.append((len(some), done)), None) as (ledger, _):
        for name in ("a", "b"):
            ledger.keep(Record(name, {"task": "needle", "length": 1}, name, 1.0, "", None, None))
    assert left_behind == [(1, 0), (2, 0)]


def test_a_cut_that_nobody_asked_for_is_raised() -> None:
    with pytest.raises(RunCut, match="why"), open_ledger([], 0, None, None, None):
        raise RunCut("why")


def test_status_tells_failures_from_cuts() -> None:
    fine, failed = {"failures": 0}, {"failures": 1}
    assert exit_status([fine, failed], None) == exit_status([failed], "cut") == FAILED == 1
    assert exit_status([fine], "cut") == CUT == 3
    assert exit_status([fine], None) == 0


def test_a_command_that_is_cut_leaves_table_and_json(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        "tasks",
        "--model",
        str(MODEL),
        "--device",
        "cpu",
        "--lengths",
        "256",
        "--samples",
        "2",
        "--seconds",
        "0",
    ]
    result = CliRunner().invoke(app, [*command, "--json", str(out)])
    assert result.exit_code == CUT
    document = json.loads(out.read_text())
    assert document["cut"] == "--seconds 0 are over"
    assert document["missing"][0] == {"task": "needle", "length": 256, "method": "full", "samples": 0, "asked": 2}
    assert "cut: --seconds 0 are over" in result.stderr
