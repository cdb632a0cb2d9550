"""Claude Code: writes a file, reads it and runs a command, each by a call of the model's, and ends with its text.

It asks the model to think, so that each answer begins with a thought.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from script import SCRIPTED_URL, call, check_over, say

TEXT = "forty-two\n"
PROGRAM = Path(os.environ["AGENTS"]) / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
# IS_SANDBOX: it may run as root, as in a container. The rest keeps it from every host but the server.
ENVIRONMENT = os.environ | {
    "ANTHROPIC_BASE_URL": SCRIPTED_URL.removesuffix("/v1"),
    "ANTHROPIC_API_KEY": "k",
    "ANTHROPIC_MODEL": "scripted",
    "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "IS_SANDBOX": "1",
}

with tempfile.TemporaryDirectory() as home:
    environment = ENVIRONMENT | {"HOME": home, "TMPDIR": home}
    project = Path(home) / "project"
    project.mkdir()
    version = subprocess.run(
        ["node", PROGRAM, "--version"], env=environment, check=True, capture_output=True, text=True
    )
    print(version.stdout.strip(), flush=True)
    notes = project / "notes.txt"
    say(
        f"A file first.</think>{call('Write', file_path=str(notes), content=TEXT)}",
        f"Then read it.</think>Now I look at it. {call('Read', file_path=str(notes))}",
        f"And count.</think>{call('Bash', command='wc -c < notes.txt > size', description='Count its bytes')}",
        "All is done.</think>There are ten bytes.",
    )
    asked = ["-p", "Write a note and count its bytes.", "--allowedTools", "Write,Read,Bash", "--output-format", "json"]
    done = subprocess.run(
        ["node", PROGRAM, *asked], env=environment, cwd=project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    answer = json.loads(done.stdout)
    assert answer["result"] == "There are ten bytes.", answer
    assert answer["num_turns"] == 4, answer
    assert notes.read_text() == TEXT
    assert (project / "size").read_text().strip() == "10"
check_over()
