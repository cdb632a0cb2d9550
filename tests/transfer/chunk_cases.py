"""Small chunks with known bytes, the folder that they go to, and a death at any of the calls that write. No torch."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transfer.chunks.chunk_folder import ChunkFolder
from transfer.chunks.chunk_format import ChunkError, ChunkKey, ChunkShape, name_chunk
from transfer.chunks.room import locked

MODEL, OTHER_MODEL = "0" * 31 + "a", "0" * 31 + "b"
SHAPE = ChunkShape(num_layers=2, num_kv_heads=2, dim=8, rows="bfloat16")
TOKENS = 3
LAYER_BYTES = 2 * TOKENS * 2 * 16
FILE_BYTES = 4096 + 2 * LAYER_BYTES
PLENTY = 2**30
LIMIT_KEY = "documents.memory_limit_gib"
CALLS = ("open", "posix_fallocate", "pwrite", "fsync", "rename", "utime", "scandir")  # of the system, in a put


def key_of(number: int) -> ChunkKey:
    return name_chunk([number] * TOKENS, SHAPE, "bfloat16")


def layers_of(number: int) -> list[bytes]:
    """What a chunk's layers hold: bytes that nothing else holds."""
    return [hashlib.shake_128(f"{number}:{layer}".encode()).digest(LAYER_BYTES) for layer in range(2)]


def open_folder(root: Path, limit_bytes: int = PLENTY, model: str = MODEL) -> ChunkFolder:
    return ChunkFolder(root, model, SHAPE, limit_bytes)


def store(folder: ChunkFolder, number: int) -> bool:
    return folder.put(key_of(number), [memoryview(layer) for layer in layers_of(number)])


def fetch(folder: ChunkFolder, number: int) -> list[bytes] | None:
    """The chunk's layers, or None where it is not there or lost: then it is set aside, as the store does."""
    file = folder.open(key_of(number))
    if file is None:
        return None
    layers = [bytearray(LAYER_BYTES) for _ in range(2)]
    try:
        for index, layer in enumerate(layers):
            file.read(index, memoryview(layer))
    except ChunkError as error:
        folder.set_aside(key_of(number), str(error))
        return None
    finally:
        file.close()
    return [bytes(layer) for layer in layers]


def is_right(folder: ChunkFolder, number: int) -> bool:
    """Whether the chunk is whole, or absent: never another one's bytes."""
    return fetch(folder, number) in (None, layers_of(number))


def break_calls(strike: Callable[[int, str, Callable[..., object], tuple[object, ...]], object]) -> Callable[[], None]:
    """Lead each of CALLS through `strike(how many before, name, the call, its arguments)`; returns what undoes it."""
    real, count = {name: getattr(os, name) for name in CALLS}, iter(range(10**9))

    def lead(name: str) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            return strike(next(count), name, lambda *given: real[name](*given, **named), arguments)

        return call

    for name in CALLS:
        setattr(os, name, lead(name))

    def undo() -> None:
        for name in CALLS:
            setattr(os, name, real[name])

    return undo


def die_at(when: int, is_after: bool) -> None:
    """End this process at the call of this number: before it, or when half of what it writes is written."""

    def strike(number: int, name: str, call: Callable[..., object], arguments: tuple[object, ...]) -> object:
        if number == when:
            if is_after:
                if name == "pwrite":
                    data = memoryview(arguments[1])
                    arguments = (arguments[0], data[: len(data) // 2], *arguments[2:])
                call(*arguments)
            os._exit(9)
        return call(*arguments)

    break_calls(strike)


def store_and_die(root: Path, limit_bytes: int, number: int, when: int, is_after: bool) -> bool:
    """Put a chunk in a process that dies at a call; whether there was such a call."""
    child = os.fork()
    if child == 0:
        die_at(when, is_after)
        with suppress(BaseException):
            store(open_folder(root, limit_bytes), number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def fail_at(when: int, code: int) -> Callable[[], None]:
    """Let the call of this number raise an OSError, after half of a write; returns what undoes it."""

    def strike(number: int, name: str, call: Callable[..., object], arguments: tuple[object, ...]) -> object:
        if number == when:
            if name == "pwrite":
                data = memoryview(arguments[1])
                call(arguments[0], data[: len(data) // 2], *arguments[2:])
            raise OSError(code, os.strerror(code))
        return call(*arguments)

    return break_calls(strike)


@contextmanager
def fill_disk(root: Path, budget: int) -> Iterator[None]:
    """A disk that has no room for more than so many bytes of files below `root`."""

    def strike(number: int, name: str, call: Callable[..., object], arguments: tuple[object, ...]) -> object:
        if name == "posix_fallocate":
            held = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
            if held + int(str(arguments[2])) > budget:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*arguments)

    undo = break_calls(strike)
    try:
        yield
    finally:
        undo()


def kill_everywhere(root: Path) -> int:
    """Kill a writer at every call, before and in it; returns how many kills. Raises AssertionError for a wrong one."""
    kills = 0
    limit = 3 * FILE_BYTES
    for is_after in (False, True):
        when = 0
        while store_and_die(root, limit, kills + 2, when, is_after):
            folder = open_folder(root, limit)
            assert is_right(folder, kills + 2), (when, is_after)
            assert list(root.rglob("*.part")) == [], "what the dead have left is cleared away"
            assert folder.bytes_held() <= limit
            assert store(folder, 1), "the next one stores"
            assert fetch(folder, 1) == layers_of(1)
            assert folder.counts["set_aside"] == 0, "nothing that a kill leaves has a chunk's name"
            kills, when = kills + 1, when + 1
    return kills


def share(root: Path, seed: int, rounds: int) -> None:
    """One of several processes that store, read, give up and delete the same chunks in a folder for three of them."""
    folder = open_folder(root, 3 * FILE_BYTES)
    state = seed
    for _ in range(rounds):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        number = state >> 16 & 7
        if state & 0x300:
            assert is_right(folder, number), number
        elif state & 0x3000:
            store(folder, number)
        else:
            folder.delete(key_of(number))
        with locked(folder.root):
            assert folder.bytes_held() <= 3 * FILE_BYTES
    assert folder.counts["set_aside"] == folder.counts["refused"] == 0
