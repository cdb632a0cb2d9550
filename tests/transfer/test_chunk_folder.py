"""Chunks on disk: whole or absent, whatever happens to files, disks, processes; the limit holds; the oldest go."""

import errno
import hashlib
import logging
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.chunk_cases import (
    FILE_BYTES,
    LAYER_BYTES,
    MODEL,
    OTHER_MODEL,
    SHAPE,
    TOKENS,
    fail_at,
    fetch,
    fill_disk,
    is_right,
    key_of,
    layers_of,
    open_folder,
    store,
)
from transfer.chunks.chunk_format import ChunkError, ChunkShape, header_bytes, name_chunk, read_header, write_header
from transfer.chunks.room import MOST_SET_ASIDE, locked

ROOT = Path(__file__).parents[2]
# All over a file, more densely where there are no blanks.
PLACES = [*range(0, 800, 3), *range(800, header_bytes(SHAPE), 64), *range(header_bytes(SHAPE), FILE_BYTES, 3)]


def path_of(root: Path, number: int, model: str = MODEL) -> Path:
    return root / model / f"{key_of(number).name}.kv"


def run_child(code: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_what_is_stored_is_found_by_this_process_and_the_next(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "a" / "b")
    assert fetch(folder, 1) is None
    assert store(folder, 1)
    assert store(folder, 2)
    assert fetch(folder, 1) == layers_of(1)
    again = open_folder(tmp_path / "a" / "b")
    assert [fetch(again, number) for number in (1, 2, 3)] == [layers_of(1), layers_of(2), None]
    assert again.bytes_held() == 2 * FILE_BYTES
    assert fetch(open_folder(tmp_path / "a" / "b", model=OTHER_MODEL), 1) is None
    again.delete(key_of(1))
    again.delete(key_of(1))
    assert fetch(folder, 1) is None


def test_layers_are_read_one_by_one_in_any_order_and_after_the_file_is_gone(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    store(folder, 1)
    file = folder.open(key_of(1))
    folder.delete(key_of(1))
    for index in (1, 0, 1):
        out = bytearray(b"\xa5" * LAYER_BYTES)
        file.read(index, memoryview(out))
        assert bytes(out) == layers_of(1)[index]
    with pytest.raises(AssertionError, match="out has 3 bytes"):
        file.read(0, memoryview(bytearray(3)))
    file.close()


def test_names_differ_with_all_that_changes_keys_and_values() -> None:
    shapes = [SHAPE, ChunkShape(2, 2, 8, "int8"), ChunkShape(3, 2, 8, "bfloat16")]
    keys = {name_chunk(ids, shape, kv_key).name for ids in ([1, 2], [2, 1], [1, 2, 2], [12], [2**40])
            for shape in shapes for kv_key in ("", "a", "\udc80")}  # fmt: skip
    assert len(keys) == 5 * 3 * 3
    assert name_chunk((1, 2), SHAPE, "") == name_chunk([1, 2], SHAPE, "")


def test_a_header_is_that_of_one_chunk_of_one_model() -> None:
    sums = ["1" * 32, "2" * 32]
    raw = write_header(MODEL, key_of(1), SHAPE, sums)
    assert len(raw) == header_bytes(SHAPE) == 4096
    assert read_header(raw, MODEL, key_of(1), SHAPE) == sums
    for model, key, shape, field in (
        (OTHER_MODEL, key_of(1), SHAPE, "model"),
        (MODEL, key_of(2), SHAPE, "name"),
        (MODEL, key_of(1), ChunkShape(2, 4, 4, "bfloat16"), "num_kv_heads"),
        (MODEL, key_of(1), ChunkShape(2, 2, 8, "float32"), "rows"),
    ):
        with pytest.raises(ChunkError, match=f"its {field} is .*, wanted"):
            read_header(raw, model, key, shape)
    other = write_header(MODEL, key_of(1), SHAPE, [*sums, "3" * 32])
    with pytest.raises(ChunkError, match="checksums of 3 layers, wanted 2"):
        read_header(other, MODEL, key_of(1), SHAPE)


def test_a_flipped_bit_anywhere_is_found_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = open_folder(tmp_path)
    store(folder, 1)
    path = path_of(tmp_path, 1)
    sound = path.read_bytes()
    assert sound[700 : header_bytes(SHAPE)].isspace()
    with caplog.at_level(logging.ERROR, "transfer.chunks.chunk_folder"):
        for place in PLACES:
            flipped = bytearray(sound)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            assert fetch(folder, 1) is None, place
            path.with_suffix(".bad").unlink()
    path.write_bytes(sound)
    assert fetch(folder, 1) == layers_of(1)
    assert folder.counts["set_aside"] == len(PLACES)


def test_a_file_cut_anywhere_is_set_aside_and_stored_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = open_folder(tmp_path)
    store(folder, 1)
    path = path_of(tmp_path, 1)
    sound = path.read_bytes()
    with caplog.at_level(logging.ERROR, "transfer.chunks.chunk_folder"):
        for size in PLACES:
            path.write_bytes(sound[:size])
            assert fetch(folder, 1) is None, size
            path.with_suffix(".bad").unlink()
    path.write_bytes(sound + b"\0")
    assert fetch(folder, 1) is None
    assert f"chunk_set_aside path={path.with_suffix('.bad')} reason=it has 4,4" in caplog.text
    assert path.with_suffix(".bad").exists()
    assert store(folder, 1)
    assert fetch(folder, 1) == layers_of(1)


def test_a_file_cut_while_it_is_read_is_lost_and_not_made_up(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    store(folder, 1)
    file = folder.open(key_of(1))
    os.truncate(path_of(tmp_path, 1), FILE_BYTES - 1)
    out = bytearray(LAYER_BYTES)
    file.read(0, memoryview(out))
    assert bytes(out) == layers_of(1)[0]
    with pytest.raises(ChunkError, match="layer 1 ends after 191 of 192 bytes"):
        file.read(1, memoryview(out))
    file.close()


FOREIGN = hashlib.shake_128(b"foreign").digest(FILE_BYTES)
PREFIX = b"TANDEMKV" + struct.pack("<II", 1, 4096) + bytes(16)
FORGED = [
    (PREFIX + body).ljust(FILE_BYTES) for body in (b"[" * 4000, b"7", b'{"checksums": 7}', b'["checksums"]', b"\xff")
]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"TANDEMKV", FOREIGN, bytes(FILE_BYTES), *FORGED])
def test_a_foreign_file_is_set_aside(content: bytes, tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    path_of(tmp_path, 1).write_bytes(content)
    assert fetch(folder, 1) is None
    assert store(folder, 1)
    assert fetch(folder, 1) == layers_of(1)


def test_a_chunk_of_another_model_or_another_name_is_never_read(tmp_path: Path) -> None:
    store(open_folder(tmp_path, model=OTHER_MODEL), 1)
    folder = open_folder(tmp_path)
    shutil.copy(path_of(tmp_path, 1, OTHER_MODEL), path_of(tmp_path, 1))
    shutil.copy(path_of(tmp_path, 1, OTHER_MODEL), path_of(tmp_path, 2))
    assert fetch(folder, 1) is None
    assert fetch(folder, 2) is None
    store(folder, 1)
    shutil.copy(path_of(tmp_path, 1), path_of(tmp_path, 2))
    assert fetch(folder, 2) is None
    assert folder.counts["set_aside"] == 3


def test_files_that_are_not_ours_are_neither_counted_nor_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.kv").write_text("mine")
    (tmp_path / "sub").mkdir()
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "notes.kv").write_text("mine")
    (tmp_path / MODEL / f"{key_of(5).name}.txt").write_text("mine")
    folder = open_folder(tmp_path, FILE_BYTES)
    assert store(folder, 1)
    assert store(folder, 2)
    assert folder.bytes_held() == FILE_BYTES
    assert len(list(tmp_path.rglob("*.kv"))) == 3
    assert (tmp_path / MODEL / f"{key_of(5).name}.txt").exists()


WHAT = st.sampled_from(["put", "put", "get", "get", "touch", "delete", "restart"])
OPERATIONS = st.lists(st.tuples(WHAT, st.integers(0, 4)), min_size=10, max_size=40)


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS, capacity=st.integers(0, 4))
def test_the_least_recently_used_go_as_in_an_ordered_dictionary(
    operations: list[tuple[str, int]], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("chunks")
    folder, model = open_folder(root, max(1, capacity * FILE_BYTES)), OrderedDict[int, None]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for what, number in operations:
            if what == "put":
                assert store(folder, number) == (capacity > 0)
                model[number] = None
                model.move_to_end(number)
                while len(model) > capacity:
                    model.popitem(last=False)
            elif what == "get":
                assert (fetch(folder, number) is not None) == (number in model)
                if number in model:
                    model.move_to_end(number)
            elif what == "delete":
                folder.delete(key_of(number))
                model.pop(number, None)
            elif what == "touch":
                folder.touch(key_of(number))
                if number in model:
                    model.move_to_end(number)
            else:
                capacity = number
                folder = open_folder(root, max(1, capacity * FILE_BYTES))
                while len(model) > capacity:
                    model.popitem(last=False)
            assert {path.name for path in root.rglob("*.kv")} == {f"{key_of(one).name}.kv" for one in model}
            assert folder.bytes_held() == len(model) * FILE_BYTES
    shutil.rmtree(root)


def test_a_smaller_limit_holds_from_the_start_and_what_was_set_aside_goes_first(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for number in range(4):
        store(folder, number)
    path_of(tmp_path, 3).write_bytes(bytes(FILE_BYTES))
    assert fetch(folder, 3) is None
    smaller = open_folder(tmp_path, 2 * FILE_BYTES)
    assert [fetch(smaller, number) is not None for number in range(4)] == [False, True, True, False]
    assert smaller.bytes_held() == 2 * FILE_BYTES
    assert smaller.counts["evicted"] == 2


def test_the_chunks_of_all_models_share_the_limit(tmp_path: Path) -> None:
    first, second = open_folder(tmp_path, 2 * FILE_BYTES), open_folder(tmp_path, 2 * FILE_BYTES, OTHER_MODEL)
    store(first, 1)
    store(second, 2)
    store(second, 3)
    assert [fetch(first, 1), fetch(second, 2)] == [None, layers_of(2)]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_at_any_call_stores_nothing_and_says_so_once(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder(tmp_path)
    store(folder, 0)
    failed = 0
    for when in range(100):
        undo = fail_at(when, code)
        try:
            was_stored = store(folder, 1)
        finally:
            undo()
        assert list(tmp_path.rglob("*.part")) == []
        assert was_stored == (fetch(folder, 1) is not None)
        assert fetch(folder, 0) == layers_of(0)
        if was_stored:
            break
        failed += 1
    assert failed >= 7, "open thrice, allocate, three writes, sync, rename"
    assert folder.counts["refused"] == failed
    assert caplog.text.count("chunks_not_stored") == 1
    assert os.strerror(code) in caplog.text
    undo = fail_at(0, code)
    store(folder, 2)
    undo()
    assert caplog.text.count("chunks_not_stored") == 2, "it is said again when chunks were stored in between"


def test_a_limit_of_the_system_on_files_is_a_full_disk(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES - 1, before[1]))
        assert not store(folder, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.rglob("*.part")) == []
    assert store(folder, 1)


def test_a_folder_that_cannot_be_made_finds_and_stores_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = open_folder(tmp_path / "file")
    assert fetch(folder, 1) is None
    assert not store(folder, 1)
    assert caplog.text.count("chunks_not_stored") == 1


def test_a_chunk_above_the_limit_drives_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(open_folder(tmp_path, FILE_BYTES), 1)
    folder = open_folder(tmp_path, FILE_BYTES)
    big = name_chunk(list(range(100)), SHAPE, "")
    assert not folder.put(big, [memoryview(bytes(SHAPE.layer_bytes(100)))] * 2)
    assert "exceed the limit" in caplog.text
    assert fetch(folder, 1) == layers_of(1)


def test_a_lock_that_another_process_keeps_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder(tmp_path)
    store(folder, 1)
    monkeypatch.setattr("transfer.chunks.room.LOCK_SECONDS", 0.02)
    with locked(folder.root):
        assert not store(folder, 2)
        assert fetch(folder, 1) == layers_of(1)
    assert "chunks_not_stored" in caplog.text
    assert store(folder, 2)


def test_a_writer_killed_at_any_call_leaves_a_whole_chunk_or_none(tmp_path: Path) -> None:
    code = "import sys, pathlib; from tests.transfer.chunk_cases import *; " \
           "print(kill_everywhere(pathlib.Path(sys.argv[1])), 'torch' in sys.modules)"  # fmt: skip
    child = run_child(code, str(tmp_path))
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err[-2000:]
    kills, has_torch = out.split()
    assert int(kills) >= 2 * 9
    assert has_torch == "False", "files and bytes need no torch"


def test_processes_that_share_a_folder_never_read_wrong_bytes(tmp_path: Path) -> None:
    code = "import sys, pathlib; from tests.transfer.chunk_cases import *; " \
           "share(pathlib.Path(sys.argv[1]), int(sys.argv[2]), 300)"  # fmt: skip
    children = [run_child(code, str(tmp_path), str(seed)) for seed in (1, 2, 3)]
    for child in children:
        _, err = child.communicate(timeout=60)
        assert child.returncode == 0, err[-2000:]
    folder = open_folder(tmp_path, 3 * FILE_BYTES)
    assert all(is_right(folder, number) for number in range(8))
    assert list(tmp_path.rglob("*.part")) == []


def test_what_a_living_writer_reserves_is_counted_and_not_cleared_away(tmp_path: Path) -> None:
    writing, other = open_folder(tmp_path, 2 * FILE_BYTES), open_folder(tmp_path, 2 * FILE_BYTES)
    store(other, 1)
    with locked(writing.root):
        part, descriptor = writing._reserve(key_of(2))
    assert store(other, 3)
    assert part.exists()
    assert other.bytes_held() == 2 * FILE_BYTES
    assert [fetch(other, 1), fetch(other, 3)] == [None, layers_of(3)]
    os.close(descriptor)
    assert store(other, 1)
    assert not part.exists()


def test_the_file_is_as_large_as_its_shape_says() -> None:
    assert SHAPE.file_bytes(TOKENS) == FILE_BYTES
    assert ChunkShape(32, 8, 128, "int8").layer_bytes(512) == 2 * 512 * 8 * 136
    assert header_bytes(ChunkShape(32, 8, 128, "int8")) == 4096
    assert header_bytes(ChunkShape(126, 8, 128, "int8")) == 8192


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "store", "delete", "read", "damage"]), st.integers(0, 6)), max_size=40
    ),
    st.integers(FILE_BYTES, 4 * FILE_BYTES),
)
def test_a_full_disk_gives_up_what_was_used_longest_ago(steps: list[tuple[str, int]], budget: int) -> None:
    with tempfile.TemporaryDirectory() as name, fill_disk(Path(name), budget):
        root = Path(name)
        folder, alive = open_folder(root), OrderedDict[int, None]()
        for what, number in steps:
            if what == "store":
                assert store(folder, number), "what is not used makes room"
                assert fetch(folder, number) == layers_of(number)
                alive[number] = None
                alive.move_to_end(number)
            elif what == "delete":
                folder.delete(key_of(number))
                alive.pop(number, None)
            elif what == "damage" and path_of(root, number).exists():
                os.truncate(path_of(root, number), FILE_BYTES - 1)
                assert fetch(folder, number) is None
                alive.pop(number)
            elif fetch(folder, number) == layers_of(number):
                alive.move_to_end(number)
            assert bytes_on_disk(root) <= budget
            found = [number for number in alive if path_of(root, number).exists()]
            assert found == list(alive)[len(alive) - len(found) :], "those that were used last are there"
            assert len(list(root.rglob("*.bad"))) <= MOST_SET_ASIDE
        for number in range(7):
            folder.delete(key_of(number))
        assert bytes_on_disk(root) == 0
        assert store(folder, 9)
        assert folder.counts["refused"] == 0


def test_a_disk_that_others_have_filled_refuses_and_takes_chunks_when_there_is_room_again(tmp_path: Path) -> None:
    with fill_disk(tmp_path, 2 * FILE_BYTES):
        folder = open_folder(tmp_path)
        (tmp_path / "another").write_bytes(bytes(FILE_BYTES + 1))
        assert not store(folder, 1)
        assert list(tmp_path.rglob("*.part")) == []
        (tmp_path / "another").unlink()
        assert store(folder, 1)
        assert store(folder, 2)
        assert fetch(folder, 1) == layers_of(1)


def test_a_disk_that_is_full_at_any_call_stores_in_the_room_of_others(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for when in range(100):
        store(folder, 0)
        folder.delete(key_of(1))
        undo = fail_at(when, errno.ENOSPC)
        try:
            assert store(folder, 1), when
        finally:
            undo()
        assert list(tmp_path.rglob("*.part")) == []
        assert fetch(folder, 1) == layers_of(1)
        if fetch(folder, 0) is not None:
            break
    assert when >= 7, "open thrice, allocate, three writes, sync, rename"
    assert folder.counts["refused"] == 0


def test_damaged_files_are_kept_to_be_looked_at_but_not_more_than_a_few(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for number in range(3 * MOST_SET_ASIDE):
        store(folder, number)
        os.truncate(path_of(tmp_path, number), 9)
        assert fetch(folder, number) is None
    left = {path.stem for path in tmp_path.rglob("*.bad")}
    assert left == {key_of(number).name for number in range(2 * MOST_SET_ASIDE, 3 * MOST_SET_ASIDE)}
    for name in range(9):
        (tmp_path / MODEL / f"{name:064}.bad").write_bytes(b"of a version that kept them")
    open_folder(tmp_path)
    assert len(list(tmp_path.rglob("*.bad"))) == MOST_SET_ASIDE
    folder.delete(key_of(3 * MOST_SET_ASIDE - 1))
    assert not path_of(tmp_path, 3 * MOST_SET_ASIDE - 1).with_suffix(".bad").exists()
