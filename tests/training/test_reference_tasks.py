"""Generated exercises: every answer follows from the document, by a solver that shares nothing with the generator."""

import random
import re
from collections import Counter

import pytest

from evals.tasks.needles import Distinct
from evals.tasks.vocabulary import KEY_WORDS
from training.reference.tasks import KINDS, TASKS, Exercise, Room

LEVELS = (0.0, 0.3, 0.6, 1.0)
NUM_DRAWS = 40


def exercises(kind: str, level: float, tokens: int) -> list[Exercise]:
    drawn = []
    for seed in range(NUM_DRAWS):
        draw = random.Random(f"{kind}/{level}/{seed}")
        drawn.append(KINDS[kind](Room(draw, Distinct(draw, KEY_WORDS), level, tokens)))
    return drawn


def numbers_of(document: str, key: str) -> list[str]:
    return re.findall(rf"special magic (?:number|word) for {key} is (\w+)\.", document)


def follow(document: str, number: str) -> list[str]:
    names = re.findall(rf"VAR (\w+) = {number}\.", document)
    while further := re.findall(rf"VAR (\w+) = VAR {names[-1]}\.", document):
        names += further
    return names


def one(pattern: str, document: str) -> str:
    found = re.findall(pattern, document)
    assert len(found) == 1, (pattern, found)
    return found[0]


def solve(document: str, question: str) -> str:
    """The answer, from the document alone."""
    if match := re.fullmatch(r"What is the special magic (?:number|word) for ([\w-]+)\?", question):
        (found,) = numbers_of(document, match[1])
        return found
    if match := re.fullmatch(r"What are all the special magic numbers for ([\w-]+)\?", question):
        return ", ".join(numbers_of(document, match[1]))
    if match := re.fullmatch(r"What are the special magic numbers for (.+)\?", question):
        return ", ".join(numbers_of(document, key)[0] for key in match[1].split(", "))
    if match := re.fullmatch(r"Where does (.+) live\?", question):
        return one(rf"{match[1]} lives in ([\w ]+)\.", document)
    if match := re.fullmatch(r"What does (.+) work as\?", question):
        return one(rf"{match[1]} works as ([\w ]+)\.", document)
    if match := re.fullmatch(r"Who is the mayor of the city where (.+) lives\?", question):
        city = one(rf"{match[1]} lives in ([\w ]+)\.", document)
        return one(rf"The mayor of {city} is ([\w ]+)\.", document)
    if match := re.fullmatch(r"Who is the mayor of ([\w ]+)\?", question):
        return one(rf"The mayor of {match[1]} is ([\w ]+)\.", document)
    if match := re.fullmatch(r"Find all variables that are assigned the value (\d+)\.", question):
        return ", ".join(follow(document, match[1]))
    if question.startswith("List every"):
        return "\n".join(f"{key}: {number}" for key, number in re.findall(r"number for ([\w-]+) is (\d+)\.", document))
    counts = Counter(document.split(", "))
    if question == "What is the most common word in the list above?":
        (first, times), (_, others) = counts.most_common(2)
        assert times > others
        return first
    assert question == "What are the 3 most common words in the list above, in alphabetical order?"
    ranked = counts.most_common(4)
    assert ranked[2][1] > ranked[3][1]
    return ", ".join(sorted(word for word, _ in ranked[:3]))


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
