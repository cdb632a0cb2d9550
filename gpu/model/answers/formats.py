"""Declare a format of calls or of reasoning: its region in an answer, its sign in a chat template, its grammar.

A region is a field of transformers' response templates, version 1, as `server.parsing.response_template` reads it.
Names of tools are as long as a request may give them at most, and the beginning of a region is bounded as well: text
that might begin one is searched again from there with each new piece.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Region = Mapping[str, Any]

NAMED_CALL: Region = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""The transform of a region that opens with the tool's name and holds its arguments."""


@dataclass(frozen=True, slots=True)
class Tags:
    """Delimit arguments one by one with text values: what stands before a key, between it and its value, and behind."""

    begin: str
    between: str
    end: str


@dataclass(frozen=True, slots=True)
class Marked:
    """Write arguments as JSON with bare keys and without white space, and texts between two of `mark`."""

    mark: str


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Say how a grammar writes calls.

    `begin`, `between`, `end`: around all calls. `head`, `tail`: before and behind the arguments of one, with `{name}`
    for its tool; in JSON each text of the head is a token of its own. `arguments`: JSON of a schema, tags, marked
    texts, or any text up to the tail. Within content, `opens` is a pattern of everything that begins a call, with
    `{names}` for the tools'. `mark` is what a call then begins with; empty where that is its head, behind what the
    pattern `before` matches. Without `opens` no call within content is constrained.
    """

    head: tuple[str, ...]
    arguments: Literal["json", "text"] | Tags | Marked
    tail: str
    begin: str = ""
    between: str = ""
    end: str = ""
    opens: str = ""
    mark: str = ""
    before: str = ""


@dataclass(frozen=True, slots=True)
class Marks:
    """Delimit reasoning with plain texts."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Channels:
    """Split an answer into messages, each in a channel: `begin`, a channel's name, `message`, text, `end`, `turn`.

    `inner`: channels of messages that others may follow; `final`: that of the answer. `content`: the region of text
    outside of all others, which ends with what means nothing.
    """

    begin: str
    message: str
    end: str
    turn: str
    inner: tuple[str, ...]
    final: str
    content: Region

    @property
    def content_begin(self) -> str:
        """Return what a grammar writes in front of content."""
        return f"{self.begin}{self.final}{self.message}"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Declare how a model writes calls of tools.

    name: for `model.tool_parser`.
    sign: a pattern that chat templates of this format match, None where no template asks for it.
    before: names of formats whose signs such templates match as well, though they are not theirs.
    known_only: calls have no marks of their own, so one of an unknown tool is content.
    syntax: how a grammar writes calls, None where it cannot.
    syntax_of: another one, where a chat template has the text.
    channels: in which the whole answer comes.
    """

    name: str
    region: Region
    sign: str | None
    before: tuple[str, ...] = ()
    known_only: bool = False
    syntax: CallSyntax | None = None
    syntax_of: Mapping[str, CallSyntax] = field(default_factory=dict)
    channels: Channels | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Declare how a model marks its reasoning. `name`, for `model.reasoning_parser`, `sign`, `before` and `channels` as
    of CallFormat. `marks`: what a grammar writes around it, None where it cannot.
    """

    name: str
    region: Region
    sign: str | None
    before: tuple[str, ...] = ()
    marks: Marks | None = None
    channels: Channels | None = None


def json_head(arguments: str) -> tuple[str, ...]:
    """Return JSON's tokens one by one, since an answer that is JSON may begin as a call does and go on otherwise.

    arguments: the key of a call's arguments.
    """
    return ("{", '"name"', ": ", '"{name}"', ", ", f'"{arguments}"', ": ")
