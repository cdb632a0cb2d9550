"""Draw exercises at a level: sentences for a document, and questions about it with their answers, as text.

The wording is that of `evals.tasks.reference`, so that a model trained here is measured there. A level in [0, 1] is the
difficulty: few keys, short chains and strong contrasts at 0, harder than the evaluations at 1. What an answer passes
through (the city of a two-hop fact, the name that a sentence assigns, the word that leads a list so far) is given
beside the text, so that it can be taught as a separate lesson. Invariant: every answer follows from the document alone
and is unique, and sentences are in the order of their appearance.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from evals.tasks.counting_words import PLAIN_WORDS, words_of
from evals.tasks.needles import Distinct
from evals.tasks.reference import COUNTED, NUMBER_NEEDLE, WORD_NEEDLE, a
from evals.tasks.task_words import CITIES, FIRST_NAMES, JOBS, LAST_NAMES

TASKS = (
    "needle",
    "many_needles",
    "word_needle",
    "several_values",
    "several_keys",
    "facts_one_hop",
    "facts_two_hops",
    "variables",
    "list",
    "continue",
    "common_word",
    "common_words",
    "mayor",
)
SENTENCE_TOKENS, TURN_TOKENS = 16, 40
FACT_TOKENS, FACT_TURN_TOKENS = 12, 27
MOST_TURNS = 24
WORD_TOKENS, PAIR_TOKENS = 2.55, 5.3
"""Tokens of a listed word with its comma, and of a joined pair of words, which longer lists need."""


@dataclass(frozen=True)
class Turn:
    """A question about the document and its whole answer. task: an index of TASKS. through: what the answer is found
    by; for a list, the word that is found before it is spelled."""

    task: int
    question: str
    answer: str
    through: str | None


@dataclass
class Exercise:
    """Sentences for a document of text, or a document of its own (`listed`), and turns about it. assigned: by sentence,
    the variable that it gives a value to."""

    sentences: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    listed: str | None = None
    assigned: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Room:
    """The limits of an exercise. draw and distinct are shared by the exercises of one document."""

    draw: random.Random
    distinct: Distinct
    level: float
    tokens: int

    @property
    def most_sentences(self) -> int:
        return max(4, int(self.tokens * 0.45) // SENTENCE_TOKENS)

    @property
    def most_turns(self) -> int:
        return max(1, min(MOST_TURNS, int(self.tokens * 0.45) // TURN_TOKENS))

    def between(self, easiest: float, hardest: float) -> int:
        """Draw a whole number from 1 to what the level allows, more often near the latter."""
        top = easiest + (hardest - easiest) * self.level * self.draw.random() ** 0.5
        return max(1, round(top))

    def most_of(self, share: float, tokens: int) -> int:
        """Return how many pieces of `tokens` tokens fill a share of the room."""
        return int(share * self.tokens) // tokens


def turn(task: str, question: str, answer: str) -> Turn:
    return Turn(TASKS.index(task), question, answer, None)


def turn_through(task: str, question: str, answer: str, through: str) -> Turn:
    return Turn(TASKS.index(task), question, answer, through)


def needles(room: Room) -> Exercise:
    """Ask for numbers of keys, one question for each key."""
    count = min(room.between(1, 28), room.most_sentences)
    pairs = [(room.distinct.key(), room.distinct.number()) for _ in range(count)]
    task = "needle" if count < 4 else "many_needles"
    asked = room.draw.sample(pairs, min(count, room.most_turns))
    return Exercise(
        [NUMBER_NEEDLE.format(*pair) for pair in pairs],
        [turn(task, f"What is the special magic number for {key}?", number) for key, number in asked],
    )


def word_needles(room: Room) -> Exercise:
    """Ask for words of keys, one question for each key."""
    count = min(room.between(1, 10), room.most_sentences)
    pairs = [(room.distinct.key(), room.distinct.word()) for _ in range(count)]
    asked = room.draw.sample(pairs, min(count, room.most_turns))
    return Exercise(
        [WORD_NEEDLE.format(*pair) for pair in pairs],
        [turn("word_needle", f"What is the special magic word for {key}?", word) for key, word in asked],
    )


def several_values(room: Room) -> Exercise:
    """Ask for one to four numbers of a key, in order of appearance, among other keys' numbers."""
    draw, distinct = room.draw, room.distinct
    most = room.most_sentences
    held: dict[str, int] = {}
    for _ in range(draw.randint(1, max(3, room.between(3, 10)))):
        count = draw.choices((1, 2, 3, 4), (1, 5, 2, 2))[0]
        if sum(held.values()) + count > most:
            break
        held[distinct.key()] = count
    order = [key for key, count in held.items() for _ in range(count)]
    draw.shuffle(order)
    pairs = [(key, distinct.number()) for key in order]
    asked = draw.sample(list(held), min(len(held), room.most_turns))
    return Exercise(
        [NUMBER_NEEDLE.format(*pair) for pair in pairs],
        [
            turn(
                "several_values",
                f"What are all the special magic numbers for {key}?",
                ", ".join(number for owner, number in pairs if owner == key),
            )
            for key in asked
        ],
    )


def several_keys(room: Room) -> Exercise:
    """Ask for the numbers of several keys in a given order."""
    draw, distinct = room.draw, room.distinct
    pairs = [(distinct.key(), distinct.number()) for _ in range(min(max(3, room.between(3, 14)), room.most_sentences))]
    turns = []
    for _ in range(max(1, min(room.most_turns // 2, len(pairs)))):
        asked = draw.sample(pairs, min(len(pairs), draw.choices((2, 3, 4), (1, 8, 1))[0]))
        question = f"What are the special magic numbers for {', '.join(key for key, _ in asked)}?"
        turns.append(turn("several_keys", question, ", ".join(number for _, number in asked)))
    return Exercise([NUMBER_NEEDLE.format(*pair) for pair in pairs], turns)


def full_names(draw: random.Random, count: int) -> list[str]:
    """Draw names that share neither first nor last name."""
    pairs = zip(draw.sample(FIRST_NAMES, count), draw.sample(LAST_NAMES, count), strict=True)
    return [f"{first} {last}" for first, last in pairs]


def facts_one_hop(room: Room) -> Exercise:
    """Ask where people live and what their jobs are."""
    draw = room.draw
    count = max(2, min(room.between(3, 9), room.most_of(0.4, 2 * FACT_TOKENS)))
    people = full_names(draw, count)
    cities, jobs = draw.sample(CITIES, count), draw.sample(JOBS, count)
    lives = [f"{person} lives in {city}." for person, city in zip(people, cities, strict=True)]
    works = [f"{person} works as {a(job)}." for person, job in zip(people, jobs, strict=True)]
    turns = [lives_turn(person, city) for person, city in zip(people, cities, strict=True)]
    turns += [
        turn("facts_one_hop", f"What does {person} work as?", a(job))
        for person, job in zip(people, jobs, strict=True)
    ]  # fmt: skip
    draw.shuffle(turns)
    most = max(1, min(MOST_TURNS, room.most_of(0.6, FACT_TURN_TOKENS)))
    return Exercise(shuffled(draw, lives + works), turns[:most])


def lives_turn(person: str, city: str) -> Turn:
    return turn_through("facts_one_hop", f"Where does {person} live?", city, city)


def facts_two_hops(room: Room) -> Exercise:
    """Ask for the mayor of the city that someone lives in. Some turns ask for one of the two steps.

    At most two thirds of the people are asked for in two steps, so that earlier answers never leave just one name.
    """
    draw = room.draw
    with_works = draw.random() < 0.2 + 0.6 * room.level
    kinds = 3 if with_works else 2
    count = max(2, min(room.between(4, 10), room.most_of(0.4, kinds * FACT_TOKENS)))
    names = full_names(draw, 2 * count)
    people, mayors = names[:count], names[count:]
    cities, jobs = draw.sample(CITIES, count), draw.sample(JOBS, count)
    sentences = [f"{person} lives in {city}." for person, city in zip(people, cities, strict=True)]
    sentences += [f"The mayor of {city} is {mayor}." for city, mayor in zip(cities, mayors, strict=True)]
    if with_works:
        sentences += [f"{person} works as {a(job)}." for person, job in zip(people, jobs, strict=True)]
    order = draw.sample(range(count), count)
    num_two = max(1, -(-2 * count // 3))
    turns = [
        turn_through(
            "facts_two_hops", f"Who is the mayor of the city where {people[i]} lives?", mayors[i], cities[i]
        )
        for i in order[:num_two]
    ]  # fmt: skip
    steps = [turn("mayor", f"Who is the mayor of {cities[i]}?", mayors[i]) for i in order]
    steps += [lives_turn(people[i], cities[i]) for i in order]
    turns += draw.sample(steps, min(len(steps), draw.randint(0, max(1, round(num_two * (1 - 0.7 * room.level))))))
    if draw.random() < 0.5:
        draw.shuffle(turns)
    most = max(1, min(MOST_TURNS, room.most_of(0.6, FACT_TURN_TOKENS)))
    return Exercise(shuffled(draw, sentences), turns[:most])


def shuffled(draw: random.Random, items: list[str]) -> list[str]:
    return draw.sample(items, len(items))


def interleaved(draw: random.Random, chains: list[list[str]]) -> list[str]:
    """Return the sentences of all chains in random order; each chain keeps its own order."""
    order = [number for number, chain in enumerate(chains) for _ in chain]
    draw.shuffle(order)
    rest = [iter(chain) for chain in chains]
    return [next(rest[number]) for number in order]


def variables(room: Room) -> Exercise:
    """Make chains of one to four names that end in a number. Each chain's names are asked for by the number.

    Even at level 0 a chain has up to two names: a further name is found as the first is, from the end of its sentence.
    """
    draw, distinct = room.draw, room.distinct
    longest = 2 + min(2, int(3 * room.level))
    most = room.most_sentences
    chains: list[list[str]] = []
    turns = []
    assigned: dict[str, str] = {}
    for _ in range(draw.randint(2, 9 - longest)):
        count = draw.choices((1, 2, 3, 4)[:longest], (2, 4, 8, 1)[:longest])[0]
        if sum(map(len, chains)) + count > most and chains:
            break
        names, number = [distinct.variable(4) for _ in range(count)], distinct.number()
        links = [f"VAR {name} = VAR {source}." for source, name in itertools.pairwise(names)]
        chains.append([f"VAR {names[0]} = {number}.", *links])
        assigned.update(zip(chains[-1], names, strict=True))
        turns.append(turn("variables", f"Find all variables that are assigned the value {number}.", ", ".join(names)))
    draw.shuffle(turns)
    return Exercise(interleaved(draw, chains), turns[: room.most_turns], None, assigned)


def listing(room: Room) -> Exercise:
    """Ask for every key and number by line, in order of appearance."""
    draw, distinct = room.draw, room.distinct
    most = max(2, min(24, room.tokens // 40))
    count = max(2, min(most, draw.randint(2, 4 + round(20 * room.level))))
    pairs = [(distinct.key(), distinct.number()) for _ in range(count)]
    answer = "\n".join(f"{key}: {number}" for key, number in pairs)
    question = "List every special magic number in order of appearance."
    return Exercise([NUMBER_NEEDLE.format(*pair) for pair in pairs], [turn("list", question, answer)])


def other_words(words: Iterator[str], tokens: float, num_taken: int, times: int) -> list[str]:
    """Return words that fill about `tokens` tokens if each comes `times` times.

    num_taken: how many were taken from `words` before.
    """
    plain = len(PLAIN_WORDS) - num_taken
    num_plain = min(plain, int(tokens / (times * WORD_TOKENS)))
    num_pairs = int(max(0.0, tokens - plain * times * WORD_TOKENS) / (times * PAIR_TOKENS))
    return list(itertools.islice(words, max(2, num_plain + num_pairs)))


def common_words(room: Room) -> Exercise:
    """Ask for the one or three words of a list that come many times; others come once or twice. The document is the
    list.

    At level 0 the common words fill most of the list. At level 1 it is the evaluations' list, with about thirty times,
    and sometimes fewer, so that a short list may be as thin as a long one.
    """
    draw = room.draw
    num_common = draw.choices((1, 3), (0.75, 0.25))[0]
    strongest = 0.75 * room.tokens / WORD_TOKENS / num_common
    usual = min(strongest, draw.uniform(26 if draw.random() < 0.6 else 10, 34))
    times = max(4, round(strongest ** (1 - room.level) * usual**room.level))
    others_times = 2 if times >= 8 and draw.random() < 0.8 else 1
    words = words_of(draw)
    common = list(itertools.islice(words, num_common))
    others = other_words(words, 0.97 * room.tokens - num_common * times * WORD_TOKENS, num_common, others_times)
    words_listed = common * times + others * others_times
    task = "common_word" if num_common == 1 else "common_words"
    _, question = COUNTED[task]
    if num_common == 1:
        asked = turn_through(task, question, common[0], common[0])
    else:
        asked = turn(task, question, ", ".join(sorted(common)))
    return Exercise([], [asked], ", ".join(shuffled(draw, words_listed)))


KINDS: dict[str, Callable[[Room], Exercise]] = {
    "needles": needles,
    "word_needles": word_needles,
    "several_values": several_values,
    "several_keys": several_keys,
    "facts_one_hop": facts_one_hop,
    "facts_two_hops": facts_two_hops,
    "variables": variables,
    "listing": listing,
    "common_words": common_words,
}
MERGED = ("needles", "word_needles", "several_values", "several_keys", "variables")
"""Kinds that can share one document; at most one kind of facts may join them."""
