"""Report and forget what a model's folder on disk has of an owner while no engine runs. Imports no torch."""

from collections.abc import Callable
from pathlib import Path

from scheduler.messages import AskSessions, SavedContext, Sessions
from transfer.disk.context_store import KV
from transfer.disk.holders import SAVED, SESSION, Holder, forget_holder, read_holders


def read_sessions(folder: Path | None, block_tokens: int, asked: AskSessions) -> Sessions:
    """Answer `AskSessions` from the files alone, after forgetting what it names. folder: of the model; None: it has
    none.
    """
    is_deleted, owner = False, asked.owner
    if folder is not None:
        if asked.forget:
            forget_holder(folder, SESSION, owner, asked.forget)
        is_deleted = bool(asked.forget_saved) and forget_holder(folder, SAVED, owner, asked.forget_saved)
    holders = [] if folder is None else read_holders(folder)

    def num_bytes(record: str) -> int:
        assert folder is not None
        try:
            return (folder / record).stat().st_size
        except OSError:  # evicted
            return 0

    mine = [one for one in holders if one.owner == owner and one.kind == SESSION]
    sizes = {one.name: sum(map(num_bytes, one.records)) for one in mine}
    saved = [
        describe_saved(one, num_bytes, block_tokens)
        for one in holders
        if one.kind == SAVED and (asked.of_all or one.owner == owner)
    ]
    return Sessions("", [], 0, {name: size for name, size in sizes.items() if size}, saved, is_deleted)


def describe_saved(holder: Holder, num_bytes: Callable[[str], int], block_tokens: int) -> SavedContext:
    """Describe a saved context. num_bytes(record): the size of its file; 0: it was evicted."""
    there = {record: size for record in holder.records if (size := num_bytes(record))}
    return SavedContext(
        name=holder.name,
        session=holder.session,
        tokens=len(holder.token_ids()) // 4,
        disk_tokens=block_tokens * sum(one.endswith(f".{KV}") for one in there),
        disk_bytes=sum(there.values()),
        created_s=holder.created_s,
        owner=holder.owner,
    )
