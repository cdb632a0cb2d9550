"""Keep snapshots of recurrent layers' states in host memory, found by the hash of the last block before them.

A snapshot is copied to host memory when it is kept on the card, so the card may evict it at any time. It stays in host
memory when a prompt starts from a copy. The snapshot that is cheapest to compute again is evicted first.
"""

from dataclasses import dataclass

from scheduler.cache.eviction_order import EvictionOrder, Owners


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot after `end` blocks of a prefix. place: where it is. root: hash of the prefix's first block. owner: the
    number of the conversation or front that left it.
    """

    place: int
    root: bytes
    end: int
    owner: int


class HostSnapshots:
    """Assigns snapshots to `count` places in host memory."""

    def __init__(self, count: int, owners: Owners | None = None) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._by_hash: dict[bytes, _Snapshot] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder(owners)

    def __len__(self) -> int:
        return len(self._by_hash)

    def add(self, digest: bytes, root: bytes, end: int, cost: float, owner: int) -> int | None:
        """Return the place to copy a snapshot to; None: it has one already, or there are no places at all."""
        if digest in self._by_hash:
            self._order.touch(digest)
            return None
        if not self.count:
            return None
        if not self._free:
            self._free.append(self._by_hash.pop(self._order.pop()).place)
        self._by_hash[digest] = _Snapshot(self._free.pop(), root, end, owner)
        self._order.put(digest, cost, owner)
        return self._by_hash[digest].place

    def place_of(self, digest: bytes) -> int | None:
        """Return the place of a snapshot, and note its use; None: it is not here."""
        found = self._by_hash.get(digest)
        if found is None:
            return None
        self._order.touch(digest)
        return found.place

    def has(self, digest: bytes) -> bool:
        return digest in self._by_hash

    def last_end(self, hashes: list[bytes], num_blocks: int, step: int) -> int:
        """Return the most of the first `num_blocks` blocks that end with a snapshot, a multiple of `step`; 0: none."""
        ends = [
            one.end
            for digest, one in self._by_hash.items()
            if one.end <= num_blocks and one.end % step == 0 and hashes[one.end - 1] == digest
        ]
        return max(ends, default=0)

    def drop(self, digest: bytes) -> None:
        """Forget a snapshot, if it is here."""
        found = self._by_hash.pop(digest, None)
        if found is not None:
            self._order.remove(digest)
            self._free.append(found.place)

    def forget(self, owner: int, hashes: set[bytes], kept: set[bytes]) -> None:
        """Forget snapshots that this owner left or that follow one of these blocks, unless it is one of `kept`."""
        for digest, one in list(self._by_hash.items()):
            if (one.owner == owner or digest in hashes) and digest not in kept:
                self.drop(digest)

    def retract(self, root: bytes) -> None:
        """Forget all snapshots whose prefix begins with this block."""
        for digest in [digest for digest, one in self._by_hash.items() if one.root == root]:
            self.drop(digest)
