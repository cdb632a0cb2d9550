"""What Open WebUI and Continue send, written as their public sources build it, is understood and streamed."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.deployment import Deployment
from server.text.model_tokenizer import Tokenizer
from tests.server.live_server import REFERENCE, fake_command, running_server
from tests.server.scripted_model import HERMES, Script, make_model

BODIES = sorted((Path(__file__).parent / "written_bodies").glob("*.json"))
SAID = "So it is."
CALL = '\n<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'


def read_stream(path: str, text: str) -> str:
    """Return what a stream says and thinks, whole to its end."""
    if path.startswith("/api/"):
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        parts = [line.get("message", line) for line in lines]
        return "".join(part.get("content") or part.get("response") or part.get("thinking") or "" for part in parts)
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    parts = [choice.get("delta", choice) for event in events for choice in event["choices"]]
    return "".join(part.get("text") or part.get("content") or part.get("reasoning_content") or "" for part in parts)


def read_whole(path: str, tree: dict[str, Any]) -> str | None:
    """Return what an answer says that is not streamed; None: it is none."""
    if path.startswith("/api/"):
        return tree.get("message", {}).get("content")
    return tree["choices"][0]["message"]["content"] if "choices" in tree else None


async def test_what_open_webui_and_continue_send_is_understood_and_streamed(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    folder = make_model(tmp_path / "model", HERMES)
    script = Script(tmp_path / "script", Tokenizer(folder, REFERENCE))
    model = {"path": REFERENCE, "name": "scripted", "tokenizer": folder}
    deployment = Deployment.model_validate({"model": model, "server": {"port": 0}})
    async with running_server(deployment, fake_command(script=str(script.path))) as live:
        for path in BODIES:
            for i, one in enumerate(json.loads(path.read_text())["requests"]):
                route, body = one["path"], one["body"]
                with subtests.test(client=path.stem, number=i, route=route):
                    asks_form = body is not None and body.get("format") == "json"
                    said = '{"a": 1}' if asks_form else SAID
                    script.path.write_text("")
                    script.add(*[said] * 2)
                    answer = await live.http.request(one["method"], route, json=body)
                    assert answer.status_code == 200, answer.text
                    if body is None or route.startswith(("/api/embed", "/v1/embed", "/api/show")):
                        continue
                    if body.get("stream"):
                        assert read_stream(route, answer.text) == said
                    elif body.get("prompt") != "":
                        assert read_whole(route, answer.json()) == said
        named = {"open_webui": "get_time", "continue_ollama": "read_file"}
        for path in BODIES:
            for one in json.loads(path.read_text())["requests"]:
                body = one["body"] or {}
                if one["path"] != "/api/chat" or "tools" not in body:
                    continue
                script.path.write_text("")
                script.add(CALL % named[path.stem])
                answer = await live.http.post(one["path"], json=body)
                lines = [json.loads(line) for line in answer.text.splitlines()]
                calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", [])]
                assert calls == [{"index": 0, "name": named[path.stem], "arguments": {}}]


def test_each_written_body_says_whose_it_is() -> None:
    for path in BODIES:
        assert json.loads(path.read_text())["client"] == path.stem
