"""Chat templates: jinja in a sandbox, with the options and functions that Hugging Face's templates expect.

A template comes from a checkpoint, so it is foreign code: it sees the messages alone, and cannot change them.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpu.config import ModelConfig
from server.api_error import invalid
from server.bodies import Message, message_text
from server.config import ConfigError
from server.tokenizer import Tokenizer


class ChatTemplate:
    """Messages to the prompt's text, special tokens spelled out."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises ConfigError if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"chat_template: does not compile: {error}") from None
        self._special_tokens = special_tokens
        self.source = source

    def render(
        self, messages: list[Message], spell: Callable[[str], str], documents: list[dict[str, str]] | None = None
    ) -> str:
        """`spell`: how a text of a message is written; documents are given as they are, each a `title` and a `text`.

        Raises ApiError 400 if the template refuses the messages.
        """
        plain = [
            {"role": message.role, "content": spell(message_text(message))}
            | ({"name": spell(message.name)} if message.name else {})
            for message in messages
        ]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=documents, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            what = " ".join(str(error).split()) or type(error).__name__
            raise invalid("messages", f"the chat template refused them: {what}") from None


def load_template(model: ModelConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The configured file, else the tokenizer's own; None if there is neither."""
    path = model.chat_template
    if path is None and (tokenizer.folder / "chat_template.jinja").is_file():
        path = tokenizer.folder / "chat_template.jinja"
    if path is not None:
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer.special_tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template: {path} cannot be read: {error}") from None
    source = tokenizer.settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return ChatTemplate(source, tokenizer.special_tokens) if isinstance(source, str) else None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Macro) -> str:
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
