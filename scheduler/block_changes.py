"""Define the messages in which the engine reports which blocks of KV can be reused, and in which memory.

A block is named by the digest of all tokens up to its end. Media have the names of vLLM's cache events.
"""

from typing import Literal

import msgspec

Medium = Literal["GPU", "CPU", "DISK"]
GPU: Medium = "GPU"
CPU: Medium = "CPU"
DISK: Medium = "DISK"


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A chain of blocks that can be found in a medium from now on. Each follows the one before it in the prompt.

    parent: the digest of the block before the first; None: there is none, or it is unknown.
    tokens: the token ids of all blocks, packed (`pack_tokens`). Empty for a record on disk that an earlier engine
        wrote and no request has used since.
    block_tokens: the tokens of each block.
    adapter: the number of the LoRA adapter; 0: none.
    salt: the salt in the blocks' digests.
    """

    medium: Medium
    digests: list[bytes]
    parent: bytes | None
    tokens: bytes
    block_tokens: int
    adapter: int = 0
    salt: str = ""


class BlocksRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that can no longer be found in a medium."""

    medium: Medium
    digests: list[bytes]


class BlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All blocks reported so far are gone from every medium; only blocks reported later exist."""


BlockChange = BlocksStored | BlocksRemoved | BlocksCleared


class CacheChanges(msgspec.Struct, frozen=True, tag=True):
    """The engine's message with block changes, in the order in which they happened. time_s: Unix time."""

    time_s: float
    changes: list[BlockChange]

    @property
    def num_bytes(self) -> int:
        """Estimate the memory that this message takes."""
        return 64 + sum(
            64 * len(one.digests) + (len(one.tokens) if isinstance(one, BlocksStored) else 0)
            for one in self.changes
            if not isinstance(one, BlocksCleared)
        )
