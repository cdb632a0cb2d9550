"""RULER's own wording: answers are what a reader of the document alone would say."""

import re
from pathlib import Path
from typing import Any

import pytest

from evals.tasks import generate
from evals.tasks.needles import SETTINGS

REFERENCE_MODEL = Path(__file__).parents[2] / "deploy" / "models" / "reference"
NEEDLE = re.compile(r"One of the special magic \w+ for (\S+) is: (\S+)\.")
ASKED = re.compile(r"What (?:are all|is) the special magic \w+ for (.+) mentioned in the provided text\?")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(REFERENCE_MODEL)


@pytest.mark.parametrize("task", SETTINGS)
def test_values_of_the_asked_keys_are_the_answers(task: str, tokenizer: Any) -> None:
    for sample in generate(task, tokenizer, 2048, 3, 4, "ruler", None):
        asked = re.split(r", and |, ", ASKED.search(sample.prompt)[1])
        held = NEEDLE.findall(sample.prompt)
        assert sorted(value for key, value in held if key in asked) == sorted(sample.answers)
        assert len(sample.answers) == SETTINGS[task].num_values * SETTINGS[task].num_asked
        assert len({key for key, _ in held}) >= SETTINGS[task].num_keys


def test_names_of_a_chain_are_those_that_end_in_its_value(tokenizer: Any) -> None:
    for sample in generate("vt", tokenizer, 2048, 4, 4, "ruler", None):
        document, question = sample.prompt.rsplit("\nQuestion: ", 1)
        value = re.search(r"assigned the value (\d+) in", question)[1]
        held: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", document):
            held[name] = held.get(source, source)
        assert [name for name, number in held.items() if number == value] == sample.answers
        assert len(sample.answers) == 5
