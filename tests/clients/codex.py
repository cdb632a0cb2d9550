"""Codex: runs three commands and a tool of a namespace, each by a call of the model's, and ends with its text."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from script import SCRIPTED_URL, call, check_over, say

PROGRAM = Path(os.environ["AGENTS"]) / "@openai" / "codex" / "bin" / "codex.js"
CONFIGURATION = f"""
model = "scripted"
model_provider = "local"
check_for_update_on_startup = false
[analytics]
enabled = false
[otel]
exporter = "none"
[model_providers.local]
name = "local"
base_url = "{SCRIPTED_URL}"
wire_api = "responses"
env_key = "LOCAL_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""

with tempfile.TemporaryDirectory() as home:
    project, settings = Path(home) / "project", Path(home) / ".codex"
    project.mkdir()
    settings.mkdir()
    (settings / "config.toml").write_text(CONFIGURATION)
    environment = os.environ | {"HOME": home, "CODEX_HOME": str(settings), "LOCAL_API_KEY": "k", "TMPDIR": home}
    version = subprocess.run(
        ["node", PROGRAM, "--version"], env=environment, check=True, capture_output=True, text=True
    )
    print(version.stdout.strip(), flush=True)
    say(
        call("exec_command", cmd="printf 'forty-two\\n' > notes.txt"),
        f"Now I look at it. {call('exec_command', cmd='cat notes.txt')}",
        call("exec_command", cmd="wc -c < notes.txt > size"),
        call("multi_agent_v1.close_agent", target="nobody"),
        "There are ten bytes.",
    )
    asked = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Write a note; count bytes."]
    done = subprocess.run(
        ["node", PROGRAM, *asked], env=environment, cwd=project, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "invalid agent id nobody" in done.stderr, done.stderr  # it found the tool in its namespace
    events = [json.loads(line) for line in done.stdout.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    commands = [item for item in items if item["type"] == "command_execution"]
    assert [command["exit_code"] for command in commands] == [0, 0, 0], items
    assert commands[1]["aggregated_output"] == "forty-two\n"
    assert items[-1]["text"] == "There are ten bytes.", items
    assert (project / "size").read_text().strip() == "10"
check_over()
