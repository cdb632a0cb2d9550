"""Cline's program for the terminal: ten turns, in which it writes a file, reads it and runs commands."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from script import SCRIPTED_URL, call, check_over, say

(PROGRAM, *_) = Path(os.environ["AGENTS"]).glob("@cline/cli-linux-*/bin/cline")

with tempfile.TemporaryDirectory() as home:
    project = Path(home) / "project"
    project.mkdir()
    environment = os.environ | {"HOME": home, "TMPDIR": home}
    version = subprocess.run([PROGRAM, "--version"], env=environment, check=True, capture_output=True, text=True)
    print(version.stdout.strip(), flush=True)
    given = ["--provider", "openai", "--apikey", "k", "--modelid", "scripted", "--baseurl", SCRIPTED_URL]
    subprocess.run([PROGRAM, "auth", *given], env=environment, check=True, capture_output=True)
    notes = project / "notes.txt"
    say(
        call("editor", path=str(notes), new_text="forty-two\n"),
        f"Now I look at it.{call('read_files', files=[{'path': str(notes)}])}",
        *(call("run_commands", commands=[f"echo {turn} >> turns; cat turns"]) for turn in range(6)),
        call("run_commands", commands=["wc -c < notes.txt > size"]),
        "There are ten bytes.",
    )
    asked = ["--json", "--auto-approve", "true", "Write a note and count its bytes."]
    done = subprocess.run(
        [PROGRAM, *asked], env=environment, cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = [one for one in map(json.loads, done.stdout.splitlines()) if one["type"] == "run_result"]
    assert (results[0]["text"], results[0]["iterations"]) == ("There are ten bytes.", 10), results
    assert notes.read_text() == "forty-two\n"
    assert (project / "size").read_text().strip() == "10"
check_over()
