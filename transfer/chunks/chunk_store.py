"""Read document chunks for a prefill: from host memory, which has those used last, or layer by layer from the disk.

A read returns exactly the bytes that were stored, or its future reports that the chunk is lost. Leased memory is
neither evicted nor overwritten before the lease ends. Storing a chunk does not wait for the disk, and a lease waits
only for reads that leases have asked for. Methods may be called from any thread.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import numpy as np

from transfer.chunks.chunk_file import ChunkFile
from transfer.chunks.chunk_folder import ChunkFolder
from transfer.chunks.chunk_format import ChunkError, ChunkKey, ChunkShape, layer_ranges
from transfer.chunks.readers import Readers
from transfer.host_config import DocumentsConfig
from transfer.host_memory import slab_bytes
from transfer.host_pages import Pages, map_pages, pin_pages, unpin_pages
from transfer.host_tier import HostMemoryError
from transfer.slabs import GIB, PageSource, Slab, SlabPool

MAX_MAPPING_THREADS = 4

log = logging.getLogger(__name__)


def open_chunks(
    config: DocumentsConfig, memory_bytes: int, model: str, shape: ChunkShape, is_pinned: bool
) -> "ChunkStore":
    """Open the store of one model. model: the digest of its weights. memory_bytes: host memory for the chunks used
    last. is_pinned: whether it is registered with CUDA.
    """
    pin, unpin = (pin_pages, unpin_pages) if is_pinned else (None, None)
    folder = ChunkFolder(config.resolved_folder, model, shape, int(config.disk_limit_gib * GIB))
    slabs = SlabPool(memory_bytes, "documents.memory_limit_gib", PageSource(map_pages, pin, unpin), MAX_MAPPING_THREADS)
    return ChunkStore(folder, slabs, config.threads)


@dataclass(eq=False, slots=True)
class _Entry:
    """A chunk that is leased or in memory.

    file: open until every layer is in the slab; without a slab, until the end.
    layers: reads into the slab, by layer.
    wanted: reads that leases have asked for.
    num_unrequested: unfinished reads into the slab that no lease has asked for.
    """

    key: ChunkKey
    slab: Slab | None
    file: ChunkFile | None
    ranges: list[tuple[int, int]]
    num_missing: int
    layers: dict[int, "Future[Pages]"] = field(default_factory=dict)
    wanted: list["Future[Pages]"] = field(default_factory=list)
    num_leases: int = 0
    num_unrequested: int = 0
    is_lost: bool = False

    @property
    def is_idle(self) -> bool:
        return not (self.num_leases or self.num_unrequested)


class ChunkLease:
    """The right to read a chunk, until `release`. The chunk's memory, and buffers that are read into, must stay."""

    def __init__(self, store: "ChunkStore", entry: _Entry) -> None:
        self._store, self._entry = store, entry
        self.key = entry.key

    @property
    def is_in_memory(self) -> bool:
        """Return whether `layer` never needs `out`."""
        return self._entry.slab is not None

    def layer(self, index: int, out: Pages) -> "Future[Pages]":
        """Return a future of a layer's bytes, uint8 `[layer_bytes]`: in host memory, or read into `out` of that size.

        The future raises ChunkError if the chunk turns out to be lost. Layers that were read before are correct; to get
        the others, the caller computes the chunk again.
        """
        return self._store.start_read(self._entry, index, out)

    def release(self) -> None:
        """End the lease, once, after all copies of its layers have ended. Waits for running reads; reads that have not
        begun are cancelled, unless another lease wants them.
        """
        self._store.end_lease(self._entry)


class ChunkStore:
    """A folder of chunks, with a cache in memory from `slabs`. The least recently used chunk is evicted."""

    def __init__(self, folder: ChunkFolder, slabs: SlabPool, num_threads: int) -> None:
        """num_threads: how many layers are read from the disk at a time."""
        self.folder = folder
        self._slabs = slabs
        self._lock = Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # with a slab; the last used is last
        self._has_memory = True
        self._counts: Counter[str] = Counter()
        self._readers = Readers(num_threads)
        self._writer = ThreadPoolExecutor(1, "chunk-writes")

    def has(self, key: ChunkKey) -> bool:
        """Return whether the chunk is on the disk, and mark it there as used. The cache in memory does not change."""
        file = self.folder.open(key)
        if file is not None:
            file.close()
        return file is not None

    def find(self, key: ChunkKey) -> ChunkLease | None:
        """Return a lease of the chunk, or None if the caller must compute it. Reads the file's header, but no layer."""
        with self._lock:
            entry = self._lease(key)
        if entry is not None:
            self.folder.touch(key)
            return ChunkLease(self, entry)
        file = self.folder.open(key)
        with self._lock:
            entry = self._lease(key)  # another thread may have entered it by now
            if entry is None and file is not None:
                entry, file = self._enter(key, file), None
                self._counts["found_on_disk"] += 1
            elif entry is None:
                self._counts["absent"] += 1
        if file is not None:
            file.close()
        return None if entry is None else ChunkLease(self, entry)

    def put(self, key: ChunkKey, layers: Sequence[Pages]) -> "Future[bool]":
        """Store the bytes of every layer, uint8 `[layer_bytes]`, in memory and on disk. The future returns whether they
        are on the disk.

        `layers` must not change until the future is done. The caller checks `has_finite_scales` before.
        """
        return self._writer.submit(self._put, key, [layer.data for layer in layers])

    def delete(self, key: ChunkKey) -> "Future[None]":
        """Delete the chunk, after earlier writes. Leases of it stay valid."""
        return self._writer.submit(self._delete, key)

    def finish_reads(self) -> None:
        """Wait until all reads have ended, so that chunks that were read in part are completely in memory. Used to time
        memory.
        """
        with self._lock:
            under_way = [read for entry in self._entries.values() for read in entry.layers.values()]
        wait(under_way)

    def counts(self) -> Mapping[str, int]:
        """Return found_in_memory, found_on_disk, absent, lost (while read), stored, refused, evicted and set_aside."""
        with self._lock:
            return Counter(self._counts) + self.folder.counts

    @property
    def memory_limit_bytes(self) -> int:
        return self._slabs.limit_bytes

    @property
    def bytes_in_memory(self) -> int:
        return self._slabs.bytes_in_use

    def shutdown(self) -> None:
        """Finish writes and release memory. No lease may be held."""
        self._writer.shutdown()
        self._readers.shutdown()
        with self._lock:
            for entry in self._entries.values():
                self._end(entry)
            self._entries.clear()
        self._slabs.shutdown()

    def start_read(self, entry: _Entry, index: int, out: Pages) -> "Future[Pages]":
        """Start a read for a lease."""
        with self._lock:
            if entry.slab is not None and index in entry.layers:
                read = entry.layers[index]
                self._readers.set_wanted(read, True)
                return read
            if entry.slab is None:
                read = self._readers.submit(partial(self._read, entry, index, out), True)
            else:
                read = self._readers.submit(partial(self._read_to_slab, entry, index, entry.slab), True)
                entry.layers[index] = read
            entry.wanted.append(read)
            return read

    def end_lease(self, entry: _Entry) -> None:
        """End a lease. If all its reads were done, the rest of the chunk is read too, and the chunk then stays in
        memory: prompts that compute their first layers in full never ask for these layers. A chunk of which nothing was
        read, or whose reads were cancelled, is not kept in memory.
        """
        while (under_way := self._leave(entry)) is not None:
            wait(under_way)

    def _leave(self, entry: _Entry) -> "list[Future[Pages]] | None":
        """End a lease and return None, or return the reads that must end first."""
        with self._lock:
            if entry.num_leases == 1 and (under_way := self._stop_reads(entry)):
                return under_way
            entry.num_leases -= 1
            if entry.is_idle and entry.num_missing > 0 and not self._read_rest(entry):
                self._forget(entry)
            self._end_if_over(entry)
        return None

    def _stop_reads(self, entry: _Entry) -> "list[Future[Pages]]":
        """Cancel the last lease's reads that have not begun, and return the others."""
        under_way = [read for read in entry.wanted if not read.cancel()]
        if len(under_way) < len(entry.wanted):
            self._forget(entry)
        entry.wanted = []
        for read in entry.layers.values():
            self._readers.set_wanted(read, False)
        return under_way

    def _read_rest(self, entry: _Entry) -> bool:
        """Submit reads of the remaining layers, behind all requested reads, and return whether there are any."""
        if not entry.layers or entry.slab is None or self._entries.get(entry.key.name) is not entry:
            return False
        rest = [index for index in range(len(entry.ranges)) if index not in entry.layers]
        entry.num_unrequested += len(rest)
        for index in rest:
            read = partial(self._read_unrequested, entry, index, entry.slab)
            entry.layers[index] = self._readers.submit(read, False)
        return bool(rest)

    def _read_unrequested(self, entry: _Entry, index: int, slab: Slab) -> Pages:
        try:
            return self._read_to_slab(entry, index, slab)
        finally:
            with self._lock:
                entry.num_unrequested -= 1
                self._end_if_over(entry)

    def _end_if_over(self, entry: _Entry) -> None:
        if entry.is_idle and self._entries.get(entry.key.name) is not entry:
            self._end(entry)

    def _lease(self, key: ChunkKey) -> _Entry | None:
        entry = self._entries.get(key.name)
        if entry is not None:
            self._entries.move_to_end(key.name)
            entry.num_leases += 1
            self._counts["found_in_memory"] += 1
        return entry

    def _enter(self, key: ChunkKey, file: ChunkFile | None) -> _Entry:
        """Return a new, leased entry. It is in memory if there is room beside leased chunks."""
        shape = self.folder.shape
        slab = self._claim(shape.chunk_bytes(key.num_tokens))
        entry = _Entry(key, slab, file, layer_ranges(shape, key.num_tokens), shape.num_layers, num_leases=1)
        if slab is not None:
            self._entries[key.name] = entry
        return entry

    def _claim(self, num_bytes: int) -> Slab | None:
        if not self._has_memory or slab_bytes(num_bytes) > self._slabs.limit_bytes:
            return None
        idle = [entry for entry in self._entries.values() if entry.is_idle]
        while True:
            try:
                return self._slabs.claim([num_bytes])[0]
            except HostMemoryError:
                if not idle:
                    return None
                oldest = idle.pop(0)
                self._forget(oldest)
                self._end(oldest)

    def _forget(self, entry: _Entry) -> None:
        """Drop a chunk from memory."""
        if self._entries.get(entry.key.name) is entry:
            del self._entries[entry.key.name]

    def _end(self, entry: _Entry) -> None:
        if entry.file is not None:
            entry.file.close()
            entry.file = None
        if entry.slab is not None:
            self._slabs.release([entry.slab])

    def _read_to_slab(self, entry: _Entry, index: int, slab: Slab) -> Pages:
        begin, end = entry.ranges[index]
        try:
            pages = slab.wait()[begin:end]
        except HostMemoryError as error:
            with self._lock:
                self._forget(entry)
                self._has_memory = False  # the host has no memory: from now on chunks are read without the cache
            raise ChunkError(f"chunk {entry.key.name}: {error}") from error
        self._read(entry, index, pages)
        with self._lock:
            entry.num_missing -= 1
            if entry.num_missing == 0 and entry.file is not None:
                entry.file.close()
                entry.file = None
        return pages

    def _read(self, entry: _Entry, index: int, pages: Pages) -> Pages:
        assert entry.file is not None, "the file is open while layers are missing"
        try:
            entry.file.read(index, pages.data)
        except ChunkError as error:
            with self._lock:
                is_first, entry.is_lost = not entry.is_lost, True
                self._forget(entry)
                self._counts["lost"] += is_first
            if is_first:
                self.folder.set_aside(entry.key, str(error))
            raise ChunkError(f"chunk {entry.key.name}: {error}; compute it anew") from error
        return pages

    def _put(self, key: ChunkKey, layers: list[memoryview]) -> bool:
        self._keep_in_memory(key, layers)
        return self.folder.put(key, layers)

    def _keep_in_memory(self, key: ChunkKey, layers: list[memoryview]) -> None:
        with self._lock:
            if key.name in self._entries:
                return
            slab = self._claim(self.folder.shape.chunk_bytes(key.num_tokens))
        if slab is None:
            return
        entry = _Entry(key, slab, None, layer_ranges(self.folder.shape, key.num_tokens), 0)
        try:
            pages = slab.wait()
        except HostMemoryError:
            with self._lock:
                self._has_memory = False
                self._end(entry)
            return
        for index, ((begin, end), layer) in enumerate(zip(entry.ranges, layers, strict=True)):
            pages[begin:end] = np.frombuffer(layer, np.uint8)
            entry.layers[index] = Future()
            entry.layers[index].set_result(pages[begin:end])
        with self._lock:
            if key.name in self._entries:  # another process stored it, and it was found on the disk meanwhile
                self._end(entry)
            else:
                self._entries[key.name] = entry

    def _delete(self, key: ChunkKey) -> None:
        self.folder.delete(key)
        with self._lock:
            entry = self._entries.pop(key.name, None)
            if entry is not None and entry.is_idle:
                self._end(entry)
