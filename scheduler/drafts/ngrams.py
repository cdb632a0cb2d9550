"""Draft by n-grams: the tokens that followed the longest earlier copy of the last tokens, in prompt and output.

Positions are chained by a hash of the `least_match` tokens before them, as in LZ77, so that adding a token takes
constant time. A proposal walks the chain from the latest position, compares tokens backwards, and takes the longest
match, of equal ones the latest. No model is used. Hash collisions do no harm, since the tokens themselves are compared.
"""

from typing import Any

import numba
import numpy as np

import transfer.simd  # noqa: F401, lets numba keep in memory what it cannot cache
from scheduler.drafts.draft_source import NOTHING, Proposal

LONGEST_MATCH = 64  # most tokens that are compared
LONGEST_CHAIN = 64  # most positions that are tried
_FEWEST_HEADS, _MOST_HEADS = 1 << 10, 1 << 18
_SPARE_TOKENS = 512
_LEAD_TOKENS = 8  # last tokens of the prompt, put before a predicted text so that its beginning can be matched
_FACTOR = 0x9E3779B97F4A7C15  # odd: a multiplicative hash


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _head_of(tokens: np.ndarray, end: int, length: int, num_heads: int) -> Any:
    """Return the head of the chain for the `length` tokens before `end`. num_heads: a power of two."""
    value = np.uint64(0)
    for place in range(end - length, end):
        value = (value + np.uint64(tokens[place]) + np.uint64(1)) * np.uint64(_FACTOR)
        value ^= value >> np.uint64(29)
    return np.int64(value & np.uint64(num_heads - 1))


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _chain(tokens: np.ndarray, begin: int, end: int, length: int, heads: np.ndarray, earlier: np.ndarray) -> None:
    """Chain positions `[begin, end)`, each by the `length` tokens before it."""
    for place in range(max(begin, length), end):
        head = _head_of(tokens, place, length, len(heads))
        earlier[place] = heads[head]
        heads[head] = place


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _find(
    tokens: np.ndarray, end: int, length: int, heads: np.ndarray, earlier: np.ndarray, longest: int, most: int
) -> tuple[int, int]:
    """Return the position after the longest match of the tokens before `end`, and its length; -1 and 0: none."""
    best, best_length = -1, 0
    if end < length:
        return best, best_length
    place = heads[_head_of(tokens, end, length, len(heads))]
    for _ in range(most):
        if place < 0:
            break
        equal = 0
        while equal < min(longest, place) and tokens[place - 1 - equal] == tokens[end - 1 - equal]:
            equal += 1
        if equal >= length and equal > best_length:
            best, best_length = place, equal
            if equal == longest:
                break
        place = earlier[place]
    return best, best_length


class NGrams:
    """The n-grams of one request. least_match: tokens of the shortest match. predicted: a text that the answer may
    repeat, int32 `[tokens]`, or None.
    """

    def __init__(self, least_match: int, prompt: np.ndarray, predicted: np.ndarray | None = None) -> None:
        self.num_observed = 0
        self._least_match = least_match
        given = np.zeros(0, np.int32) if predicted is None else np.concatenate([prompt[-_LEAD_TOKENS:], predicted])
        num_tokens = len(given) + len(prompt)
        num_heads = min(max(1 << int(num_tokens).bit_length(), _FEWEST_HEADS), _MOST_HEADS)
        self._heads = np.full(num_heads, -1, np.int32)
        self._tokens = np.empty(num_tokens + _SPARE_TOKENS, np.int32)
        self._earlier = np.full(num_tokens + _SPARE_TOKENS, -1, np.int32)
        self._end = 0
        self._append(given)

    def observe(self, token_ids: np.ndarray) -> None:
        """Take in further tokens; see `DraftSource.observe`."""
        self._append(token_ids)
        self.num_observed += len(token_ids)

    def propose(self, most_tokens: int) -> Proposal:
        """Propose the tokens after the longest match. If these end, the proposal is repeated from its start."""
        place, num_matched = _find(
            self._tokens, self._end, self._least_match, self._heads, self._earlier, LONGEST_MATCH, LONGEST_CHAIN
        )
        if place < 0:
            return NOTHING
        token_ids = self._tokens[place : min(place + most_tokens, self._end)].tolist()
        while len(token_ids) < most_tokens:
            token_ids += token_ids[: most_tokens - len(token_ids)]
        return Proposal(token_ids, num_matched)

    def forget(self) -> None:
        """Free the arrays."""
        self._heads = self._tokens = self._earlier = np.zeros(0, np.int32)
        self._end = 0

    @classmethod
    def compile_ahead(cls) -> None:
        """Compile the functions, so that no step waits for that: 2 s if nothing is cached."""
        one = cls(2, np.zeros(4, np.int32))
        one.observe(np.zeros(4, np.int32))
        one.propose(1)

    def _append(self, token_ids: np.ndarray) -> None:
        begin, end = self._end, self._end + len(token_ids)
        if end > len(self._tokens):
            more = max(end, len(self._tokens) * 3 // 2) - len(self._tokens) + _SPARE_TOKENS
            self._tokens = np.concatenate([self._tokens, np.empty(more, np.int32)])
            self._earlier = np.concatenate([self._earlier, np.full(more, -1, np.int32)])
        self._tokens[begin:end] = token_ids
        self._end = end
        _chain(self._tokens, begin, end, self._least_match, self._heads, self._earlier)
