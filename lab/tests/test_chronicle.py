"""The evaluations' text is one that training has not seen: another vocabulary, other sentences, and no way to it."""

import hashlib
import random
import re
from functools import cache
from itertools import islice

import pytest

from evals.chronicle import word_lists as chronicle_words
from evals.chronicle.chronicler import GRAMMAR, chronicle, ordinal, spelled
from evals.tasks import task_words
from evals.tasks.needles import Distinct
from evals.tasks.task_words import CITIES, FIRST_NAMES, KEY_WORDS, LAST_NAMES
from lab.reference import tasks
from tests.tolerances import PROSE_DISTINCT
from training import narrative
from training.narrative import Narrator

NUM_SENTENCES = 3_000
LONG_TOKENS = 131_072
FUNCTION_WORDS = frozenset(
    """
    a after along among an and another are as at because been between but by could does for from had have how if in is
    neither no nor not of one only out rather so such than that the then third to until was were what where who whose
    with within without would
    """.split()  # noqa: SIM905
)
"""Articles, pronouns, prepositions, conjunctions, auxiliaries and numerals: no English text is without them."""


def lists_of(module: object) -> set[str]:
    """Return the words of a module's lists, lower case."""
    return {word.lower() for items in vars(module).values() if isinstance(items, list) for word in items}


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def told(num_sentences: int, seed: int) -> list[str]:
    return list(islice(chronicle(seed), num_sentences))


def narrated(num_sentences: int, seed: int) -> list[str]:
    narrator = Narrator(seed)
    return [narrator.sentence() for _ in range(num_sentences)]


def task_wording() -> str:
    """Return what training's exercises say, questions and answers included."""
    said = []
    for kind, make in tasks.KINDS.items():
        for seed in range(20):
            draw = random.Random(f"{kind}/{seed}")
            exercise = make(tasks.Room(draw, Distinct(draw, KEY_WORDS), 1.0, 2048))
            said += [*exercise.sentences, *(f"{turn.question} {turn.answer}" for turn in exercise.turns)]
    return " ".join(said)


@cache
def trained_words() -> set[str]:
    grammar = " ".join(re.sub(r"\{\w+\}", " ", options) for options in narrative.GRAMMAR.values())
    told_words = words_of(" ".join(narrated(NUM_SENTENCES, 0)))
    return words_of(grammar) | told_words | lists_of(task_words) | words_of(re.sub(r"[A-Z]{4}", "", task_wording()))


@cache
def chronicle_lexicon() -> set[str]:
    grammar = " ".join(re.sub(r"\{\w+\}", " ", options) for options in GRAMMAR.values())
    return words_of(grammar) | lists_of(chronicle_words) | words_of(" ".join(told(NUM_SENTENCES, 0)))


def test_no_word_of_content_is_one_that_training_uses() -> None:
    assert chronicle_lexicon() & trained_words() <= FUNCTION_WORDS


def test_a_word_of_the_training_would_be_noticed() -> None:
    assert {"magic", "lives", "harvest", "lantern", "abigail", "walked", "variables"} <= trained_words()
    assert {"theodolite", "moravec", "moraine", "inasmuch"} <= chronicle_lexicon() - trained_words()
    assert len(FUNCTION_WORDS) < 0.1 * len(chronicle_lexicon())


def skeletons(sentences: list[str]) -> set[str]:
    """Return sentences with all but function words as one blank, so that only their build is left."""
    shapes = set()
    for sentence in sentences:
        parts = re.findall(r"[A-Za-z]+|[.,;:!?\"]", sentence)
        marked = " ".join("_" if part.isalpha() and part.lower() not in FUNCTION_WORDS else part for part in parts)
        shapes.add(re.sub(r"_( _)+", "_", marked))
    return shapes


def test_no_sentence_is_built_as_one_of_the_training() -> None:
    ours, theirs = (skeletons(made(NUM_SENTENCES, 1)) for made in (told, narrated))
    assert not ours & theirs


def templates(grammar: dict[str, str]) -> set[str]:
    """Return the builds of a grammar's sentences, slots as blanks."""
    lines = [line for line in grammar["sentence"].splitlines() if line.strip()]
    return skeletons([re.sub(r"\{\w+\}", "blank", line) for line in lines])


def test_no_template_of_a_sentence_is_one_of_the_training() -> None:
    ours, theirs = templates(GRAMMAR), templates(narrative.GRAMMAR)
    assert len(ours) > 30
    assert not ours & theirs


def test_a_template_of_the_training_would_be_noticed() -> None:
    one, other = (skeletons(narrated(NUM_SENTENCES, seed)) for seed in (1, 2))
    assert len(one & other) > 0.1 * len(one)


def test_names_and_keys_of_the_tasks_never_stand_in_the_text() -> None:
    text = words_of(" ".join(told(NUM_SENTENCES, 3)))
    drawn = {word.lower() for name in [*KEY_WORDS, *FIRST_NAMES, *LAST_NAMES, *CITIES] for word in name.split()}
    assert not text & drawn


def test_a_document_of_128k_tokens_repeats_no_sentence() -> None:
    sentences = told(LONG_TOKENS // 20, 0)
    words = " ".join(sentences).split()
    assert len(words) > LONG_TOKENS
    assert len(set(sentences)) == len(sentences)
    assert share_of_distinct_runs(words) > PROSE_DISTINCT


def share_of_distinct_runs(words: list[str]) -> float:
    runs = [tuple(words[place : place + 8]) for place in range(len(words) - 8)]
    return len(set(runs)) / len(runs)


def test_repeated_text_would_be_noticed() -> None:
    assert share_of_distinct_runs(" ".join(told(1_000, 0)).split() * 2) < PROSE_DISTINCT


def test_sentences_have_no_digits_no_hyphens_and_one_end() -> None:
    for sentence in told(NUM_SENTENCES, 4):
        assert re.fullmatch(r"[A-Z][A-Za-z ,;:()']*[.?!]", sentence), sentence
        assert not re.search(r"  | [.,;:!?)]|\( |,,|\ba [aeiou]", sentence), sentence


def test_the_text_depends_on_its_seed_alone() -> None:
    assert told(50, 5) == told(50, 5)
    assert not set(told(50, 5)) & set(told(50, 6))
    digest = hashlib.sha256("\n".join(told(200, 0)).encode()).hexdigest()
    assert digest == "6228aa4315b64ad86ff9f4e3bb8b23d243ae2142618fda07655218df39d7e567"


def test_the_training_prose_is_the_one_that_the_model_was_trained_on() -> None:
    digest = hashlib.sha256("\n".join(narrated(200, 1)).encode()).hexdigest()
    assert digest == "aa2f6b36407ee5622e459414935a5d7a16405db659b63c24b2991a197d0a4036"


@pytest.mark.parametrize(
    ("number", "words", "place"),
    [(2, "two", "second"), (12, "twelve", "twelfth"), (40, "forty", "fortieth"), (61, "sixty one", "sixty first"),
     (100, "one hundred", "one hundredth"), (312, "three hundred and twelve", "three hundred and twelfth"),
     (12_005, "twelve thousand and five", "twelve thousand and fifth")],
)  # fmt: skip
def test_numbers_are_spelled(number: int, words: str, place: str) -> None:
    assert spelled(number) == words
    assert ordinal(number) == place
