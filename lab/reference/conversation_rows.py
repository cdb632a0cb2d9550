"""Make training rows: conversations about one document of novel text, filled to their length to the token.

The invariant: a row has exactly `length + 1` tokens, the prompt up to the first answer is what `evals.tasks.reference`
would write for the same sentences and question, and a span covers each whole answer with its end token. A hint is the
token that the model's middle layer should predict at a position, as a separate lesson: it changes no token of the row.
"""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from evals.tasks.needles import Distinct
from evals.tasks.task_words import KEY_WORDS
from lab.reference.corpus import Text
from lab.reference.spelling import ASSISTANT, BEGIN, END, END_OF_TEXT, USER, Spelling
from lab.reference.tasks import KINDS, MERGED, TASKS, Exercise, Room, Turn

NOTHING, PLAIN_TEXT, ANSWER, LISTED, FILLER = range(5)
"""Classes of predicted tokens: not learnt, text alone, an answer, a word of a list, text between sentences."""

CONTINUE = "continue"
ROW_KINDS = (*KINDS, CONTINUE)
OPENING_WORDS, PASSAGE_WORDS, PASSAGE_TOKENS = 10, 60, 150
MERGE_FROM_TOKENS = 2048
LISTS_A_ROW, LIST_TURN_TOKENS = 4, 44
DEPTHS = 40


HINTS = ("first_hop", "city", "assigned", "leader", "common")
"""Subjects of hints. first_hop, city: at a question's end, the city that a two-hop answer passes through, or that is
the answer. assigned: at a sentence's end, the variable that it gives a value to. leader: in a list, the most common
word so far. common: at a question's end, a list's common word."""
ASKED_HINTS = {"facts_two_hops": "first_hop", "facts_one_hop": "city", "common_word": "common"}
QUESTION_END_TOKENS = 4
LEADER_HINTS, LEADER_TIMES, LEADER_LEAD = 40, 3, 2
"""Hints in a list; the times a word must have come, and its lead over the next, to be the leader."""


class RowError(Exception):
    """Raised if the drawn exercise does not fit the row."""


@dataclass(frozen=True)
class Row:
    """One training row. tokens: uint16 `[length + 1]`. classes: uint8 `[length]`, of the predicted tokens `tokens[1:]`.
    spans: (task, begin, end) of answers among the predicted tokens. hints: (index in HINTS, position among the inputs
    `tokens[:-1]`, token to be predicted there).
    """

    tokens: np.ndarray
    classes: np.ndarray
    spans: list[tuple[int, int, int]]
    hints: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Library:
    """The texts that rows are made of. texts, weights: sources of filler. text_rows: sources of rows of text alone."""

    spelling: Spelling
    words: list[str]
    texts: tuple[Text, ...]
    weights: tuple[float, ...]
    text_rows: tuple[Text, ...]
    corrupted: float


def make_library(
    spelling: Spelling, novels: tuple[Text, ...], weights: tuple[float, ...], num_text_rows: int, corrupted: float
) -> Library:
    """Return a library whose keys are one token a word. The first `num_text_rows` sources also give text alone."""
    return Library(spelling, spelling.single(KEY_WORDS), novels, weights, novels[:num_text_rows], corrupted)


class Tape:
    """Collects a row's tokens with the class of each, and its spans and hints."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.counted: list[tuple[int, int]] = []
        self.spans: list[tuple[int, int, int]] = []
        self.hints: list[tuple[int, int, int]] = []

    def hint(self, about: str, position: int, token: int) -> None:
        self.hints.append((HINTS.index(about), position, token))

    def add(self, tokens: list[int], counts_as: int) -> None:
        self.tokens += tokens
        self.counted.append((counts_as, len(tokens)))

    def row(self, length: int) -> Row:
        """Return the row, cut or padded to length + 1 tokens. Spans that are cut are dropped."""
        missing = length + 1 - len(self.tokens)
        if missing > 0:
            self.add([END_OF_TEXT] * missing, NOTHING)
        classes = np.repeat([c for c, _ in self.counted], [n for _, n in self.counted]).astype(np.uint8)
        spans = [(task, begin - 1, end - 1) for task, begin, end in self.spans if end <= length + 1]
        hints = [hint for hint in self.hints if hint[1] < length]
        return Row(np.array(self.tokens[: length + 1], np.uint16), classes[1 : length + 1], spans, hints)


def text_row(library: Library, length: int, draw: random.Random, numbers: np.random.Generator) -> Row:
    """Draw a row of text alone. Some inputs are replaced by other tokens, which need not be predicted."""
    text = draw.choice(library.text_rows)
    begin = int(text.ends[draw.randrange(len(text.ends) - 1)])
    begin = max(0, min(begin, len(text.tokens) - length))
    tokens = np.concatenate([[BEGIN], text.tokens[begin : begin + length]]).astype(np.uint16)
    classes = np.full(length, PLAIN_TEXT, np.uint8)
    if library.corrupted:
        wrong = np.flatnonzero(numbers.random(length) < library.corrupted)
        tokens[wrong + 1] = numbers.choice(text.tokens, len(wrong))
        classes[wrong] = NOTHING
    return Row(tokens, classes, [], [])


def task_row(library: Library, kind: str, levels: dict[str, float], length: int, draw: random.Random) -> Row:
    """Draw a conversation of a kind. levels: by kind. Raises RowError if what was drawn does not fit."""
    if kind == CONTINUE:
        return continue_row(library, length, draw)
    if kind == "common_words":
        return list_row(library, draw_lists(library, levels[kind], length, draw), length, draw)
    return document_row(library, draw_exercise(library, kind, levels, length, draw), length, draw)


def document_row(library: Library, exercise: Exercise, length: int, draw: random.Random) -> Row:
    """Return a conversation about a document of text with the exercise's sentences, with as many turns as fit."""
    spelling = library.spelling
    sentences = [spelling.ids(f" {sentence}") for sentence in exercise.sentences]
    turns = [spell_turn(spelling, turn, number == 0) for number, turn in enumerate(exercise.turns)]
    fixed = sum(map(len, sentences)) + 3
    kept = 0
    for question, answer in turns:
        if fixed + len(question) + len(answer) > length + 1:
            break
        fixed += len(question) + len(answer)
        kept += 1
    if not kept:
        raise RowError(f"document: no turn fits {length} tokens")
    text = draw.choices(library.texts, library.weights)[0]
    tape = Tape()
    tape.add([BEGIN, USER, *spelling.ids("\n")], NOTHING)
    lay_document(tape, text, sentences, exercise, length + 1 - fixed, spelling, draw)
    for (question, answer), turn in zip(turns[:kept], exercise.turns, strict=False):
        lay_turn(tape, question, answer, turn, spelling)
    return tape.row(length)


def draw_exercise(library: Library, kind: str, levels: dict[str, float], length: int, draw: random.Random) -> Exercise:
    """Draw one exercise, or for a long document several that can share it."""
    kinds = [kind]
    if length >= MERGE_FROM_TOKENS and kind in (*MERGED, "facts_two_hops") and draw.random() < 0.4:
        kinds += draw.sample([other for other in MERGED if other != kind], draw.randint(1, 2))
        if "facts_two_hops" not in kinds and draw.random() < 0.4:
            kinds.append("facts_two_hops")
    distinct = Distinct(draw, library.words)
    drawn = [KINDS[name](Room(draw, distinct, levels[name], length // len(kinds))) for name in kinds]
    if len(drawn) == 1:
        return drawn[0]
    order = [number for number, exercise in enumerate(drawn) for _ in exercise.sentences]
    draw.shuffle(order)
    rest = [iter(exercise.sentences) for exercise in drawn]
    turns = [turn for exercise in drawn for turn in exercise.turns]
    draw.shuffle(turns)
    assigned = {sentence: name for exercise in drawn for sentence, name in exercise.assigned.items()}
    return Exercise([next(rest[number]) for number in order], turns, None, assigned)


def spell_turn(spelling: Spelling, turn: Turn, first: bool) -> tuple[list[int], list[int]]:
    """Return the tokens up to where the answer begins, and those of the answer with its end."""
    opened = spelling.ids(f"\n\n{turn.question}") if first else [USER, *spelling.ids(f"\n{turn.question}")]
    return [*opened, END, ASSISTANT, *spelling.ids("\n")], [*spelling.ids(turn.answer), END]


def lay_turn(tape: Tape, question: list[int], answer: list[int], turn: Turn, spelling: Spelling) -> None:
    """Add a question and its answer with its span, and hints at the question's last tokens."""
    tape.add(question, NOTHING)
    if turn.through:
        token = spelling.ids(f" {turn.through}")[0]
        for position in range(len(tape.tokens) - QUESTION_END_TOKENS, len(tape.tokens)):
            tape.hint(ASKED_HINTS[TASKS[turn.task]], position, token)
    tape.spans.append((turn.task, len(tape.tokens), len(tape.tokens) + len(answer)))
    tape.add(answer, ANSWER)


def lay_sentence(tape: Tape, sentence: list[int], assigned: str | None, spelling: Spelling) -> None:
    """Add a sentence. If it assigns a variable, its last tokens get the name's tokens as hints, in reverse order."""
    tape.add(sentence, NOTHING)
    if assigned:
        for back, token in enumerate(spelling.ids(f" {assigned}"), start=1):
            tape.hint("assigned", len(tape.tokens) - back, token)


def lay_document(
    tape: Tape,
    text: Text,
    sentences: list[list[int]],
    exercise: Exercise,
    num_filler: int,
    spelling: Spelling,
    draw: random.Random,
) -> None:
    """Add num_filler tokens of text, and the sentences in their order at sentence ends near random depths."""
    filler, ends = take_filler(text, num_filler, draw)
    even = draw.random() < 0.5
    depths = sorted(draw.randrange(DEPTHS) / (DEPTHS - 1) if even else draw.random() for _ in sentences)
    wanted = np.array(depths) * num_filler
    after = np.searchsorted(ends, wanted)
    after = np.clip(after, 1, len(ends) - 1) if len(ends) > 1 else np.zeros(len(wanted), np.int64)
    slots = np.where(wanted - ends[after - 1] <= ends[after] - wanted, ends[after - 1], ends[after])
    begin = 0
    if sentences and num_filler and slots[0] != 0:
        begin = lay_bare_word(tape, filler, spelling)
    for number, (slot, sentence) in enumerate(zip(slots.tolist(), sentences, strict=True)):
        if slot > begin:
            tape.add(filler[begin:slot], FILLER)
            begin = slot
        bare = number == 0 and len(tape.tokens) == 3
        plain = exercise.sentences[number]
        lay_sentence(
            tape, bare_ids(spelling, plain, sentence) if bare else sentence, exercise.assigned.get(plain), spelling
        )
    tape.add(filler[begin:], FILLER)


def bare_ids(spelling: Spelling, plain: str, spaced: list[int]) -> list[int]:
    """Return the first sentence of a document without its leading space, if that has as many tokens."""
    ids = spelling.ids(plain)
    return ids if len(ids) == len(spaced) else spaced


def lay_bare_word(tape: Tape, filler: list[int], spelling: Spelling) -> int:
    """Add a document's first token without its leading space, if there is such a token. Returns how many were added."""
    bare = spelling.ids(spelling.text(filler[:1]).lstrip())
    if len(bare) != 1:
        return 0
    tape.add(bare, NOTHING)
    return 1


def take_filler(text: Text, num_tokens: int, draw: random.Random) -> tuple[list[int], np.ndarray]:
    """Return num_tokens tokens that begin with a sentence and end with a full stop, and the ends of its sentences, with
    0 as the first.
    """
    if num_tokens <= 0:
        return [], np.zeros(1, np.int64)
    last = int(np.searchsorted(text.ends, len(text.tokens) - num_tokens - 1, side="right")) - 1
    if last < 0:
        raise RowError(f"filler: text of {len(text.tokens)} tokens, wanted more than {num_tokens}")
    first = draw.randrange(last + 1)
    begin = int(text.ends[first])
    filler = text.tokens[begin : begin + num_tokens].tolist()
    stop = int(np.searchsorted(text.ends, begin + num_tokens))
    ends = text.ends[first:stop] - begin
    return filler, np.append(ends, num_tokens)


def draw_lists(library: Library, level: float, length: int, draw: random.Random) -> list[Exercise]:
    """Draw one list of words, or several short ones at low levels."""
    count = draw.randint(1, max(1, min(LISTS_A_ROW, length // 100)))
    if draw.random() < level or length > MERGE_FROM_TOKENS:
        count = 1
    room = length // count - LIST_TURN_TOKENS
    return [
        KINDS["common_words"](Room(draw, Distinct(draw, library.words), level, room)) for _ in range(count)
    ]  # fmt: skip


def lay_list(tape: Tape, words: list[str], spelling: Spelling, draw: random.Random) -> None:
    """Add words with commas between. If one word leads so far, some positions get it as a hint."""
    tape.add(spelling.ids(words[0]), LISTED)
    often = Counter(words[:1])
    leader, most, next_most = words[0], 1, 0
    found: list[tuple[int, str]] = []
    for word in words[1:]:
        if most >= LEADER_TIMES and most - next_most >= LEADER_LEAD:
            found.append((len(tape.tokens), leader))
        tape.add(spelling.ids(f", {word}"), LISTED)
        often[word] = times = often[word] + 1
        if word == leader:
            most = times
        elif times > most:
            leader, most, next_most = word, times, most
        elif times > next_most:
            next_most = times
    for position, word in draw.sample(found, min(LEADER_HINTS, len(found))):
        tape.hint("leader", position, spelling.ids(f" {word}")[0])


def list_row(library: Library, exercises: list[Exercise], length: int, draw: random.Random) -> Row:
    """Return a row of lists of words, each a user's turn with its question."""
    spelling = library.spelling
    tape = Tape()
    tape.add([BEGIN], NOTHING)
    for exercise in exercises:
        question, answer = spell_turn(spelling, exercise.turns[0], True)
        tape.add([USER, *spelling.ids("\n")], NOTHING)
        lay_list(tape, (exercise.listed or "").split(", "), spelling, draw)
        lay_turn(tape, question, answer, exercise.turns[0], spelling)
    if len(tape.tokens) > length + 1:
        raise RowError(f"common_words: {len(tape.tokens)} tokens, room for {length + 1}")
    return tape.row(length)


def continue_row(library: Library, length: int, draw: random.Random) -> Row:
    """Return a row of text with passages of it to continue from their first words."""
    spelling, text = library.spelling, library.texts[0]
    words_asked = PASSAGE_WORDS if length >= 500 else PASSAGE_WORDS // 3
    most = PASSAGE_TOKENS * words_asked // PASSAGE_WORDS
    count = max(1, min(4, length // 500))
    num_filler = length - count * (most + 30)
    filler, ends = take_filler(text, num_filler, draw)
    begins = [int(end) for end in ends if end + PASSAGE_TOKENS // 2 + most // 2 < num_filler]
    if len(begins) < count:
        raise RowError(f"continue: {len(begins)} sentences, wanted {count}")
    tape = Tape()
    tape.add([BEGIN, USER, *spelling.ids("\n")], NOTHING)
    done = lay_bare_word(tape, filler, spelling)
    tape.add(filler[done:], FILLER)
    for number, begin in enumerate(draw.sample(begins, count)):
        words = spelling.text(filler[begin : begin + PASSAGE_TOKENS]).split()[:-1]
        opening, passage = words[:OPENING_WORDS], words[OPENING_WORDS : OPENING_WORDS + words_asked]
        asked = Turn(
            TASKS.index(CONTINUE),
            f"Continue the passage that begins with: {' '.join(opening)}",
            " ".join(passage),
            None,
        )
        lay_turn(tape, *spell_turn(spelling, asked, number == 0), asked, spelling)
    if len(tape.tokens) > length + 1:
        raise RowError(f"continue: {len(tape.tokens)} tokens, room for {length + 1}")
    return tape.row(length)


def draw_row(library: Library, kind: str, levels: dict[str, float], length: int, draw: random.Random) -> Row:
    """Return a row of the kind. It is drawn again until it fits."""
    for _ in range(50):
        try:
            return task_row(library, kind, levels, length, draw)
        except RowError as error:
            last = error
    raise RowError(f"{kind}: 50 draws did not fit {length} tokens; the last said: {last}")
