"""Store the contexts of one model on disk, with threads that read and write them.

A block is named by the hash of all tokens up to its end, so a prefix that two contexts share is stored once. Reads run
side by side and begin in the order of their requests. Writes run one after another, in the background.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from transfer.disk.disk_config import DiskConfig
from transfer.disk.disk_counts import DiskCounts
from transfer.disk.disk_rate import ReadRate, find_rate
from transfer.disk.record_folder import RecordFolder
from transfer.disk.record_format import RecordShape
from transfer.disk.turn_bytes import TurnBytes

GIB = 2**30
KV = "kv"  # blocks of keys and values
COUNTED = ("written", "refused", "capped", "declined", "evicted", "damaged", "failed")
MOST_TOUCHES = 256  # prefixes whose marks may wait for the disk
END = "end"  # the content of windows or states at the end of a prefix


class ContextStore:
    """Records of one model's contexts. block_tokens: tokens of a block. kv: the shape of a block, with a part for each
    layer that has pages. end: the shape of the record of a prefix's end; None: the model needs none.
    """

    def __init__(self, config: DiskConfig, model: str, kv: RecordShape, end: RecordShape | None) -> None:
        """Open the folder. Raises FolderError."""
        self.config, self.block_tokens, self.kv, self.end = config, config.block_tokens, kv, end
        root = config.resolved_folder
        day = None if config.written_gib_a_day is None else int(config.written_gib_a_day * GIB)
        self.folder = RecordFolder(root, model, self.shapes, int(config.limit_gib * GIB), day)
        self.rate = ReadRate(find_rate(root, config.threads))
        self.bytes_read = 0
        self._turns = TurnBytes()
        self._lock = Lock()
        self._num_touches = 0  # marks that wait for the writer
        self._readers = ThreadPoolExecutor(config.threads, "context-reads")
        self._writer = ThreadPoolExecutor(1, "context-writes")
        self._last_write: Future[None] | None = None

    @property
    def shapes(self) -> list[RecordShape]:
        return [self.kv] if self.end is None else [self.kv, self.end]

    def watch_blocks(self, move: Callable[[bytes, bool], None]) -> None:
        """Call `move(digest, is_there)` for each block that is there, and whenever one is added or removed, from any
        thread. digest: the hash that names the block.
        """

        def see(file_name: str, is_there: bool) -> None:
            name, _, kind = file_name.partition(".")
            if kind == KV and "/" not in name:  # otherwise it belongs to another model
                move(bytes.fromhex(name), is_there)

        self.folder.watch(see)

    def count_front(self, names: Sequence[str], first: int) -> int:
        """Return how many of these blocks, in order, are there without a gap. Those before `first` are not checked."""
        end = first
        while end < len(names) and self.folder.has(KV, names[end]):
            end += 1
        return end

    def read_seconds(self, num_blocks: int) -> float:
        """Return the estimated seconds to read `num_blocks` blocks and the end of a prefix."""
        end_bytes = 0 if self.end is None else self.end.file_bytes
        return (num_blocks * self.kv.file_bytes + end_bytes) / self.rate.bytes_a_second

    def read(self, kind: str, name: str, part: int, out: memoryview) -> None:
        """Read a part of a record into `out`, now. Raises RecordError."""
        self.rate.begin()
        try:
            self.folder.read(kind, name, part, out)
        finally:
            self.rate.end(out.nbytes)
        self.bytes_read += out.nbytes

    def run_read(self, read: Callable[[], None]) -> "Future[None]":
        """Run `read` in a thread, after reads that were requested before."""
        return self._readers.submit(read)

    def run_write(self, write: Callable[[], None]) -> "Future[None]":
        self._last_write = self._writer.submit(write)
        return self._last_write

    @property
    def is_writing(self) -> bool:
        """Return whether a write is running or waiting."""
        return self._last_write is not None and not self._last_write.done()

    def run_touch(self, kind: str, names: Sequence[str]) -> None:
        """Mark the records of a prefix as used, after all waiting writes. If a slow disk has too many waiting marks,
        this one is dropped, since marks only order evictions.
        """
        if self._num_touches < MOST_TOUCHES:
            with self._lock:
                self._num_touches += 1
            self.run_write(lambda: self._touch(kind, names))

    def _touch(self, kind: str, names: Sequence[str]) -> None:
        try:
            self.folder.touch(kind, names)
        finally:
            with self._lock:
                self._num_touches -= 1

    def end_turn(self, names: Sequence[str]) -> None:
        """Count the bytes that a turn has written, after its writes, and mark the blocks of its prefix as used."""
        self.run_write(lambda: self._turns.add(self.folder.bytes_written - self._turns.total))
        if names:
            self.run_touch(KV, names)

    def counts(self) -> DiskCounts:
        folder = self.folder
        return DiskCounts(
            bytes_held=folder.bytes_held,
            records=len(folder),
            bytes_written=folder.bytes_written,
            bytes_read=self.bytes_read,
            read_rate=int(self.rate.bytes_a_second),
            bytes_today=folder.day.num_bytes,
            bytes_a_day=folder.day.limit_bytes or 0,
            turns_written=tuple(self._turns.counts),
            turn_bytes=self._turns.total,
            **{name: folder.counts[name] for name in COUNTED},
        )

    def shutdown(self) -> None:
        """Finish all writes, and unlock the folder."""
        self._writer.shutdown()
        self._readers.shutdown(cancel_futures=True)
        self.folder.shutdown()
