"""Aider: three edits of a file in one conversation, each from a text of the model's; it offers no tools."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from script import SCRIPTED_URL, check_over, say

WORDS = ["one", "two", "three", "four"]
OPTIONS = (
    "--model openai/scripted --edit-format diff --yes-always --no-git --no-show-model-warnings --no-check-update "
    "--analytics-disable"
)


def edit(before: str, after: str) -> str:
    return f"notes.txt\n```\n<<<<<<< SEARCH\n{before}\n=======\n{after}\n>>>>>>> REPLACE\n```\nDone."


with tempfile.TemporaryDirectory() as home:
    notes = Path(home) / "project" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text(f"{WORDS[0]}\n")
    environment = os.environ | {
        "HOME": home, "TMPDIR": home, "OPENAI_API_BASE": SCRIPTED_URL, "OPENAI_API_KEY": "k",
    }  # fmt: skip
    say(*map(edit, WORDS, WORDS[1:]))
    asked = "".join(f"Write {word}.\n" for word in WORDS[1:])
    done = subprocess.run(
        [sys.executable, "-m", "aider", *OPTIONS.split(), "notes.txt"], env=environment, cwd=notes.parent,
        input=f"{asked}/exit\n", capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert notes.read_text() == f"{WORDS[-1]}\n", done.stdout
check_over()
