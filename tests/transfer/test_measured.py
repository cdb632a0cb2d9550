"""What was measured is kept by what it depends on, and a file that cannot be read or written stops nobody."""

import logging
from pathlib import Path

import pytest

from transfer.measured import MOST_ENTRIES, keep_measured, measured_path, read_measured


def test_what_is_measured_again_takes_the_place_of_what_was_known(tmp_path: Path) -> None:
    path = tmp_path / "of" / "measured.json"
    assert read_measured(path) == []
    keep_measured(path, "speed", {"gpu": "a", "dim": 64}, {"rate": 1.0})
    keep_measured(path, "speed", {"gpu": "b", "dim": 64}, {"rate": 2.0, "by_size": {256: 1}})
    keep_measured(path, "speed", {"gpu": "a", "dim": 64}, {"rate": 3.0})
    assert [(entry["of"]["gpu"], entry["result"]["rate"]) for entry in read_measured(path)] == [("b", 2.0), ("a", 3.0)]
    assert [one.name for one in path.parent.iterdir()] == ["measured.json"], "nothing half written is left"


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    for number in range(MOST_ENTRIES + 3):
        keep_measured(path, "speed", {"number": number}, {})
    assert [entry["of"]["number"] for entry in read_measured(path)] == list(range(3, MOST_ENTRIES + 3))


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", '[{"what": "speed"}]', '[{"what": 1, "of": 2, "result": 3}]'])
def test_a_file_that_nobody_here_wrote_says_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(text)
    assert read_measured(path) == []
    keep_measured(path, "speed", {"gpu": "a"}, {"rate": 1.0})
    assert len(read_measured(path)) == 1


def test_a_folder_that_cannot_be_written_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        keep_measured(tmp_path / "file" / "measured.json", "speed", {}, {})
    assert "measurements event=not_saved" in caplog.text


def test_it_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured_path() == tmp_path / "tandem" / "measured.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measured_path() == tmp_path / ".cache" / "tandem" / "measured.json"
