"""A process that is killed in the middle of a run loses at most the sample that it was at."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

from evals.cli import app

COMMAND = [
    "tasks", "--model", "deploy/models/reference", "--device", "cpu", "--batch", "1",
    "--tasks", "needle", "--lengths", "256", "--samples", "6", "--method", "full", "--method", "streaming:budget=0.1",
]  # fmt: skip
PATIENCE_S = 120
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_killed_process_goes_on_where_it_stopped(tmp_path: Path) -> None:
    store = tmp_path / "store" / "records.jsonl"
    arguments = [*COMMAND, "--resume", str(store.parent), "--json", str(tmp_path / "out.json")]
    command = [sys.executable, "-m", "evals", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    ends = time.monotonic() + PATIENCE_S
    while count_lines(store) < 3 and time.monotonic() < ends and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL, "the run ended before it could be killed"
    with store.open("ab") as file:
        file.write(b'{"key": "cut sho')
    begun = [json.loads(line) for line in store.read_bytes().splitlines()[:-1]]
    assert 3 <= len(begun) < 12
    resumed = CliRunner().invoke(app, arguments)
    assert resumed.exit_code == 0, resumed.output
    records = [json.loads(line) for line in store.read_bytes().splitlines()]
    assert records[: len(begun)] == begun
    assert len({record["key"] for record in records}) == len(records) == 12
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["samples"], row["failures"]) for row in rows] == [(6, 0), (6, 0)]
