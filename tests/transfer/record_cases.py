"""Small records with known bytes, the folder that they go to, and a death at any of the calls that write. No torch."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from tests.transfer.chunk_cases import die_at
from transfer.disk.record_folder import RecordFolder
from transfer.disk.record_format import RecordError, RecordShape

MODEL, OTHER_MODEL = "0" * 31 + "a", "0" * 31 + "b"
SHAPE = RecordShape("kv", (100, 60))
FILE_BYTES = 4096 + 160
PLENTY = 2**30


def name_of(number: int) -> str:
    return hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()


def parts_of(number: int) -> list[bytes]:
    """What a record holds: bytes that nothing else holds."""
    return [hashlib.shake_128(f"{number}:{part}".encode()).digest(size) for part, size in enumerate(SHAPE.part_bytes)]


def open_folder(
    root: Path, limit_bytes: int = PLENTY, model: str = MODEL, day_limit_bytes: int | None = None
) -> RecordFolder:
    return RecordFolder(root, model, [SHAPE], limit_bytes, day_limit_bytes)


def store(folder: RecordFolder, number: int) -> bool:
    return folder.put("kv", name_of(number), [memoryview(part) for part in parts_of(number)])


def fetch(folder: RecordFolder, number: int) -> list[bytes] | None:
    """A record's parts; None: it is not there, or lost."""
    parts = [bytearray(b"\xa5" * size) for size in SHAPE.part_bytes]
    try:
        for index, part in enumerate(parts):
            folder.read("kv", name_of(number), index, memoryview(part))
    except RecordError:
        return None
    folder.touch("kv", [name_of(number)])
    return [bytes(part) for part in parts]


def path_of(root: Path, number: int, model: str = MODEL) -> Path:
    return root / model / f"{name_of(number)}.kv"


def reopen(folder: RecordFolder, limit_bytes: int = PLENTY) -> RecordFolder:
    folder.shutdown()
    return open_folder(folder.root, limit_bytes)


def kill_everywhere(root: Path) -> int:
    """Kill writers at each call that they make, before it and in the middle of it; return how many were killed. What is
    left is whole or absent, and is written again.
    """
    kills = 0
    for is_after in (False, True):
        for when in range(100):
            first = open_folder(root)
            store(first, 0)
            store(first, 1)
            first.shutdown()
            child = os.fork()
            if child == 0:
                die_at(when, is_after)
                with suppress(BaseException):
                    folder = open_folder(root, 2 * FILE_BYTES)
                    store(folder, 2)
                    folder.touch("kv", [name_of(0)])
                os._exit(0)
            was_killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
            folder = open_folder(root)
            for number in range(3):
                assert fetch(folder, number) in (None, parts_of(number)), (when, is_after, number)
            assert list(root.rglob("*.part")) == []
            assert store(folder, 2)
            assert fetch(folder, 2) == parts_of(2)
            folder.drop("kv", name_of(2), "for the next one")
            folder.shutdown()
            if not was_killed:
                break
            kills += 1
    return kills
