"""OpenCode: writes a file, reads it and runs a command, each by a call of the model's, and ends with its text."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from script import SCRIPTED_URL, call, check_over, say

(PROGRAM, *_) = sorted(
    Path(os.environ["AGENTS"]).glob("opencode-linux-*/bin/opencode"), key=lambda path: len(str(path))
)
MODEL = {"name": "scripted", "limit": {"context": 200_000, "output": 8192}}
CONFIGURATION = {
    "provider": {
        "tandem": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": SCRIPTED_URL, "apiKey": "k"},
            "models": {"scripted": MODEL},
        }
    },
    "model": "tandem/scripted",
    "agent": {"title": {"disable": True}},  # or it asks for one at the same time, and takes an answer from the script
    "autoupdate": False,
    "share": "disabled",
}

with tempfile.TemporaryDirectory() as home:
    project = Path(home) / "project"
    project.mkdir()
    (project / "opencode.json").write_text(json.dumps(CONFIGURATION))
    environment = os.environ | {"HOME": home, "TMPDIR": home, "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    version = subprocess.run([PROGRAM, "--version"], env=environment, check=True, capture_output=True, text=True)
    print(version.stdout.strip(), flush=True)
    notes = project / "notes.txt"
    say(
        call("write", filePath=str(notes), content="forty-two\n"),
        f"Now I look at it. {call('read', filePath=str(notes))}",
        call("bash", command="wc -c < notes.txt > size", description="Count its bytes"),
        "There are ten bytes.",
    )
    done = subprocess.run(
        [PROGRAM, "run", "Write a note and count its bytes."], env=environment, cwd=project, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "There are ten bytes." in done.stdout, done.stdout + done.stderr
    assert notes.read_text() == "forty-two\n"
    assert (project / "size").read_text().strip() == "10"
check_over()
