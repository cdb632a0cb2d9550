"""Report what is kept of conversations and where, save conversations by name, and forget them on request."""

import time
from collections import deque

from scheduler.messages import (
    AskSessions,
    ContextSaved,
    KeptConversation,
    ReadSaved,
    SaveContext,
    SavedContext,
    SavedTokens,
    Sessions,
    Told,
)
from scheduler.residence.residence import Residence
from scheduler.residence.resting_sessions import describe_saved
from scheduler.sequences.conversation import Conversation
from transfer.disk.holders import SAVED, SESSION

Question = AskSessions | SaveContext | ReadSaved


class SessionDesk:
    """Answers questions about sessions. A question that forgets or saves waits for an unfinished save, so that a
    context stays complete while it is saved. Waiting questions keep their order.
    """

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self._waiting: deque[Question] = deque()

    def ask(self, question: Question) -> None:
        self._waiting.append(question)

    def take_answers(self) -> list[Told]:
        """Return the answers that are ready: to saves that have finished, and to questions that need not wait."""
        told: list[Told] = [*self._residence.disk.take_saved()]
        waiting, self._waiting = self._waiting, deque()
        for question in waiting:
            changes = isinstance(question, SaveContext) or (isinstance(question, AskSessions) and question.forgets)
            if changes and (self._residence.disk.is_saving or self._waiting):  # only those that change something wait
                self._waiting.append(question)
                continue
            answer = self._answer(question)
            told += [] if answer is None else [answer]
        return told

    def _answer(self, question: Question) -> Told | None:
        if isinstance(question, AskSessions):
            return answer_sessions(self._residence, question)
        if isinstance(question, SaveContext):
            return save_context(self._residence, question)
        return read_saved(self._residence, question)


def answer_sessions(residence: Residence, asked: AskSessions) -> Sessions:
    """Forget what the question names, and return what is kept of the owner's conversations, most recent first."""
    num_forgotten = 0
    if asked.forget:
        num_forgotten = _forget_all(residence, asked.owner, asked.forget, _named(residence, asked.owner, asked.forget))
    if asked.forget_slot >= 0:
        ones = [one for one in _of(residence, asked.owner) if one.slot == asked.forget_slot]
        num_forgotten = sum(_forget_all(residence, asked.owner, one.session, [one]) for one in ones)
    is_deleted = bool(asked.forget_saved) and residence.disk.forget_saved(
        asked.owner, asked.forget_saved, _hashes(residence)
    )
    kept = [_describe(residence, one) for one in _of(residence, asked.owner)]
    bytes_by_session, saved = _on_disk(residence, asked.owner, asked.of_all)
    return Sessions(asked.request_id, kept[::-1], num_forgotten, bytes_by_session, saved, is_deleted)


def save_context(residence: Residence, asked: SaveContext) -> ContextSaved | None:
    """Begin to save a conversation under a name. None: `DiskContexts.take_saved` will return the answer."""
    ones = _named(residence, asked.owner, asked.session) if asked.session else []
    if not asked.session:
        ones = [one for one in _of(residence, asked.owner) if one.slot == asked.slot]
    if residence.disk.side is None:
        return ContextSaved(asked.request_id, code="no_disk")
    if not ones:
        return ContextSaved(asked.request_id, code="unknown")
    answer = ContextSaved(asked.request_id, ones[-1].slot)
    if ones[-1].num_running:
        return ContextSaved(asked.request_id, ones[-1].slot, code="running")
    residence.disk.save(answer, ones[-1], asked.name)
    return None


def read_saved(residence: Residence, asked: ReadSaved) -> SavedTokens:
    """Return the tokens of a saved context."""
    side = residence.disk.side
    if side is None:
        return SavedTokens(asked.request_id, code="no_disk")
    holder = side.store.folder.holders.find(SAVED, asked.owner, asked.name)
    if holder is None:
        return SavedTokens(asked.request_id, code="unknown")
    sizes = side.store.block_tokens, side.store.kv.file_bytes
    return SavedTokens(asked.request_id, holder.token_ids(), holder.profile, holder.session, *sizes)


def _of(residence: Residence, owner: str) -> list[Conversation]:
    """Return an owner's conversations, the most recently used last."""
    return [one for one in residence.conversations if one.owner == owner]


def _named(residence: Residence, owner: str, session: str) -> list[Conversation]:
    return [one for one in _of(residence, owner) if _name(one) == session]


def _name(one: Conversation) -> str:
    return one.session or f"conversation-{one.number}"


def _hashes(residence: Residence) -> set[bytes]:
    """Return the hashes of the blocks of all conversations."""
    return {digest for one in residence.conversations for digest in one.hashes}


def _on_disk(residence: Residence, owner: str, of_all: bool) -> tuple[dict[str, int], list[SavedContext]]:
    """Return the bytes of each session of an owner on disk, and its saved contexts, or those of all owners."""
    side = residence.disk.side
    if side is None:
        return {}, []
    folder = side.store.folder
    sessions = {one.name: folder.num_bytes(one.records) for one in folder.holders.of(SESSION, owner)}
    for one in _of(residence, owner):
        if one.records:
            sessions[_name(one)] = sessions.get(_name(one), 0) + folder.num_bytes(one.records)
    saved = [
        describe_saved(holder, lambda record: folder.num_bytes([record]), side.store.block_tokens)
        for holder in folder.holders.of(SAVED, None if of_all else owner)
    ]
    return {name: num_bytes for name, num_bytes in sessions.items() if num_bytes}, saved


def _describe(residence: Residence, one: Conversation) -> KeptConversation:
    return KeptConversation(
        session=_name(one),
        slot=one.slot,
        turns=one.num_turns,
        running=one.num_running,
        is_awaited=one.is_awaited,
        tokens=one.num_tokens,
        device_tokens=_num_on_device(residence, one) * residence.page_tokens,
        host_tokens=_num_in_host(residence, one) * residence.page_tokens,
        disk_tokens=residence.disk.count_tokens(one.hashes),
        idle_seconds=0.0 if one.num_running else time.monotonic() - one.used_s,
    )


def _num_on_device(residence: Residence, one: Conversation) -> int:
    return residence.pages.count_known(one.hashes, 0, len(one.hashes))


def _num_in_host(residence: Residence, one: Conversation) -> int:
    """Count the blocks after the sink that are in host memory, even if they are on the device as well."""
    first, contexts = residence.num_sink_blocks, residence.contexts
    return 0 if contexts is None or len(one.hashes) <= first else contexts.find(one.hashes, first, len(one.hashes))[1]


def _forget_all(residence: Residence, owner: str, session: str, ones: list[Conversation]) -> int:
    """Forget the conversations of a session that do not run, and return how many tokens they had in both memories.

    On disk, blocks stay if another conversation begins with them or another holder has them.
    """
    gone = [one for one in ones if not one.num_running]
    num_tokens = sum(_forget(residence, one) for one in gone)
    is_over = not _named(residence, owner, session)
    residence.disk.forget(owner, session, gone, _hashes(residence), is_over)
    return num_tokens


def _forget(residence: Residence, one: Conversation) -> int:
    """Forget a conversation in both memories, except what others read, and return the number of forgotten tokens."""
    kept = {digest for other in residence.conversations if other is not one for digest in other.hashes}
    num_before = _num_on_device(residence, one) + _num_in_host(residence, one)
    if residence.contexts is not None:
        residence.contexts.forget(one.hashes)
    residence.pages.forget_left_by(one.number)  # also blocks of turns that the client replaced
    residence.pages.forget(one.hashes)
    residence.windows.forget(one.number, one.hashes, kept)
    num_left = _num_on_device(residence, one) + _num_in_host(residence, one)
    residence.conversations.forget(one)
    return (num_before - num_left) * residence.page_tokens
