"""Results survive a kill at any byte, failures stay, and one changed setting is another key."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evals.cells import PromptSettings
from evals.samples import Sample
from evals.store import Record, Store, key_of, sample_key

PROMPTS = PromptSettings(Path("model"), "reference", 0, ())


def make_sample(prompt: str) -> Sample:
    return Sample("needle", "s-0", prompt, ["7"], "exact_match", 8, 100, 0.5)


def make_record(key: str, score: float, failure: str | None) -> Record:
    return Record(key, {"method": "full", "task": "needle"}, key, score, "text ✓", failure, 0.5, {"head_fraction": 1.0})


def test_what_was_added_is_there_in_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "results.jsonl"
    with Store(path) as store:
        store.add(make_record("a", 1.0, None))
        store.add(make_record("b", 0.0, "out of memory"))
        assert path.read_bytes().count(b"\n") == 2, "a process that is killed now has left both"
    with Store(path) as store:
        assert len(store) == 2
        assert store["a"] == make_record("a", 1.0, None)
        assert store.missing(["a", "b", "c"], retry_failures=False) == ["c"]
        assert store.missing(["a", "b", "c"], retry_failures=True) == ["b", "c"]


def test_a_kill_at_any_byte_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    with Store(whole) as store:
        for name in "abc":
            store.add(make_record(name, 1.0, None))
    content = whole.read_bytes()
    ends = [place for place, byte in enumerate(content, start=1) if byte == ord("\n")]
    for cut in range(0, len(content) + 1, 7):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(content[:cut])
        with Store(path) as store:
            assert len(store) == sum(end <= cut for end in ends)
            for name in store.missing("abc", retry_failures=False):
                store.add(make_record(name, 1.0, None))
        with Store(path) as store:
            assert sorted(record.key for record in store) == ["a", "b", "c"]


def test_the_last_record_of_a_key_counts(tmp_path: Path) -> None:
    with Store(tmp_path / "r.jsonl") as store:
        store.add(make_record("a", 0.0, "timed out"))
        store.add(make_record("a", 1.0, None))
    with Store(tmp_path / "r.jsonl") as store:
        assert [record.failure for record in store] == [None]


def test_a_broken_line_inside_is_an_error_not_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"key": "a"}\n' + json.dumps({"x": 1}) + "\n")
    with pytest.raises(ValueError, match=r"r.jsonl:1: not a result record"):
        Store(path)


def test_failures_score_zero_and_scores_are_fractions() -> None:
    with pytest.raises(ValueError, match="a failure scores 0"):
        make_record("a", 0.5, "broken")
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        make_record("a", 50.0, None)


def test_every_part_of_a_key_changes_it() -> None:
    base = {
        "method": "topk", "settings": {"budget": 0.05}, "sample": make_sample("p"), "length": 4096,
        "prompts": PROMPTS, "model": "m", "code_version": "1",
    }  # fmt: skip
    changes = [
        {"method": "quest"}, {"settings": {"budget": 0.1}}, {"sample": make_sample("q")}, {"length": 8192},
        {"prompts": replace(PROMPTS, seed=1)}, {"prompts": replace(PROMPTS, sent_as="chat")},
        {"model": "n"}, {"code_version": "2"},
    ]  # fmt: skip
    keys = [sample_key(**(base | change)) for change in [{}, *changes]]
    assert len(set(keys)) == len(keys)
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
