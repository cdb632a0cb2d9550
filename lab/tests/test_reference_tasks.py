"""Generated exercises: every answer follows from the document, by a solver that shares nothing with the generator."""

import random
import re
from collections import Counter

import pytest

from evals.tasks.needles import Distinct
from evals.tasks.task_words import KEY_WORDS
from lab.reference.tasks import KINDS, TASKS, Exercise, Room
from tests.reference_solver import solve

LEVELS = (0.0, 0.3, 0.6, 1.0)
NUM_DRAWS = 40


def exercises(kind: str, level: float, tokens: int) -> list[Exercise]:
    drawn = []
    for seed in range(NUM_DRAWS):
        draw = random.Random(f"{kind}/{level}/{seed}")
        drawn.append(KINDS[kind](Room(draw, Distinct(draw, KEY_WORDS), level, tokens)))
    return drawn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_answer_follows_from_its_document(kind: str, level: float) -> None:
    for tokens in (256, 1024, 4096):
        for exercise in exercises(kind, level, tokens):
            document = exercise.listed or " ".join(exercise.sentences)
            assert exercise.turns
            for turn in exercise.turns:
                assert solve(document, turn.question) == turn.answer


def test_the_solver_tells_a_wrong_document() -> None:
    exercise = exercises("variables", 1.0, 1024)[0]
    turn = max(exercise.turns, key=lambda turn: len(turn.answer))
    assert ", " in turn.answer
    broken = " ".join(sentence for sentence in exercise.sentences if f"VAR {turn.answer[-4:]} =" not in sentence)
    assert solve(broken, turn.question) != turn.answer


def chain_lengths(level: float) -> Counter[int]:
    turns = [turn for exercise in exercises("variables", level, 1024) for turn in exercise.turns]
    return Counter(turn.answer.count(",") + 1 for turn in turns)


def test_chains_grow_with_the_level_and_three_names_are_most_common_at_the_top() -> None:
    assert set(chain_lengths(0.0)) == {1, 2}
    assert set(chain_lengths(0.4)) == {1, 2, 3}
    top = chain_lengths(1.0)
    assert set(top) == {1, 2, 3, 4}
    assert top.most_common(1)[0][0] == 3


def test_two_hops_are_asked_of_no_more_than_two_thirds_of_the_people() -> None:
    for exercise in exercises("facts_two_hops", 1.0, 4096):
        people = sum(" lives in " in sentence for sentence in exercise.sentences)
        asked = sum(TASKS[turn.task] == "facts_two_hops" for turn in exercise.turns)
        assert 1 <= asked <= -(-2 * people // 3)


def test_a_link_stands_after_the_link_that_it_copies() -> None:
    for exercise in exercises("variables", 1.0, 4096):
        known: set[str] = set()
        for sentence in exercise.sentences:
            name, source = re.fullmatch(r"VAR (\w+) = (?:VAR )?(\w+)\.", sentence).groups()
            assert source in known or source.isdigit()
            known.add(name)
