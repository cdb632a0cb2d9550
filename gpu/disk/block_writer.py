"""Blocks on their way to the disk: copied out of their pages in stream order, written by a thread behind the steps."""

from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from gpu.disk.disk_copies import DiskCopies, pinned_bytes
from gpu.disk.record_shapes import num_buffers
from gpu.step import SavedBlock
from transfer.copies import Event
from transfer.disk.context_store import KV


class BlockWriter:
    """Buffers of pinned memory, a block each, that pass from the device to the disk and back."""

    def __init__(self, copies: DiskCopies) -> None:
        self._copies = copies
        shape = copies.store.kv
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(num_buffers(copies.store.config.memory_mib, sum(shape.part_bytes))):
            self._free.put(pinned_bytes(sum(shape.part_bytes), copies.pool.device))

    @property
    def num_free(self) -> int:
        """Return how many blocks may be saved now."""
        return self._free.qsize()

    def save(self, blocks: Sequence[SavedBlock]) -> None:
        """Copy blocks out of their pages; no more than `num_free`. Returns at once."""
        for block in blocks:
            buffer = self._free.get_nowait()
            done = self._copies.copy_down(self._copies.gather(block.page_ids), buffer)
            self._copies.store.run_write(partial(self._write, block.name, buffer, done))

    def shutdown(self) -> None:
        """Finish what is under way, and give the folder to others."""
        self._copies.store.shutdown()

    def _write(self, name: str, buffer: Tensor, done: Event) -> None:
        try:
            done.synchronize()
            parts = buffer.view(len(self._copies.layers), -1).numpy()
            self._copies.store.folder.put(KV, name, [part.data for part in parts])
        finally:
            self._free.put(buffer)
