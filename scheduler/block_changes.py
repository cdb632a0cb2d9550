"""The messages by which the engine tells which blocks of keys and values others may find, and where.

A block is named by the digest of all tokens to its end. Media have the names that vLLM's cache events give them.
"""

from typing import Literal

import msgspec

Medium = Literal["GPU", "CPU", "DISK"]
GPU: Medium = "GPU"
CPU: Medium = "CPU"
DISK: Medium = "DISK"


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A chain of blocks that can be found in a medium from now on, each behind the one before it.

    parent: the block in front of the first; None: there is none, or it is not known.
    tokens: of all blocks, packed (`pack_tokens`); empty where a record on disk was written before this engine began,
        and nobody has named its tokens.
    block_tokens: of each.
    adapter: its number; 0: none.
    salt: of the blocks' names.
    """

    medium: Medium
    digests: list[bytes]
    parent: bytes | None
    tokens: bytes
    block_tokens: int
    adapter: int = 0
    salt: str = ""


class BlocksRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that can be found in a medium no more."""

    medium: Medium
    digests: list[bytes]


class BlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No block can be found anywhere, but those that are told of behind this."""


BlockChange = BlocksStored | BlocksRemoved | BlocksCleared


class CacheChanges(msgspec.Struct, frozen=True, tag=True):
    """The engine's message of what has changed, in order. time_s: Unix time."""

    time_s: float
    changes: list[BlockChange]

    @property
    def num_bytes(self) -> int:
        """Return about what it takes in memory."""
        return 64 + sum(
            64 * len(one.digests) + (len(one.tokens) if isinstance(one, BlocksStored) else 0)
            for one in self.changes
            if not isinstance(one, BlocksCleared)
        )
