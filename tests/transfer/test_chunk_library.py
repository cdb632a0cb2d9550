"""What requests hold: chunks of the store, or those that were just computed, in memory that has its own limit."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.transfer.chunk_cases import LAYER_BYTES, LIMIT_KEY, PLENTY, SHAPE, key_of, layers_of, open_folder, store
from transfer.chunks import chunk_library as library_module
from transfer.chunks.chunk_folder import ChunkFolder
from transfer.chunks.chunk_format import ChunkKey, ChunkShape, name_chunk
from transfer.chunks.chunk_library import ChunkLibrary
from transfer.chunks.chunk_store import ChunkLease, ChunkStore
from transfer.host_memory import SMALL_PAGE_BYTES
from transfer.slabs import PageSource, SlabPool

CHUNK_BYTES = SHAPE.chunk_bytes(3)
NONE = np.empty(0, np.uint8)


def open_library(folder: ChunkFolder, num_in_memory: int) -> ChunkLibrary:
    source = PageSource(lambda num_bytes: np.full(num_bytes, 0xA5, np.uint8), None, None)
    return ChunkLibrary(ChunkStore(folder, SlabPool(num_in_memory * SMALL_PAGE_BYTES, LIMIT_KEY, source, 1), 2))


def pages(number: int) -> list[np.ndarray]:
    return [np.frombuffer(layer, np.uint8) for layer in layers_of(number)]


def read(library: ChunkLibrary, number: int) -> list[bytes]:
    source = library.open(key_of(number))
    out = np.empty((2, LAYER_BYTES), np.uint8)
    layers = [source.layer(index, out[index]).result(20).tobytes() for index in range(2)]
    source.release()
    return layers


def settle(library: ChunkLibrary) -> list[bool | None]:
    """What has become of chunks that were computed, behind all writes."""
    library.store.delete(key_of(99)).result(20)
    return [None if written is None else written.result() for _, written in library.take_done()]


@pytest.mark.parametrize("num_in_memory", [0, 1])
def test_a_chunk_that_was_computed_is_held_as_the_stores_once_it_is_stored(num_in_memory: int, tmp_path: Path) -> None:
    library = open_library(open_folder(tmp_path), num_in_memory)
    room = library.room_bytes
    assert not library.hold(key_of(1))
    assert not library.is_there(key_of(1))
    library.keep(key_of(1), pages(1))
    assert library.is_there(key_of(1))
    source_before = library.open(key_of(1))
    assert settle(library) == [True]
    assert library.room_bytes == room, "what was computed may go"
    assert library._held[key_of(1).name].layers is None
    library.store.delete(key_of(1)).result(20)
    assert library.is_there(key_of(1)), "it is held"
    out = np.empty(LAYER_BYTES, np.uint8)
    assert source_before.layer(0, out).result(20).tobytes() == layers_of(1)[0], "who reads it goes on"
    source_before.release()
    library.release(key_of(1))
    assert library._held == {}
    library.shutdown()


def test_a_chunk_that_waits_for_the_writer_is_found_and_takes_no_more_memory(tmp_path: Path) -> None:
    library, may_go = open_library(open_folder(tmp_path), 0), threading.Event()
    room = library.room_bytes
    library.store._writer.submit(may_go.wait, 20)
    library.keep(key_of(1), pages(1))
    written = library.find_written(key_of(1))
    assert not written.done()
    assert read(library, 1) == layers_of(1), "who does not hold it"
    assert library.hold(key_of(1))
    assert library.room_bytes == room - CHUNK_BYTES
    library.release(key_of(1))
    assert library.room_bytes == room - CHUNK_BYTES, "it still waits"
    assert library.hold(key_of(1))
    may_go.set()
    assert settle(library) == [True]
    assert library.find_written(key_of(1)) is None
    assert library._writing == {}
    assert library.room_bytes == room
    assert library._held[key_of(1).name].layers is None, "it is the store's"
    assert read(library, 1) == layers_of(1)
    library.release(key_of(1))
    library.shutdown()


def test_a_chunk_that_waited_for_a_disk_without_room_stays_with_who_holds_it(tmp_path: Path) -> None:
    library, may_go = open_library(open_folder(tmp_path, limit_bytes=1), 0), threading.Event()
    room = library.room_bytes
    library.store._writer.submit(may_go.wait, 20)
    for number in (1, 2):
        library.keep(key_of(number), pages(number))
    assert library.hold(key_of(1))
    may_go.set()
    assert settle(library) == [False, False]
    assert library.room_bytes == room - CHUNK_BYTES
    assert read(library, 1) == layers_of(1)
    assert library.open(key_of(2)) is None
    library.release(key_of(1))
    assert library.room_bytes == room
    library.shutdown()


def test_a_chunk_that_is_found_while_it_is_computed_is_held_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, folder = open_library(open_folder(tmp_path), 1), open_folder(tmp_path)
    find, may_go = library.store.find, threading.Event()
    library.store._writer.submit(may_go.wait, 20)

    def find_late(key: ChunkKey) -> ChunkLease | None:
        monkeypatch.setattr(library.store, "find", find)
        store(folder, 1)  # another process
        library.keep(key, pages(1))  # a thread of this one
        return find(key)

    monkeypatch.setattr(library.store, "find", find_late)
    assert library.hold(key_of(1))
    may_go.set()
    assert settle(library) == [True]
    assert library._held[key_of(1).name].layers is None
    assert read(library, 1) == layers_of(1)
    library.release(key_of(1))
    assert [entry.num_leases for entry in library.store._entries.values()] == [0]
    library.shutdown()


def test_a_chunk_that_the_store_has_no_room_for_stays_until_nobody_holds_it(tmp_path: Path) -> None:
    library = open_library(open_folder(tmp_path, limit_bytes=1), 0)
    room = library.room_bytes
    for _ in range(2):
        assert not library.hold(key_of(1))
        assert not library.hold(key_of(1))
        library.keep(key_of(1), pages(1))
        assert settle(library) == [False]
        assert library.room_bytes == room - CHUNK_BYTES
        assert read(library, 1) == layers_of(1)
        library.release(key_of(1))
        assert library.hold(key_of(1)), "somebody has it"
        library.release(key_of(1))
        library.release(key_of(1))
        assert library.room_bytes == room
        assert not library.has(key_of(1))
    library.keep(key_of(2), pages(2))  # nobody waits for it any more
    assert settle(library) == [False]
    assert library.room_bytes == room
    library.shutdown()


def test_what_is_not_written_yet_takes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = open_library(open_folder(tmp_path), 4)
    room, may_go, real = library.room_bytes, threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert may_go.wait(20)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    for number in (1, 2):
        library.keep(key_of(number), pages(number))
    assert library.room_bytes == room - 2 * CHUNK_BYTES
    may_go.set()
    assert settle(library) == [True, True]
    assert library.room_bytes == room
    library.shutdown()


def test_there_is_as_much_room_as_the_store_has_memory_and_a_gibibyte_at_least(tmp_path: Path) -> None:
    library = open_library(open_folder(tmp_path), 4)
    assert library.room_bytes == library_module.LEAST_AHEAD_BYTES == 2**30
    library.shutdown()
    library = open_library(open_folder(tmp_path), 2**19)
    assert library.room_bytes == library.store.memory_limit_bytes == 2**19 * SMALL_PAGE_BYTES
    library.shutdown()


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_codes_that_are_no_numbers_are_refused_before_anybody_has_them(number: str, tmp_path: Path) -> None:
    """A card writes them without a look; whoever waits computes the tokens as any text."""
    shape = ChunkShape(1, 2, 8, "int8")
    library = open_library(ChunkFolder(tmp_path, "0" * 32, shape, PLENTY), 1)
    key, rows = name_chunk([1, 2, 3], shape, ""), np.zeros((2 * 3 * 2, 16), np.uint8)
    rows[7, 8:12] = np.frombuffer(np.float32(number).tobytes(), np.uint8)
    assert not library.hold(key)
    library.keep(key, [rows.reshape(-1)])
    assert library.is_refused(key)
    assert not library.is_there(key)
    assert library.open(key) is None
    assert settle(library) == [None]
    library.release(key)
    assert not library.has(key)
    rows[7, 8:12] = 0
    library.keep(key, [rows.reshape(-1)])
    assert settle(library) == [True]
    library.shutdown()
