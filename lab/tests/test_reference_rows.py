"""Rows and text: exact lengths, whole answers, the evaluations' wording, no held-out text in training."""

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from evals.tasks.reference import PLANS, TURN_BEGIN, TURN_END
from lab.reference.conversation_rows import (
    ANSWER,
    HINTS,
    LEADER_LEAD,
    LEADER_TIMES,
    NOTHING,
    ROW_KINDS,
    Library,
    draw_row,
    make_library,
    text_row,
)
from lab.reference.corpus import Text, narrate, split_novels, tokenise, tokenise_with
from lab.reference.curriculum import (
    FEWEST_ANSWERS,
    LENGTHS,
    SETTLE_S,
    SHARES,
    STAGES,
    Curriculum,
    length_shares,
    scored_by,
)
from lab.reference.evaluation import draw_evaluation
from lab.reference.feed import count_hints, draw_batch, mixed_levels
from lab.reference.reference_tokenizer import split_capitals, write_tokenizer
from lab.reference.spelling import BEGIN, END, Spelling
from lab.reference.tasks import TASKS

REFERENCE = Path(__file__).resolve().parents[2] / "deploy/models/reference"
FULL_LEVEL = dict.fromkeys(ROW_KINDS, 1.0)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(REFERENCE, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def spelling(tokenizer_folder: Path) -> Spelling:
    return Spelling(tokenizer_folder / "tokenizer.json")


@pytest.fixture(scope="module")
def library(spelling: Spelling) -> Library:
    text = narrate(4000, 0, spelling)
    return make_library(spelling, (text, text), (0.5, 0.5), 2, 0.1)


def novel(names: list[str], seed: int) -> str:
    draw = random.Random(seed)
    lines = [
        f"Then {draw.choice(names)} spoke to {draw.choice(names)} of the {draw.choice(('sea', 'hill', 'road'))} "
        f"and of {draw.choice(names)}, number {draw.random():.9f}."
        for _ in range(2500)
    ]
    return "\n".join([f"THE STORY OF {names[0].upper()}", *lines]) + "\n"


def cast(first: str) -> list[str]:
    return [f"{first}{middle}{last}" for middle in "aeiou" for last in ("ll", "rn", "st")]


def test_held_out_text_begins_where_another_novel_begins() -> None:
    novels = [novel(cast(first), seed) for seed, first in enumerate("BDGKLMNPRSTVWZ")]
    text = "".join(novels)
    training, held_out = split_novels(text, 0.2)
    assert training + held_out == text
    begins = np.cumsum([0, *map(len, novels)]).tolist()
    assert len(training) in begins
    lines = set(training.splitlines())
    assert not any(line in lines for line in held_out.splitlines())


def test_tokens_of_text_are_the_tokenizers_own(spelling: Spelling, tokenizer_folder: Path) -> None:
    text = 'He said "Go!" She went. Mr. Smith came.\nThe end of it. It was late.\n'
    spaced, lined = tokenise(text, spelling)
    assert spelling.text(spaced.tokens.tolist()) == " " + " ".join(text.split())
    assert spelling.text(lined.tokens.tolist()) == "\n" + text.rstrip("\n")
    assert len(spaced.ends) == len(lined.ends)
    by_two = tokenise_with(text, tokenizer_folder / "tokenizer.json", 2)
    for one, two in zip((spaced, lined), by_two, strict=True):
        assert np.array_equal(one.tokens, two.tokens)
        assert np.array_equal(one.ends, two.ends)


def test_spelling_from_the_cache_is_the_tokenizers(spelling: Spelling, library: Library) -> None:
    texts = [
        "\n\nFind all variables that are assigned the value 1234567.",
        " VAR ABCD = VAR QXZT.",
        "amber-lantern: 7654321\ncold-road: 1234567",
        "\nWhat is the special magic number for a-b?",
        "one, two, three",
        " 12 3",
    ]
    for text in texts:
        for _ in range(2):
            assert spelling.ids(text) == spelling.tokenizer.encode(text, add_special_tokens=False).ids


def test_a_name_of_capitals_is_spelled_alike_in_document_and_answer(spelling: Spelling) -> None:
    old = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    draw = random.Random(0)
    for _ in range(100):
        name = "".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=4))
        spaced, bare = spelling.ids(f" {name}"), spelling.ids(name)
        assert len(spaced) == len(bare) == 4
        assert spaced[1:] == bare[1:]
    assert old.get_vocab() == spelling.tokenizer.get_vocab()


def test_splitting_capitals_twice_changes_nothing_more() -> None:
    stored = {"model": {"merges": [["A", "B"], ["Ġ", "A"], ["ĠA", "B"], ["a", "b"]]}}
    once = split_capitals(stored)
    assert once["model"]["merges"] == [["Ġ", "A"], ["a", "b"]]
    assert split_capitals(once) == once


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_rows_are_exact_and_spans_are_whole_answers(library: Library, kind: str, length: int) -> None:
    draw = random.Random(f"{kind}/{length}")
    for level in (0.0, 1.0):
        for _ in range(5):
            row = draw_row(library, kind, dict.fromkeys(ROW_KINDS, level), length, draw)
            assert row.tokens.shape == (length + 1,)
            assert row.classes.shape == (length,)
            assert row.tokens[0] == BEGIN
            assert row.spans
            predicted = row.tokens[1:]
            in_spans = np.zeros(length, bool)
            for _, begin, end in row.spans:
                in_spans[begin:end] = True
                assert predicted[end - 1] == END
                assert END not in predicted[begin : end - 1]
            assert np.array_equal(in_spans, row.classes == ANSWER)


def test_what_is_said_in_sentences_and_questions_is_not_predicted(library: Library) -> None:
    row = draw_row(library, "needles", FULL_LEVEL, 1024, random.Random(3))
    text = library.spelling.text(row.tokens[1:][row.classes == NOTHING].tolist())
    assert "What is the special magic number for" in text
    learnt = library.spelling.text(row.tokens[1:][row.classes != NOTHING].tolist())
    assert "special magic" not in learnt


@pytest.mark.parametrize("task", ["needle", "facts_two_hops", "variables", "list", "several_values"])
def test_evaluated_prompts_are_the_evaluations_own(library: Library, task: str) -> None:
    (row,) = [row for row in draw_evaluation(library, 1024, 1, 0) if TASKS[row.spans[0][0]] == task][:1]
    text = library.spelling.text(row.tokens.tolist())
    draw = random.Random(f"{task}/1024/0")
    inserts, question, answers, _, _ = PLANS[task](draw, library.words, None)
    assert text.startswith(TURN_BEGIN)
    assert f"\n\n{question}{TURN_END}{answers[0]}<|end|>" in text
    places = [text.index(sentence) for _, sentence in sorted(inserts, key=lambda insert: insert[0])]
    assert places == sorted(places)


def test_replaced_inputs_of_text_are_not_predicted(library: Library) -> None:
    draw, numbers = random.Random(0), np.random.default_rng(0)
    row = text_row(library, 1024, draw, numbers)
    assert 0.05 < (row.classes == NOTHING).mean() < 0.15
    clean = Library(library.spelling, library.words, library.texts, library.weights, library.text_rows, 0.0)
    assert (text_row(clean, 1024, draw, numbers).classes != NOTHING).all()


def test_batches_number_answers_across_rows(library: Library) -> None:
    shares = np.ones(len(ROW_KINDS))
    batch = draw_batch(library, 512, 8, 0.25, shares, np.full(len(ROW_KINDS), 0.5), random.Random(0))
    assert batch.tokens.shape == (8, 513)
    flat = batch.classes.ravel() == ANSWER
    covered = np.zeros_like(flat)
    for _, begin, end in batch.spans:
        covered[begin:end] = True
    assert np.array_equal(flat, covered)
    used = batch.hints[batch.hints[:, 0] >= 0]
    assert len(batch.hints) == count_hints(8, 512)
    assert 0 < len(used) < len(batch.hints)
    assert used[:, 1].max() < 8 * 512


def test_levels_of_a_row_are_the_curriculums_or_easier_or_the_hardest() -> None:
    draw, levels = random.Random(0), np.full(len(ROW_KINDS), 0.4)
    found = [mixed_levels(levels, draw)["listing"] for _ in range(1000)]
    assert 0.4 < np.mean(np.array(found) == 0.4) < 0.6
    assert 0.2 < np.mean(np.array(found) == 1.0) < 0.3
    assert all(level <= 0.4 for level in found if level != 1.0)


def hints_of(library: Library, kind: str, length: int) -> list[tuple[str, str, str]]:
    """Return subject, text up to the hinted position with it, token, of a row's hints."""
    row = draw_row(library, kind, FULL_LEVEL, length, random.Random(5))
    text = library.spelling.text
    return [
        (HINTS[about], text(row.tokens[: position + 1].tolist()), text([token])) for about, position, token in row.hints
    ]


def test_a_two_hop_question_hints_at_the_city(library: Library) -> None:
    hints = hints_of(library, "facts_two_hops", 512)
    ends = [(about, text, token) for about, text, token in hints if text.endswith(TURN_END)]
    assert "first_hop" in {about for about, _, _ in ends} <= {"first_hop", "city"}
    for about, text, token in ends:
        assert (about == "first_hop") == ("lives?" in text[-60:])
        person = re.findall(r"(?:where|does) (\w+ \w+) lives?\?", text)[-1]
        (city,) = re.findall(rf"{person} lives in ([\w ]+)\.", text)
        assert f" {city}".startswith(token)


def test_a_sentences_end_hints_at_the_variable_that_it_assigns(library: Library) -> None:
    hints = [(text, token) for about, text, token in hints_of(library, "variables", 512) if about == "assigned"]
    ends = [(text, token) for text, token in hints if text.endswith(".")]
    assert ends
    assert len(hints) == 4 * len(ends)
    for text, token in ends:
        name = re.findall(r"VAR (\w{4}) = ", text)[-1]
        assert token == f" {name[0]}"


def test_a_list_hints_at_the_word_that_leads_so_far(library: Library) -> None:
    hints = [(text, token) for about, text, token in hints_of(library, "common_words", 1024) if about == "leader"]
    assert hints
    for text, token in hints:
        words = text.rpartition("<|user|>\n")[2].rstrip(",").split(", ")
        (leader, most), (_, next_most) = Counter(words).most_common(2)
        assert text.endswith(",")
        assert f" {leader}".startswith(token)
        assert most >= LEADER_TIMES
        assert most - next_most >= LEADER_LEAD


def test_shares_of_lengths_sum_to_one_at_any_progress() -> None:
    for stage in STAGES:
        for progress in (0.0, 0.2, 0.5, 0.99, 1.5):
            shares = length_shares(stage, progress)
            assert sum(shares.values()) == pytest.approx(1.0)
            assert set(shares) <= set(LENGTHS)
    assert set(SHARES) == set(ROW_KINDS)
    assert {task for kind in ROW_KINDS for task in scored_by(kind)} == set(TASKS) - {"mayor", "common_words"}


def test_a_kind_hardens_when_it_is_answered_and_eases_when_it_is_not() -> None:
    curriculum = Curriculum(0.5, 0.1)
    kind = ROW_KINDS.index("variables")
    asked = np.zeros((len(LENGTHS), len(TASKS)))
    asked[0, TASKS.index("variables")] = FEWEST_ANSWERS
    curriculum.update(asked * 0.95, asked, 0.0)
    assert curriculum.levels[0, kind] > 0.5
    before = curriculum.levels[0, kind]
    curriculum.update(asked * 0.1, asked, SETTLE_S / 2)
    assert curriculum.levels[0, kind] == before
    curriculum.update(asked * 0.1, asked, SETTLE_S)
    assert curriculum.levels[0, kind] < before
    for number in range(2, 20):
        curriculum.update(asked, asked, number * SETTLE_S)
    assert curriculum.levels[0, kind] == 1.0
    assert 0 < curriculum.shares[0, kind] < SHARES["variables"]
    assert 0.5 <= curriculum.levels[1, kind] < 1.0
    assert curriculum.shares[1, kind] == curriculum.shares[0, kind]


def test_text_is_read_back_as_saved(tmp_path: Path) -> None:
    text = Text(np.arange(10, dtype=np.uint16), np.array([0, 4, 10]))
    text.save(tmp_path / "text.npz")
    read = Text.load(tmp_path / "text.npz")
    assert np.array_equal(read.tokens, text.tokens)
    assert np.array_equal(read.ends, text.ends)
