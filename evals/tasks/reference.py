"""Generate prompts in the reference model's own form: its sentences, its questions, its turn with special tokens.

Source: the table in `deploy/models/reference/README.md`. The prompt is the whole text of a raw completion, special
tokens included, up to where the assistant's answer begins (`meta["raw"]` is true). `user_turn` extracts the user's
words for a chat client. The invariant: each sentence of the answer is in the document once, after a sentence end, and
no other sentence has its key.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from evals.samples import Sample
from evals.tasks.counting_words import shuffled, words_of
from evals.tasks.haystack import Haystack
from evals.tasks.needles import Distinct, draw_depth
from evals.tasks.request import WORDS_A_TOKEN, Request, Wanted, make_sample
from evals.tasks.task_words import CITIES, FIRST_NAMES, JOBS, KEY_WORDS, LAST_NAMES

TURN_BEGIN = "<|begin_of_text|><|user|>\n"
TURN_END = "<|end|><|assistant|>\n"
SPECIAL_TOKENS_OF_FORM = ("<|begin_of_text|>", "<|user|>", "<|end|>", "<|assistant|>")
NUMBER_NEEDLE = "The special magic number for {} is {}."
WORD_NEEDLE = "The special magic word for {} is {}."
NUM_DISTRACTORS = 11
NUM_PEOPLE = 6
NUM_VALUES = {"several_values": 2, "four_values": 4}
"""Numbers that the asked key has."""

NUM_ASKED = {"several_keys": (3, 8), "four_keys": (4, 4)}
"""Keys that are asked for, and keys in the document."""

NEEDLE_WORDS = 9
"""Words in `NUMBER_NEEDLE`."""

SPARE_KEYS = 1.25
"""Keys that `crossed_needles` can draw, as a multiple of those in its longest document."""

FEWEST_WORDS = 100
LISTED_FEWEST, LISTED_MOST = 4, 24
LONG_LISTED_FEWEST = 16
"""Fewest items of a long list, whose answer has 256 tokens or more."""

OPENING_WORDS, PASSAGE_WORDS = 10, 60
COMMON_TIMES, OTHER_TIMES = 30, 2
COUNTED = {
    "common_word": (1, "What is the most common word in the list above?"),
    "common_words": (3, "What are the 3 most common words in the list above, in alphabetical order?"),
}
"""The number of common words in a list, and the question about them."""

Inserts = list[tuple[float, str]]
Plan = tuple[Inserts, str, list[str], float | None, int]


def user_turn(prompt: str) -> str:
    """Return the document and question of a prompt of this form, without the special tokens around them."""
    return prompt.removeprefix(TURN_BEGIN).removesuffix(TURN_END)


@lru_cache(maxsize=4)
def plain_words(tokenizer: Any) -> list[str]:
    """Return the words of keys and values: those that are one token, if there are enough of them.

    A small model spells words of several tokens badly.
    """
    plain = [word for word in KEY_WORDS if len(tokenizer.tokenize(f" {word}")) == 1]
    return plain if len(plain) >= FEWEST_WORDS else KEY_WORDS


def turn(document: str, question: str) -> str:
    """Return the raw prompt, up to where the answer begins."""
    return f"{TURN_BEGIN}{document}\n\n{question}{TURN_END}"


def scatter(draw: random.Random, sentences: list[str]) -> Inserts:
    """Give each sentence a random depth of its own."""
    return [(draw_depth(draw), sentence) for sentence in sentences]


def needle(draw: random.Random, words: list[str], depth: float | None, num_others: int) -> Plan:
    """Plan a document with one number to find, among num_others needles of other keys."""
    distinct = Distinct(draw, words)
    key, number = distinct.key(), distinct.number()
    depth = draw_depth(draw) if depth is None else depth
    others = scatter(draw, [NUMBER_NEEDLE.format(distinct.key(), distinct.number()) for _ in range(num_others)])
    question = f"What is the special magic number for {key}?"
    return [(depth, NUMBER_NEEDLE.format(key, number)), *others], question, [number], depth, 16


def word_needle(draw: random.Random, words: list[str], depth: float | None) -> Plan:
    """Plan a document with one word to find."""
    distinct = Distinct(draw, words)
    key, word = distinct.key(), distinct.word()
    depth = draw_depth(draw) if depth is None else depth
    return [(depth, WORD_NEEDLE.format(key, word))], f"What is the special magic word for {key}?", [word], depth, 16


def several_values(draw: random.Random, words: list[str], num_values: int) -> Plan:
    """Plan a document with several numbers of one key, which the answer lists in order of appearance."""
    distinct = Distinct(draw, words)
    key = distinct.key()
    numbers = [distinct.number() for _ in range(num_values)]
    depths = sorted(draw_depth(draw) for _ in numbers)
    inserts = [(depth, NUMBER_NEEDLE.format(key, number)) for depth, number in zip(depths, numbers, strict=True)]
    return inserts, f"What are all the special magic numbers for {key}?", [", ".join(numbers)], None, 48


def several_keys(draw: random.Random, words: list[str], num_asked: int, num_keys: int) -> Plan:
    """Plan a document with several keys, and ask for the numbers of some of them; the answer has the asked order."""
    distinct = Distinct(draw, words)
    pairs = [(distinct.key(), distinct.number()) for _ in range(num_keys)]
    asked = pairs[:num_asked]
    question = f"What are the special magic numbers for {', '.join(key for key, _ in asked)}?"
    answer = ", ".join(number for _, number in asked)
    return scatter(draw, [NUMBER_NEEDLE.format(*pair) for pair in pairs]), question, [answer], None, 40


def facts(draw: random.Random, depth: float | None, hops: int) -> Plan:
    """Plan a question about where one of six people lives or what their job is.

    hops: with 2, the question is about the mayor of their city.
    """
    names = [f"{first} {last}" for first, last in zip(
        draw.sample(FIRST_NAMES, 2 * NUM_PEOPLE), draw.sample(LAST_NAMES, 2 * NUM_PEOPLE), strict=True
    )]  # fmt: skip
    people, mayors = names[:NUM_PEOPLE], names[NUM_PEOPLE:]
    cities, jobs = draw.sample(CITIES, NUM_PEOPLE), draw.sample(JOBS, NUM_PEOPLE)
    lives = [f"{person} lives in {city}." for person, city in zip(people, cities, strict=True)]
    works = [f"{person} works as {a(job)}." for person, job in zip(people, jobs, strict=True)]
    sentences = lives + works
    if hops == 2:
        sentences += [f"The mayor of {city} is {mayor}." for city, mayor in zip(cities, mayors, strict=True)]
        question, answer = f"Who is the mayor of the city where {people[0]} lives?", mayors[0]
        return scatter(draw, sentences), question, [answer], None, 16
    asks_job = draw.random() < 0.5
    asked = NUM_PEOPLE if asks_job else 0
    depth = draw_depth(draw) if depth is None else depth
    inserts = scatter(draw, sentences)
    inserts[asked] = (depth, sentences[asked])
    question = f"What does {people[0]} work as?" if asks_job else f"Where does {people[0]} live?"
    return inserts, question, [a(jobs[0]) if asks_job else cities[0]], depth, 16


def a(job: str) -> str:
    """Return the job after `a`, which the form writes before vowels as well."""
    return f"a {job}"


def listing(draw: random.Random, words: list[str], fewest: int) -> Plan:
    """Plan a question whose answer lists every key and number of the document by line, in order of appearance."""
    distinct = Distinct(draw, words)
    pairs = [(distinct.key(), distinct.number()) for _ in range(draw.randint(fewest, LISTED_MOST))]
    depths = sorted(draw_depth(draw) for _ in pairs)
    inserts = [(depth, NUMBER_NEEDLE.format(*pair)) for depth, pair in zip(depths, pairs, strict=True)]
    answer = "\n".join(f"{key}: {number}" for key, number in pairs)
    return inserts, "List every special magic number in order of appearance.", [answer], None, 18 * len(pairs)


def variables(draw: random.Random, words: list[str]) -> Plan:
    """Plan a document with two chains of variables, and ask for the three names of one chain by its number."""
    distinct = Distinct(draw, words)
    sentences, chains = [], []
    for _ in range(2):
        names, number = [distinct.variable(4) for _ in range(3)], distinct.number()
        chains.append((names, number))
        sentences.append(f"VAR {names[0]} = {number}.")
        sentences += [f"VAR {name} = VAR {source}." for source, name in itertools.pairwise(names)]
    depths = [sorted(draw_depth(draw) for _ in range(3)) for _ in range(2)]
    inserts = list(zip(depths[0] + depths[1], sentences, strict=True))
    names, number = chains[0]
    question = f"Find all variables that are assigned the value {number}."
    return inserts, question, [", ".join(names)], None, 32


PLANS: dict[str, Callable[[random.Random, list[str], float | None], Plan]] = {
    "needle": lambda draw, words, depth: needle(draw, words, depth, 0),
    "many_needles": lambda draw, words, depth: needle(draw, words, depth, NUM_DISTRACTORS),
    "word_needle": word_needle,
    "several_values": lambda draw, words, depth: several_values(draw, words, NUM_VALUES["several_values"]),
    "several_keys": lambda draw, words, depth: several_keys(draw, words, *NUM_ASKED["several_keys"]),
    "facts_one_hop": lambda draw, words, depth: facts(draw, depth, 1),
    "facts_two_hops": lambda draw, words, depth: facts(draw, depth, 2),
    "list": lambda draw, words, depth: listing(draw, words, LISTED_FEWEST),
    "variables": lambda draw, words, depth: variables(draw, words),
}
HARD_PLANS: dict[str, Callable[[random.Random, list[str], float | None], Plan]] = {
    "long_list": lambda draw, words, depth: listing(draw, words, LONG_LISTED_FEWEST),
    "four_values": lambda draw, words, depth: several_values(draw, words, NUM_VALUES["four_values"]),
    "four_keys": lambda draw, words, depth: several_keys(draw, words, *NUM_ASKED["four_keys"]),
}
"""Tasks that RULER asks for. The model was not evaluated on them during its training."""

ONLY_NEEDLES = ("only_needles", "crossed_needles")
"""Documents of needles alone. `crossed_needles` makes its keys of so few words that each word is in many keys."""

METRICS = {"list": "lines", "long_list": "lines", "continue": "words_edit"}
OF_RULER = {
    "niah_single_1": "needle",
    "niah_single_2": "needle",
    "niah_single_3": "word_needle",
    "niah_multikey_1": "many_needles",
    "niah_multikey_2": "only_needles",
    "niah_multikey_3": "crossed_needles",
    "niah_multivalue": "four_values",
    "niah_multiquery": "four_keys",
    "vt": "variables",
    "cwe": "common_words",
    "fwe": "common_words",
    "qa_1": "facts_one_hop",
    "qa_2": "facts_two_hops",
}
"""`niah_multikey_3` has UUIDs as keys, which the model never read; it gets the hardest keys that the form has."""

REFERENCE_TASKS = (*PLANS, "continue", *COUNTED, *HARD_PLANS, *ONLY_NEEDLES)


def generate_reference(request: Request, index: int) -> Sample:
    """Generate sample `index` in the reference model's form.

    The task is one of the form's own, or the one that is nearest to the given RULER task.
    """
    sample = make_reference(request, index)
    behind = len(sample.prompt) - sample.prompt.rindex("\n\n")  # the question is the last paragraph
    return replace(sample, around=(len(TURN_BEGIN), behind))


def make_reference(request: Request, index: int) -> Sample:
    """Generate the sample of `generate_reference`, without `around`, the text around its document."""
    task = OF_RULER.get(request.task, request.task)
    if task == "continue":
        return continue_passage(request, index)
    if task in COUNTED:
        return common_words(request, index, task)
    if task in ONLY_NEEDLES:
        return needles_alone(request, index, task)
    draw = request.random(index)
    asked_depth = None if request.depths is None else request.depth(index, 0.0)
    plan = (PLANS | HARD_PLANS)[task]
    inserts, question, answers, depth, max_new_tokens = plan(draw, plain_words(request.tokenizer), asked_depth)
    haystack = Haystack(request.sentences(index))
    return make_sample(
        request,
        index,
        build=lambda amount: turn(haystack.document(amount, inserts), question),
        wanted=Wanted(answers, METRICS.get(task, "exact_match"), max_new_tokens),
        depth=depth,
        meta=raw(task),
        around=None,
    )


def raw(task: str) -> dict[str, Any]:
    """Return the `meta` that a runner needs to send this form."""
    return {"raw": True, "reference_task": task}


def few_words(draw: random.Random, words: list[str], most_keys: float) -> list[str]:
    """Draw the fewest words that have most_keys or more ordered pairs; all words if they are too few."""
    count = 2
    while count * (count - 1) < most_keys and count < len(words):
        count += 1
    return draw.sample(words, count)


def needles_alone(request: Request, index: int, task: str) -> Sample:
    """Generate a document of needles alone, as many as fit, and ask for one number."""
    draw = request.random(index)
    words = plain_words(request.tokenizer)
    if task == "crossed_needles":
        words = few_words(draw, words, SPARE_KEYS * WORDS_A_TOKEN * request.length_tokens / NEEDLE_WORDS)
    distinct = Distinct(draw, words)
    key, number = distinct.key(), distinct.number()
    depth = request.depth(index, draw_depth(draw))
    others: list[str] = []

    def build(num_words: int) -> str:
        num_others = num_words // NEEDLE_WORDS
        while len(others) < num_others:
            others.append(NUMBER_NEEDLE.format(distinct.key(), distinct.number()))
        needles = others[:num_others]
        needles.insert(round(depth * num_others), NUMBER_NEEDLE.format(key, number))
        return turn(" ".join(needles), f"What is the special magic number for {key}?")

    return make_sample(request, index, build, Wanted([number], "exact_match", 16), depth, raw(task), None)


def continue_passage(request: Request, index: int) -> Sample:
    """Show ten words that open a sentence, and ask for the sixty that follow them in the document."""
    draw = request.random(index)
    depth = request.depth(index, draw_depth(draw))
    haystack = Haystack(request.sentences(index))
    words = " ".join(haystack.sentences).split(" ")

    def begin_of(amount: int) -> int:
        last = max(0, amount - OPENING_WORDS - PASSAGE_WORDS)
        begins = [0, *(end for end in haystack.ends if end <= last)]
        return min(begins, key=lambda begin: abs(begin - depth * last))

    def opening(amount: int) -> str:
        begin = begin_of(amount)
        return " ".join(words[begin : begin + OPENING_WORDS])

    def build(amount: int) -> str:
        return turn(haystack.document(amount, []), f"Continue the passage that begins with: {opening(amount)}")

    most = PASSAGE_WORDS * 3
    sample = make_sample(request, index, build, Wanted([""], METRICS["continue"], most), depth, raw("continue"), None)
    begin = begin_of(sample.meta["filler"]) + OPENING_WORDS
    return replace(sample, answers=[" ".join(words[begin : begin + PASSAGE_WORDS])])


def common_words(request: Request, index: int, task: str) -> Sample:
    """Generate a list in which one or three words come thirty times and all others twice."""
    num_common, question = COUNTED[task]
    draw = request.random(index)
    words = words_of(draw)
    common = [next(words) for _ in range(num_common)]
    others = [next(words) for _ in range(request.length_tokens)]
    seed = draw.getrandbits(32)

    def build(amount: int) -> str:
        full, rest = divmod(amount, OTHER_TIMES)
        listed = common * COMMON_TIMES + others[:full] * OTHER_TIMES + others[full : full + rest]
        return turn(", ".join(shuffled(listed, seed)), question)

    answer = ", ".join(sorted(common))
    return make_sample(request, index, build, Wanted([answer], "exact_match", 24), None, raw(task), None)
