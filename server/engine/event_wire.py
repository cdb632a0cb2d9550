"""Encode cache events as vLLM does: MessagePack arrays, each event with its name first.

Fields have the order of `vllm/distributed/kv_events.py` before it wrote maps, since routers read them by position.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from scheduler.block_changes import BlockChange, BlocksCleared, BlocksRemoved, BlocksStored, CacheChanges


@dataclass(frozen=True, slots=True)
class AdapterTag:
    """An adapter's name, and the salt of its blocks if the request has none."""

    name: str
    salt: str


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks, after `parent_block_hash`, that a medium has now. token_ids: of all; []: unknown."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None  # of each block; a salt stands at a prompt's first


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(message: CacheChanges, adapters: Sequence[AdapterTag]) -> bytes:
    """Encode a batch for publication. adapters: by number, from 1 on."""
    events = [_event(change, adapters) for change in message.changes]
    return _ENCODER.encode(KVEventBatch(message.time_s, events))


def cleared(time_s: float) -> CacheChanges:
    """Return the message that an engine is gone, with all of its blocks."""
    return CacheChanges(time_s, [BlocksCleared()])


def block_hash(digest: bytes) -> int:
    """Return a block's 64-bit hash, in the form that vLLM publishes by default."""
    return int.from_bytes(digest[-8:], "big")


def _event(change: BlockChange, adapters: Sequence[AdapterTag]) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(change, BlocksStored):
        adapter = adapters[change.adapter - 1] if change.adapter else None
        is_first = change.salt != ("" if adapter is None else adapter.salt) and change.parent is None
        salts = [[change.salt], *[None] * (len(change.digests) - 1)] if is_first else None
        return BlockStored(
            block_hashes=[block_hash(one) for one in change.digests],
            parent_block_hash=None if change.parent is None else block_hash(change.parent),
            token_ids=array("i", change.tokens).tolist(),
            block_size=change.block_tokens,
            lora_id=change.adapter or None,
            medium=change.medium,
            lora_name=None if adapter is None else adapter.name,
            extra_keys=salts,
        )
    if isinstance(change, BlocksRemoved):
        return BlockRemoved([block_hash(one) for one in change.digests], change.medium)
    return AllBlocksCleared()
