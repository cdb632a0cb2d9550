"""Count the files of a folder of chunks, over all models, and make room on its disk. No torch.

Files are counted and evicted under the folder's lock. A file that is being written is never evicted. At most a few
damaged files are set aside for inspection.
"""

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MOST_SET_ASIDE = 4  # damaged files that are kept for inspection
LOCK_SECONDS = 5.0  # long enough for a process that makes room; a hanging process is not waited for
_POLL_SECONDS = 0.005
_OURS = re.compile(r"[0-9a-f]{64}\.(kv|bad|[0-9a-f]{8}\.part)")
MODEL = re.compile(r"[0-9a-f]{32}")
BAD, PART = ".bad", ".part"


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk file. is_whole: it is not set aside as damaged."""

    is_whole: bool
    used_ns: int
    num_bytes: int
    path: Path


def write_with_room(root: Path, num_bytes: int, write: Callable[[], None]) -> int:
    """Call `write`, which writes `num_bytes` to the disk of `root`. Return how many files were evicted for it.

    If the disk is full, files of as many bytes are evicted and `write` is called once more, but only once: if another
    program fills the disk, evicting does not help. `write` must leave nothing behind when it raises. Raises its
    OSError.
    """
    try:
        write()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (num_files := give_up(root, num_bytes)):
            raise
    write()
    return num_files


def give_up(root: Path, num_bytes: int) -> int:
    """Remove the oldest files below `root`, up to `num_bytes`. Return how many were removed. Raises OSError."""
    num_files = 0
    with locked(root):
        found = [one for one in oldest_first(root) if one.path.suffix != PART or remove_abandoned(one.path)]
        for one in found:
            if num_bytes <= 0:
                break
            one.path.unlink(missing_ok=True)
            num_files, num_bytes = num_files + 1, num_bytes - one.num_bytes
    return num_files


def oldest_first(root: Path) -> list[Found]:
    return sorted(scan(root), key=lambda one: (one.is_whole, one.used_ns))


def too_many_set_aside(found: Iterable[Found]) -> list[Found]:
    bad = sorted((one for one in found if not one.is_whole), key=lambda one: one.used_ns)
    return bad[:-MOST_SET_ASIDE]


def scan(root: Path) -> Iterator[Found]:
    """Yield every chunk file of all models. It costs a system call per file, little compared with writing a chunk."""
    for folder in root.iterdir():
        if not MODEL.fullmatch(folder.name) or not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        state = entry.stat(follow_symlinks=False)
                        is_whole = not entry.name.endswith(BAD)
                        yield Found(is_whole, state.st_mtime_ns, state.st_size, Path(entry.path))


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises OSError (EAGAIN) if another process holds it for LOCK_SECONDS."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        ends = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def remove_abandoned(part: Path) -> bool:
    """Remove a file if its writer has died, and return whether it was removed. Call it with the folder's lock held, so
    that no writer is about to begin.
    """
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
