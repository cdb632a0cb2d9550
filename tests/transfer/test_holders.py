"""Holders on disk: what a write that was killed has left is gone, nobody else may read them, and there is an end."""

import errno
import stat
from pathlib import Path

import pytest

from transfer.disk import holders as module
from transfer.disk.holders import FOLDER, SAVED, Holders, save_holder


def saved(name: str) -> module.Holder:
    return save_holder("me", name, b"\1\0\0\0", "exact", "")


def test_what_a_killed_write_has_left_does_not_come_back(tmp_path: Path) -> None:
    first = Holders(tmp_path)
    first.add(saved("a"))
    (path,) = (tmp_path / FOLDER).iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it has what was said"
    path.rename(path.with_suffix(".part"))  # as between a write and its last step
    assert Holders(tmp_path).of(SAVED, "me") == []
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_more_contexts_than_may_be_saved_are_refused_and_one_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SAVED", 2)
    held = Holders(tmp_path)
    held.add(saved("a"))
    held.add(saved("b"))
    with pytest.raises(OSError, match="2 contexts are saved, and no more than 2") as refused:
        held.add(saved("c"))
    assert refused.value.errno == errno.ENOSPC
    held.add(saved("b"))
    held.remove(saved("a"))
    held.add(saved("c"))
    assert [one.name for one in held.of(SAVED, "me")] == ["c", "b"]
