"""What clients send, as recorded (`client_bodies/`, from `tests.clients --record`) and as reported, is served.

No answer is a 5xx, and the only refusals are those of `REFUSED`, each with its reason.
"""

import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from server.deployment import Deployment
from server.text.model_tokenizer import Tokenizer
from tests.server.live_server import REFERENCE, fake_command, running_server
from tests.server.scripted_model import HERMES, Script, make_model

HERE = Path(__file__).parent
CAPTURED = sorted((HERE / "client_bodies").glob("*.json"))
CLIENTS = {
    "aider_edits", "claude_code", "cline", "codex", "continue_cli", "guidellm", "instructor_answers",
    "langchain_openai", "langchain_openai_agent", "litellm", "litellm_calls", "lm_eval", "ollama_js", "open_webui",
    "openai", "opencode", "pydantic_ai", "pydantic_ai_agent", "smg",
}  # fmt: skip
CONTEXT = 48_000  # room for the 32,000 tokens that Claude Code asks for
TOO_LONG, PROMPT_TOO_LONG = "an answer longer than the context has room for", "a prompt longer than the context"
REFUSED = {
    # The prompt and max_tokens are more than the context; the client reads the numbers and asks for less.
    TOO_LONG: "exceed context limit",
    PROMPT_TOO_LONG: "prompt is too long: ",
    "ollama_js[12]": "tandem serve hf:",  # a pull
}
# As templates do that know their roles and have one place for what the system says.
STRICT = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('Unexpected message role.') }}{% elif m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)


def read_requests() -> Iterator[tuple[str, str, str, Any]]:
    """Return the name, method, path and body of each request."""
    for path in CAPTURED:
        for i, request in enumerate(json.loads(path.read_text())["requests"]):
            yield f"{path.stem}[{i}]", request["method"], request["path"], request["body"]
    for report in json.loads((HERE / "reported_bodies.json").read_text()):
        if "prompt_times" in report:
            report["body"]["messages"][0]["content"] *= report["prompt_times"]
        yield report["name"], "POST", report["path"], report["body"]


async def test_what_clients_send_is_served_or_refused_for_a_listed_reason(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", STRICT + HERMES)
    script = Script(tmp_path / "script", Tokenizer(folder, REFERENCE))
    script.add(*["So it is."] * 300)
    model = {"path": REFERENCE, "name": "reference", "tokenizer": folder, "aliases": ("scripted", "smol")}
    deployment = Deployment.model_validate({"model": model, "server": {"port": 0}})
    refused = {}
    async with running_server(deployment, fake_command(script=str(script.path), context=CONTEXT)) as live:
        for name, method, path, body in read_requests():
            answer = await live.http.request(method, path, json=body)
            if answer.status_code != 200:
                refused[name] = (answer.status_code, answer.text)
            else:
                assert '"error":{' not in answer.text, (name, answer.text)
    assert {TOO_LONG, PROMPT_TOO_LONG} <= set(refused)
    for name, (status, text) in refused.items():
        assert status == 400, (name, text)
        assert name in REFUSED, (name, text)
        assert REFUSED[name] in text, (name, text)
    assert not script.is_over, "answers repeat their prompts; write more lines"


def test_there_are_captures_of_every_client() -> None:
    assert {path.stem for path in CAPTURED} == CLIENTS
    for path in CAPTURED:
        capture = json.loads(path.read_text())
        assert capture["client"] == path.stem
        assert re.fullmatch(r"[0-9]+(\.[0-9]+)+", capture["version"])
        assert date.fromisoformat(capture["captured"])
