"""The reference form's samples: every answer is what a reader of the document alone would say, at the depth asked."""

import re
from pathlib import Path
from typing import Any

import pytest

from evals.samples import Sample
from evals.tasks import generate
from evals.tasks.reference import NUM_ASKED, OF_RULER, REFERENCE_TASKS, user_turn
from evals.tasks.text import text_source
from tests.reference_solver import solve
from tests.tolerances import DEPTH_SHARE

REFERENCE_MODEL = Path(__file__).parents[2] / "deploy" / "models" / "reference"
NEEDLE = re.compile(r"The special magic number for ([a-z]+)-([a-z]+) is (\d{7})\.")
PLACED = ("needle", "many_needles", "word_needle", "facts_one_hop", "only_needles", "crossed_needles")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(REFERENCE_MODEL)


def read(sample: Sample) -> tuple[str, str]:
    """Document and question."""
    document, question = user_turn(sample.prompt).rsplit("\n\n", 1)
    return document, question


def made(task: str, tokenizer: Any, num: int, **more: Any) -> list[Sample]:
    return generate(task, tokenizer, 2048, num, 11, "reference", None, **more)


def test_several_keys_are_asked_in_another_order_than_they_stand(tokenizer: Any) -> None:
    """Else an answer in the document's order would be right too."""
    for task in ("several_keys", "four_keys"):
        differing = 0
        for sample in made(task, tokenizer, 12):
            document, question = read(sample)
            keys = question.removeprefix("What are the special magic numbers for ").removesuffix("?").split(", ")
            assert len(keys) == NUM_ASKED[task][0]
            assert len(NEEDLE.findall(document)) == NUM_ASKED[task][1]
            differing += keys != sorted(keys, key=document.index)
        assert differing > 6


@pytest.mark.parametrize(("task", "count"), [("several_values", 2), ("four_values", 4)])
def test_one_key_has_as_many_values_as_the_name_says(task: str, count: int, tokenizer: Any) -> None:
    for sample in made(task, tokenizer, 4):
        found = NEEDLE.findall(read(sample)[0])
        assert len({(first, second) for first, second, _ in found}) == 1
        assert [number for _, _, number in found] == sample.answers[0].split(", ")
        assert len(found) == count


@pytest.mark.parametrize("task", ["only_needles", "crossed_needles"])
def test_documents_of_needles_hold_nothing_else_and_no_key_twice(task: str, tokenizer: Any) -> None:
    for sample in made(task, tokenizer, 3):
        document = read(sample)[0]
        found = NEEDLE.findall(document)
        assert NEEDLE.sub("", document).strip() == ""
        assert len({(first, second) for first, second, _ in found}) == len(found) > 80
        assert len({number for _, _, number in found}) == len(found)


def test_words_of_crossed_needles_stand_in_many_keys_and_those_of_others_in_few(tokenizer: Any) -> None:
    """So the asked key is told from others by both of its words only."""
    sharing = {}
    for task in ("only_needles", "crossed_needles"):
        (sample,) = made(task, tokenizer, 1)
        document, question = read(sample)
        first, second = question.removeprefix("What is the special magic number for ").removesuffix("?").split("-")
        keys = [(one, other) for one, other, _ in NEEDLE.findall(document)]
        sharing[task] = min(sum(key[place] == word for key in keys) for place, word in enumerate((first, second)))
    assert sharing["only_needles"] < 4 <= sharing["crossed_needles"]


@pytest.mark.parametrize("task", PLACED)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.75, 1.0])
def test_what_is_asked_stands_at_the_depth_that_is_asked(task: str, depth: float, tokenizer: Any) -> None:
    for sample in made(task, tokenizer, 2, depths=[depth]):
        document, question = read(sample)
        subject = question.removesuffix("?").removesuffix(" live").removesuffix(" work as").split(" does ")[-1]
        verb = "works" if "work as" in question else "lives"
        stands = f"{subject} {verb}" if "does" in question else f"{subject.split(' for ')[-1]} is"
        assert document.count(stands) == 1
        assert sample.depth == depth
        assert abs(document.index(stands) / len(document) - depth) < DEPTH_SHARE


def test_a_depth_that_is_ignored_would_be_noticed(tokenizer: Any) -> None:
    drawn = [sample.depth for sample in made("needle", tokenizer, 12)]
    assert sum(abs(depth - 0.3) > DEPTH_SHARE for depth in drawn) > 6


def test_ruler_names_lead_to_their_own_settings() -> None:
    assert {OF_RULER[name] for name in ("niah_multikey_2", "niah_multikey_3")} == {"only_needles", "crossed_needles"}
    assert OF_RULER["niah_multivalue"] == "four_values"
    assert OF_RULER["niah_multiquery"] == "four_keys"


def test_every_task_can_stand_in_a_text_file(tokenizer: Any, tmp_path: Path) -> None:
    book = tmp_path / "novel.txt"
    book.write_text("\n".join(f"The {number}th carriage of Mr. Pym stood still. So did he!" for number in range(4_000)))
    for task in REFERENCE_TASKS:
        (sample,) = generate(task, tokenizer, 1536, 1, 0, "reference", text_source([book], {}))
        document, question = read(sample)
        if task != "continue":
            assert [solve(document, question)] == sample.answers
        if task not in ("common_word", "common_words", "only_needles", "crossed_needles"):
            assert "th carriage of Mr." in document
