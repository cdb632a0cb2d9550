"""Snapshots of recurrent layers' states in host memory, found by the hash of the last block in front of them.

A snapshot is copied to host memory when it is kept on the card, beside all else, so the card may evict it at any time.
It stays here when a prompt begins with a copy. The one that is cheapest to compute again is evicted first.
"""

from dataclasses import dataclass

from scheduler.cache.eviction_order import EvictionOrder, Owners


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot behind `end` blocks, of a prefix whose first block is `root`; `owner` left it."""

    place: int
    root: bytes
    end: int
    owner: int


class HostSnapshots:
    """Which place of `count` has which snapshot."""

    def __init__(self, count: int, owners: Owners | None = None) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._by_hash: dict[bytes, _Snapshot] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder(owners)

    def __len__(self) -> int:
        return len(self._by_hash)

    def add(self, digest: bytes, root: bytes, end: int, cost: float, owner: int) -> int | None:
        """Return the place that a snapshot is to be copied to; None: there is none, or it has one already."""
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
        """Return where a snapshot is, which is used; None: it is not here."""
        found = self._by_hash.get(digest)
        if found is None:
            return None
        self._order.touch(digest)
        return found.place

    def has(self, digest: bytes) -> bool:
        return digest in self._by_hash

    def last_end(self, hashes: list[bytes], num_blocks: int, step: int) -> int:
        """Return the most of these blocks in front that a snapshot is behind, a multiple of `step`."""
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
        """Forget what this owner left, or is behind one of these blocks, but what is behind one of `kept`."""
        for digest, one in list(self._by_hash.items()):
            if (one.owner == owner or digest in hashes) and digest not in kept:
                self.drop(digest)

    def retract(self, root: bytes) -> None:
        """Forget all that begin with this block."""
        for digest in [digest for digest, one in self._by_hash.items() if one.root == root]:
            self.drop(digest)
