"""Answers drawn from what a grammar leaves a model, token by token, and ended as soon as they may be."""

import codecs
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.parsing.answer_parts import ReadAnswer, join_parts
from server.text.model_tokenizer import Tokenizer

MOST_TOKENS = 150
_FREE_TOKENS = 30  # then those are preferred that end something
_ENDING = b'"}<'


class Drawer:
    """Draw answers by one grammar for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, grammar: str, seed: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = LLTokenizer(TokenizerWrapper(_Spelled(tokenizer)))
        self._grammar = grammar
        self._draw = random.Random(seed)
        spelled = (tokenizer.token_bytes(token_id) for token_id in range(self._tokens.vocab_size + 64))
        self._is_ending = np.array([bool(set(raw) & set(_ENDING)) for raw in spelled])

    def read_answer(self, reader: Any, begin: str) -> ReadAnswer | None:
        """Return what a reader makes of an answer that begins so, None if it does not end."""
        matcher = LLMatcher(self._tokens, self._grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        assert matcher.consume_tokens(self._tokenizer.encode(begin, False))
        parts, decoder = reader.feed(begin, False), codecs.getincrementaldecoder("utf-8")()
        for step in range(MOST_TOKENS):
            token_id = self._choose(matcher, prefers_end=step > _FREE_TOKENS or self._draw.random() < 0.5)
            matcher.consume_token(token_id)
            if token_id in self._tokenizer.eos_ids:
                break
            text = decoder.decode(self._tokenizer.token_bytes(token_id))
            parts += reader.feed(text, token_id in self._tokenizer.special_ids)
            if matcher.is_stopped():
                break
        else:
            return None
        return join_parts([*parts, *reader.finish()])

    def _choose(self, matcher: LLMatcher, prefers_end: bool) -> int:
        ids = allowed_ids(matcher)
        ending = ids[self._is_ending[ids]]
        return int(self._draw.choice(ending if len(ending) and prefers_end else ids))


def allowed_ids(matcher: LLMatcher) -> np.ndarray:
    """Return the tokens that may come next."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


class _Spelled:
    """Wrap a tokenizer as llguidance asks one."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [
            tokenizer.token_bytes(index) for index in range(1 + max(tokenizer.vocabulary.get_vocab().values()))
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text, False)
