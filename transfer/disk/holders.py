"""Record which sessions and saved contexts hold which records of a model's folder. No torch.

A session's records can so be forgotten together, and a context that was saved by name stays until it is deleted. Each
holder is a small file, written aside and renamed. Its name is the hash of owner and name, so a client's name is never a
path. Files that are cut short or changed are removed at the start. Of sessions only the last ones noted are kept.
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
MOST_SAVED = 1024  # contexts by name, of one model, of all keys
MOST_SAVED_OF_KEY = 256  # of these, of one key, where there are keys
_CHECK_DIGITS = 32


@dataclass(slots=True)
class Holder:
    """What a session, or a saved context, holds: names of records' files. The fields below are of a saved context:
    tokens (int32, base64), the attention profile that made it, and the session that it was of.
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
        """Return the tokens of a saved context as a prompt has them: int32, little-endian."""
        return b64decode(self.tokens)


def save_holder(owner: str, name: str, token_ids: bytes, profile: str, session: str) -> Holder:
    """Return a saved context without records."""
    return Holder(SAVED, owner, name, set(), b64encode(token_ids).decode(), profile, session, int(time.time()))


class Holders:
    """The holders in one model's folder. From any thread."""

    def __init__(self, model_folder: Path) -> None:
        self._folder = model_folder / FOLDER
        self._lock = RLock()
        self._holders: dict[str, Holder] = {}  # noted last, last
        for path, holder in _read_all(self._folder):
            if holder is None:  # also what a write that was killed has left
                path.unlink(missing_ok=True)
            else:
                self._holders[holder.key] = holder

    def note(self, owner: str, session: str, records: Iterable[str]) -> Holder | None:
        """Note that a session holds these; return it if it did not hold all of them, to be written."""
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
        """Take in a saved context; one of the same name is replaced. Raises OSError where it cannot be written, and
        beyond MOST_SAVED, or MOST_SAVED_OF_KEY of the same owner.
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
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it has what was said
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
        """Return an owner's holders of this kind, or those of all owners, the one noted last first."""
        with self._lock:
            ones = reversed(self._holders.values())
            return [one for one in ones if one.kind == kind and owner in (None, one.owner)]

    def held(self, kind: str | None = None) -> set[str]:
        """Return what holders of this kind hold; None: of any kind."""
        with self._lock:
            ones = [one.records for one in self._holders.values() if kind is None or one.kind == kind]
            return set().union(*ones)

    def is_saved(self, record: str) -> bool:
        """Return whether a saved context holds a record."""
        with self._lock:
            return any(record in one.records for one in self._holders.values() if one.kind == SAVED)

    def keep_to(self, is_there: Iterable[str]) -> None:
        """Let sessions forget records that are not there, and forget those that hold no other."""
        there = set(is_there)
        with self._lock:
            for holder in [one for one in self._holders.values() if one.kind == SESSION]:
                holder.records &= there
                if not holder.records:
                    self.remove(holder)


def read_holders(model_folder: Path) -> list[Holder]:
    """Return the holders in a model's folder, the one noted last first, and leave all files as they are: an engine may
    begin to use them meanwhile.
    """
    return [holder for _, holder in reversed(_read_all(model_folder / FOLDER)) if holder is not None]


def forget_holder(model_folder: Path, kind: str, owner: str, name: str) -> bool:
    """Remove a holder, and records that nobody else holds, while no engine has the folder. False: there is none."""
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
    """Return what each file holds, the one noted last last; None: it is to go. What goes meanwhile is left out."""
    found: list[tuple[int, Path, Holder | None]] = []
    if folder.is_dir():
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path, _read(path)))
    return [(path, holder) for _, path, holder in sorted(found, key=itemgetter(0))]


def _read(path: Path) -> Holder | None:
    """Return what a file holds; None: it is to go."""
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
