"""Define the parts of an answer: content, reasoning and tool calls, in pieces and complete.

A stream sends the pieces. Joined, they are the complete answer, however the text was cut.
"""

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field

_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # what Mistral's chat templates insist on, and nobody minds


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call with this index and name begins; its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A complete call. arguments: JSON as the model wrote it, cut if the answer was."""

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ReadAnswer:
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def join_parts(parts: Iterable[Part]) -> ReadAnswer:
    """Return the whole answer that the pieces make."""
    answer = ReadAnswer()
    content, reasoning = [], []
    arguments: list[list[str]] = []
    for part in parts:
        if isinstance(part, Content):
            content.append(part.text)
        elif isinstance(part, Reasoning):
            reasoning.append(part.text)
        elif isinstance(part, CallBegun):
            answer.calls.append(ToolCall(part.call_id, part.name, ""))
            arguments.append([])
        else:
            arguments[part.index].append(part.text)
    answer.content, answer.reasoning = "".join(content), "".join(reasoning)
    for call, pieces in zip(answer.calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return answer


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
