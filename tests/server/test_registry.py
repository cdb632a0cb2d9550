"""Documents on disk: their owners', within limits, for all processes that share them, whatever ends a process."""

import asyncio
import hashlib
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scheduler.messages import NamedChunk
from server.stores.document_registry import DocumentRegistry, RegistryError, RegistryFull, TextsTooLarge, _log_ahead
from tests.server.live_server import ROOT
from tests.transfer.chunk_cases import fetch, open_folder, store
from transfer.chunks import room

MIB = 2**20


@pytest.fixture
def registry(tmp_path: Path):
    opened = DocumentRegistry(tmp_path / "documents.sqlite3", 10, MIB)
    yield opened
    opened.close()


async def ids_of(registry: DocumentRegistry, owner: str) -> list[str]:
    return [entry.id for entry in await registry.page(owner, None, 1000)]


async def test_a_document_is_found_by_its_owner_alone(registry) -> None:
    text = "naïve 東京\x00 <|end|>"
    mine = await registry.add("a", "T", text, True, [])
    yours = await registry.add("b", "T", text, True, [])
    assert mine.id != yours.id
    assert mine.content_hash == yours.content_hash == hashlib.sha256(text.encode()).hexdigest()
    found = await registry.find("a", [mine.id, yours.id, "doc-0", mine.id], MIB)
    assert list(found) == [mine.id]
    assert (found[mine.id].entry, found[mine.id].text) == (mine, text)
    assert await ids_of(registry, "b") == [yours.id]
    assert await registry.page("a", yours.id, 10) is None
    assert await registry.delete("a", yours.id) is None
    assert await registry.delete("b", yours.id) == []
    assert await registry.delete("b", yours.id) is None
    assert await registry.count() == 1


async def test_texts_that_no_prompt_has_room_for_are_not_read(registry) -> None:
    ids = [(await registry.add("a", "", letter * 1000, True, [])).id for letter in "xyz"]
    assert len(await registry.find("a", ids, 3000)) == 3
    for asked in (ids, [ids[0]] * 3):
        with pytest.raises(TextsTooLarge, match="3000"):
            await registry.find("a", asked, 2999)
    assert await registry.find("b", ids, 0) == {}


async def test_the_same_title_and_text_are_one_document_and_any_other_is_another(registry) -> None:
    one = await registry.add("a", "T", "text", True, [])
    assert await registry.add("a", "T", "text", True, []) == one
    others = {(await registry.add("a", *parts, True, [])).id for parts in (("T", "texts"), ("Tt", "ext"), ("", "x"))}
    assert len(others | {one.id}) == 4


async def test_a_disk_that_takes_nothing_more_gives_what_it_has(registry, monkeypatch, caplog) -> None:
    inline = await registry.add("a", "", "inline", False, [])
    monkeypatch.setattr("server.stores.document_registry._USED_SECONDS", -1.0)
    registry._file.execute("PRAGMA query_only=1")
    found = await registry.find("a", [inline.id], MIB)
    assert found[inline.id].text == "inline"
    assert f"document_use_not_noted document={inline.id}" in caplog.text
    with pytest.raises(RegistryError, match="attempt to write a readonly database"):
        await registry.add("a", "", "another", False, [])
    registry._file.execute("PRAGMA query_only=0")
    assert await registry.add("a", "", "another", False, [])


async def test_pages_are_in_the_order_of_arrival(registry) -> None:
    ids = [(await registry.add("a", "", f"text {i}", True, [])).id for i in range(7)]
    pages, after = [], None
    while page := await registry.page("a", after, 3):
        pages.append([entry.id for entry in page])
        after = page[-1].id
    assert pages == [ids[:3], ids[3:6], ids[6:]]


async def test_one_document_too_many_is_refused_and_what_came_with_a_prompt_goes_first(registry) -> None:
    inline = [(await registry.add("a", "", f"inline {i}", False, [])).id for i in range(3)]
    kept = [(await registry.add("a", "", f"kept {i}", True, [])).id for i in range(7)]
    await registry.add("b", "", "inline of another", False, [])
    await registry.add("a", "", "inline 1", True, [])  # from now on
    assert set(await ids_of(registry, "a")) == {*inline, *kept}
    for i in (7, 8):
        kept.append((await registry.add("a", "", f"kept {i}", True, [])).id)
    assert set(await ids_of(registry, "a")) == {inline[1], *kept}
    with pytest.raises(RegistryFull, match="this key has 10 documents, at most 10"):
        await registry.add("a", "", "one more", True, [])
    assert await registry.add("a", "", "kept 0", True, []), "one that is there needs no room"
    await registry.add("b", "", "another key's", True, [])
    assert await registry.count() == 12


async def test_a_full_disk_opens(tmp_path: Path, monkeypatch) -> None:
    path, connect = tmp_path / "documents.sqlite3", sqlite3.connect
    before = DocumentRegistry(path, 10, MIB)
    made = await before.add("a", "T", "text", True, [])
    before.close()

    def connect_to_read(*where, **how) -> sqlite3.Connection:
        connection = connect(*where, **how)
        connection.execute("PRAGMA query_only=1")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_read)
    full = DocumentRegistry(path, 10, MIB)
    assert (await full.find("a", [made.id], MIB))[made.id].text == "text"
    with pytest.raises(RegistryError, match="readonly"):
        await full.add("a", "", "another", True, [])
    full.close()


async def test_a_lower_limit_holds_from_the_next_document_on(tmp_path: Path) -> None:
    path = tmp_path / "documents.sqlite3"
    before = DocumentRegistry(path, 10, MIB)
    for i in range(8):
        await before.add("a", "", f"text {i}", i < 2, [])
    before.close()
    now = DocumentRegistry(path, 4, MIB)
    await now.add("a", "", "one more", True, [])
    assert len(await ids_of(now, "a")) == 4
    now.close()
    fewer = DocumentRegistry(path, 2, MIB)
    with pytest.raises(RegistryFull, match="this key has 3 documents, at most 2"):
        await fewer.add("a", "", "yet another", True, [])
    assert len(await ids_of(fewer, "a")) == 4, "nothing is given up for what is refused"
    fewer.close()


async def test_texts_stay_below_the_limit_the_least_recently_used_inline_one_goes(registry, monkeypatch) -> None:
    clock = iter(range(1000, 10**6, 100))
    monkeypatch.setattr("server.stores.document_registry.time.time", lambda: float(next(clock)))
    size = MIB // 4
    first, second, third = [await registry.add(owner, "", owner * size, False, []) for owner in "abc"]
    await registry.find("a", [first.id], MIB)
    kept = await registry.add("d", "", "d" * size, True, [])
    with pytest.raises(RegistryFull, match=f"no room for {MIB + 1} bytes in 1 MiB"):
        await registry.add("e", "", "e" * (MIB + 1), True, [])
    assert await registry.count() == 4, "nothing is given up for what cannot fit"
    await registry.add("e", "", "e", False, [])
    found = {owner: await registry.page(owner, None, 9) for owner in "abcd"}
    assert [owner for owner, entries in found.items() if entries] == ["a", "c", "d"], "b was used longest ago"
    with pytest.raises(RegistryFull):
        await registry.add("e", "", "e" * (MIB - size + 1), True, [])
    assert [await registry.count(), second.id, third.id, kept.id != ""] == [4, second.id, third.id, True]


async def test_documents_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "documents.sqlite3"
    first = DocumentRegistry(path, 10, MIB)
    entry = await first.add("a", "T", "text", True, [])
    first.close()
    again = DocumentRegistry(path, 10, MIB)
    assert (await again.find("a", [entry.id], MIB))[entry.id].text == "text"
    again.close()
    assert path.stat().st_mode & 0o077 == 0, "texts are their owners'"


WRITER = """
import asyncio, sys
from pathlib import Path
from scheduler.messages import NamedChunk
from server.stores.document_registry import DocumentRegistry
async def main():
    registry = DocumentRegistry(Path(sys.argv[1]), 10_000, 2**30)
    for i in range(10_000):
        await registry.add("a", sys.argv[2], f"{i} " * 200, True, [])
        print(i, flush=True)
asyncio.run(main())
"""


async def test_two_processes_write_at_once_and_one_that_is_killed_leaves_whole_documents(tmp_path: Path) -> None:
    path = tmp_path / "documents.sqlite3"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    told = {}
    for name, writer in zip(("one", "two"), writers, strict=True):
        while (line := writer.stdout.readline().strip()) != "20":
            assert line, "it goes on until it is killed"
        writer.kill()
        told[name] = max(map(int, writer.stdout.read().split()), default=20)
        writer.wait()
        writer.stdout.close()
    registry = DocumentRegistry(path, 10_000, 2**30)
    entries = await registry.page("a", None, 20_000)
    for name in told:
        mine = [entry.id for entry in entries if entry.title == name]
        texts = [document.text for document in (await registry.find("a", mine, MIB)).values()]
        assert texts == [f"{i} " * 200 for i in range(len(texts))], "all that was told, in order, and none torn"
        assert len(texts) > told[name]
    registry.close()


async def test_processes_that_open_a_new_file_at_once_wait_for_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite does not, where the way of its journal changes: one in fifty pairs found it locked."""
    path = tmp_path / "documents.sqlite3"
    tries = 0

    class Locked:
        def execute(self, command: str) -> None:
            nonlocal tries
            tries += 1
            if tries < 4:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise error

    _log_ahead(Locked())
    assert tries == 4
    began = time.monotonic()
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("CREATE TABLE a (b)")
        monkeypatch.setattr("server.stores.document_registry._LOCK_SECONDS", 0.2)
        with pytest.raises(RegistryError, match="locked"):
            DocumentRegistry(path, 10, MIB)
    other.close()
    assert time.monotonic() - began > 0.2
    DocumentRegistry(path, 10, MIB).close()


async def test_a_file_that_is_none_of_ours_is_told_of_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "documents.sqlite3"
    path.write_bytes(b"something else entirely, and long enough to be looked at" * 100)
    with pytest.raises(RegistryError, match=r"documents\.sqlite3: file is not a database"):
        DocumentRegistry(path, 10, MIB)
    assert path.read_bytes().startswith(b"something else")
    other = tmp_path / "newer.sqlite3"
    with sqlite3.connect(other) as file:
        file.execute("PRAGMA user_version=7")
    with pytest.raises(RegistryError, match="of version 7, wanted 2"):
        DocumentRegistry(other, 10, MIB)
    (tmp_path / "folder").write_text("")
    with pytest.raises(RegistryError):
        DocumentRegistry(tmp_path / "folder" / "documents.sqlite3", 10, MIB)


async def test_a_disk_that_is_full_is_an_error_and_what_was_there_stays(registry) -> None:
    entry = await registry.add("a", "", "text", True, [])
    pages = registry._file.execute("PRAGMA page_count").fetchone()[0]
    registry._file.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(RegistryError, match="full"):
        await registry.add("a", "", "x" * 500_000, True, [])
    assert list(await registry.find("a", [entry.id], MIB)) == [entry.id]
    registry._file.execute("PRAGMA max_page_count=1000000")
    await asyncio.gather(*(registry.add("a", "", f"text {i}", True, []) for i in range(5)))
    assert await registry.count() == 6


def chunks_of(*names: int, salt: str = "") -> list[NamedChunk]:
    return [NamedChunk(f"{name:064x}", 512, salt) for name in names]


async def test_deleting_names_the_chunks_that_no_document_has_any_more(registry) -> None:
    one = await registry.add("a", "", "one", True, chunks_of(1, 2, 3))
    two = await registry.add("b", "", "two", True, chunks_of(3, 4))
    await registry.add("a", "", "one", True, chunks_of(1, salt="s"))
    await registry.note_chunks("b", two.id, chunks_of(2, 4, salt="s"))
    await registry.note_chunks("a", two.id, chunks_of(1))  # not theirs
    await registry.note_chunks("a", "doc-0", chunks_of(4))
    unnamed = await registry.delete("a", one.id)
    assert sorted(unnamed, key=str) == sorted([*chunks_of(1, 2), *chunks_of(1, salt="s")], key=str)
    await registry.add("a", "", "one", True, chunks_of(1))
    unnamed = await registry.delete("b", two.id)
    assert sorted(unnamed, key=str) == sorted([*chunks_of(3, 4), *chunks_of(2, 4, salt="s")], key=str)


async def test_what_is_given_up_names_no_chunks(tmp_path: Path) -> None:
    registry = DocumentRegistry(tmp_path / "documents.sqlite3", 1, MIB)
    await registry.add("a", "", "of a prompt", False, chunks_of(1))
    kept = await registry.add("a", "", "kept", True, chunks_of(1))
    assert await registry.delete("a", kept.id) == chunks_of(1)
    registry.close()


async def test_texts_that_are_deleted_leave_the_disk(tmp_path: Path) -> None:
    registry = DocumentRegistry(tmp_path / "documents.sqlite3", 100, 64 * MIB)
    ids = [(await registry.add("a", "", f"{i}" * MIB, True, [])).id for i in range(8)]
    for document_id in ids:
        await registry.delete("a", document_id)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < MIB
    registry.close()


async def test_a_full_disk_has_room_for_a_text_as_long_as_it_holds_chunks(tmp_path: Path) -> None:
    registry = DocumentRegistry(tmp_path / "documents.sqlite3", 100, 64 * MIB)
    folder = open_folder(tmp_path)
    pages = registry._file.execute("PRAGMA page_count").fetchone()[0]
    registry._file.execute(f"PRAGMA max_page_count={pages}")

    def give_up(root: Path, num_bytes: int) -> int:
        assert num_bytes > 3 * 500_000
        registry._file.execute("PRAGMA max_page_count=1000000")
        return room.give_up(root, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.stores.document_registry.give_up", give_up)
        with pytest.raises(RegistryError, match="full"):
            await registry.add("a", "", "x" * 500_000, True, [])
        registry._file.execute(f"PRAGMA max_page_count={pages}")
        store(folder, 1)
        entry = await registry.add("a", "", "x" * 500_000, True, [])
    assert list(await registry.find("a", [entry.id], MIB)) == [entry.id]
    assert fetch(folder, 1) is None
    registry.close()


async def test_a_file_of_the_version_without_chunks_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "documents.sqlite3"
    before = DocumentRegistry(path, 10, MIB)
    entry = await before.add("a", "T", "text", True, [])
    before._file.executescript("DROP TABLE chunks; PRAGMA user_version=1")
    before.close()
    now = DocumentRegistry(path, 10, MIB)
    assert list(await now.find("a", [entry.id], MIB)) == [entry.id]
    await now.note_chunks("a", entry.id, chunks_of(1))
    assert await now.delete("a", entry.id) == chunks_of(1)
    now.close()
