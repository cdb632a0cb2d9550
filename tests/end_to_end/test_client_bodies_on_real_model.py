"""What clients send, replayed against `tandem serve` with a real model: nothing breaks, and few bodies are refused.

The bodies are those of `tests/server/test_client_bodies.py`, as they were recorded and reported. Needs
TANDEM_REAL_MODEL, a GGUF file or a folder of a small chat model that has 8,192 positions. Minutes on two cores.
"""

import os
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.real_server import running_server
from tests.server.test_client_bodies import PROMPT_TOO_LONG, TOO_LONG, read_requests

MODEL = os.environ.get("TANDEM_REAL_MODEL")
CONTEXT = 8192
NUM_TOKENS = 32  # of an answer whose body says nothing of it
CLAUDE_CODE = "claude_code[0]"
# By request, the reason that the answer is a 400.
REFUSED = {
    TOO_LONG: "prompt is too long: ",  # 40,000 characters: with the 48,000 tokens of the other test they fit
    PROMPT_TOO_LONG: "prompt is too long: ",
    CLAUDE_CODE: "exceed context limit",  # it asks for 32,000 tokens, reads the sentence and asks for fewer
}


def read_room(message: str) -> int:
    """Return the tokens that an answer has room for, by the numbers that Claude Code reads."""
    found = re.search(r"exceed context limit: (\d+) \+ (\d+) > (\d+)", message)
    assert found is not None, message
    num_prompt, _, context = map(int, found.groups())
    return context - num_prompt


def replay(client: httpx.Client) -> dict[str, httpx.Response]:
    """Return the answer of each request."""
    answers = {}
    for name, method, path, body in read_requests():
        began = time.monotonic()
        answers[name] = client.request(method, path, json=body)
        print(f"{time.monotonic() - began:6.1f} s  {answers[name].status_code}  {name}")
    return answers


def ask_for_less(client: httpx.Client, answer: httpx.Response) -> httpx.Response:
    """Ask as Claude Code does when it has read how many tokens there is room for; for fewer, or it takes long."""
    requests = {name: (path, body) for name, _, path, body in read_requests()}
    path, body = requests[CLAUDE_CODE]
    room = read_room(answer.json()["error"]["message"])
    assert room > NUM_TOKENS
    less: dict[str, Any] = body | {"max_tokens": NUM_TOKENS}
    return client.post(path, json=less)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(MODEL is None, reason="needs TANDEM_REAL_MODEL: a GGUF file or folder of a small chat model")
def test_what_clients_send_to_a_real_model_is_served_or_refused_for_a_listed_reason(tmp_path: Path) -> None:
    changes = {
        "model": {"path": MODEL, "name": "reference", "aliases": ["scripted", "smol"]},
        "gpu": {"kv_cache_gib": 0.5, "threads": 2},
        "scheduler": {"max_context_tokens": CONTEXT, "max_running": 4},
        "server": {"default_max_tokens": NUM_TOKENS},
    }
    with running_server(tmp_path, changes) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        answers = replay(client)
        answers["Claude Code's next one"] = ask_for_less(client, answers[CLAUDE_CODE])
        log = server.log.read_text()
    refused = {name: answer for name, answer in answers.items() if answer.status_code != 200}
    for name, answer in answers.items():
        assert answer.status_code < 500, (name, answer.text)
        assert '"error":{' not in answer.text or name in refused, (name, answer.text)
    for name, answer in refused.items():
        assert REFUSED.get(name, "no reason is listed") in answer.text, (name, answer.status_code, answer.text)
    assert set(refused) == set(REFUSED)
    assert "Traceback" not in log
