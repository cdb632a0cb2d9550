"""Name context records on disk, and run the work on records that is done in the writing thread."""

import logging
from collections.abc import Callable, Iterable, Iterator

from transfer.disk.context_store import END, KV
from transfer.disk.holders import Holder
from transfer.disk.record_folder import RecordFolder

log = logging.getLogger(__name__)


def remove_all(folder: RecordFolder, remove: Callable[[str, str], None], blocks: set[str], ends: set[str]) -> None:
    for kind, names in ((KV, blocks), (END, ends)):
        for name in names:
            if folder.has(kind, name):
                remove(kind, name)


def files(kind: str, names: Iterable[str]) -> Iterator[str]:
    """Return the file names of records of one kind."""
    return (f"{name}.{kind}" for name in names)


def digest_of(record: str) -> bytes:
    """Return the hash of a record's last KV block."""
    return bytes.fromhex(record.partition(".")[0])


def write_holder(write: Callable[[Holder], None], holder: Holder) -> None:
    try:
        write(holder)
    except OSError as error:
        log.warning("disk_session_not_noted session=%s error=%s", holder.name, error)
