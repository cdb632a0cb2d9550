"""Chunks out of memory and from the disk: the same bytes, the last used ones fastest, and a lost one is told."""

import os
import random
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.engine_patches import forget_chunks
from gpu.operations.kv.fused_rows import fuse_rows, widen_rows
from tests.gpu.kernel_oracles import wide
from tests.tolerances import CHUNK_BFLOAT16, FUSED_HALF_STEP, FUSED_READ
from tests.transfer.chunk_cases import FILE_BYTES, LAYER_BYTES, LIMIT_KEY, MODEL, PLENTY, key_of, layers_of, open_folder
from tests.transfer.chunk_cases import SHAPE as SMALL
from transfer.chunks.chunk_file import ChunkFile
from transfer.chunks.chunk_format import ChunkError, ChunkKey, ChunkShape, name_chunk
from transfer.chunks.chunk_store import ChunkLease, ChunkStore, open_chunks
from transfer.host_config import DocumentsConfig
from transfer.host_memory import SMALL_PAGE_BYTES
from transfer.slabs import PageSource, SlabPool

SLAB = SMALL_PAGE_BYTES  # of a small chunk
THREADS = 2


class Poisoned:
    """Pages that hold 0xA5 until they are written, and are refused when that is asked for."""

    def __init__(self) -> None:
        self.is_refusing = False
        self.source = PageSource(self.map, None, None)

    def map(self, num_bytes: int) -> np.ndarray:
        if self.is_refusing:
            raise OSError("no more pages")
        return np.full(num_bytes, 0xA5, np.uint8)


def open_store(root: Path, num_in_memory: int, limit_bytes: int = PLENTY, host: Poisoned | None = None) -> ChunkStore:
    slabs = SlabPool(num_in_memory * SLAB, LIMIT_KEY, (host or Poisoned()).source, 1)
    return ChunkStore(open_folder(root, limit_bytes), slabs, THREADS)


def put(store: ChunkStore, number: int) -> bool:
    return store.put(key_of(number), [np.frombuffer(layer, np.uint8) for layer in layers_of(number)]).result(20)


def fetch(store: ChunkStore, number: int) -> list[bytes] | None:
    lease = store.find(key_of(number))
    if lease is None:
        return None
    out = np.full((2, LAYER_BYTES), 0x5A, np.uint8)
    reads = [lease.layer(index, out[index]) for index in range(2)]
    try:
        return [read.result(20).tobytes() for read in reads]
    except ChunkError:
        return None
    finally:
        lease.release()


def path_of(root: Path, number: int) -> Path:
    return root / MODEL / f"{key_of(number).name}.kv"


@pytest.mark.parametrize("num_in_memory", [0, 1, 9])
def test_what_is_stored_is_read_from_memory_or_disk_and_after_a_restart(num_in_memory: int, tmp_path: Path) -> None:
    store = open_store(tmp_path, num_in_memory)
    assert fetch(store, 1) is None
    for number in range(4):
        assert put(store, number)
    for _ in range(2):
        assert [fetch(store, number) for number in range(4)] == [layers_of(number) for number in range(4)]
    assert store.bytes_in_memory <= num_in_memory * SLAB
    counts = store.counts()
    assert counts["found_in_memory"] == (8 if num_in_memory == 9 else 0)
    assert (counts["found_in_memory"] + counts["found_on_disk"], counts["absent"], counts["stored"]) == (8, 1, 4)
    store.shutdown()
    again = open_store(tmp_path, num_in_memory)
    assert fetch(again, 2) == layers_of(2)
    assert fetch(again, 2) == layers_of(2)
    assert again.counts()["found_in_memory"] == (num_in_memory > 0)
    again.shutdown()


def test_a_chunk_in_memory_is_read_without_a_copy_and_without_its_file(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1)
    put(store, 1)
    path_of(tmp_path, 1).unlink()
    lease = store.find(key_of(1))
    out = np.full(LAYER_BYTES, 0x5A, np.uint8)
    assert lease.is_in_memory
    got = lease.layer(0, out).result(20)
    assert got.tobytes() == layers_of(1)[0]
    assert not np.shares_memory(got, out)
    assert (out == 0x5A).all()
    assert lease.layer(0, out).result(20).ctypes.data == got.ctypes.data
    lease.release()
    store.shutdown()


def test_memory_that_is_leased_is_not_given_to_others(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1)
    put(store, 1)
    lease = store.find(key_of(1))
    view = lease.layer(1, np.empty(LAYER_BYTES, np.uint8)).result(20)
    put(store, 2)
    assert fetch(store, 2) == layers_of(2)
    store.delete(key_of(1)).result(20)
    put(store, 3)
    assert store.find(key_of(1)) is None
    assert view.tobytes() == layers_of(1)[1]
    assert store.bytes_in_memory == SLAB
    lease.release()
    assert store.bytes_in_memory == 0
    assert fetch(store, 3) == layers_of(3)
    assert fetch(store, 3) == layers_of(3)
    assert store.counts()["found_in_memory"] == 2
    store.shutdown()


def read_last_layer(store: ChunkStore, number: int) -> bytes:
    """As a prompt does that computes the first layers in full."""
    lease = store.find(key_of(number))
    layer = lease.layer(1, np.empty(LAYER_BYTES, np.uint8)).result(20).tobytes()
    lease.release()
    return layer


def test_a_chunk_that_is_read_in_part_is_read_to_its_end_and_stays_in_memory(tmp_path: Path) -> None:
    put(store := open_store(tmp_path, 0), 1)
    store.shutdown()
    store = open_store(tmp_path, 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert read_last_layer(store, 1) == layers_of(1)[1]
    store.finish_reads()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "its file is closed"
    path_of(tmp_path, 1).unlink()
    assert fetch(store, 1) == layers_of(1)
    assert store.counts()["found_in_memory"] == 1
    forget_chunks(store)
    assert store.bytes_in_memory == 0
    store.shutdown()


class Held:
    """A store of one thread that reads, which waits until it may go; what it reads then is noted, in order."""

    def __init__(self, root: Path, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        first = open_store(root, 0)
        for number in numbers:
            put(first, number)
        first.shutdown()
        slabs = SlabPool(len(numbers) * SLAB, LIMIT_KEY, Poisoned().source, 1)
        self.store = ChunkStore(open_folder(root), slabs, 1)
        self.order: list[tuple[int, int]] = []
        self._may_go = threading.Event()
        names, real = {key_of(number).name: number for number in numbers}, ChunkFile.read

        def note(file: ChunkFile, layer: int, out: memoryview) -> None:
            self.order.append((names[file.key.name], layer))
            real(file, layer, out)

        monkeypatch.setattr(ChunkFile, "read", note)

    def wait(self) -> None:
        self.store._readers.submit(lambda: np.empty(self._may_go.wait(20), np.uint8), True)

    def go_on(self) -> None:
        self._may_go.set()
        self.store.finish_reads()


def ask_for(store: ChunkStore, number: int, *layers: int) -> ChunkLease:
    lease = store.find(key_of(number))
    for layer in layers:
        lease.layer(layer, np.empty(LAYER_BYTES, np.uint8))
    return lease


def test_what_somebody_waits_for_is_read_before_what_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, (1, 2, 3), monkeypatch)
    leases = [ask_for(held.store, number, 1) for number in (1, 2)]
    held.store.finish_reads()
    held.wait()
    for lease in leases:
        lease.release()  # and the rest of both is to be read
    cold, again = ask_for(held.store, 3, 0, 1), ask_for(held.store, 2, 0)
    held.go_on()
    assert held.order == [(1, 1), (2, 1), (3, 0), (3, 1), (2, 0), (1, 0)]
    for lease in (cold, again):
        lease.release()
    for number in (1, 2, 3):
        path_of(tmp_path, number).unlink()
    assert [fetch(held.store, number) for number in (1, 2, 3)] == [layers_of(number) for number in (1, 2, 3)]
    held.store.shutdown()
    assert held.store.bytes_in_memory == 0


def test_what_a_cancelled_prompt_wanted_is_not_read_unless_others_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, (1, 2, 3), monkeypatch)
    ask_for(held.store, 3, 1).release()
    held.store.finish_reads()
    held.order.clear()
    descriptors = len(os.listdir("/proc/self/fd"))
    held.wait()
    cancelled, both, other = (ask_for(held.store, number, 0, 1) for number in (1, 2, 2))
    for lease in (cancelled, both):
        lease.release()
    again = ask_for(held.store, 1, 1)
    held.go_on()
    assert held.order == [(2, 0), (2, 1), (1, 1)]
    other.release()
    again.release()
    held.store.finish_reads()
    assert held.order[3:] == [(1, 0)], "the rest, since a prompt was done with what it wanted"
    assert len(os.listdir("/proc/self/fd")) == descriptors, "files are closed"
    assert [fetch(held.store, number) for number in (1, 2, 3)] == [layers_of(number) for number in (1, 2, 3)]
    forget_chunks(held.store)
    assert held.store.bytes_in_memory == 0
    held.store.shutdown()


def test_what_nobody_waits_for_any_more_is_read_behind_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled prompt had asked for the rest of a chunk that another one had read in part."""
    held = Held(tmp_path, (1, 2), monkeypatch)
    first = ask_for(held.store, 1, 1)
    held.store.finish_reads()
    held.wait()
    first.release()
    ask_for(held.store, 1, 0).release()
    wanted = ask_for(held.store, 2, 0, 1)
    held.go_on()
    assert held.order == [(1, 1), (2, 0), (2, 1), (1, 0)]
    wanted.release()
    held.store.shutdown()
    assert held.store.bytes_in_memory == 0


def test_a_chunk_of_which_nothing_is_read_takes_no_memory(tmp_path: Path) -> None:
    put(store := open_store(tmp_path, 0), 1)
    store.shutdown()
    store = open_store(tmp_path, 1)
    store.find(key_of(1)).release()
    assert store.bytes_in_memory == 0
    assert fetch(store, 1) == layers_of(1)
    store.shutdown()


def test_a_chunk_whose_rest_is_lost_is_not_kept_and_not_found_again(tmp_path: Path) -> None:
    put(store := open_store(tmp_path, 0), 1)
    store.shutdown()
    with path_of(tmp_path, 1).open("r+b") as file:
        file.seek(FILE_BYTES - 2 * LAYER_BYTES)
        file.write(b"?")
    store = open_store(tmp_path, 1)
    assert read_last_layer(store, 1) == layers_of(1)[1]
    forget_chunks(store)
    assert store.bytes_in_memory == 0
    assert store.find(key_of(1)) is None
    assert store.counts()["set_aside"] == 1
    store.shutdown()


def test_memory_whose_rest_is_read_is_not_given_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store := open_store(tmp_path, 0), 1)
    store.shutdown()
    store = open_store(tmp_path, 1)
    may_go, real, firsts = threading.Event(), os.preadv, iter([True])

    def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if at == FILE_BYTES - 2 * LAYER_BYTES and next(firsts, False):
            assert may_go.wait(20)
        return real(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", read)
    assert read_last_layer(store, 1) == layers_of(1)[1]
    assert put(store, 2)
    assert fetch(store, 2) == layers_of(2)
    assert store.counts()["found_in_memory"] == 0, "there is room for one"
    lease = store.find(key_of(1))
    first = lease.layer(0, np.empty(LAYER_BYTES, np.uint8))
    may_go.set()
    assert first.result(20).tobytes() == layers_of(1)[0], "who comes meanwhile waits for the same read"
    lease.release()
    assert fetch(store, 1) == layers_of(1)
    store.shutdown()
    assert store.bytes_in_memory == 0


def test_to_ask_whether_a_chunk_is_there_gives_up_no_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1)
    put(store, 1)
    put(store, 2)
    path_of(tmp_path, 2).unlink()
    before = store.counts()
    found = [store.has(key_of(number)) for number in (1, 2, 3)]
    assert found == [True, False, False], "what is in memory alone is gone with a restart"
    assert store.counts() == before
    assert fetch(store, 2) == layers_of(2)
    path_of(tmp_path, 1).write_bytes(b"nothing of ours")
    assert not store.has(key_of(1))
    store.shutdown()


def test_a_chunk_that_is_asked_for_is_the_last_one_used(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0, 2 * FILE_BYTES)
    put(store, 1)
    put(store, 2)
    assert store.has(key_of(1))
    put(store, 3)
    assert [store.has(key_of(number)) for number in (1, 2, 3)] == [True, False, True]
    store.shutdown()


WHAT = st.sampled_from(["put", "get", "get", "get", "delete"])
OPERATIONS = st.lists(st.tuples(WHAT, st.integers(0, 4)), min_size=10, max_size=40)


@settings(max_examples=30, deadline=None)
@given(operations=OPERATIONS, capacity=st.integers(0, 4))
def test_memory_keeps_the_last_used_as_an_ordered_dictionary_does(
    operations: list[tuple[str, int]], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = open_store(tmp_path_factory.mktemp("chunks"), capacity)
    memory, disk, hits = OrderedDict[int, None](), set(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for what, number in operations:
            if what == "delete":
                store.delete(key_of(number)).result(20)
                memory.pop(number, None)
                disk.discard(number)
                continue
            if what == "put":
                put(store, number)
                disk.add(number)
            else:
                assert fetch(store, number) == (layers_of(number) if number in disk else None)
                hits += number in memory
                if number in memory:
                    memory.move_to_end(number)
            if number in disk and number not in memory:
                memory[number] = None
                while len(memory) > capacity:
                    memory.popitem(last=False)
            assert store.bytes_in_memory == len(memory) * SLAB
    assert store.counts()["found_in_memory"] == hits
    store.shutdown()


def test_many_threads_find_put_and_delete_and_read_right_bytes(tmp_path: Path) -> None:
    store = open_store(tmp_path, 2, 4 * FILE_BYTES)

    def run(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(60):
            number = generator.randrange(6)
            match generator.randrange(4):
                case 0:
                    put(store, number)
                case 1:
                    store.delete(key_of(number)).result(20)
                case _:
                    assert fetch(store, number) in (None, layers_of(number))

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(run, seed) for seed in range(4)]:
            done.result(60)
    assert store.counts()["lost"] == store.counts()["set_aside"] == store.counts()["refused"] == 0
    store.shutdown()
    assert store.bytes_in_memory == 0


@pytest.mark.parametrize("num_in_memory", [0, 1])
def test_a_layer_that_is_lost_while_it_is_read_is_told_and_the_chunk_stored_again(
    num_in_memory: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(store := open_store(tmp_path, 0), 1)
    store.shutdown()
    with path_of(tmp_path, 1).open("r+b") as file:
        file.seek(FILE_BYTES - 7)
        file.write(b"?")
    store = open_store(tmp_path, num_in_memory)
    first, second = store.find(key_of(1)), store.find(key_of(1))
    out = np.empty((4, LAYER_BYTES), np.uint8)
    assert first.layer(0, out[0]).result(20).tobytes() == layers_of(1)[0]
    for lease, to in ((first, out[1]), (second, out[2])):
        with pytest.raises(
            ChunkError, match=f"chunk {key_of(1).name}: layer 1 does not match its checksum; compute it"
        ):
            lease.layer(1, to).result(20)
    assert second.layer(0, out[3]).result(20).tobytes() == layers_of(1)[0]
    assert store.find(key_of(1)) is None
    assert "chunk_set_aside" in caplog.text
    assert put(store, 1)
    first.release()
    assert fetch(store, 1) == layers_of(1)
    second.release()
    assert fetch(store, 1) == layers_of(1)
    store.shutdown()
    assert store.bytes_in_memory == 0


def test_a_disk_that_refuses_leaves_memory_and_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, 1)
    put(store, 1)

    def refuse(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert not put(store, 2)
    assert fetch(store, 2) == layers_of(2)
    assert fetch(store, 1) == layers_of(1)
    assert store.counts()["refused"] == 1
    store.shutdown()


def test_a_host_that_refuses_pages_leaves_the_disk(tmp_path: Path) -> None:
    host = Poisoned()
    store = open_store(tmp_path, 4, host=host)
    host.is_refusing = True
    assert put(store, 1)
    assert fetch(store, 1) == layers_of(1)
    assert store.bytes_in_memory == 0
    store.shutdown()
    host = Poisoned()
    store = open_store(tmp_path, 4, host=host)
    host.is_refusing = True
    assert fetch(store, 1) is None, "found out while it is read"
    assert fetch(store, 1) == layers_of(1)
    assert store.counts()["set_aside"] == 0
    store.shutdown()


def test_a_host_that_refuses_pages_is_told_of_with_the_setting_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store := open_store(tmp_path, 0), 1)
    store.shutdown()
    host = Poisoned()
    host.is_refusing = True
    monkeypatch.setattr("transfer.chunks.chunk_store.map_pages", host.map)
    store = open_chunks(DocumentsConfig(folder=tmp_path, threads=1), PLENTY, MODEL, SMALL, is_pinned=False)
    lease = store.find(key_of(1))
    with pytest.raises(ChunkError, match=r"refused: no more pages; .* lower documents\.memory_limit_gib"):
        lease.layer(0, np.empty(LAYER_BYTES, np.uint8)).result(20)
    lease.release()
    store.shutdown()


def test_reading_another_layer_does_not_wait_for_one_that_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store := open_store(tmp_path, 0), 1)
    may_go, real = threading.Event(), os.preadv
    header = FILE_BYTES - 2 * LAYER_BYTES

    def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        assert at != header or may_go.wait(20)
        return real(descriptor, buffers, at)

    lease = store.find(key_of(1))
    monkeypatch.setattr(os, "preadv", read)
    out = np.empty((2, LAYER_BYTES), np.uint8)
    slow, fast = lease.layer(0, out[0]), lease.layer(1, out[1])
    assert fast.result(20).tobytes() == layers_of(1)[1]
    assert not slow.done()
    may_go.set()
    assert slow.result(20).tobytes() == layers_of(1)[0]
    lease.release()
    store.shutdown()


def rounded(rows: np.ndarray) -> np.ndarray:
    """To bf16 and back, in float64: 8 significant bits, ties to even."""
    spacing = 2.0 ** (np.floor(np.log2(np.abs(rows))) - 7)
    return np.rint(rows / spacing) * spacing


@pytest.mark.parametrize("rows", ["bfloat16", "int8"])
def test_keys_and_values_come_back_within_the_error_of_their_rows(rows: str, tmp_path: Path) -> None:
    shape, tokens = ChunkShape(2, 2, 64, rows), 37
    store = open_chunks(DocumentsConfig(folder=tmp_path, rows=rows, threads=2), 0, MODEL, shape, is_pinned=False)
    generator = np.random.default_rng(0)
    true = generator.standard_normal((2, 2, tokens, 2, 64)) * 3  # [layers, keys and values, tokens, heads, dim]
    computed = torch.from_numpy(true).float()
    key: ChunkKey = name_chunk(list(range(tokens)), shape, "float32")
    stored = torch.empty(2, 2, tokens, 2, shape.row_bytes, dtype=torch.uint8)
    for part, to in zip(computed.flatten(0, 1), stored.flatten(0, 1), strict=True):
        if rows == "int8":
            fuse_rows(part, to)
        else:
            to.copy_(part.bfloat16().view(torch.uint8))
    assert store.put(key, list(stored.flatten(1).numpy())).result(20)
    lease = store.find(key)
    out = np.full((2, shape.layer_bytes(tokens)), 0xFF, np.uint8)
    raw = torch.from_numpy(np.stack([lease.layer(index, out[index]).result(20) for index in range(2)]))
    lease.release()
    store.shutdown()
    raw = raw.reshape(stored.shape)
    if rows == "bfloat16":
        got = wide(raw.view(torch.bfloat16))
        assert (got == rounded(wide(computed))).all()
        assert np.abs(got / true - 1).max() <= CHUNK_BFLOAT16
        assert np.abs(np.roll(got, 1, axis=2) / true - 1).max() > CHUNK_BFLOAT16
        return
    back = torch.full_like(computed, float("nan"))
    for part, to in zip(raw.flatten(0, 1), back.flatten(0, 1), strict=True):
        widen_rows(part, to)
    step = (true.max(-1, keepdims=True) - true.min(-1, keepdims=True)) / 255
    slack = np.abs(true).max(-1, keepdims=True) * FUSED_READ["float32"]
    assert (np.abs(wide(back) - true) <= FUSED_HALF_STEP * step + slack).all()
    assert (np.abs(np.roll(wide(back), 1, axis=2) - true) > FUSED_HALF_STEP * step + slack).any()


def test_the_folder_is_in_the_users_cache_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DocumentsConfig().resolved_folder == tmp_path / "tandem" / "chunks"
    assert DocumentsConfig(folder=tmp_path).resolved_folder == tmp_path
    with pytest.raises(ValueError, match="rows"):
        DocumentsConfig(rows="int4")
