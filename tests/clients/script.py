"""What the scripted model is to say next, written by the programs here; the server that it is behind has its tokens."""

import json
import os
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

SCRIPTED_URL, REFERENCE_URL = os.environ["SCRIPTED_URL"], os.environ["REFERENCE_URL"]
_PATH = Path(os.environ["SCRIPT"])


def say(*texts: str) -> None:
    """One text a request, in their order."""
    _PATH.write_text("\n".join(json.dumps(_tokens_of(text)) for text in texts))


def _tokens_of(text: str) -> list[int]:
    body = json.dumps({"model": "scripted", "prompt": text, "add_special_tokens": False}).encode()
    asked = Request(f"{SCRIPTED_URL.removesuffix('/v1')}/tokenize", body, {"content-type": "application/json"})
    with build_opener(ProxyHandler({})).open(asked) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
        return tokens


def call(name: str, /, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def check_over() -> None:
    """Everything that was written was asked for."""
    assert not _PATH.read_text()
