"""Generate RULER's needle tasks: one or many facts hidden in text, noise or other needles, and a question about some.

Source: RULER (Hsieh et al., 2024), its eight `niah_*` settings: the kinds of haystack, key and value, and the numbers
of keys, of values for each key and of queries. The invariant: every key that is asked for is in the document with all
of its values, and no other needle has the same key.
"""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from evals.samples import Sample
from evals.tasks.haystack import Haystack
from evals.tasks.request import Request, Wanted, make_sample
from evals.tasks.task_words import KEY_WORDS

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{document}\n"
    "What are all the special magic {kind} for {asked} mentioned in the provided text?"
)
PREFIX = " The special magic {kind} for {asked} mentioned in the provided text are"
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
NOISE_A_NEEDLE = {"words": 3, "uuids": 9}
MAX_NEW_TOKENS = 128
NUM_DEPTHS = 40


@dataclass(frozen=True)
class Setting:
    """What a needle task hides, and where. haystack: `noise`, `text` or `needle`. key: `words` or `uuids`. value:
    `numbers` or `uuids`.
    """

    haystack: str
    key: str
    value: str
    num_keys: int
    num_values: int
    num_asked: int


SETTINGS = {
    "niah_single_1": Setting("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": Setting("text", "words", "numbers", 1, 1, 1),
    "niah_single_3": Setting("text", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": Setting("text", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": Setting("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": Setting("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": Setting("text", "words", "numbers", 1, 4, 1),
    "niah_multiquery": Setting("text", "words", "numbers", 4, 1, 4),
}


class Distinct:
    """Draws keys and values, none of them twice. words: the words that keys and word values are made of."""

    def __init__(self, draw: random.Random, words: list[str]) -> None:
        self.random = draw
        self.words = words
        self.drawn: set[str] = set()

    def _new(self, make: Callable[[], str]) -> str:
        while (made := make()) in self.drawn:
            continue
        self.drawn.add(made)
        return made

    def key(self) -> str:
        """Return two words with a hyphen, such as `amber-lantern`."""
        return self._new(lambda: "-".join(self.random.sample(self.words, 2)))

    def number(self) -> str:
        """Return seven digits."""
        return self._new(lambda: str(self.random.randint(1_000_000, 9_999_999)))

    def uuid(self) -> str:
        """Return a random UUID, version 4."""
        return self._new(lambda: str(uuid.UUID(int=self.random.getrandbits(128), version=4)))

    def word(self) -> str:
        """Return a word of the vocabulary."""
        return self._new(lambda: self.random.choice(self.words))

    def variable(self, num_letters: int) -> str:
        """Return num_letters capital letters."""
        return self._new(lambda: "".join(self.random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=num_letters)))


def joined(items: list[str]) -> str:
    """Join items as RULER lists them: one alone, else commas, and `, and` before the last."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def draw_depth(draw: random.Random) -> float:
    """Draw one of RULER's forty even depths from 0 to 1."""
    return draw.randrange(NUM_DEPTHS) / (NUM_DEPTHS - 1)


def generate_needles(request: Request, index: int) -> Sample:
    """Generate sample `index` of a `niah_*` task. request.depths, where given, places the first asked needle."""
    setting = SETTINGS[request.task]
    draw = request.random(index)
    distinct = Distinct(draw, KEY_WORDS)
    kind = setting.value
    make_key = distinct.key if setting.key == "words" else distinct.uuid
    make_value = distinct.number if kind == "numbers" else distinct.uuid
    keys = [make_key() for _ in range(setting.num_keys)]
    asked = keys[: setting.num_asked]
    needles = [(key, make_value()) for key in keys for _ in range(setting.num_values)]
    depths = [draw_depth(draw) for _ in needles]
    depths[0] = request.depth(index, depths[0])
    inserts = [
        (depth, NEEDLE.format(kind=kind, key=key, value=value))
        for depth, (key, value) in zip(depths, needles, strict=True)
    ]
    other_needle = partial(other, setting.value, make_key, make_value)
    make_filler = filler_of(setting, request, index, other_needle)
    wording = [PROMPT.split("{document}")[0], PROMPT.split("{document}")[1], PREFIX]
    if setting.num_values * setting.num_asked == 1:
        wording = [one_value(text) for text in wording]
        kind = kind[:-1]
    before, after, prefix = (text.format(kind=kind, asked=joined(asked)) for text in wording)
    answers = [value for key, value in needles if key in asked]
    return make_sample(
        request,
        index,
        build=lambda amount: before + make_filler(amount, inserts) + after + prefix,
        wanted=Wanted(answers, "string_match_all", MAX_NEW_TOKENS),
        depth=depths[0] if setting.num_values == setting.num_asked == 1 else None,
        meta={"answer_prefix": prefix, "keys": asked},
        around=(before, after + prefix),
    )


def other(kind: str, make_key: Callable[[], str], make_value: Callable[[], str]) -> str:
    """Return a needle whose key is not asked for."""
    return NEEDLE.format(kind=kind, key=make_key(), value=make_value())


def one_value(text: str) -> str:
    """Return RULER's wording for a single value: the singular in place of the plural."""
    return text.replace("Some", "A").replace("are all", "is").replace(" are", " is")


def noise_lines(num_sentences: int) -> list[str]:
    """Return RULER's noise, five sentences a line; the last line may be shorter."""
    full, rest = divmod(num_sentences, len(NOISE))
    return [" ".join(NOISE)] * full + ([" ".join(NOISE[:rest])] if rest else [])


def hide(lines: list[str], inserts: list[tuple[float, str]]) -> str:
    """Return the lines joined, with each insert at its depth in [0, 1]; inserts at one place keep their order."""
    num_lines = len(lines)
    for depth, text in sorted(inserts, key=lambda insert: insert[0], reverse=True):
        lines.insert(round(depth * num_lines), text)
    return "\n".join(lines)


def filler_of(
    setting: Setting, request: Request, index: int, other_needle: Callable[[], str]
) -> Callable[[int, list[tuple[float, str]]], str]:
    """Return a function of the number of filler units and the inserts, which returns the document.

    In a haystack of needles a unit is a sentence of noise. Several of them are replaced by a needle as soon as they are
    as long as one. So the document ends with a few sentences of noise, and any length can be filled.
    """
    if setting.haystack == "text":
        return Haystack(request.sentences(index)).document
    if setting.haystack == "noise":
        return lambda amount, inserts: hide(noise_lines(amount), inserts)
    others: list[str] = []

    def document(amount: int, inserts: list[tuple[float, str]]) -> str:
        num_needles, num_noises = divmod(amount, NOISE_A_NEEDLE[setting.key])
        while len(others) < num_needles:
            others.append(other_needle())
        return hide(others[:num_needles], inserts) + "\n" + " ".join(noise_lines(num_noises))

    return document
