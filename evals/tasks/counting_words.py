"""Generate RULER's counting tasks: the ten most common words of a list, and the three most frequent coded words.

Source: RULER (Hsieh et al., 2024), `cwe` (ten words 30 times each among words that come 3 times; below 4,096 tokens
6 times and once) and `fwe` (counts after a Zeta distribution with exponent 2). The invariant: each word of the answer
occurs more often than any other word, so the answer is unique.
"""

import random
import string
from collections.abc import Iterator
from itertools import count, islice

from evals.samples import Sample
from evals.tasks.request import Request, Wanted, make_sample
from evals.tasks.task_words import ABSTRACTIONS, ADJECTIVES, ANIMALS, OBJECTS, PLACES, ROLES

COMMON_PROMPT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{document}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON_TOKENS = 120
NUM_COMMON = 10
SHORT_TOKENS = 4096

FREQUENT_PROMPT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {document}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
FREQUENT_TOKENS = 50
ZETA_2 = 1.6449340668482264
CODED_LETTERS = 6
TOKENS_A_CODED_WORD = 50
PLAIN_WORDS = sorted({*ADJECTIVES, *OBJECTS, *PLACES, *ROLES, *ANIMALS, *ABSTRACTIONS})


def words_of(draw: random.Random) -> Iterator[str]:
    """Yield the plain words, shuffled; then joined pairs of them, for lists longer than the vocabulary."""
    words = draw.sample(PLAIN_WORDS, len(PLAIN_WORDS))
    yield from words
    for step in range(1, len(words)):
        yield from (first + second for first, second in zip(words, words[step:], strict=False))


def listed(words: list[str]) -> str:
    """Return `1. word 2. word` ..."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def shuffled(words: list[str], seed: int) -> list[str]:
    """Return the words in an order that depends on the seed alone."""
    return random.Random(seed).sample(words, len(words))


def generate_common(request: Request, index: int) -> Sample:
    """Generate sample `index` of `cwe`, after one worked example."""
    draw = request.random(index)
    words = words_of(draw)
    seed = draw.getrandbits(32)
    often, seldom, shown_often, shown_seldom, num_shown = (
        (30, 3, 10, 3, 30) if request.length_tokens >= SHORT_TOKENS else (6, 1, 3, 1, 10)
    )
    shown, seen = list(islice(words, NUM_COMMON)), list(islice(words, num_shown))
    common = list(islice(words, NUM_COMMON))
    others = list(islice(words, request.length_tokens))
    example = COMMON_PROMPT.format(document=listed(shuffled(shown * shown_often + seen * shown_seldom, seed)))
    example += COMMON_PREFIX + " " + listed(shown) + "\n"
    before, after = COMMON_PROMPT.split("{document}")
    around = example + before, after + COMMON_PREFIX

    def build(amount: int) -> str:
        full, rest = divmod(amount, seldom)
        chosen = common * often + others[:full] * seldom + others[full : full + 1] * rest
        return listed(shuffled(chosen, seed)).join(around)

    return make_sample(
        request,
        index,
        build=build,
        wanted=Wanted(common, "string_match_all", COMMON_TOKENS),
        depth=None,
        meta={"answer_prefix": COMMON_PREFIX},
        around=around,
    )


def generate_frequent(request: Request, index: int) -> Sample:
    """Generate sample `index` of `fwe`: the first rank is the dots, the next three are the answers."""
    draw = request.random(index)
    coded = ("".join(draw.choices(string.ascii_lowercase, k=CODED_LETTERS)) for _ in count())
    num_ranks = max(16, request.length_tokens // TOKENS_A_CODED_WORD)
    vocabulary = list(islice(dict.fromkeys(islice(coded, 2 * num_ranks)), num_ranks))
    seed = draw.getrandbits(32)
    ranked = ["...", *vocabulary]
    before, after = FREQUENT_PROMPT.split("{document}")
    around = before, after + FREQUENT_PREFIX

    def build(amount: int) -> str:
        text = [word for rank, word in enumerate(ranked, start=1) for _ in range(int(amount * rank**-2 / ZETA_2))]
        return " ".join(shuffled(text, seed)).join(around)

    return make_sample(
        request,
        index,
        build=build,
        wanted=Wanted(vocabulary[:3], "string_match_all", FREQUENT_TOKENS),
        depth=None,
        meta={"answer_prefix": FREQUENT_PREFIX},
        around=around,
    )
