"""Readers take rows as published, from files made here; `test_answer_sheets.py` scores answers to them."""

import json
from pathlib import Path
from typing import Any

import pytest

from evals.datasets import DATASETS, read, shorten
from tests.evals.tokenizers import ByteTokenizer

CONTEXT = "A long text about a mill by the river."
SPECIAL_ANSWERS: dict[str, Any] = {
    "longbench/passage_retrieval_en": "Paragraph 12",
    "longbench/passage_retrieval_zh": "段落12",
    "longbench/passage_count": "12",
    "longbench/lcc": "    return total + 1",
    "longbench/repobench-p": "    return total + 1",
    "longbench/multifieldqa_zh": "河边的磨坊",
    "longbench/dureader": "河边的磨坊",
    "longbench/vcsum": "河边的磨坊",
    "longbench/lsht": "体育",
}


def row_of(name: str) -> dict[str, Any]:
    """A row in the published format."""
    answer = SPECIAL_ANSWERS.get(name, "the old mill")
    classes = [str(answer), "another class"] if name.split("/")[1] in ("trec", "lsht") else None
    return {
        "input": "What is told?", "context": CONTEXT, "answers": [str(answer)], "length": 9, "dataset": name,
        "language": "en", "all_classes": classes, "_id": "abc",
    }  # fmt: skip


def test_all_published_datasets_have_a_reader() -> None:
    assert len(DATASETS) == 21


def test_braces_in_a_context_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = row_of("longbench/lcc") | {"context": "def f(): return {input} + {context}"}
    path.write_text(json.dumps(row), encoding="utf-8")
    assert row["context"] in read("longbench/lcc", path, None)[0].prompt


def test_broken_rows_name_the_file_the_line_and_the_field(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "x"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: no field context"):
        read("longbench/qasper", path, None)
    path.write_text("not json\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: not JSON"):
        read("longbench/qasper", path, None)
    with pytest.raises(KeyError, match="longbench/qasper"):
        read("unheard-of", path, None)


def test_only_as_many_rows_are_read_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(row_of("longbench/qasper") | {"_id": str(number)}) + "\n" for number in range(5))
    )
    assert [sample.sample_id for sample in read("longbench/qasper", path, 2)] == ["0", "1"]


def test_long_prompts_lose_their_middle(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row_of("longbench/qasper") | {"context": "begin " + "filler " * 500 + "end"}))
    (sample,) = read("longbench/qasper", path, None)
    short = shorten(sample, ByteTokenizer(), 1000)
    assert short.length_tokens + short.max_new_tokens <= 1000
    assert short.prompt[:50] == sample.prompt[:50]
    assert short.prompt[-50:] == sample.prompt[-50:]
    assert shorten(sample, ByteTokenizer(), 100_000).prompt == sample.prompt
