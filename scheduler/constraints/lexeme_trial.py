"""Test with a few texts whether a regular expression's automaton grows beyond llguidance's limits.

llguidance makes an automaton's states as a text reaches them. It gives up if one step takes too long or if there are
too many states. Their number cannot be computed beforehand. So this module generates texts that match the expression,
with a vocabulary in which a mask looks as far ahead as with a model's. The test is deterministic and bounded. An
expression that passes may still fail on an answer that needs more states than these texts.
"""

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from scheduler.constraints.grammar import MOST_STATES, MOST_STEP_FUEL, ByteVocabulary, limits_of

GROWS = "it grows too complex as a text goes on; write it with fewer counts inside of counts, or between ^ and $"
_STATES = MOST_STATES // 2  # half, since an answer may be longer than these texts
_TEXTS = 6
_TOKENS = 32  # of a text
_SHORT = 3  # characters: the vocabulary has all words up to this length, ...
_LONG = 16  # ... and of this length repetitions of one character, and some other words
_NUM_LONG = 64
_NUM_NAMED = 4  # characters taken from the expression to make words
_OTHERS = "0 xaé漢"
_MOST_CHARACTERS = 8
_ANY = 0.1  # how often another byte comes
_COUNTS = re.compile(r"\{[\d,]*\}")
_NOTATION = frozenset("\\^$.|?*+()[]{}")


class Lexeme(NamedTuple):
    """One lexeme of a grammar. label: how an error about it begins. grammar: one with this lexeme alone. text: its
    source.
    """

    label: str
    grammar: str
    text: str


@lru_cache(1024)
def grows(grammar: str, text: str) -> bool:
    """Return whether a lexeme's automaton gets too large, or a step too slow; False if the lexeme does not compile.

    grammar, text: as `Lexeme` has them.
    """
    draw = random.Random(0)
    characters = _choose_characters(text, draw)
    runs = [one * _LONG for one in characters]
    mixed = ["".join(draw.choices(characters, k=_LONG)) for _ in range(_NUM_LONG)]
    short = ["".join(word) for size in range(1, _SHORT + 1) for word in product(characters, repeat=size)]
    words = [raw for raw in dict.fromkeys(word.encode() for word in short + runs + mixed) if len(raw) > 1]
    token_ids = {raw: 257 + i for i, raw in enumerate(words)} | {bytes([byte]): byte + 1 for byte in range(256)}
    one_by_one, same, others = ([token_ids[word.encode()] for word in some] for some in (characters, runs, mixed))
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary(words)))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits_of(MOST_STEP_FUEL, _STATES))
    if matcher.is_error():
        return False
    pools = [[same, one_by_one], [one_by_one], [others, one_by_one]]
    for number in range(_TEXTS):
        for _ in range(_TOKENS):
            allowed = matcher.compute_bitmask()
            if matcher.is_error():
                return True
            token_id = _choose(allowed, pools[0] if number == 0 else draw.choice(pools[1:]), draw, number == 0)
            if token_id is None or not matcher.consume_token(token_id) or matcher.is_stopped():
                break
        if matcher.is_error():
            return True
        matcher.reset()
    return False


def _choose(allowed: bytes, pools: Sequence[Sequence[int]], draw: random.Random, is_first: bool) -> int | None:
    """Choose an allowed token from the first pool that has one: the pool's first if `is_first`, else any.

    Sometimes, and if no pool has one, it is any allowed byte; None if there is none. allowed: the mask.
    """
    if is_first or draw.random() > _ANY:
        for pool in pools:
            known = [token_id for token_id in pool if _is_in(allowed, token_id)]
            if known:
                return known[0] if is_first else draw.choice(known)
    known = [token_id for token_id in range(1, 257) if _is_in(allowed, token_id)]
    return draw.choice(known) if known else None


def _is_in(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _choose_characters(text: str, draw: random.Random) -> list[str]:
    """Choose some characters that occur in the expression, and some others."""
    found = [one for one in dict.fromkeys(_COUNTS.sub("", text)) if one.isprintable() and one not in _NOTATION]
    named = found if len(found) <= _NUM_NAMED else draw.sample(found, _NUM_NAMED)
    return list(dict.fromkeys([*named, *_OTHERS]))[:_MOST_CHARACTERS]
