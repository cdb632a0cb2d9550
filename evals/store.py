"""Store results on disk as they finish, one JSON line for each scored sample, so that a killed run can be resumed.

A record's key is a hash of everything that its score depends on. An existing record is not made again, and any change
of the settings gives another key. Invariants: every sample that was tried has exactly one record that counts (the
last); a failure counts with score 0; a line that a crash cut short is dropped.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evals.cells import Cell, PromptSettings
from evals.samples import Sample

SYNC_EVERY_S = 1.0


def key_of(parts: dict[str, Any]) -> str:
    """Return 16 hex digits of SHA-256 over the parts as canonical JSON. Raises TypeError for other than JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def sample_key(
    method: str,
    settings: dict[str, Any],
    sample: Sample,
    length: int,
    prompts: PromptSettings,
    model: str,
    code_version: str,
) -> str:
    """Return the key of one sample under one method: a hash of all that its prediction depends on."""
    return key_of(
        {
            "method": method,
            "settings": settings,
            "task": sample.task,
            "length": length,
            "seed": prompts.seed,
            "sent_as": prompts.sent_as,
            "sample_id": sample.sample_id,
            "prompt": hashlib.sha256(sample.prompt.encode()).hexdigest(),
            "model": model,
            "code_version": code_version,
        }
    )


@dataclass(frozen=True)
class Record:
    """One sample that was tried. score: in [0, 1]. failure: why there is no prediction, with score 0; or None.

    measured: numbers of the run, such as head_fraction and bytes_fraction. layers: shares by layer
    (`evals.meter.layer_shares`). cell: the identity of the table row.
    """

    key: str
    cell: dict[str, Any]
    sample_id: str
    score: float
    prediction: str
    failure: str | None
    depth: float | None
    measured: dict[str, float] = field(default_factory=dict)
    layers: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.score <= 1.0:
            raise ValueError(f"record {self.sample_id}: score {self.score}, wanted a number in [0, 1]")
        if self.failure is not None and self.score != 0.0:
            raise ValueError(f"record {self.sample_id}: a failure scores 0, got {self.score}")


@dataclass(frozen=True)
class Ledger:
    """Functions that a runner calls before and after samples.

    done: keys that need not run. found: called with those of them that the run needs. keep: with new records. amend:
    with kept records that were improved. finished: with each cell once its last record is made. check: called between
    samples or batches; raises RunCut when the run is to end, so that what is finished is kept.
    """

    done: Container[str]
    found: Callable[[str], None]
    keep: Callable[[Record], None]
    amend: Callable[[Record], None]
    check: Callable[[], None]
    finished: Callable[[Cell], None]


class Store:
    """Records of one JSONL file, appended and flushed one by one. One process writes a file at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._load()
        self._file = path.open("a", encoding="utf-8")
        self._synced = 0.0

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def __getitem__(self, key: str) -> Record:
        return self.records[key]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())

    def add(self, record: Record) -> None:
        """Write a record to the file, so that it survives the process, and every second to disk, so that it survives a
        power failure. It replaces a record with the same key.
        """
        self._file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
        self.records[record.key] = record

    def missing(self, keys: Iterable[str], retry_failures: bool) -> list[str]:
        """Return the keys still to be made, in order: those without a record and, if asked, those of failures."""
        return [
            key for key in keys if key not in self.records or (retry_failures and self.records[key].failure is not None)
        ]

    def _load(self) -> None:
        """Read the file, and cut off a last line without its end. Raises ValueError at a broken line before it."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = Record(**json.loads(line))
            except (json.JSONDecodeError, TypeError) as error:
                raise ValueError(f"{self.path}:{number}: not a result record ({error}); move the file away") from error
            self.records[record.key] = record
