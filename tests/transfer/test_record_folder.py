"""Records on disk: whole or absent, whatever happens to files, disks and processes; limits hold; the oldest go."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from threading import Thread, Timer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.chunk_cases import fail_at
from tests.transfer.record_cases import (
    FILE_BYTES,
    MODEL,
    OTHER_MODEL,
    SHAPE,
    fetch,
    name_of,
    open_folder,
    parts_of,
    path_of,
    reopen,
    store,
)
from transfer.disk.disk_rate import KEPT_SECONDS, SLOW_RATE, ReadRate, find_rate, probe_rate
from transfer.disk.holders import save_holder
from transfer.disk.record_folder import FolderError, RecordFolder
from transfer.disk.record_format import RecordError, RecordShape, name_model, read_header, write_header

ROOT = Path(__file__).parents[2]
PLACES = [*range(0, 320, 3), *range(320, 4096, 64), *range(4096, FILE_BYTES, 3)]  # more densely where there is text

WHAT = st.sampled_from(["put", "put", "get", "get", "drop", "restart"])
OPERATIONS = st.lists(st.tuples(WHAT, st.integers(0, 4)), max_size=40)


def run_child(code: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def fail_with(number: int) -> int:
    raise OSError(number, os.strerror(number))


def test_what_is_stored_is_found_by_this_process_and_the_next(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "a" / "b")
    assert fetch(folder, 1) is None
    assert store(folder, 1)
    assert store(folder, 2)
    assert store(folder, 1), "it is there already"
    assert (folder.bytes_held, folder.bytes_written) == (2 * FILE_BYTES, 2 * FILE_BYTES)
    again = reopen(folder)
    assert [fetch(again, number) for number in (1, 2, 3)] == [parts_of(1), parts_of(2), None]
    assert again.bytes_held == 2 * FILE_BYTES
    again.shutdown()
    assert fetch(open_folder(tmp_path / "a" / "b", model=OTHER_MODEL), 1) is None


def test_a_header_is_that_of_one_record_of_one_model() -> None:
    sums = ["1" * 32, "2" * 32]
    raw = write_header(MODEL, SHAPE, name_of(1), sums)
    assert len(raw) == SHAPE.header_bytes == 4096
    assert read_header(raw, MODEL, SHAPE, name_of(1)) == sums
    others = [
        (OTHER_MODEL, SHAPE, name_of(1)),
        (MODEL, SHAPE, name_of(2)),
        (MODEL, RecordShape("kv", (60, 101)), name_of(1)),
        (MODEL, RecordShape("end", SHAPE.part_bytes), name_of(1)),
    ]
    for other in others:
        with pytest.raises(RecordError):
            read_header(raw, *other)
    assert RecordShape("kv", (8,) * 200).header_bytes == 8192
    assert name_model("a", 1) != name_model("a1") != name_model("a", "1", "")


def test_a_flipped_bit_anywhere_is_found_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = open_folder(tmp_path)
    store(folder, 1)
    folder.shutdown()
    sound = path_of(tmp_path, 1).read_bytes()
    with caplog.at_level(logging.ERROR, "transfer.disk.record_folder"):
        for place in PLACES:
            flipped = bytearray(sound)
            flipped[place] ^= 1 << place % 8
            path_of(tmp_path, 1).write_bytes(flipped)
            folder = open_folder(tmp_path)
            assert fetch(folder, 1) is None, place
            assert not path_of(tmp_path, 1).exists()
            folder.shutdown()
    path_of(tmp_path, 1).write_bytes(sound)
    assert fetch(open_folder(tmp_path), 1) == parts_of(1)


def test_what_changes_under_a_running_server_is_found_out_too(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for number in range(4):
        store(folder, number)
    os.truncate(path_of(tmp_path, 0), FILE_BYTES - 1)
    path_of(tmp_path, 1).unlink()
    shutil.copy(path_of(tmp_path, 3), path_of(tmp_path, 2))
    assert [fetch(folder, number) for number in range(4)] == [None, None, None, parts_of(3)]
    assert folder.counts["damaged"] == 3
    assert folder.bytes_held == FILE_BYTES


@pytest.mark.parametrize("why", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_cannot_be_read_for_want_of_files_or_memory_stays(
    why: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path)
    store(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr("transfer.disk.record_folder.read_bytes", lambda *_: fail_with(why))
        assert fetch(folder, 1) is None
        assert (folder.counts["failed"], folder.counts["damaged"], folder.is_readable) == (1, 0, False)
        folder.shutdown()
        patch.setattr(Path, "open", lambda *_: fail_with(why))
        with pytest.raises(FolderError, match="cannot be used"):
            open_folder(tmp_path)
    monkeypatch.setattr("transfer.disk.record_folder.READ_RETRY_SECONDS", 0.0)
    folder = open_folder(tmp_path)
    assert fetch(folder, 1) == parts_of(1)
    monkeypatch.setattr("transfer.disk.record_folder.read_bytes", lambda *_: fail_with(errno.EIO))
    assert fetch(folder, 1) is None
    assert (folder.counts["failed"], folder.counts["damaged"], folder.is_readable) == (0, 1, True)


@pytest.mark.parametrize("content", [b"", b"TANDEMCX", b"PK\x03\x04", bytes(FILE_BYTES), b"TANDEMCX" * 532])
def test_a_foreign_or_cut_file_goes_at_the_start(content: bytes, tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    path_of(tmp_path, 1).write_bytes(content)
    (tmp_path / MODEL / f"{name_of(2)}.kv.part").write_bytes(content)
    (tmp_path / MODEL / "notes.kv").write_text("mine")
    folder = reopen(folder)
    assert fetch(folder, 1) is None
    assert [path.name for path in (tmp_path / MODEL).iterdir()] == ["notes.kv"], "what is not ours is not touched"


def test_a_record_of_another_model_or_name_is_never_read(tmp_path: Path) -> None:
    other = open_folder(tmp_path, model=OTHER_MODEL)
    store(other, 1)
    other.shutdown()
    (tmp_path / MODEL).mkdir()
    shutil.copy(path_of(tmp_path, 1, OTHER_MODEL), path_of(tmp_path, 1))
    shutil.copy(path_of(tmp_path, 1, OTHER_MODEL), path_of(tmp_path, 2))
    folder = open_folder(tmp_path)
    assert [fetch(folder, 1), fetch(folder, 2), len(folder)] == [None, None, 1]
    store(folder, 1)
    shutil.copy(path_of(tmp_path, 1), path_of(tmp_path, 2))
    assert fetch(reopen(folder), 2) is None


def test_files_of_all_models_share_the_limit(tmp_path: Path) -> None:
    other = open_folder(tmp_path, model=OTHER_MODEL)
    store(other, 1)
    store(other, 2)
    other.shutdown()
    folder = open_folder(tmp_path, 3 * FILE_BYTES)
    assert folder.bytes_held == 2 * FILE_BYTES
    store(folder, 3)
    store(folder, 4)
    assert [path_of(tmp_path, one, OTHER_MODEL).exists() for one in (1, 2)] == [False, True]
    assert [fetch(folder, 3), fetch(folder, 4)] == [parts_of(3), parts_of(4)]


def test_a_record_that_no_limit_holds_evicts_nobody(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    store(folder, 1)
    folder.shutdown()
    large = RecordShape("kv", (3 * FILE_BYTES,))
    folder = RecordFolder(tmp_path, OTHER_MODEL, [large], 2 * FILE_BYTES, None)
    assert not folder.put("kv", name_of(2), [memoryview(bytes(3 * FILE_BYTES))])
    assert (len(folder), folder.counts["refused"]) == (1, 1)


def test_a_folder_that_is_called_as_a_record_is_not_touched(tmp_path: Path) -> None:
    path_of(tmp_path, 1).mkdir(parents=True)
    folder = open_folder(tmp_path)
    assert not folder.has("kv", name_of(1))
    assert store(folder, 2)


def test_what_is_read_now_stays_and_a_prefix_outlives_what_is_behind_it(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, 3 * FILE_BYTES)
    for number in (1, 2, 3):
        store(folder, number)
    folder.touch("kv", [name_of(number) for number in (1, 2, 3)])
    folder = reopen(folder, 3 * FILE_BYTES)
    assert not folder.lease("kv", [name_of(1), name_of(9)]), "all or none"
    assert folder.lease("kv", [name_of(3)])
    assert store(folder, 4)
    assert [folder.has("kv", name_of(one)) for one in (1, 2, 3, 4)] == [True, False, True, True]
    folder.release("kv", [name_of(3)])
    assert store(folder, 5)
    assert not folder.has("kv", name_of(3))


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "contexts")
    store(folder, 1)
    shutil.rmtree(tmp_path / "contexts")
    assert fetch(folder, 1) is None
    assert not store(folder, 2)
    folder._stopped_until = 0.0
    assert store(folder, 2)
    assert fetch(folder, 2) == parts_of(2)


def test_where_all_is_read_nothing_is_written(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, 2 * FILE_BYTES)
    store(folder, 1)
    store(folder, 2)
    folder.lease("kv", [name_of(1), name_of(2)])
    assert not store(folder, 3)
    assert folder.counts["refused"] == 1


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS, capacity=st.integers(0, 4))
def test_the_least_recently_used_go_as_in_an_ordered_dictionary(
    operations: list[tuple[str, int]], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("records")
    folder, model = open_folder(root, max(1, capacity * FILE_BYTES)), OrderedDict[int, None]()
    for what, number in operations:
        if what == "put":
            assert store(folder, number) == (capacity > 0)
            model[number] = None  # what is there stays where it is, until it is used
            while len(model) > capacity:
                model.popitem(last=False)
        elif what == "get":
            assert fetch(folder, number) == (parts_of(number) if number in model else None)
            if number in model:
                model.move_to_end(number)
        elif what == "drop":
            folder.drop("kv", name_of(number), "a test")
            model.pop(number, None)
        else:
            capacity = number
            folder = reopen(folder, max(1, capacity * FILE_BYTES))
            while len(model) > capacity:
                model.popitem(last=False)
        assert {path.name for path in root.rglob("*.kv")} == {f"{name_of(one)}.kv" for one in model}
        assert folder.bytes_held == len(model) * FILE_BYTES
    folder.shutdown()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_at_any_call_stops_writes_and_says_so_once(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder(tmp_path)
    store(folder, 0)
    failed = 0
    for when in range(100):
        folder._stopped_until = 0.0
        undo = fail_at(when, code)
        try:
            was_stored = store(folder, 1)
        finally:
            undo()
        assert list((tmp_path / MODEL).glob("*.part")) == []
        assert fetch(folder, 1) == (parts_of(1) if was_stored else None)
        assert fetch(folder, 0) == parts_of(0)
        if was_stored:
            break
        failed += 1
        assert not store(folder, 1), "for a while nothing is tried"
    assert failed == 6, "open, three writes, the time, rename"
    assert folder.counts["refused"] == 2 * failed
    assert caplog.text.count("disk_writes_stop") == 1
    assert caplog.text.count("disk_writes_go_on") == 1


def test_the_limit_of_a_day_holds_over_a_restart_and_ends_with_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    day = "2026-11-29"
    monkeypatch.setattr("transfer.disk.day_count._today", lambda: day)
    folder = open_folder(tmp_path, day_limit_bytes=2 * FILE_BYTES)
    store(folder, 1)
    folder.shutdown()
    folder = open_folder(tmp_path, day_limit_bytes=2 * FILE_BYTES)
    assert [store(folder, number) for number in (2, 3, 4)] == [True, False, False]
    assert (folder.counts["capped"], caplog.text.count("disk_day_limit")) == (2, 1)
    day = "2026-11-30"
    assert [store(folder, number) for number in (3, 4, 5)] == [True, True, False]
    day = "2026-11-29"
    assert not store(folder, 6), "a clock that is set back counts on where it was"
    day = "2026-11-30"
    folder.shutdown()
    folder = open_folder(tmp_path, day_limit_bytes=2 * FILE_BYTES)
    assert not store(folder, 6), "and forth again, too"
    folder.shutdown()
    (tmp_path / "written.json").write_text('{"days": {"2026-11-30": []')
    assert store(open_folder(tmp_path, day_limit_bytes=FILE_BYTES), 6)


def test_a_second_process_is_refused_by_name_until_the_first_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.disk.record_folder.LOCK_SECONDS", 0.1)
    code = "import sys, pathlib; from tests.transfer.record_cases import open_folder; " \
           "folder = open_folder(pathlib.Path(sys.argv[1])); print('there', flush=True); sys.stdin.read()"  # fmt: skip
    child = run_child(code, str(tmp_path))
    assert child.stdout is not None
    assert child.stdout.readline() == "there\n"
    refusal = rf"disk\.folder: .* in use by process {child.pid}; give each server a folder"
    with pytest.raises(FolderError, match=refusal):
        open_folder(tmp_path)
    monkeypatch.setattr("transfer.disk.record_folder.LOCK_SECONDS", 30)
    Timer(0.2, child.kill).start()
    open_folder(tmp_path).shutdown()  # one that is about to end is waited for
    child.communicate()


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"disk\.folder: .*file cannot be used"):
        open_folder(tmp_path / "file")


def test_a_writer_killed_at_any_call_leaves_whole_records_or_none(tmp_path: Path) -> None:
    code = "import sys, pathlib; from tests.transfer.record_cases import *; " \
           "print(kill_everywhere(pathlib.Path(sys.argv[1])), 'torch' in sys.modules)"  # fmt: skip
    child = run_child(code, str(tmp_path))
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err[-2000:]
    kills, has_torch = out.split()
    assert int(kills) >= 2 * 8, "of the lock, the scans, three writes, rename, and its time"
    assert has_torch == "False"


def test_the_rate_is_measured_and_learnt_from_reads_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe_rate(tmp_path, 2) > SLOW_RATE / 10
    assert list(tmp_path.iterdir()) == []
    assert probe_rate(tmp_path / "missing", 2) == SLOW_RATE
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    rate = ReadRate(1e9)
    rate.begin()
    rate.begin()
    now = 0.1
    rate.end(2**26)
    rate.end(2**26)
    assert rate.bytes_a_second == pytest.approx(1e9 + 0.3 * (2**27 / 0.1 - 1e9))


def test_the_rate_is_kept_with_the_folder_until_it_is_old_or_the_device_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = []
    monkeypatch.setattr("transfer.disk.disk_rate.probe_rate", lambda *of: probed.append(of) or 7e8 + len(probed))
    assert find_rate(tmp_path, 2) == find_rate(tmp_path, 2) == 7e8 + 1
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + KEPT_SECONDS + 60)
    assert find_rate(tmp_path, 2) == find_rate(tmp_path, 2) == 7e8 + 2
    monkeypatch.setattr("time.time", lambda: now)  # measured in the future
    assert find_rate(tmp_path, 2) == 7e8 + 3
    assert find_rate(tmp_path, 4) == 7e8 + 4
    kept = json.loads((tmp_path / "rate.json").read_text())
    (tmp_path / "rate.json").write_text(json.dumps(kept | {"device": [1, 2]}))
    assert find_rate(tmp_path, 4) == 7e8 + 5
    for damaged in ("", "[]", "{", json.dumps(kept | {"bytes_a_second": float("inf")})):
        (tmp_path / "rate.json").write_text(damaged)
        before = len(probed)
        find_rate(tmp_path, 4)
        assert len(probed) == before + 1
    monkeypatch.setattr("transfer.disk.disk_rate.probe_rate", lambda *of: SLOW_RATE)
    (tmp_path / "rate.json").unlink()
    assert find_rate(tmp_path, 2) == SLOW_RATE
    assert list(tmp_path.iterdir()) == [], "what could not be measured is measured again"


def test_what_another_thread_saves_while_pins_are_looked_up_stays_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path)
    assert store(folder, 1)
    file_name = f"{name_of(1)}.{SHAPE.kind}"
    held = folder.holders.held

    def save() -> None:
        holder = save_holder("", "notes", b"", "exact", "")
        holder.records = {file_name}
        folder.holders.add(holder)
        folder.pin([file_name])

    other = Thread(target=save)

    def look_up(kind: str | None = None) -> set[str]:
        found = held(kind)
        if not other.ident:
            other.start()
            other.join(0.2)
        return found

    monkeypatch.setattr(folder.holders, "held", look_up)
    folder.pin()
    other.join()
    folder.remove(SHAPE.kind, name_of(1))
    assert folder.has(SHAPE.kind, name_of(1))
    folder.holders.remove(folder.holders.find("saved", "", "notes"))
    folder.pin()
    folder.remove(SHAPE.kind, name_of(1))
    assert not folder.has(SHAPE.kind, name_of(1))
