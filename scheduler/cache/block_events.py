"""Record, change by change, which blocks can be found on the card, in host memory and on disk.

Pools report when they publish and withdraw a block by its digest. Several may hold a block in the same medium. The
prefix cache describes blocks before they are published, since pools know no tokens. A block without a description is
not reported, such as pages that a preempted sequence keeps for itself. A record on disk covers several blocks, which
are reported one by one. Of a record written before this engine started, only the last block is reported until a prompt
supplies its tokens. Invariant: applying the changes in order gives, for each medium, exactly the blocks that
`blocks_in` returns.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, repeat

import numpy as np

from scheduler.block_changes import CPU, DISK, GPU, BlockChange, BlocksCleared, BlocksRemoved, BlocksStored, Medium

_MOST_UNHELD = 65_536  # described blocks that are nowhere now; a record may be written after its pages are gone
_TOKEN_BYTES = 4


@dataclass(eq=False, slots=True)
class _Run:
    """Consecutive blocks of one prompt. tokens: packed, of all blocks. making: their adapter and salt."""

    digests: list[bytes]
    parent: bytes | None
    tokens: bytes
    making: tuple[int, str]


class BlockEvents:
    """The blocks of one engine. page_tokens: tokens of a block. record_tokens: of a record on disk; 0: no disk."""

    def __init__(self, page_tokens: int, record_tokens: int = 0) -> None:
        self._page_tokens = page_tokens
        self._record_tokens = record_tokens
        self._changes: list[BlockChange] = [BlocksCleared()]
        self._blocks: dict[bytes, tuple[_Run, int]] = {}  # described blocks: the run of each, and its index in it
        self._unheld: dict[bytes, None] = {}  # described blocks that are in no medium, the longest so first
        self._held: dict[Medium, dict[bytes, int]] = {GPU: {}, CPU: {}, DISK: {}}  # number of holders
        self._records: dict[bytes, list[bytes]] = {}  # the blocks of each record, by its last block
        self._bare: set[bytes] = set()  # records of which only the last block is reported
        self._moved: deque[tuple[bytes, bool]] = deque()  # records written or removed, reported by any thread

    def blocks_in(self, medium: Medium) -> set[bytes]:
        """Return the blocks that can be found in a medium, as of the last `take`."""
        return set(self._held[medium])

    def describe(self, hashes: list[bytes], begin: int, end: int, tokens: np.ndarray, adapter: int, salt: str) -> None:
        """Describe the blocks `[begin, end)` of a prompt, so that they may be published.

        hashes: of all blocks of the prompt. tokens: int32, the tokens of these blocks.
        """
        digests = hashes[begin:end]
        new = [digest for digest in digests if digest not in self._blocks]
        if not new:
            return
        raw = tokens.astype(np.int32, copy=False).tobytes()[: len(digests) * self._page_tokens * _TOKEN_BYTES]
        run = _Run(digests, hashes[begin - 1] if begin else None, raw, (adapter, salt))
        placed = list(zip(digests, zip(repeat(run), count()), strict=False))
        if len(new) < len(digests):
            placed = [one for one in placed if one[0] not in self._blocks]
        self._blocks.update(placed)
        self._unheld.update(dict.fromkeys(new))
        for digest in self._bare.intersection(digests):
            self._fill_record(digest)
        while len(self._unheld) > _MOST_UNHELD:
            oldest = next(iter(self._unheld))
            del self._unheld[oldest], self._blocks[oldest]

    def add(self, medium: Medium, digests: Iterable[bytes]) -> None:
        """Add one holder in a medium to each of these blocks, which are in the prompt's order."""
        held, blocks = self._held[medium], self._blocks
        known = [digest for digest in digests if digest in blocks]
        new = [digest for digest in known if digest not in held]
        for digest in known if len(new) < len(known) else ():
            if digest in held:
                held[digest] += 1
        held.update(dict.fromkeys(new, 1))
        for digest in new:
            self._unheld.pop(digest, None)
        begin = 0
        if self._is_of_one_run(new):
            self._changes.append(self._chain(medium, new))
            return
        for place in range(1, len(new) + 1):
            if place == len(new) or not self._follows(new[place - 1], new[place]):
                self._changes.append(self._chain(medium, new[begin:place]))
                begin = place

    def remove(self, medium: Medium, digests: Iterable[bytes]) -> None:
        """Remove one holder in a medium from each of these blocks."""
        held, gone = self._held[medium], []
        for digest in digests:
            num_holders = held.get(digest, 0)
            if num_holders > 1:
                held[digest] = num_holders - 1
            elif num_holders:
                del held[digest]
                gone.append(digest)
                if digest in self._blocks and not any(digest in other for other in self._held.values()):
                    self._unheld[digest] = None
        last = self._changes[-1] if self._changes else None
        if gone and isinstance(last, BlocksRemoved) and last.medium == medium:
            last.digests.extend(gone)
        elif gone:
            self._changes.append(BlocksRemoved(medium, gone))

    def move_record(self, digest: bytes, is_there: bool) -> None:
        """Note that a record was written to disk, or removed. digest: of its last block. Any thread may call."""
        self._moved.append((digest, is_there))

    def take(self) -> list[BlockChange]:
        """Return the changes since the last call, in order."""
        while self._moved:
            digest, is_there = self._moved.popleft()
            if is_there:
                self._add_record(digest)
            else:
                self.remove(DISK, self._records.pop(digest))
                self._bare.discard(digest)
        changes, self._changes = self._changes, []
        return changes

    # --- inside -------------------------------------------------------------------------------------------------------

    def _parent(self, digest: bytes) -> bytes | None:
        run, place = self._blocks[digest]
        return run.digests[place - 1] if place else run.parent

    def _follows(self, before: bytes, digest: bytes) -> bool:
        """Return whether a block directly follows the block `before`."""
        return self._parent(digest) == before

    def _is_of_one_run(self, digests: list[bytes]) -> bool:
        """Return whether these are consecutive blocks of one run, as most are."""
        if not digests:
            return False
        run, place = self._blocks[digests[0]]
        return run.digests[place : place + len(digests)] == digests

    def _chain(self, medium: Medium, digests: list[bytes]) -> BlocksStored:
        """Return the change that reports these consecutive blocks as stored."""
        (run, place), size = self._blocks[digests[0]], self._page_tokens * _TOKEN_BYTES
        adapter, salt = run.making
        if self._is_of_one_run(digests):
            tokens = run.tokens[place * size : (place + len(digests)) * size]
        else:
            tokens = b"".join(map(self._tokens_of, digests))
        parent = self._parent(digests[0])
        return BlocksStored(medium, digests, parent, tokens, self._page_tokens, adapter, salt)

    def _tokens_of(self, digest: bytes) -> bytes:
        (run, place), size = self._blocks[digest], self._page_tokens * _TOKEN_BYTES
        return run.tokens[place * size : (place + 1) * size]

    def _add_record(self, digest: bytes) -> None:
        digests = self._blocks_of_record(digest)
        if digests:
            self._records[digest] = digests
            self.add(DISK, digests)
            return
        self._records[digest] = [digest]
        self._bare.add(digest)
        self._held[DISK][digest] = 1
        self._unheld.pop(digest, None)
        self._changes.append(BlocksStored(DISK, [digest], None, b"", self._record_tokens))

    def _fill_record(self, digest: bytes) -> None:
        """Report all blocks of a record in place of its last one, if all are described now."""
        digests = self._blocks_of_record(digest)
        if digests:
            self._bare.discard(digest)
            self.remove(DISK, [digest])
            self._records[digest] = digests
            self.add(DISK, digests)

    def _blocks_of_record(self, digest: bytes) -> list[bytes]:
        """Return the blocks that a record covers; [] if not all of them are described."""
        digests: list[bytes] = []
        one: bytes | None = digest
        while len(digests) * self._page_tokens < self._record_tokens:
            if one is None or one not in self._blocks:
                return []
            digests.append(one)
            one = self._parent(one)
        return digests[::-1]
