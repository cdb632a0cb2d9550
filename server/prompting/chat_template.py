"""Find out which messages a chat template accepts, and render chats with it.

A template comes from a checkpoint, so it is foreign code, and a child process renders it (`template_renderers.py`).
Rendering short chats shows which messages it accepts. A chat is then adapted so that no message is dropped silently. If
a template writes no tools, `default_tools.py` does.
"""

import secrets
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from gpu.config import ModelConfig
from server.api_error import ApiError, invalid
from server.bodies.chat_message import CalledFunction, Message, MessageCall, Part, message_text
from server.bodies.chat_tools import Function, Tool
from server.deployment import ConfigError
from server.prompting.default_tools import write_calls, write_observations, write_results, write_tools
from server.prompting.plain_chat import Conversation, Spell, Tree, plain_message, plain_tool, spell_tree
from server.prompting.system_messages import place_systems
from server.prompting.template_renderers import RENDERERS, MalformedTemplate, TemplateOverrun, TemplateRefusal
from server.text.model_tokenizer import Tokenizer

_PROBE, _OTHER, _NAME = "probe_7f3a1c", "probe_e09d52", "probe_51d2aa"
_USER, _ASSISTANT = Message(role="user", content="Hi"), Message(role="assistant", content="Yes.")
_PROBE_CHAT = [_USER]
_PROBE_TOOL = plain_tool(Tool(type="function", function=Function(name=_NAME)))
_CALL_ID = "abcdefghi"  # as long as Mistral's templates want it
_CALL = MessageCall(id=_CALL_ID, function=CalledFunction(name=_NAME, arguments=f'{{"{_PROBE}": 1}}'))
_CALL_CHAT = [
    _USER,
    Message(role="assistant", content="", tool_calls=[_CALL]),
    Message(role="tool", content=_OTHER, tool_call_id=_CALL_ID),
]
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}


class ChatTemplate:
    """Renders messages as the prompt's text, with special tokens spelled out."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile and try the template. Raises ConfigError if it does not compile, or had to be stopped."""
        self._special_tokens = special_tokens
        self.source = source
        self.for_tools: ChatTemplate | None = None  # the one to render where there are tools
        try:
            self._probe()
        except MalformedTemplate as error:
            raise ConfigError(f"chat_template: does not compile: {error}") from None
        except TemplateOverrun as error:
            raise ConfigError(f"chat_template: {error} on a chat of a few words") from None

    def _probe(self) -> None:
        """Find out which messages the template accepts."""
        self._takes_observations, self._takes_parts, self._takes_text = False, True, True
        text = self._try([Message(role="user", content=_PROBE)], [])
        parts = self._try([Message(role="user", content=[Part(type="text", text=_PROBE)])], [])
        self._takes_text = text is None or _PROBE in text
        self._takes_parts = parts is not None and (parts == text if self._takes_text else _PROBE in parts)
        self.writes_tools = _NAME in (self._try(_PROBE_CHAT, [_PROBE_TOOL]) or "")
        self.takes_system = _PROBE in (self._try([Message(role="system", content=_PROBE), _USER], []) or "")
        systems = [Message(role="system", content=name) for name in (_PROBE, _OTHER)]
        later = self._try([systems[0], _USER, _ASSISTANT, systems[1], _USER], []) or ""
        self._takes_later_systems = _PROBE in later and _OTHER in later
        # Those that a template refuses stay as they are: it says why.
        called = self._try(_CALL_CHAT, [_PROBE_TOOL])
        self._drops_calls = called is not None and _PROBE not in called
        self._drops_results = called is not None and _OTHER not in called
        observed = self._try([_USER, Message(role="observation", content=_OTHER)], []) or ""
        self._takes_observations = self._drops_results and _OTHER in observed

    def render(
        self,
        messages: list[Message] | Conversation,
        spell: Spell,
        documents: list[dict[str, str]] | None = None,
    ) -> str:
        """Render a conversation in a child process, for which a thread waits.

        `spell`: how a text of a client is written; documents are given as they are, each a `title` and a `text`. Raises
        ApiError 400 if the template refuses the conversation, or had to be stopped.
        """
        given = messages if isinstance(messages, Conversation) else Conversation(messages)
        if given.has_tools and self.for_tools is not None:
            return self.for_tools.render(given, spell, documents)
        try:
            adapted = self._adapt(given)
            return (
                self._continue(adapted, spell, documents) if given.continues else self._write(adapted, spell, documents)
            )
        except TemplateOverrun as error:
            raise invalid("messages", f"the chat template was stopped: on them it {error}") from None

    def _continue(self, given: Conversation, spell: Spell, documents: list[dict[str, str]] | None) -> str:
        """Return the prompt up to the end of the last message's text, without the template's end of the turn."""
        mark = f"zq{secrets.randbits(127):039d}"
        last = given.messages[-1]
        marked = structs.replace(last, content=message_text(last) + mark)
        text = self._write(replace(given, messages=[*given.messages[:-1], marked]), spell, documents)
        before, found, _ = text.rpartition(mark)
        if not found:
            raise invalid("messages", "the last one cannot be continued: the chat template does not write it as it is")
        return before

    def _adapt(self, given: Conversation) -> Conversation:
        """Return the conversation with messages that the template accepts."""
        messages = place_systems(given.messages, self.takes_system, self._takes_later_systems)
        adapted = replace(given, messages=messages)
        if given.has_tools and not self.writes_tools:
            return write_tools(adapted, self.takes_system)
        if self._takes_observations:
            return adapted  # written below, where messages have `metadata`
        if self._drops_results:
            adapted = replace(adapted, messages=write_results(adapted.messages))
        if self._drops_calls:
            adapted = replace(adapted, messages=write_calls(adapted.messages))
        return adapted

    def _write(self, given: Conversation, spell: Spell, documents: list[dict[str, str]] | None) -> str:
        plain = [plain_message(message, spell, self._goes_over_parts(message)) for message in given.messages]
        variables = (
            self._special_tokens
            | spell_tree(given.variables, spell)
            | {
                "messages": write_observations(plain) if self._takes_observations else plain,
                "tools": spell_tree(given.tools, spell) or None,
                "documents": documents,
                "add_generation_prompt": given.begins_answer and not given.continues,
            }
        )
        try:
            return RENDERERS.render(self.source, variables)
        except TemplateRefusal as error:
            raise invalid("messages", f"the chat template refused them: {error}") from None

    @property
    def own_variables(self) -> frozenset[str]:
        """Return the names that no request may give a value."""
        return frozenset(_GIVEN | set(self._special_tokens))

    def _goes_over_parts(self, message: Message) -> bool:
        return self._takes_parts and (isinstance(message.content, list) or not self._takes_text)

    def _try(self, messages: list[Message], tools: list[Tree]) -> str | None:
        """Render a chat; None: the template refuses it."""
        try:
            return self._write(Conversation(messages, tools), str, None)
        except ApiError:
            return None


def load_template(model: ModelConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the configured template, else the tokenizer's own, with the one named `tool_use` for chats that have tools.

    Returns None if there is none. Raises ConfigError.
    """
    if model.chat_template is not None:
        return _open(str(model.chat_template), _read(model.chat_template), tokenizer)
    named = _named_sources(tokenizer)
    if not named:
        return None
    if "default" not in named and len(named) > 1:
        raise ConfigError(
            f"chat_template: {tokenizer.folder} has templates named {sorted(named)} and none named 'default'; "
            "set model.chat_template"
        )
    first = "default" if "default" in named else next(iter(named))
    template = _open(f"{tokenizer.folder} ({first})", named[first], tokenizer)
    if "tool_use" in named and first != "tool_use":
        template.for_tools = _open(f"{tokenizer.folder} (tool_use)", named["tool_use"], tokenizer)
    return template


def _open(name: str, source: str, tokenizer: Tokenizer) -> ChatTemplate:
    try:
        return ChatTemplate(source, tokenizer.special_tokens)
    except ConfigError as error:
        raise ConfigError(f"chat_template: {name}: {str(error).removeprefix('chat_template: ')}") from None


def _named_sources(tokenizer: Tokenizer) -> dict[str, str]:
    """Return templates by name, as transformers stores them: in files, or else in the tokenizer's settings.

    Raises ConfigError.
    """
    given = tokenizer.settings.get("chat_template") or {}
    if isinstance(given, str):
        given = {"default": given}
    elif isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        given = {entry.get("name"): entry.get("template") for entry in given}
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in [*given, *given.values()]):
        raise ConfigError(
            "tokenizer_config.json: chat_template: wanted a text, a list of objects with `name` and `template`, or an "
            "object of named texts"
        )
    named = dict(given)
    if (tokenizer.folder / "chat_template.jinja").is_file():
        named["default"] = _read(tokenizer.folder / "chat_template.jinja")
    for path in sorted(tokenizer.folder.glob("additional_chat_templates/*.jinja")):
        named[path.stem] = _read(path)
    return named


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {path} cannot be read: {error}") from None
