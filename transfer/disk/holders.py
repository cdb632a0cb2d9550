"""Record which sessions and saved contexts hold which records of a model's folder. No torch.

So a session's records can be forgotten together, and a context that was saved by name stays until it is deleted. Each
holder is a small file, written under another name and renamed. Its name is the hash of owner and name, so that a
client's name is never used as a path. Damaged files are removed at the start. Only the most recent sessions are kept.
"""

import errno
import hashlib
import json
import os
import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from threading import RLock

import xxhash

FOLDER = "holders"
SESSION, SAVED = "session", "saved"
MOST_SESSIONS = 1024
MOST_SAVED = 1024  # saved contexts of one model, of all API keys
MOST_SAVED_OF_KEY = 256  # saved contexts of one API key, if there are keys
_CHECK_DIGITS = 32


@dataclass(slots=True)
class Holder:
    """A session or a saved context, and the file names of the records that it holds. Only a saved context has the
    fields from `tokens` on: tokens (int32, base64), the attention profile that computed it, and its session.
    """

    kind: str
    owner: str
    name: str
    records: set[str] = field(default_factory=set)
    tokens: str = ""
    profile: str = ""
    session: str = ""
    created_s: int = 0

    @property
    def key(self) -> str:
        text = json.dumps([self.kind, self.owner, self.name])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def token_ids(self) -> bytes:
        """Return the tokens of a saved context as bytes: int32, little-endian."""
        return b64decode(self.tokens)


def save_holder(owner: str, name: str, token_ids: bytes, profile: str, session: str) -> Holder:
    """Make a saved context without records."""
    return Holder(SAVED, owner, name, set(), b64encode(token_ids).decode(), profile, session, int(time.time()))


class Holders:
    """The holders in one model's folder. Called from any thread."""

    def __init__(self, model_folder: Path) -> None:
        self._folder = model_folder / FOLDER
        self._lock = RLock()
        self._holders: dict[str, Holder] = {}  # the one noted last is last
        for path, holder in _read_all(self._folder):
            if holder is None:  # damaged, or left by an interrupted write
                path.unlink(missing_ok=True)
            else:
                self._holders[holder.key] = holder

    def note(self, owner: str, session: str, records: Iterable[str]) -> Holder | None:
        """Note that a session holds these records. Return its holder, to be written, if any of them is new to it."""
        with self._lock:
            holder = Holder(SESSION, owner, session)
            key = holder.key
            holder = self._holders.pop(key, holder)
            self._holders[key] = holder
            new = set(records) - holder.records
            holder.records |= new
            sessions = [other for other in self._holders.values() if other.kind == SESSION]
            for oldest in sessions[: max(0, len(sessions) - MOST_SESSIONS)]:
                self.remove(oldest)
            return holder if new else None

    def add(self, holder: Holder) -> None:
        """Add and write a saved context; one of the same name is replaced. Raises OSError if it cannot be written, or
        if there are MOST_SAVED already, or MOST_SAVED_OF_KEY of this owner.
        """
        with self._lock:
            saved = [one.owner for one in self._holders.values() if one.kind == SAVED]
            counts = [(len(saved), MOST_SAVED)]
            if holder.owner:
                counts.append((saved.count(holder.owner), MOST_SAVED_OF_KEY))
            for number, most in counts:
                if holder.key not in self._holders and number >= most:
                    raise OSError(errno.ENOSPC, f"{number} contexts are saved, and no more than {most}")
            before, self._holders[holder.key] = self._holders.get(holder.key), holder
            try:
                self.write(holder)
            except OSError:
                self._holders.pop(holder.key)
                self._holders |= {} if before is None else {before.key: before}
                raise

    def write(self, holder: Holder) -> None:
        """Write a holder's file, unless it was removed meanwhile. Raises OSError."""
        with self._lock:
            if self._holders.get(holder.key) is not holder:
                return
            fields = asdict(holder) | {"records": sorted(holder.records)}
            text = json.dumps(fields)
            path = self._folder / f"{holder.key}.json"
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it has a conversation's tokens
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{_check(text)}{text}")
            os.replace(part, path)

    def remove(self, holder: Holder) -> None:
        with self._lock:
            self._holders.pop(holder.key, None)
            with suppress(OSError):
                (self._folder / f"{holder.key}.json").unlink(missing_ok=True)

    def find(self, kind: str, owner: str, name: str) -> Holder | None:
        return self._holders.get(Holder(kind, owner, name).key)

    def of(self, kind: str, owner: str | None) -> list[Holder]:
        """Return an owner's holders of this kind, the one noted last first. owner: None for all owners."""
        with self._lock:
            ones = reversed(self._holders.values())
            return [one for one in ones if one.kind == kind and owner in (None, one.owner)]

    def held(self, kind: str | None = None) -> set[str]:
        """Return the records that holders of this kind hold. kind: None for both kinds."""
        with self._lock:
            ones = [one.records for one in self._holders.values() if kind is None or one.kind == kind]
            return set().union(*ones)

    def is_saved(self, record: str) -> bool:
        """Return whether a saved context holds a record."""
        with self._lock:
            return any(record in one.records for one in self._holders.values() if one.kind == SAVED)

    def keep_to(self, is_there: Iterable[str]) -> None:
        """Remove records that are not in `is_there` from sessions, and remove sessions that hold no other records."""
        there = set(is_there)
        with self._lock:
            for holder in [one for one in self._holders.values() if one.kind == SESSION]:
                holder.records &= there
                if not holder.records:
                    self.remove(holder)


def read_holders(model_folder: Path) -> list[Holder]:
    """Return the holders in a model's folder, the one noted last first. Changes no file, because an engine may begin to
    use them meanwhile.
    """
    return [holder for _, holder in reversed(_read_all(model_folder / FOLDER)) if holder is not None]


def forget_holder(model_folder: Path, kind: str, owner: str, name: str) -> bool:
    """Remove a holder, and the records that no other holder has. Return False if there is no such holder. Call it while
    no engine uses the folder.
    """
    holders = read_holders(model_folder)
    gone = next((one for one in holders if (one.kind, one.owner, one.name) == (kind, owner, name)), None)
    if gone is None:
        return False
    others: set[str] = set().union(*(one.records for one in holders if one is not gone))
    (model_folder / FOLDER / f"{gone.key}.json").unlink(missing_ok=True)
    for record in gone.records - others:
        (model_folder / record).unlink(missing_ok=True)
    return True


def _check(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _read_all(folder: Path) -> list[tuple[Path, Holder | None]]:
    """Return each file with its holder, the one noted last last; None for a file to remove. Files that disappear
    meanwhile are left out.
    """
    found: list[tuple[int, Path, Holder | None]] = []
    if folder.is_dir():
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path, _read(path)))
    return [(path, holder) for _, path, holder in sorted(found, key=itemgetter(0))]


def _read(path: Path) -> Holder | None:
    """Return the holder in a file; None if the file is damaged."""
    try:
        raw = path.read_text()
        text = raw[_CHECK_DIGITS:]
        if _check(text) != raw[:_CHECK_DIGITS]:
            return None
        fields = json.loads(text)
        holder = Holder(**fields | {"records": set(fields["records"])})
        array("i").frombytes(holder.token_ids())
        return holder if path.name == f"{holder.key}.json" else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
