"""Keep the documents that clients have stored: their texts on disk, by the API key that stored each.

A document's id is made of its owner, title and text, so a second copy has the same id. An owner finds only its own
documents. A stored document can be found by every process that shares the file, also after a restart, until it is
deleted. Documents that came with a prompt are evicted to make room, the least recently used first. If the disk is full,
chunks are evicted to make room for texts. The event loop never waits for the disk.
"""

import asyncio
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from scheduler.messages import NamedChunk
from server import logs
from transfer.chunks.room import give_up

R = TypeVar("R")


_VERSION = 2  # 1 had no chunks
_LOCK_SECONDS = 5.0  # longest wait for another process
_LOOK_SECONDS = 0.01
_USED_SECONDS = 60.0  # a use is noted at most this often
_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    title TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    is_kept INTEGER NOT NULL,
    text BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS sizes ON documents (owner, is_kept, used, num_bytes);
CREATE TABLE IF NOT EXISTS chunks (
    number INTEGER NOT NULL REFERENCES documents ON DELETE CASCADE,
    tokens BLOB NOT NULL,
    num_tokens INTEGER NOT NULL,
    salt TEXT NOT NULL,
    PRIMARY KEY (number, tokens, salt)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS names ON chunks (tokens, salt);
"""
_UNNAMED = """
SELECT tokens, num_tokens, salt FROM chunks AS mine WHERE number = ? AND NOT EXISTS (
    SELECT 1 FROM chunks WHERE tokens = mine.tokens AND salt = mine.salt AND number <> mine.number
)
"""
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_ROOM_BYTES = 4 * 2**20  # for SQLite's log, beside the text
_ENTRY = "id, title, content_hash, num_bytes, created"


class RegistryError(Exception):
    """The documents cannot be read or written; the message is one line."""


class RegistryFull(Exception):
    """There is no room for another document; the message names the limit."""


class TextsTooLarge(Exception):
    """The requested texts have too many bytes; the argument is their number."""


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """A document without its text. content_hash: SHA-256 of the text in UTF-8, hexadecimal."""

    id: str
    title: str
    content_hash: str
    num_bytes: int
    created: float


@dataclass(frozen=True, slots=True)
class Document:
    entry: DocumentEntry
    text: str


def _log_ahead(file: sqlite3.Connection) -> None:
    """Turn on the write-ahead log, a setting that stays in the file.

    SQLite does not wait here: if two processes change a new file, one gets an error at once, so this tries again.
    """
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            file.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(_LOOK_SECONDS)
        else:
            return


class DocumentRegistry:
    """The documents in a SQLite file. Call `close` at the end."""

    def __init__(self, path: Path, max_documents: int, limit_bytes: int) -> None:
        """Open the file. max_documents: of one owner. limit_bytes: of all texts. Raises RegistryError."""
        self._path, self._max_documents, self._limit_bytes = path, max_documents, limit_bytes
        self._thread = ThreadPoolExecutor(1, "documents")
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._file = sqlite3.connect(path, timeout=_LOCK_SECONDS, check_same_thread=False, isolation_level=None)
            self._with_room(0, self._open)

    def _open(self) -> None:
        version = self._file.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._file.execute("PRAGMA auto_vacuum=FULL")  # deleted documents free disk space
        _log_ahead(self._file)
        self._file.execute("PRAGMA synchronous=NORMAL")  # a power failure loses only the last documents
        self._file.execute("PRAGMA foreign_keys=1")
        version = self._file.execute("PRAGMA user_version").fetchone()[0]  # another process may have made it by now
        if version not in (0, 1, _VERSION):
            raise RegistryError(f"{self._path} is of version {version}, wanted {_VERSION}; name another folder")
        if version != _VERSION:  # a current file is not written to, so that it can be opened on a full disk
            with self._writing():
                for statement in _SCHEMA.split(";"):
                    self._file.execute(statement)
                self._file.execute(f"PRAGMA user_version={_VERSION}")

    async def add(
        self, owner: str, title: str, text: str, is_kept: bool, chunks: Sequence[NamedChunk]
    ) -> DocumentEntry:
        """Add a document, or these chunks to an existing one, and return it. is_kept: it stays until it is deleted.

        Raises RegistryFull and RegistryError.
        """
        return await self._run(3 * len(text), lambda: self._add(owner, title, text, is_kept, chunks))

    async def note_chunks(self, owner: str, document_id: str, chunks: Sequence[NamedChunk]) -> None:
        """Add these chunks to the document, if the owner has it. Raises RegistryError."""
        await self._run(0, lambda: self._note_chunks(owner, document_id, chunks))

    async def find(self, owner: str, ids: list[str], most_bytes: int) -> dict[str, Document]:
        """Return the owner's documents among the ids.

        Raises TextsTooLarge, before a text is read, and RegistryError.
        """
        return await self._run(0, lambda: self._find(owner, ids, most_bytes))

    async def page(self, owner: str, after: str | None, limit: int) -> list[DocumentEntry] | None:
        """Return the owner's documents after the one named, oldest first; None if that is not theirs.

        Raises RegistryError.
        """
        return await self._run(0, lambda: self._page(owner, after, limit))

    async def delete(self, owner: str, document_id: str) -> list[NamedChunk] | None:
        """Delete a document, and return the chunks that no other has; None if it was not the owner's.

        Raises RegistryError.
        """
        return await self._run(0, lambda: self._delete(owner, document_id))

    async def count(self) -> int:
        """Return the number of documents of all owners. Raises RegistryError."""
        return await self._run(0, lambda: int(self._file.execute("SELECT count(*) FROM documents").fetchone()[0]))

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()

    async def _run(self, num_bytes: int, work: Callable[[], R]) -> R:
        """Run `work` in the file's thread. num_bytes: about the bytes that it writes."""

        def told() -> R:
            with self._told():
                return self._with_room(num_bytes, work)

        return await asyncio.get_running_loop().run_in_executor(self._thread, told)

    def _with_room(self, num_bytes: int, work: Callable[[], R]) -> R:
        """Run `work`, which must change nothing if it raises. If the disk is full, evict chunks and run it once
        more.
        """
        try:
            return work()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in _FULL or not give_up(self._path.parent, _ROOM_BYTES + num_bytes):
                raise
        logs.warning("chunks_given_up", reason="the disk was full", wanted_bytes=_ROOM_BYTES + num_bytes)
        return work()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise RegistryError(f"{self._path}: {' '.join(str(error).split())}") from None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Write all or nothing, while every other process waits."""
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise

    def _add(self, owner: str, title: str, text: str, is_kept: bool, chunks: Sequence[NamedChunk]) -> DocumentEntry:
        encoded, now = text.encode(), time.time()
        document_id = name_document(owner, title, text)
        with self._writing():
            found = self._file.execute(f"SELECT {_ENTRY}, used, is_kept FROM documents WHERE id = ?", (document_id,))
            row = found.fetchone()
            if row is not None:
                *known, used, was_kept = row
                if is_kept > was_kept or now - used > _USED_SECONDS:
                    self._file.execute(
                        "UPDATE documents SET used = ?, is_kept = max(is_kept, ?) WHERE id = ?",
                        (now, is_kept, document_id),
                    )
                self._insert_chunks(owner, document_id, chunks)
                return DocumentEntry(*known)
            self._make_room(owner, len(encoded))
            entry = DocumentEntry(document_id, title, hashlib.sha256(encoded).hexdigest(), len(encoded), now)
            self._file.execute(
                f"INSERT INTO documents ({_ENTRY}, owner, used, is_kept, text) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (entry.id, title, entry.content_hash, entry.num_bytes, now, owner, now, is_kept, encoded),
            )
            self._insert_chunks(owner, document_id, chunks)
            return entry

    def _note_chunks(self, owner: str, document_id: str, chunks: Sequence[NamedChunk]) -> None:
        """Note a document's chunks with one salt, all together; if the first is known, all are."""
        if not chunks:
            return
        known = (
            "SELECT 1 FROM chunks JOIN documents USING (number) WHERE owner = ? AND id = ? AND tokens = ? AND salt = ?"
        )
        first = (owner, document_id, bytes.fromhex(chunks[0].tokens), chunks[0].salt)
        if self._file.execute(known, first).fetchone() is None:
            with self._writing():
                self._insert_chunks(owner, document_id, chunks)

    def _insert_chunks(self, owner: str, document_id: str, chunks: Sequence[NamedChunk]) -> None:
        self._file.executemany(
            "INSERT OR IGNORE INTO chunks SELECT number, ?, ?, ? FROM documents WHERE owner = ? AND id = ?",
            [(bytes.fromhex(one.tokens), one.num_tokens, one.salt, owner, document_id) for one in chunks],
        )

    def _make_room(self, owner: str, num_bytes: int) -> None:
        """Make room for one more document by evicting those that are not kept. Raises RegistryFull, changing
        nothing.
        """
        most, mib = self._max_documents, self._limit_bytes / 2**20
        mine = self._number("SELECT count(*) FROM documents WHERE owner = ?", owner)
        for left in range(mine, most - 1, -1):  # more than one may be too many, if the limit was higher before
            if not self._give_up_oldest("owner = ? AND", owner):
                raise RegistryFull(
                    f"this key has {left} documents, at most {most} (documents.max_documents); delete one"
                )
        total = "SELECT coalesce(sum(num_bytes), 0) FROM documents"
        while self._number(total) + num_bytes > self._limit_bytes:
            if num_bytes > self._limit_bytes or not self._give_up_oldest(""):
                raise RegistryFull(f"no room for {num_bytes} bytes in {mib:g} MiB (documents.texts_limit_mib)")

    def _give_up_oldest(self, whose: str, *owner: str) -> bool:
        oldest = f"SELECT number FROM documents WHERE {whose} is_kept = 0 ORDER BY used LIMIT 1"
        return self._file.execute(f"DELETE FROM documents WHERE number = ({oldest})", owner).rowcount > 0

    def _number(self, query: str, *values: str) -> int:
        return int(self._file.execute(query, values).fetchone()[0])

    def _find(self, owner: str, ids: list[str], most_bytes: int) -> dict[str, Document]:
        found: dict[str, Document] = {}
        now = time.time()
        size = "SELECT coalesce(max(num_bytes), 0) FROM documents WHERE owner = ? AND id = ?"
        sizes = [self._number(size, owner, document_id) for document_id in ids]
        if sum(sizes) > most_bytes:
            raise TextsTooLarge(sum(sizes))
        for document_id in dict.fromkeys(ids):
            query = f"SELECT {_ENTRY}, text, used, is_kept FROM documents WHERE owner = ? AND id = ?"
            row = self._file.execute(query, (owner, document_id)).fetchone()
            if row is None:
                continue
            *entry, text, used, is_kept = row
            found[document_id] = Document(DocumentEntry(*entry), text.decode())
            if not is_kept and now - used > _USED_SECONDS:
                self._note_use(document_id, now)
        return found

    def _note_use(self, document_id: str, now: float) -> None:
        """Note a use of a document; a failure to write it is only logged."""
        try:
            self._file.execute("UPDATE documents SET used = ? WHERE id = ?", (now, document_id))
        except sqlite3.Error as error:
            logs.warning("document_use_not_noted", document=document_id, reason=str(error))

    def _page(self, owner: str, after: str | None, limit: int) -> list[DocumentEntry] | None:
        number = 0
        if after is not None:
            row = self._file.execute(
                "SELECT number FROM documents WHERE owner = ? AND id = ?", (owner, after)
            ).fetchone()
            if row is None:
                return None
            number = row[0]
        query = f"SELECT {_ENTRY} FROM documents WHERE owner = ? AND number > ? ORDER BY number LIMIT ?"
        return [DocumentEntry(*row) for row in self._file.execute(query, (owner, number, limit))]

    def _delete(self, owner: str, document_id: str) -> list[NamedChunk] | None:
        with self._writing():
            query = "SELECT number FROM documents WHERE owner = ? AND id = ?"
            number = self._file.execute(query, (owner, document_id)).fetchone()
            if number is None:
                return None
            unnamed = self._file.execute(_UNNAMED, number).fetchall()
            self._file.execute("DELETE FROM documents WHERE number = ?", number)
        with suppress(sqlite3.Error):  # else the file shrinks later
            self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return [NamedChunk(tokens.hex(), num_tokens, salt) for tokens, num_tokens, salt in unnamed]


def name_document(owner: str, title: str, text: str) -> str:
    """Return the id of a document."""
    return "doc-" + hashlib.sha256(json.dumps([owner, title, text]).encode()).hexdigest()[:32]
