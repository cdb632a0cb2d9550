"""Keep records on disk: a folder for each model and a file for each record, which is written under another name and
then renamed. The least recently used record is evicted first. No torch.

One process locks the folder and lists it once, at the start. Every part of a record is checked when it is read, so a
reader notices an incomplete file. Writes are therefore not flushed: after a loss of power the last records may be gone,
but none is wrong. The files of all models stay below the limit, including the one that is being written. Records that
are being read, or that a saved context holds, are not evicted. If the system lacks a resource (open files, memory),
nothing is read for some seconds, and no record is removed.
"""

import errno
import fcntl
import logging
import os
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from transfer.chunks.chunk_file import read_bytes, write_bytes
from transfer.disk.day_count import DayCount
from transfer.disk.holders import SAVED, Holders
from transfer.disk.record_format import NAME_DIGITS, RecordError, RecordShape, checksum, read_header, write_header

RETRY_SECONDS = 60.0  # pause of writes after the disk refused one
LOCK_SECONDS = 10.0  # for a process that is about to end: an engine outlives a server that was killed by a second
READ_RETRY_SECONDS = 2.0  # pause of reads after the system lacked a resource
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))  # not the fault of the file
_MODEL = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}\.[a-z]+(\.part)?")
_PART = ".part"

log = logging.getLogger(__name__)


class FolderError(Exception):
    """The folder cannot be used. The message names it and what to change."""


@dataclass(eq=False, slots=True)
class _Entry:
    path: Path
    num_bytes: int
    checksums: list[str]
    num_leases: int = 0
    is_pinned: bool = False


class RecordFolder:
    """Records of one model below `root`; other models' files there count towards the limit. Called from any thread."""

    def __init__(
        self, root: Path, model: str, shapes: Sequence[RecordShape], limit_bytes: int, day_limit_bytes: int | None
    ) -> None:
        """model: the folder's name, from `name_model`. Raises FolderError if the folder cannot be made, or another
        process uses it.
        """
        assert _MODEL.fullmatch(model), "a model is 32 hexadecimal digits"
        self.root, self.model, self.limit_bytes = root, model, limit_bytes
        self.counts: Counter[str] = Counter()  # written, refused, capped, declined, evicted, damaged, failed
        self.bytes_held = 0
        self.bytes_written = 0
        self._shapes = {shape.kind: shape for shape in shapes}
        self._folder = root / model
        self._lock = RLock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by file name, the last used last
        self._saving: dict[str, int] = {}
        self.version = 0  # changes when a record is added or removed
        self._watcher: Callable[[str, bool], None] | None = None
        self._stopped_until = self._unread_until = 0.0
        self._is_refusing = self._is_capped = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = _take(root)
            try:
                self.holders = Holders(self._folder)
                self._scan()
            except OSError:
                self.shutdown()
                raise
        except OSError as error:
            raise FolderError(f"disk.folder: {root} cannot be used ({error}); wanted one that can be written") from None
        self.day = DayCount(root / "written.json", day_limit_bytes)

    @property
    def path(self) -> Path:
        """Return the folder of this model's records."""
        return self._folder

    # --- what is there ------------------------------------------------------------------------------------------------

    def watch(self, watcher: Callable[[str, bool], None]) -> None:
        """Call `watcher(file_name, is_there)` for each record, and later whenever one is added or removed."""
        with self._lock:
            self._watcher = watcher
            for file_name in self._entries:
                watcher(file_name, True)

    def has(self, kind: str, name: str) -> bool:
        return f"{name}.{kind}" in self._entries

    @property
    def is_readable(self) -> bool:
        """Return whether records are read now. They are not for some seconds after the system lacked a resource."""
        return time.monotonic() >= self._unread_until

    def __len__(self) -> int:
        return len(self._entries)

    def count(self, what: str, number: int) -> None:
        """Add to one of the counts."""
        with self._lock:
            self.counts[what] += number

    def lease(self, kind: str, names: Iterable[str]) -> bool:
        """Keep records from being evicted until `release`. Return False, and keep none, if one of them is missing."""
        with self._lock:
            found = [self._entries.get(f"{name}.{kind}") for name in names]
            entries = [entry for entry in found if entry is not None]
            if len(entries) < len(found):
                return False
            for entry in entries:
                entry.num_leases += 1
            return True

    def release(self, kind: str, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                entry = self._entries.get(f"{name}.{kind}")
                if entry is not None:
                    entry.num_leases = max(0, entry.num_leases - 1)

    def begin_save(self, places: Mapping[str, int]) -> None:
        """Keep these records from being evicted until `pin`, even those that are not written yet. places: each record's
        place in its prefix. If room is short, a record may replace one behind it, but never one in front of it.
        """
        with self._lock:
            self._saving |= places

    def pin(self, saved: Iterable[str] = ()) -> None:
        """Keep the records of saved contexts, and no others, from being evicted. saved: those given to `begin_save`."""
        with self._lock:  # also around `held`: another thread may pin more meanwhile
            pinned = self.holders.held(SAVED)
            for file_name in saved:
                self._saving.pop(file_name, None)
            for file_name, entry in self._entries.items():
                if "/" not in file_name:
                    entry.is_pinned = file_name in pinned

    def num_bytes(self, file_names: Iterable[str]) -> int:
        """Return the total bytes of these records; missing ones count as 0."""
        found = map(self._entries.get, file_names)
        return sum(entry.num_bytes for entry in found if entry is not None)

    def touch(self, kind: str, names: Sequence[str]) -> None:
        """Mark the blocks of one prefix as used, the first block last, so that its end is evicted before its front."""
        for name in reversed(names):
            with self._lock:
                entry = self._entries.get(f"{name}.{kind}")
                if entry is None:
                    continue
                self._entries.move_to_end(f"{name}.{kind}")
            with suppress(OSError):  # file times give the order after a restart
                _mark_used(entry.path)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, kind: str, name: str, part: int, out: memoryview) -> None:
        """Fill `out` with a part's bytes. Raises RecordError, and removes the record, if they are not those that were
        stored. Also raises RecordError if the system lacks a resource, but then the record stays.
        """
        entry = self._entries.get(f"{name}.{kind}")
        if entry is None:
            raise RecordError(f"record {name}.{kind} is not there any more")
        begin, end = self._shapes[kind].part_ranges()[part]
        assert out.nbytes == end - begin, f"out has {out.nbytes} bytes, a part {end - begin}"
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                num_read = read_bytes(descriptor, out, begin)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._fail(str(error))
            else:
                self.drop(kind, name, str(error))
            raise RecordError(f"record {name}.{kind} cannot be read ({error})") from error
        if num_read < out.nbytes or checksum(out) != entry.checksums[part]:
            why = f"part {part} " + ("does not match its checksum" if num_read == out.nbytes else "is cut short")
            self.drop(kind, name, why)
            raise RecordError(f"record {name}.{kind}: {why}")

    def drop(self, kind: str, name: str, reason: str) -> None:
        """Remove a damaged record, and log and count it."""
        with self._lock:
            entry = self._forget(f"{name}.{kind}")
            if entry is None:
                return
            self.counts["damaged"] += 1
            with suppress(OSError):
                entry.path.unlink(missing_ok=True)
        log.warning("disk_record_damaged path=%s reason=%s", entry.path, reason)

    def remove(self, kind: str, name: str) -> None:
        """Remove a record that is no longer needed, unless it is leased, saved or being saved."""
        with self._lock:
            entry = self._entries.get(f"{name}.{kind}")
            if entry is not None and not self._is_kept(f"{name}.{kind}", entry):
                self._forget(f"{name}.{kind}")
                with suppress(OSError):
                    entry.path.unlink(missing_ok=True)

    # --- writing ------------------------------------------------------------------------------------------------------

    def takes(self, kind: str) -> bool:
        """Return whether a record would be written now. It is not, and is counted, if the disk has refused a write
        recently or the day's limit is reached.
        """
        with self._lock:
            if time.monotonic() < self._stopped_until:
                self.counts["refused"] += 1
                return False
            if self.day.allows(self._shapes[kind].file_bytes):
                self._is_capped = False
                return True
            self.counts["capped"] += 1
            is_first, self._is_capped = not self._is_capped, True
        if is_first:
            log.warning(
                "disk_day_limit folder=%s written_bytes=%d raise=disk.written_gib_a_day; nothing more is written today",
                self.root, self.day.num_bytes,
            )  # fmt: skip
        return False

    def put(self, kind: str, name: str, parts: Sequence[memoryview]) -> bool:
        """Write a record. Return False if the day's limit is reached, there is no room, or the disk refuses; after a
        refusal nothing is written for a while. Limit and refusal are logged once.
        """
        shape, file_name = self._shapes[kind], f"{name}.{kind}"
        assert tuple(part.nbytes for part in parts) == shape.part_bytes, "a record has the parts of its kind"
        with self._lock:
            if file_name in self._entries:
                return True
            if not self.takes(kind):
                return False
            if shape.file_bytes > self.limit_bytes or not self._make_room(shape.file_bytes, file_name):
                self.counts["refused"] += 1
                return False
        path = self._folder / file_name
        try:
            checksums = self._write(path, shape, name, parts)
        except OSError as error:
            with suppress(OSError):
                path.with_name(file_name + _PART).unlink(missing_ok=True)
                self._folder.mkdir(parents=True, exist_ok=True)  # another program may have removed it
            self._refuse(str(error))
            return False
        with self._lock:
            self._add(file_name, _Entry(path, shape.file_bytes, checksums, 0, self.holders.is_saved(file_name)))
            self.counts["written"] += 1
            self.bytes_written += shape.file_bytes
            self.day.add(shape.file_bytes)
            if self._is_refusing:
                log.warning("disk_writes_go_on folder=%s", self.root)
            self._is_refusing = False
        return True

    def shutdown(self) -> None:
        """Unlock the folder. Nothing may be read or written any more."""
        with suppress(OSError):
            os.close(self._lock_file)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _write(self, path: Path, shape: RecordShape, name: str, parts: Sequence[memoryview]) -> list[str]:
        part_path = path.with_name(path.name + _PART)
        descriptor = os.open(part_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        checksums = []
        try:
            for part, (begin, _) in zip(parts, shape.part_ranges(), strict=True):
                checksums.append(checksum(part))
                write_bytes(descriptor, part, begin)
            write_bytes(descriptor, memoryview(write_header(self.model, shape, name, checksums)), 0)
            _mark_used(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part_path, path)
        return checksums

    def _make_room(self, num_bytes: int, file_name: str = "") -> bool:
        """Evict records until `num_bytes` more, for this record, fit below the limit. Return False if all records that
        are left are leased or saved.
        """
        while self.bytes_held + num_bytes > self.limit_bytes:
            oldest = next((key for key, one in self._entries.items() if not self._is_kept(key, one)), None)
            oldest = oldest or self._last_behind(file_name)
            if oldest is None:
                return False
            entry = self._forget(oldest)
            assert entry is not None
            self.counts["evicted"] += 1
            with suppress(OSError):
                entry.path.unlink(missing_ok=True)
        return True

    def _fail(self, error: str) -> None:
        """Pause reads for a while, and log each pause once."""
        with self._lock:
            self.counts["failed"] += 1
            is_first = self.is_readable
            self._unread_until = time.monotonic() + READ_RETRY_SECONDS
        if is_first:
            log.warning("disk_reads_pause folder=%s error=%s remedy='raise ulimit -n'", self.root, error)

    def _is_kept(self, file_name: str, entry: _Entry) -> bool:
        return entry.num_leases > 0 or entry.is_pinned or file_name in self._saving

    def _last_behind(self, file_name: str) -> str | None:
        """Return the record that is furthest behind this one among those being saved with it, if it may be evicted."""
        place = self._saving.get(file_name)
        if place is None:
            return None
        behind = [key for key in self._saving if self._saving[key] > place and key in self._entries]
        free = [key for key in behind if not (self._entries[key].is_pinned or self._entries[key].num_leases)]
        return max(free, key=self._saving.__getitem__, default=None)

    def _refuse(self, error: str) -> None:
        """Pause writes for a while, and log it once until a write succeeds."""
        with self._lock:
            self.counts["refused"] += 1
            self._stopped_until = time.monotonic() + RETRY_SECONDS
            is_first, self._is_refusing = not self._is_refusing, True
        if is_first:
            log.warning(
                "disk_writes_stop folder=%s error=%s remedy='check disk.folder and "
                "disk.limit_gib' contexts are kept in memory only until then", self.root, error,
            )  # fmt: skip

    def _add(self, file_name: str, entry: _Entry) -> None:
        if file_name not in self._entries:
            self._entries[file_name] = entry
            self.bytes_held += entry.num_bytes
            self.version += 1
            if self._watcher is not None:
                self._watcher(file_name, True)

    def _forget(self, file_name: str) -> _Entry | None:
        entry = self._entries.pop(file_name, None)
        if entry is not None:
            self.bytes_held -= entry.num_bytes
            self.version += 1
            if self._watcher is not None:
                self._watcher(file_name, False)
        return entry

    def _scan(self) -> None:
        """List the records, and remove files that are incomplete, damaged, or of another model than their folder."""
        found: list[tuple[int, str, _Entry]] = []
        for folder in self.root.iterdir():
            if not _MODEL.fullmatch(folder.name) or not folder.is_dir():
                continue
            pinned = (self.holders if folder == self._folder else Holders(folder)).held(SAVED)
            with os.scandir(folder) as files:
                for file in [file for file in files if _OURS.fullmatch(file.name) and not _is_folder(file)]:
                    try:
                        state, path = file.stat(follow_symlinks=False), Path(file.path)
                    except FileNotFoundError:  # another model's record that was removed meanwhile
                        continue
                    checksums = self._examine(path, state.st_size)
                    if checksums is None:
                        path.unlink(missing_ok=True)
                        continue
                    key = file.name if folder == self._folder else f"{folder.name}/{file.name}"
                    entry = _Entry(path, state.st_size, checksums, 0, file.name in pinned)
                    found.append((state.st_mtime_ns, key, entry))
        for _, key, entry in sorted(found, key=lambda one: one[:2]):
            self._add(key, entry)
        self._make_room(0)  # the limit may be lower than it was
        self.holders.keep_to(self._entries)

    def _examine(self, path: Path, size: int) -> list[str] | None:
        """Return the checksums of a record; empty for another model's record; None if the file must be removed."""
        if path.suffix == _PART:
            return None
        if path.parent != self._folder:
            return []
        try:
            shape = self._shapes.get(path.suffix[1:])
            if shape is None or size != shape.file_bytes:
                raise RecordError(f"it has {size:,} bytes, wanted those of a record")
            with path.open("rb") as file:
                return read_header(file.read(shape.header_bytes), self.model, shape, path.stem)
        except (RecordError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _SHORTAGES:
                raise
            self.counts["damaged"] += 1
            log.warning("disk_record_damaged path=%s reason=%s", path, error)
            return None


def _is_folder(file: "os.DirEntry[str]") -> bool:
    return file.is_dir(follow_symlinks=False)


def _mark_used(file: int | Path) -> None:
    now = time.time_ns()  # the system's own times are some milliseconds coarse
    os.utime(file, ns=(now, now))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take(root: Path) -> int:
    """Lock the folder for this process and return the lock file. Raises FolderError if another process holds it."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ends = time.monotonic() + LOCK_SECONDS
    while not _try_lock(descriptor):
        if time.monotonic() < ends:
            time.sleep(0.05)
            continue
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "another"
        os.close(descriptor)
        raise FolderError(
            f"disk.folder: {root} is in use by process {holder}; give each server a folder of its own, or end that one"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
