"""What the scripted model is to say next, written by the programs here; they have no tokenizer."""

import json
import os
from pathlib import Path

SCRIPTED_URL, REFERENCE_URL = os.environ["SCRIPTED_URL"], os.environ["REFERENCE_URL"]
_PATH = Path(os.environ["SCRIPT"])
_CHARACTERS = json.loads((_PATH.parent / "characters.json").read_text())


def say(*texts: str) -> None:
    """One text a request, in their order."""
    lines = [json.dumps([token for character in text for token in _CHARACTERS[character]]) for text in texts]
    _PATH.write_text("\n".join(lines))


def call(name: str, /, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def check_over() -> None:
    """Everything that was written was asked for."""
    assert not _PATH.read_text()
