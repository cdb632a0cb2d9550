"""What masks leave is valid: schemas of all kinds, random texts that are forced to end, an independent judge."""

import json
import random
import re
from pathlib import Path

import pytest

from gpu.config import ModelConfig
from lab.speed import schemas
from lab.speed.schemas import Writer, accepts, check_text, examine_suite
from scheduler.constraints.constraints import read_tokens
from server.grammar.structured import choice_grammar, lark_grammar, regex_grammar, schema_grammar
from tests.server.live_server import REFERENCE

SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
VOCAB = 8192


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(read_tokens(ModelConfig(path=REFERENCE), VOCAB))


def outcomes(writer: Writer, name: str, num_texts: int) -> list[str]:
    grammar = schema_grammar("schema", SCHEMAS[name])
    return [check_text(SCHEMAS[name], writer, grammar, seed) for seed in range(num_texts)]


def test_there_are_sixty_schemas() -> None:
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_text_that_ends_is_valid(writer: Writer, name: str) -> None:
    assert outcomes(writer, name, 1) == ["valid"]


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEMAS)
def test_twenty_texts_that_end_are_valid(writer: Writer, name: str) -> None:
    assert outcomes(writer, name, 20) == ["valid"] * 20


def test_the_judge_sees_a_text_that_is_not_valid(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: texts of one schema judged by another, and ones that cannot end."""
    loose = schema_grammar(
        "schema", {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}
    )
    strict = {"type": "object", "additionalProperties": {"type": "string"}}
    assert {check_text(strict, writer, loose, seed).partition(":")[0] for seed in range(5)} == {"invalid"}
    monkeypatch.setattr(schemas, "MOST_TOKENS", 50)
    endless = {"type": "string", "minLength": 500}
    assert check_text(endless, writer, schema_grammar("schema", endless), 0) == "not ended"


def test_patterns_choices_and_grammars_are_written_too(writer: Writer) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        text = writer.write(regex_grammar("x", "[a-f]{2,9}-(one|two)?"), draw, 4)
        assert re.fullmatch("[a-f]{2,9}-(one|two)?", text or "")
        assert writer.write(choice_grammar("x", ["yes", "no", "ja wohl"]), draw, 0) in ("yes", "no", "ja wohl")
        text = writer.write(lark_grammar("x", 'start: "(" start? ")"'), draw, 9)
        assert text is not None
        assert text.count("(") == text.count(")") == len(text) // 2


def test_a_suite_is_told_by_what_became_of_its_groups(writer: Writer, tmp_path: Path) -> None:
    groups = [
        {
            "description": "integers",
            "schema": {"type": "integer", "maximum": 9},
            "tests": [
                {"description": "small", "data": 3, "valid": True},
                {"description": "large", "data": 11, "valid": False},
            ],
        },
        {"description": "unique", "schema": {"properties": {"a": {"uniqueItems": True}}}, "tests": []},
        {"description": "never", "schema": False, "tests": []},
    ]
    (tmp_path / "draft2020-12" / "optional").mkdir(parents=True)
    (tmp_path / "draft2020-12" / "optional" / "some.json").write_text(json.dumps(groups))
    ((name, draft),) = examine_suite(tmp_path, writer, 4)
    assert (name, draft.groups, draft.compiled) == ("draft2020-12", 3, 1)
    assert draft.refused["uniqueItems"] == 1
    assert draft.refused.total() == 2
    assert draft.texts == {"valid": 4}
    assert draft.wrong == draft.invalid_accepted == []
    with pytest.raises(FileNotFoundError, match="has no folder draft"):
        list(examine_suite(tmp_path / "draft2020-12", writer, 1))


def test_data_is_accepted_as_masks_have_it_written() -> None:
    grammar = schema_grammar("schema", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert accepts(grammar, {"a": 3})
    assert not accepts(grammar, {"a": "3"})
    assert not accepts(grammar, {})
