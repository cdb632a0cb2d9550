"""Chat templates: jinja in a sandbox, with the options and functions that Hugging Face's templates expect.

A template comes from a checkpoint, so it is foreign code: it sees the conversation alone, and cannot change it. For
one that writes no tools, `default_tools.py` does.
"""

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpu.config import ModelConfig
from server.api_error import ApiError, invalid
from server.chat_message import Message
from server.config import ConfigError
from server.conversation import Conversation, Spell, Tree, plain_message, plain_tool, spell_tree
from server.default_tools import write_tools
from server.tokenizer import Tokenizer
from server.tools import Function, Tool

_PROBE = "probe_7f3a1c"
_PROBE_CHAT = [Message(role="user", content="Hi")]
_PROBE_TOOL = plain_tool(Tool(type="function", function=Function(name=_PROBE)))
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}


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
        self.writes_tools = True
        self.writes_tools = self._shows(_PROBE_CHAT, [_PROBE_TOOL])
        self.takes_system = self._shows([Message(role="system", content=_PROBE), *_PROBE_CHAT], [])

    def render(
        self,
        messages: list[Message] | Conversation,
        spell: Spell,
        documents: list[dict[str, str]] | None = None,
    ) -> str:
        """`spell`: how a text of a client is written; documents are given as they are, each a `title` and a `text`.

        Raises ApiError 400 if the template refuses the conversation.
        """
        given = messages if isinstance(messages, Conversation) else Conversation(messages)
        if given.has_tools and not self.writes_tools:
            given = write_tools(given, self.takes_system)
        try:
            return self._template.render(
                **self._special_tokens
                | spell_tree(given.variables, spell)
                | {
                    "messages": [plain_message(message, spell) for message in given.messages],
                    "tools": spell_tree(given.tools, spell) or None,
                    "documents": documents,
                    "add_generation_prompt": True,
                }
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            what = " ".join(str(error).split()) or type(error).__name__
            raise invalid("messages", f"the chat template refused them: {what}") from None

    @property
    def own_variables(self) -> frozenset[str]:
        """Names that no request may give a value."""
        return frozenset(_GIVEN | set(self._special_tokens))

    def _shows(self, messages: list[Message], tools: list[Tree]) -> bool:
        try:
            return _PROBE in self.render(Conversation(messages, tools), str)
        except ApiError:
            return False


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
