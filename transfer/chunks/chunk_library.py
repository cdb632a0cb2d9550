"""Hold the chunks that requests wait for: in the store, or computed for them and kept until they have read them.

A chunk that a request holds stays until it is released, whether the disk has room for it or not. A computed chunk can
be found at once. It has memory of its own until it is stored, or, if the store has no room, until it is released.
Methods may be called from any thread.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from transfer.chunks.chunk_format import ChunkKey, has_finite_scales
from transfer.chunks.chunk_store import ChunkLease, ChunkStore
from transfer.host_config import LEAST_AHEAD_BYTES
from transfer.host_pages import Pages

log = logging.getLogger(__name__)


class ChunkSource(Protocol):
    """The source that a chunk is read from: a lease of the store, or a chunk that was just computed."""

    key: ChunkKey

    @property
    def is_in_memory(self) -> bool:
        """Return whether `layer` never needs `out`."""
        ...

    def layer(self, index: int, out: Pages) -> "Future[Pages]":
        """Return a layer; see `ChunkLease`."""
        ...

    def release(self) -> None: ...


class _Kept:
    """A computed chunk that may exist nowhere else."""

    is_in_memory = True

    def __init__(self, key: ChunkKey, layers: Sequence[Pages]) -> None:
        self.key = key
        self._layers = layers

    def layer(self, index: int, out: Pages) -> "Future[Pages]":
        future: Future[Pages] = Future()
        future.set_result(self._layers[index])
        return future

    def release(self) -> None:
        return


@dataclass(eq=False, slots=True)
class _Held:
    """A chunk held by `count` requests. It has a lease or layers, or is still to be computed. is_alone: the store had
    no room for it and will not have it.
    """

    count: int = 0
    lease: ChunkLease | None = None
    layers: Sequence[Pages] | None = None
    is_alone: bool = False
    is_refused: bool = field(default=False)

    @property
    def is_there(self) -> bool:
        return self.lease is not None or self.layers is not None


@dataclass(eq=False, frozen=True, slots=True)
class _Writing:
    """A computed chunk that is being stored. is_written: returns whether it is on the disk."""

    layers: Sequence[Pages]
    is_written: "Future[bool]"


class ChunkLibrary:
    """Chunks by key. store: where chunks are looked up and stored."""

    def __init__(self, store: ChunkStore) -> None:
        self.store = store
        self._lock = Lock()
        self._held: dict[str, _Held] = {}
        self._writing: dict[str, _Writing] = {}
        self._done: list[tuple[ChunkKey, Future[bool] | None]] = []
        self._bytes_kept = 0  # of computed chunks that the store does not have

    def has(self, key: ChunkKey) -> bool:
        """Return whether the chunk is on the disk now and need not be stored."""
        return self.store.has(key)

    def find_written(self, key: ChunkKey) -> "Future[bool] | None":
        """Return a future of whether the chunk is on the disk, if it is being written now; else None."""
        with self._lock:
            writing = self._writing.get(key.name)
            return None if writing is None else writing.is_written

    def hold(self, key: ChunkKey) -> bool:
        """Hold a chunk until `release`, and return whether it is there. If it is computed later, it is kept."""
        with self._lock:
            held = self._held.setdefault(key.name, _Held())
            held.count += 1
            if not held.is_there and key.name in self._writing:
                held.layers = self._writing[key.name].layers
            if held.is_there:
                return True
        lease = self.store.find(key)
        with self._lock:
            if lease is not None and held.lease is None and held.count:
                held.lease, lease = lease, None
            is_there = held.is_there
        if lease is not None:
            lease.release()
        return is_there

    def release(self, key: ChunkKey) -> None:
        """Release a chunk, once for each `hold`."""
        with self._lock:
            held = self._held[key.name]
            held.count -= 1
            if held.count:
                return
            del self._held[key.name]
            if held.is_alone:
                self._bytes_kept -= self._bytes_of(key)
        if held.lease is not None:
            held.lease.release()

    def is_there(self, key: ChunkKey) -> bool:
        """Return whether a held chunk is there."""
        with self._lock:
            return self._held[key.name].is_there

    def is_refused(self, key: ChunkKey) -> bool:
        """Return whether a held chunk was computed and cannot be kept."""
        with self._lock:
            return self._held[key.name].is_refused

    def open(self, key: ChunkKey) -> ChunkSource | None:
        """Return a source to read a chunk from, which the caller releases; None if there is none."""
        with self._lock:
            kept = self._held.get(key.name) or self._writing.get(key.name)
            if kept is not None and kept.layers is not None:
                return _Kept(key, kept.layers)
        return self.store.find(key)

    def keep(self, key: ChunkKey, layers: Sequence[Pages]) -> None:
        """Keep a computed chunk. layers: uint8 `[layer_bytes]` for each layer. Its holders have it at once; `take_done`
        reports later whether it is on the disk. A chunk whose rows are not finite is refused.
        """
        if not all(has_finite_scales(layer.data, self.store.folder.shape) for layer in layers):
            self.refuse(key, "it has keys or values that are not finite, or span more than float32 holds")
            return
        with self._lock:
            written = self.store.put(key, layers)
            self._writing[key.name] = _Writing(layers, written)
            held = self._held.get(key.name)
            if held is not None and not held.is_there:
                held.layers = layers
            self._bytes_kept += self._bytes_of(key)
            self._done.append((key, written))
        written.add_done_callback(lambda _: self._give_to_store(key, layers))

    def _give_to_store(self, key: ChunkKey, layers: Sequence[Pages]) -> None:
        """Finish a write. The store now has the chunk, or it had no room and the holders keep the computed one."""
        with self._lock:
            writing = self._writing.get(key.name)
            if writing is not None and writing.layers is layers:  # else it was computed again meanwhile
                del self._writing[key.name]
            held = self._held.get(key.name)
            is_held = held is not None and held.layers is layers
        lease = self.store.find(key) if is_held else None
        with self._lock:
            held = self._held.get(key.name)
            if held is not None and held.layers is layers:
                if held.lease is None and lease is None:
                    held.is_alone = True
                    return
                held.layers = None
                if held.lease is None:  # else it was also found while it was computed
                    held.lease, lease = lease, None
            self._bytes_kept -= self._bytes_of(key)
        if lease is not None:
            lease.release()

    @property
    def room_bytes(self) -> int:
        """Return the bytes left for chunks that are still to be computed: the store's memory limit less the computed
        chunks that the store does not have. It may be below 0.
        """
        with self._lock:
            return max(self.store.memory_limit_bytes, LEAST_AHEAD_BYTES) - self._bytes_kept

    def _bytes_of(self, key: ChunkKey) -> int:
        return self.store.folder.shape.chunk_bytes(key.num_tokens)

    def refuse(self, key: ChunkKey, reason: str) -> None:
        """Report that a computed chunk cannot be kept. Its holders then compute its tokens as they do other text."""
        log.warning("chunk_not_kept name=%s reason=%s", key.name, reason)
        with self._lock:
            held = self._held.get(key.name)
            if held is not None:
                held.is_refused = True
            self._done.append((key, None))

    def take_done(self) -> "list[tuple[ChunkKey, Future[bool] | None]]":
        """Return the chunks that were computed since the last call, each with a future of whether it is on the disk.
        None in place of the future: the chunk cannot be kept.
        """
        with self._lock:
            done, self._done = self._done, []
        return done

    def shutdown(self) -> None:
        """Close the library and the store. No chunk may be held or read any more."""
        with self._lock:
            leases = [held.lease for held in self._held.values() if held.lease is not None]
            self._held.clear()
        for lease in leases:
            lease.release()
        self.store.shutdown()
