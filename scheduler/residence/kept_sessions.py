"""Tell what is kept of conversations and where, and forget what an owner does not want kept."""

import time

from scheduler.messages import AskSessions, KeptConversation, Sessions
from scheduler.residence.residence import Residence
from scheduler.sequences.conversation import Conversation


def answer_sessions(residence: Residence, asked: AskSessions) -> Sessions:
    """Return what is kept of an owner's conversations, used last first, once what it names is forgotten."""
    num_forgotten = 0
    for one in _named(residence, asked) if asked.forget else ():
        num_forgotten += _forget(residence, one)
    kept = [_describe(residence, one) for one in residence.conversations if one.owner == asked.owner]
    return Sessions(asked.request_id, kept[::-1], num_forgotten)


def _named(residence: Residence, asked: AskSessions) -> list[Conversation]:
    return [one for one in residence.conversations if one.owner == asked.owner and _name(one) == asked.forget]


def _name(one: Conversation) -> str:
    return one.session or f"conversation-{one.number}"


def _describe(residence: Residence, one: Conversation) -> KeptConversation:
    return KeptConversation(
        session=_name(one),
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
    """Count the blocks that are in host memory, behind the sink, whether they are on the device as well or not."""
    first, contexts = residence.num_sink_blocks, residence.contexts
    return 0 if contexts is None or len(one.hashes) <= first else contexts.find(one.hashes, first, len(one.hashes))[1]


def _forget(residence: Residence, one: Conversation) -> int:
    """Forget what nobody else reads of a conversation that does not run, and return its tokens in both memories; on
    disk, what no other conversation begins with.
    """
    if one.num_running:
        return 0
    kept = {digest for other in residence.conversations if other is not one for digest in other.hashes}
    residence.disk.forget(one.hashes, kept)
    num_before = _num_on_device(residence, one) + _num_in_host(residence, one)
    if residence.contexts is not None:
        residence.contexts.forget(one.hashes)
    residence.pages.forget_left_by(one.number)  # of turns that were taken back, too
    residence.pages.forget(one.hashes)
    residence.windows.forget(one.number, one.hashes, kept)
    num_left = _num_on_device(residence, one) + _num_in_host(residence, one)
    residence.conversations.forget(one)
    return (num_before - num_left) * residence.page_tokens
