"""An engine that ends writes its contexts for as long as that makes progress, and says how far it is."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.engine import last_writes
from scheduler.engine.last_writes import write_contexts
from scheduler.messages import Writing


class SlowDisk:
    """A disk with so many records to write, which takes the seconds of each; no time passes but on its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: list[float], end_seconds: float) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.num_written = 0
        self.words: list[Writing] = []
        self.store = SimpleNamespace(
            is_writing=False, config=SimpleNamespace(end_seconds=end_seconds), folder=SimpleNamespace(bytes_written=0)
        )
        self.side = SimpleNamespace(store=self.store)
        monkeypatch.setattr(last_writes, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    @property
    def has_work(self) -> bool:
        return bool(self.seconds)

    @property
    def num_unsaved_bytes(self) -> int:
        return 100 * len(self.seconds)

    def step(self) -> None:
        self.now += 0.125
        self.seconds[0] -= 0.125
        if self.seconds[0] <= 0:
            self.seconds.pop(0)
            self.store.folder.bytes_written += 100

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.store.is_writing = self.now < 40.0

    def write(self) -> None:
        write_contexts(cast(Any, self), self.step, self.words.append)


def test_what_takes_long_is_written_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch, [7.0] * 5, 60.0)
    disk.write()
    assert (disk.seconds, disk.now) == ([], 35.0)
    assert len(disk.words) == 4 * 35, "four times a second"
    assert disk.words[0] == Writing(0, 500)
    assert disk.words[-1] == Writing(400, 100)


def test_what_the_thread_has_in_hand_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch, [7.0] * 5, 60.0)
    disk.store.is_writing = True
    disk.write()
    assert disk.now == pytest.approx(40.0, abs=0.02)


def test_nobody_waits_for_a_disk_that_does_not_answer_nor_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = SlowDisk(monkeypatch, [1.0, 1000.0], 60.0)
    stuck.write()
    assert stuck.now == 1.0 + last_writes.PATIENCE_SECONDS
    slow = SlowDisk(monkeypatch, [2.0] * 100, 60.0)
    slow.write()
    assert slow.now == 60.0
