"""The types of what is told of sessions."""

from typing import Literal

from server.routes.answer import Answer, Count


class SessionConversation(Answer):
    """Count the tokens of a conversation's last prompt and answer, and of these, what is kept where.

    `is_awaited`: its last answer called tools.
    """

    turns: Count
    running: Count
    is_awaited: bool
    tokens: Count
    device_tokens: Count
    host_tokens: Count
    disk_tokens: Count
    idle_seconds: float


class Session(Answer):
    id: str
    object: Literal["session"]
    conversations: list[SessionConversation]


class SessionList(Answer):
    object: Literal["list"]
    data: list[Session]


class DeletedSession(Answer):
    """Tell how many tokens are in memory no more; what others share, or what is running, stays."""

    id: str
    object: Literal["session"]
    deleted: Literal[True]
    forgotten_tokens: Count
