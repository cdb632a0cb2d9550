"""Define the answers about sessions, saved contexts and slots."""

from typing import Literal

from server.routes.answer import Answer, CachedFrom, Count, PassedOver


class SessionConversation(Answer):
    """Count the tokens of a conversation's last prompt and answer, and of these, what is kept where.

    `is_awaited`: its last answer called tools.
    """

    slot: Count
    turns: Count
    running: Count
    is_awaited: bool
    tokens: Count
    device_tokens: Count
    host_tokens: Count
    disk_tokens: Count
    idle_seconds: float


class Session(Answer):
    """Tell what is kept of a session. `disk_bytes`: of all its branches, what others share included."""

    id: str
    object: Literal["session"]
    conversations: list[SessionConversation]
    disk_bytes: Count


class SavedContext(Answer):
    """Tell what was saved by name: its tokens, and of these, what is on disk now."""

    id: str
    object: Literal["saved_context"]
    session: str
    tokens: Count
    disk_tokens: Count
    disk_bytes: Count
    created: Count


class OwnedContext(SavedContext):
    """A saved context and whose it is. `key_is_known`: false once the key that saved it is gone."""

    owner: str
    key_is_known: bool


class SavedContextList(Answer):
    object: Literal["list"]
    data: list[OwnedContext]


class SessionList(Answer):
    object: Literal["list"]
    data: list[Session]
    saved: list[SavedContext]


class DeletedSession(Answer):
    """Tell how many tokens are in memory no more; what others share, or what is running, stays."""

    id: str
    object: Literal["session"]
    deleted: Literal[True]
    forgotten_tokens: Count


class DeletedContext(Answer):
    id: str
    object: Literal["saved_context"]
    deleted: Literal[True]


class Slot(Answer):
    """A conversation, by its number. `n_ctx`: tokens that a context has at most."""

    id: Count
    n_ctx: Count
    is_processing: bool
    session: str
    tokens: Count
    device_tokens: Count
    host_tokens: Count
    disk_tokens: Count


class SlotTimings(Answer):
    save_ms: float | None = None
    restore_ms: float | None = None


class SlotDone(Answer):
    """Tell what was saved, restored or erased: tokens, and bytes on disk; which fields come depends on the action."""

    id_slot: Count
    filename: str | None = None
    n_saved: Count | None = None
    n_written: Count | None = None
    n_restored: Count | None = None
    n_read: Count | None = None
    n_erased: Count | None = None
    cached_tokens_from: CachedFrom | None = None
    passed_over_on_disk: PassedOver | None = None
    computed_again_tokens: Count | None = None
    timings: SlotTimings | None = None
