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
    "infinitebench/passkey": "71432",
    "infinitebench/number_string": "7711432255",
    "infinitebench/longbook_qa_chn": "河边的磨坊",
    "infinitebench/longdialogue_qa_eng": "ADA",
    "infinitebench/longbook_choice_eng": "the mill",
    "infinitebench/code_debug": "run_all",
    "infinitebench/code_run": -12,
    "infinitebench/math_find": 12.5,
    "infinitebench/math_calc": [1, 5, 3],
    "infinitebench/kv_retrieval": "cd-99",
}
OPTIONS = ["the barn", "the mill", "the quay", "run_all"]


def row_of(name: str) -> dict[str, Any]:
    """A row in the published format."""
    answer = SPECIAL_ANSWERS.get(name, "the old mill")
    family = name.split("/")[0]
    if family == "longbench":
        classes = [str(answer), "another class"] if name.split("/")[1] in ("trec", "lsht") else None
        return {
            "input": "What is told?", "context": CONTEXT, "answers": [str(answer)], "length": 9, "dataset": name,
            "language": "en", "all_classes": classes, "_id": "abc",
        }  # fmt: skip
    if family == "longbench_v2":
        choices = {f"choice_{letter}": option for letter, option in zip("ABCD", OPTIONS, strict=True)}
        return {"_id": "v2", "question": "What?", "context": CONTEXT, "answer": "C", "domain": "Novel", **choices}
    if family == "gsm8k":
        return {"question": "2 + 2?", "answer": "It is 2 + 2 = 4.\n#### 4"}
    listed = answer if isinstance(answer, list) else [answer]
    return {"id": 3, "context": CONTEXT, "input": "Which number?", "answer": listed, "options": OPTIONS}


def test_all_published_datasets_have_a_reader() -> None:
    counts = [sum(name.startswith(f"{family}/") for name in DATASETS) for family in ("longbench", "infinitebench")]
    assert counts == [21, 12]
    assert {"longbench_v2", "gsm8k"} <= set(DATASETS)


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
        read("gsm8k", path, None)
    with pytest.raises(KeyError, match="gsm8k"):
        read("unheard-of", path, None)


def test_only_as_many_rows_are_read_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(row_of("gsm8k")) + "\n") * 5)
    assert [sample.sample_id for sample in read("gsm8k", path, 2)] == ["1", "2"]


def test_long_prompts_lose_their_middle(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row_of("longbench/qasper") | {"context": "begin " + "filler " * 500 + "end"}))
    (sample,) = read("longbench/qasper", path, None)
    short = shorten(sample, ByteTokenizer(), 1000)
    assert short.length_tokens + short.max_new_tokens <= 1000
    assert short.prompt[:50] == sample.prompt[:50]
    assert short.prompt[-50:] == sample.prompt[-50:]
    assert shorten(sample, ByteTokenizer(), 100_000).prompt == sample.prompt
