"""A tiny model that calls tools: the fake engine, saying what a test has written down, through the whole server.

`make_model` writes a tokenizer and a chat template into a folder; `Script` what the next requests are answered with.
"""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from server.deployment import Deployment
from server.text.model_tokenizer import Tokenizer
from tests.server.fake_engine import VOCAB
from tests.server.live_server import REFERENCE, Running, fake_command, running_server

# Writes tools, calls and results as Hermes's and Qwen's do, and opens the reasoning if it is told to.
HERMES = """{{ bos_token }}{% if tools %}<|system|>
<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>{% endif %}{% for m in messages %}<|{{ m.role }}|>
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{
call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}
{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}<|assistant|>
"""


class Script:
    """Hold the next answers: `add` one; the next request says the oldest."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path = path
        self.path.write_text("")
        self._tokenizer = tokenizer

    def add(self, *texts: str) -> None:
        lines = [
            *self.path.read_text().splitlines(),
            *(json.dumps(self._tokenizer.encode(text, False)) for text in texts),
        ]
        self.path.write_text("\n".join(lines))

    @property
    def is_over(self) -> bool:
        return not self.path.read_text()


def make_model(folder: Path, template: str, special: Iterable[str] = ()) -> Path:
    """Write the reference's tokenizer with this template, and more special tokens."""
    folder.mkdir()
    tree = json.loads((REFERENCE / "tokenizer.json").read_text())
    num_tokens = max(len(tree["model"]["vocab"]), 1 + max(token["id"] for token in tree["added_tokens"]))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tree["added_tokens"] += [
        {"id": num_tokens + i, "content": text, "special": True, **plain} for i, text in enumerate(special)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    settings = json.loads((REFERENCE / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


def scripted_deployment(tokenizer: Path) -> Deployment:
    tree = {"model": {"path": REFERENCE, "name": "scripted", "tokenizer": tokenizer}, "server": {"port": 0}}
    return Deployment.model_validate(tree)


@asynccontextmanager
async def scripted_server(folder: Path, tokenizer: Path) -> AsyncIterator[tuple[Running, Script]]:
    script = Script(folder / "script", Tokenizer(tokenizer, REFERENCE))
    last = max(token["id"] for token in json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"])
    command = fake_command(script=str(script.path), vocab_size=max(VOCAB, last + 1))
    async with running_server(scripted_deployment(tokenizer), command) as running:
        yield running, script
