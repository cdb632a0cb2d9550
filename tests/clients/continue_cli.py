"""Continue's program for the terminal: ten turns, in which it writes a file, reads it and runs commands."""

import os
import subprocess
import tempfile
from pathlib import Path

from script import SCRIPTED_URL, call, check_over, say

PROGRAM = Path(os.environ["AGENTS"]) / "@continuedev" / "cli" / "dist" / "cn.js"
CONFIGURATION = f"""
name: local
version: 1.0.0
schema: v1
models:
  - name: Tandem
    provider: openai
    model: scripted
    apiBase: {SCRIPTED_URL}
    apiKey: k
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""

with tempfile.TemporaryDirectory() as home:
    project, configuration = Path(home) / "project", Path(home) / "config.yaml"
    project.mkdir()
    configuration.write_text(CONFIGURATION)
    environment = os.environ | {"HOME": home, "TMPDIR": home, "CONTINUE_TELEMETRY_ENABLED": "0"}
    version = subprocess.run(
        ["node", PROGRAM, "--version"], env=environment, check=True, capture_output=True, text=True
    )
    print(version.stdout.strip(), flush=True)
    notes = project / "notes.txt"
    say(
        call("Write", filepath=str(notes), content="forty-two\n"),
        f"Now I look at it.{call('Read', filepath=str(notes))}",
        *(call("Bash", command=f"echo {turn} >> turns; cat turns") for turn in range(6)),
        call("Bash", command="wc -c < notes.txt > size"),
        "There are ten bytes.",
    )
    asked = ["--config", configuration, "--auto", "-p", "Write a note and count its bytes."]
    done = subprocess.run(
        ["node", PROGRAM, *asked], env=environment, cwd=project, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "There are ten bytes.", done.stdout
    assert notes.read_text() == "forty-two\n"
    assert (project / "size").read_text().strip() == "10"
check_over()
