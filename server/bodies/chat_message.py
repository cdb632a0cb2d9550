"""Define messages of a chat: their types, and the checks of a list of them.

In a checked list every message has a content or calls, and every result of a tool answers a call before it.
"""

import re
from typing import Annotated, Literal

import msgspec

from server.api_error import invalid

MAX_CALL_ID_CHARS = 256
ROLE = "[A-Za-z0-9_-]{1,64}"  # a template writes it as it is, so no control token may be spelled out in it

CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CALL_ID_CHARS)]


class Part(msgspec.Struct, kw_only=True):
    type: str | None = None
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """Name a function and its `arguments`: a JSON object, as text."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, kw_only=True):
    """A tool call that the assistant made before."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] | None = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Prediction(msgspec.Struct, kw_only=True):
    """A text that the answer may repeat in parts."""

    content: str | list[Part]
    type: Literal["content"] = "content"


def check_messages(messages: list[Message]) -> None:
    if not messages:
        raise invalid("messages", "empty; wanted at least one message")
    called: set[str] = set()
    for i, message in enumerate(messages):
        if re.fullmatch(ROLE, message.role) is None:
            raise invalid(f"messages[{i}].role", f"got {message.role[:80]!r}, wanted a name: {ROLE}")
        if message.content is None and not message.tool_calls:
            raise invalid(f"messages[{i}].content", "missing; wanted a string or a list of text parts")
        check_parts(f"messages[{i}].content", message.content)
        _check_calls(i, message, called)


def check_parts(field: str, content: str | list[Part] | None) -> None:
    """Check that a content's parts are texts. Raises ApiError 400."""
    for j, part in enumerate(content if isinstance(content, list) else ()):
        if part.type != "text":
            raise invalid(f"{field}[{j}].type", f"got {part.type!r}, only 'text' is supported")
        if part.text is None:
            raise invalid(f"{field}[{j}].text", "missing; wanted a string")


def _check_calls(i: int, message: Message, called: set[str]) -> None:
    """Check that calls are the assistant's and that a result answers one. `called`: the ids of the calls so far."""
    if message.tool_calls and message.role != "assistant":
        raise invalid(
            f"messages[{i}].tool_calls",
            f"given for role {message.role!r}; only the assistant's messages have tool calls",
        )
    called.update(call.id for call in message.tool_calls or ())
    if message.role != "tool":
        return
    if message.tool_call_id is None:
        raise invalid(f"messages[{i}].tool_call_id", "missing; wanted the id of the call that this answers")
    if message.tool_call_id not in called:
        got = message.tool_call_id[:80]
        raise invalid(f"messages[{i}].tool_call_id", f"got {got!r}; no message before it has a call with this id")


def join_texts(texts: list[str]) -> str | list[Part]:
    """Return a message's content made of these texts."""
    return [Part(type="text", text=text) for text in texts] if len(texts) > 1 else "".join(texts)


def message_texts(message: Message | Prediction) -> list[str]:
    """Return the texts of a message's content, one for each part."""
    if isinstance(message.content, list):
        return [part.text or "" for part in message.content]
    return [message.content or ""]


def message_text(message: Message) -> str:
    """Return a message's content as one string, with a newline between text parts."""
    return "\n".join(message_texts(message))
