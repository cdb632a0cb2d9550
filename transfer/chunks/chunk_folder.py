"""Keep chunks on disk: a folder for each model and a file for each chunk, which is written under another name and then
renamed. The least recently used chunk is evicted first. No torch.

Several processes share the folder, its lock and its files' times. A file with a chunk's name is complete, or its reader
notices that it is not. The files of all models stay below the limit, including those that are being written. Evicting a
file does not disturb a process that has it open.

Room is reserved under the folder's lock, as a file of full size that its writer keeps locked; the file of a dead writer
is recognised because it is not locked. If the disk itself is full, files are evicted as they are for the limit. A
file's time is its last use, so the order survives restarts and is the same for all processes.
"""

import errno
import fcntl
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from transfer.chunks.chunk_file import ChunkFile, read_bytes, write_bytes
from transfer.chunks.chunk_format import (
    ChunkError,
    ChunkKey,
    ChunkShape,
    checksum,
    header_bytes,
    layer_ranges,
    read_header,
    write_header,
)
from transfer.chunks.room import (
    BAD,
    MODEL,
    PART,
    locked,
    oldest_first,
    remove_abandoned,
    scan,
    too_many_set_aside,
    write_with_room,
)

log = logging.getLogger(__name__)


class ChunkFolder:
    """Chunks of one model below `root`, which other models and processes share. Called from any thread."""

    def __init__(self, root: Path, model: str, shape: ChunkShape, limit_bytes: int) -> None:
        """model: the digest of its weights. limit_bytes: of the files of all models. If the folder cannot be made or
        written, that is logged, and nothing is found or stored.
        """
        assert MODEL.fullmatch(model), "a model is 32 hexadecimal digits"
        self.root, self.model, self.shape, self.limit_bytes = root, model, shape, limit_bytes
        self.counts: Counter[str] = Counter()  # stored, refused, evicted, set_aside
        self._folder = root / model
        self._is_refusing = False
        self._lock = Lock()  # of the counts
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(root):
                self._make_room(0)
        except OSError as error:
            self._refuse(error)

    def open(self, key: ChunkKey) -> ChunkFile | None:
        """Open a chunk's file and mark it as used; None if it does not exist. A damaged file is set aside."""
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("chunk_unreadable name=%s error=%s", key.name, error)
            return None
        try:
            checksums = self._examine(descriptor, key)
        except (ChunkError, OSError) as error:
            os.close(descriptor)
            self.set_aside(key, str(error))
            return None
        with suppress(OSError):  # in a read-only folder nothing is evicted, so the order does not matter
            _mark_used(descriptor)
        return ChunkFile(descriptor, key, self.shape, checksums)

    def touch(self, key: ChunkKey) -> None:
        """Mark a chunk as used, after it was read from memory."""
        with suppress(OSError):
            _mark_used(self._path(key))

    def put(self, key: ChunkKey, layers: Sequence[memoryview]) -> bool:
        """Store the bytes of every layer. Return False if there is no room or the disk fails, which is logged once."""
        assert [layer.nbytes for layer in layers] == [self.shape.layer_bytes(key.num_tokens)] * self.shape.num_layers
        path = self._path(key)
        try:
            if path.exists():
                self.touch(key)
                return True
            size = self.shape.file_bytes(key.num_tokens)
            self._count_evicted(write_with_room(self.root, size, lambda: self._store(key, layers)))
        except OSError as error:
            self._refuse(error)
            return False
        self._is_refusing = False
        self._count("stored")
        return True

    def delete(self, key: ChunkKey) -> None:
        """Delete the chunk for all processes, damaged or not. Processes that have it open can still read it."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            path.with_suffix(BAD).unlink(missing_ok=True)
        except OSError as error:
            log.warning("chunk_not_deleted name=%s error=%s", key.name, error)

    def set_aside(self, key: ChunkKey, reason: str) -> None:
        """Hide a damaged file from all readers. It is kept for inspection until its room is needed or MOST_SET_ASIDE
        others are set aside.
        """
        path = self._path(key)
        self._count("set_aside")
        log.warning("chunk_set_aside path=%s reason=%s", path.with_suffix(BAD), reason)
        try:
            path.rename(path.with_suffix(BAD))
            for old in too_many_set_aside(scan(self.root)):
                old.path.unlink(missing_ok=True)
        except FileNotFoundError:
            return  # another process has set it aside, or evicted it
        except OSError as error:
            log.warning("chunk_stays path=%s error=%s", path, error)

    def bytes_held(self) -> int:
        """Return the bytes of the files of all models."""
        return sum(found.num_bytes for found in scan(self.root))

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _count_evicted(self, num_files: int) -> None:
        if num_files:
            with self._lock:
                self.counts["evicted"] += num_files

    def _path(self, key: ChunkKey) -> Path:
        return self._folder / f"{key.name}.kv"

    def _examine(self, descriptor: int, key: ChunkKey) -> list[str]:
        size, wanted = os.fstat(descriptor).st_size, self.shape.file_bytes(key.num_tokens)
        raw = bytearray(min(header_bytes(self.shape), size))
        num_read = read_bytes(descriptor, memoryview(raw), 0)
        checksums = read_header(bytes(raw[:num_read]), self.model, key, self.shape)
        if size != wanted:
            raise ChunkError(f"it has {size:,} bytes, wanted {wanted:,}")
        return checksums

    def _store(self, key: ChunkKey, layers: Sequence[memoryview]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)  # the disk may have been full, or absent, at the start
        with locked(self.root):
            part, descriptor = self._reserve(key)
        try:
            self._write(descriptor, key, layers)
            with locked(self.root):  # a process that counts files sees this one under one name only
                os.rename(part, self._path(key))
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _reserve(self, key: ChunkKey) -> tuple[Path, int]:
        """Make a file of full size, which reserves room, and return its path and descriptor. The folder's lock is
        held.
        """
        size = self.shape.file_bytes(key.num_tokens)
        self._make_room(size)
        part = self._folder / f"{key.name}.{secrets.token_hex(4)}.part"
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, size)
        except BaseException:
            part.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return part, descriptor

    def _write(self, descriptor: int, key: ChunkKey, layers: Sequence[memoryview]) -> None:
        """Write the layers, then the header, and flush all to the disk before the file gets its name: after a loss of
        power a chunk is complete or absent. (If the disk only pretends to flush, checksums reveal it.)
        """
        begin = header_bytes(self.shape)
        checksums = []
        for layer, (at, _) in zip(layers, layer_ranges(self.shape, key.num_tokens), strict=True):
            checksums.append(checksum(layer))
            write_bytes(descriptor, layer, begin + at)
        write_bytes(descriptor, memoryview(write_header(self.model, key, self.shape, checksums)), 0)
        _mark_used(descriptor)  # the system's own times are some milliseconds coarse
        os.fsync(descriptor)

    def _make_room(self, num_bytes: int) -> None:
        """Evict files until `num_bytes` more fit below the limit. Raises OSError (EFBIG) if they cannot fit."""
        found = oldest_first(self.root)
        parts = [one for one in found if one.path.suffix == PART and not remove_abandoned(one.path)]
        found = [one for one in found if one.path.suffix != PART]
        room = self.limit_bytes - num_bytes - sum(one.num_bytes for one in parts)
        if num_bytes and room < 0:
            raise OSError(
                errno.EFBIG,
                f"a chunk of {num_bytes:,} bytes and those being written exceed the limit, {self.limit_bytes:,}",
            )
        spare = too_many_set_aside(found)
        held = sum(one.num_bytes for one in found)
        for one in found:
            if held > room or one in spare:
                one.path.unlink(missing_ok=True)
                held -= one.num_bytes
                self._count("evicted")

    def _refuse(self, error: OSError) -> None:
        """Log a refusal once, until a chunk is stored again."""
        self._count("refused")
        if not self._is_refusing:
            log.warning(
                "chunks_not_stored folder=%s error=%s remedy='check documents.folder and "
                "documents.disk_limit_gib' documents are computed again until then", self._folder, error,
            )  # fmt: skip
        self._is_refusing = True


def _mark_used(file: int | Path) -> None:
    now = time.time_ns()
    os.utime(file, ns=(now, now))
