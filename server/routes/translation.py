"""Serve requests of other APIs as chats: the shared fields, and errors that name the fields that were sent."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
from pydantic_core import from_json

from server.api_error import ApiError, NoRoom, PromptTooLong
from server.bodies.chat_message import Message, Part, join_texts
from server.bodies.chat_tools import ChosenTool, NamedFunction
from server.bodies.field_table import DECODING
from server.bodies.fields import Rule, served
from server.bodies.generation_bodies import CacheSalt, ChatBody, check_chat
from server.bodies.keep_alive import KeepAlive
from server.generation.generation import Generation
from server.generation.history_truncation import kept_messages
from server.generation.prompt_tokens import context_of
from server.prompting.plain_chat import read_arguments
from server.routes.generate import chat_job, start_generation
from server.routes.route import Call

SHARED: dict[str, Rule] = {**served("model", "temperature", "top_p", "stream", "tools", "tool_choice"), **DECODING}


class TranslatedBody(msgspec.Struct, kw_only=True):
    """The fields that responses and messages share with chats under the same name."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    attention_profile: str | None = None
    attention_epsilon: float | None = None
    cache_salt: CacheSalt | None = None
    keep_alive: KeepAlive | None = None
    priority: int | None = None
    max_seconds: float | None = None


class HasText(Protocol):
    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Translation:
    """A request as a chat.

    origins[i]: the path in the request of message i of the chat.
    names: patterns of a chat's fields, and the request's names for them.
    new_messages: the messages of this request alone, without instructions, which later requests do not take over.
    tells_anthropic: errors about lengths have the wording that Anthropic's clients parse.
    most_tokens: of the answer, which may end earlier with the context.
    cuts_history: drop the oldest turns if the prompt is too long.
    """

    chat: ChatBody
    origins: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    new_messages: tuple[Message, ...]
    tells_anthropic: bool = False
    most_tokens: int | None = None
    cuts_history: bool = False

    def keep_only(self, kept: list[int]) -> "Translation":
        """Return the translation with only these messages of the chat."""
        chat = msgspec.structs.replace(self.chat, messages=[self.chat.messages[i] for i in kept])
        return replace(self, chat=chat, origins=tuple(self.origins[i] for i in kept))

    def renaming_errors(self) -> AbstractContextManager[None]:
        """Make errors of the chat name the fields that were sent."""
        return rename_errors(self.origins, self.names, self.tells_anthropic)


@contextmanager
def rename_errors(
    origins: Sequence[str], names: Sequence[tuple[str, str]], tells_anthropic: bool = False
) -> Iterator[None]:
    """Make errors name the fields that were sent; the arguments are those of a `Translation`."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        renamed = _rename(error.param, origins, names)
        message = renamed + error.message.removeprefix(error.param)
        if isinstance(error, NoRoom | PromptTooLong) and tells_anthropic:
            message = error.anthropic_message  # its clients read the numbers, and ask again for less
        raise ApiError(error.status, message, param=renamed, code=error.code, headers=error.headers) from None


def _rename(param: str, origins: Sequence[str], names: Sequence[tuple[str, str]]) -> str:
    found = re.match(r"messages\[(\d+)\]", param)
    if found is not None:
        return origins[int(found[1])]
    for pattern, name in names:
        param = re.sub(pattern, name, param)
    return param


def start_chat(body: TranslatedBody, messages: list[Message]) -> ChatBody:
    """Return a chat of these messages with the fields that all three bodies have."""
    return ChatBody(
        messages=messages,
        model=body.model,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        attention_profile=body.attention_profile,
        attention_epsilon=body.attention_epsilon,
        cache_salt=body.cache_salt,
        priority=body.priority,
        max_seconds=body.max_seconds,
    )


def join_parts(content: str | Sequence[HasText] | None) -> str | list[Part]:
    """Return the content of a chat's message for a text or parts of text."""
    return content or "" if content is None or isinstance(content, str) else join_texts([part.text for part in content])


def choose_function(name: str) -> ChosenTool:
    return ChosenTool(type="function", function=NamedFunction(name=name))


def read_call_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; of those that a limit cut, as far as they came."""
    try:
        given = from_json(arguments, allow_partial="trailing-strings") if arguments.strip() else {}
    except ValueError:
        given = None
    return given if isinstance(given, dict) else read_arguments(arguments)


async def generate_chat(call: Call[Any], translated: Translation, kind: str, param: str) -> Generation:
    """Return the chat's one answer, accepted by the engine. Raises ApiError that names what was sent."""
    with translated.renaming_errors():
        check_chat(translated.chat)
        limits = call.service.supervisor.ready()
    if translated.cuts_history:
        with translated.renaming_errors():
            kept = await kept_messages(call.service, translated.chat, limits)
        translated = translated.keep_only(kept)
    with translated.renaming_errors():
        job = await chat_job(call.service, translated.chat, limits, call.owner)
        if translated.most_tokens is not None:
            room = context_of(translated.chat, limits) - len(job.prompt.token_ids)
            job = replace(job, max_tokens=min(translated.most_tokens, room))
        generation = start_generation(call, kind, translated.chat, [job], limits)
        await generation.submit(None, None, param)
    return generation
