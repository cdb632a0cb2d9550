"""What requests hold their draws to: grammars, tokens that may not come or not yet, as one mask of tokens for a draw.

Grammars are compiled in threads of their own, each once for all that have the same. Text that must come as it is costs
no search of the vocabulary: its masks are its tokens, as llguidance writes it. Refuses to know steps and slots.
Invariants: a matcher has consumed just the output that its request has; one that fails fails its own request.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from gpu.config import ModelConfig
from gpu.model.end_tokens import end_token_ids
from gpu.model.spec import ModelError
from gpu.model.vocabulary import read_vocabulary, token_text
from scheduler import grammar
from scheduler.messages import EngineRequest, MaskStats

_COMPILING_THREADS = 2
_MOST_COMPILED = 64  # grammars, kept for those that come again
_LOOK_SECONDS = 1e-3
_WORD_BITS = 32


class GrammarError(Exception):
    """A request's grammar cannot be compiled for this model's vocabulary."""


class Constraint:
    """One request's. `matcher`: None, if it has no grammar."""

    def __init__(self, request: EngineRequest, vocab_size: int, matcher: LLMatcher | None) -> None:
        self.matcher = matcher
        self._min_tokens = request.min_tokens
        self._allowed = _words_of(request.allowed_token_ids or None, vocab_size)
        self._followers: dict[int, list[list[int]]] = {}  # by the last token of a prefix: prefixes and what is banned
        for sequence in request.bad_token_ids:
            if len(sequence) == 1:
                _clear(self._allowed, sequence)
            else:
                self._followers.setdefault(sequence[-2], []).append(sequence)
        self._before_end = self._allowed.copy()
        _clear(self._before_end, request.stop_token_ids)
        self._takes_all = not (request.allowed_token_ids or request.bad_token_ids or request.min_tokens)
        self._forced: deque[int] = deque()  # what must come next, as the matcher writes it

    @property
    def needs_output(self) -> bool:
        """Whether a mask depends on what was drawn before."""
        return self.matcher is not None or bool(self._followers)

    @property
    def error(self) -> str:
        """Why nothing more can be drawn as the grammar asks; empty while it can."""
        failed = self.matcher is not None and self.matcher.is_error()
        return grammar.shorten(self.matcher.get_error()) if failed and self.matcher is not None else ""

    @property
    def is_over(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self.matcher is not None and self.matcher.is_stopped()

    def consume(self, token_id: int) -> None:
        """What was drawn next."""
        assert self.matcher is not None, "consume: this constraint has no grammar"
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()
        self.matcher.consume_token(token_id)  # 5 us, less than it takes to wake a thread

    def forced(self) -> int | None:
        """The token that must come next, or None: there are several, or another rule may forbid it."""
        if self.matcher is None or not self._takes_all or self.matcher.is_stopped():
            return None
        if not self._forced:
            self._forced.extend(self.matcher.compute_ff_tokens())
        return self._forced[0] if self._forced else None

    def narrow(self, words: np.ndarray, number: int, output: Sequence[int]) -> None:
        """Take what this draw may not be from `words` uint32 `[words]`; it is draw `number`, behind `output`."""
        words &= self._before_end if number < self._min_tokens else self._allowed
        for sequence in self._followers.get(output[-1], ()) if output else ():
            before = sequence[:-1]
            if list(output[-len(before) :]) == before:
                _clear(words, sequence[-1:])


class Constraints:
    """Those of an engine. `read_tokens`: makes the vocabulary that grammars are compiled for, when the first one comes;
    it raises GrammarError where there is none.
    """

    def __init__(self, vocab_size: int, read_tokens: Callable[[], LLTokenizer]) -> None:
        self._vocab_size = vocab_size
        self._read_tokens = read_tokens
        self._threads = ThreadPoolExecutor(_COMPILING_THREADS, "grammar")
        self._tokens: LLTokenizer | None = None
        self._tokens_lock = Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._num_requests = 0
        self._num_masks = 0
        self._seconds = 0.0

    def prepare(self, requests: Iterable[EngineRequest], rest: Callable[[], None]) -> list[Constraint | None]:
        """What each is held to, or None: one thread asks, any. While a grammar is compiled, `rest` is called. Raises
        GrammarError.
        """
        return [self._make(request, rest) if _has_any(request) else None for request in requests]

    def consume(self, drawn: Sequence[tuple[Constraint, int]]) -> None:
        """What was drawn, one token each; a constraint whose grammar does not allow it has an `error` then."""
        began = time.perf_counter()
        for one, token_id in drawn:
            if one.matcher is not None:
                one.consume(token_id)
        self._seconds += time.perf_counter() - began

    def fill(self, rows: Sequence[tuple[Constraint, int, Sequence[int]]]) -> list[np.ndarray]:
        """A mask for each constraint, number of the draw, and output so far: uint32 `[ceil(vocab / 32)]`. One that
        fails, or is over, has all tokens: nobody reads what it draws.
        """
        began = time.perf_counter()
        words = np.full((len(rows), -(-self._vocab_size // _WORD_BITS)), 0xFFFFFFFF, np.uint32)
        held = []
        for row, (one, _, _) in enumerate(rows):
            token_id = one.forced()
            if token_id is not None:
                words[row] = 0
                words[row, token_id // _WORD_BITS] = 1 << token_id % _WORD_BITS
            elif one.matcher is not None and not one.is_over:
                held.append((one.matcher, row))
        for matcher, row in held:  # one after another: a mask takes 26 us, and waking threads for them ten times that
            fill_next_token_bitmask(matcher, words.view(np.int32), row)
        for row, (one, number, output) in enumerate(rows):
            if one.error:  # it failed in this mask
                words[row] = 0xFFFFFFFF
            one.narrow(words[row], number, output)
        self._num_masks += len(rows)
        self._seconds += time.perf_counter() - began
        return list(words)

    def stats(self) -> MaskStats:
        return MaskStats(held_requests=self._num_requests, masks=self._num_masks, mask_seconds=self._seconds)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, request: EngineRequest, rest: Callable[[], None]) -> Constraint:
        self._num_requests += 1
        if not request.grammar:
            return Constraint(request, self._vocab_size, None)
        future = self._compiled.get(request.grammar)
        if future is None:
            future = self._compiled[request.grammar] = self._threads.submit(self._compile, request.grammar)
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(request.grammar)
        while not wait([future], _LOOK_SECONDS).done:
            rest()
        return Constraint(request, self._vocab_size, future.result().deep_copy())

    def _compile(self, text: str) -> LLMatcher:
        """With its first mask, so that the lexer's first states are there."""
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = self._read_tokens()
        matcher = LLMatcher(self._tokens, text, log_level=0, limits=grammar.limits())
        if not matcher.is_error():
            matcher.compute_logit_bias()
        if matcher.is_error():
            raise GrammarError(f"grammar: {grammar.shorten(matcher.get_error())}")
        return matcher


def refuse_grammars() -> LLTokenizer:
    """`read_tokens` of an engine without a vocabulary."""
    raise GrammarError("grammar: this engine has no tokenizer; set model.tokenizer to a folder that has one")


def read_tokens(model: ModelConfig, vocab_size: int) -> LLTokenizer:
    """A model's vocabulary, of as many ids as its logits have, and what ends its texts. Raises GrammarError."""
    folder = model.tokenizer or model.path
    if folder is None:
        return refuse_grammars()
    try:
        vocabulary, settings = read_vocabulary(folder)
        end_ids = set(end_token_ids(model.path or folder))
    except (ModelError, OSError) as error:
        raise GrammarError(f"grammar: {error}") from None
    own = vocabulary.token_to_id(token_text(settings.get("eos_token")) or "")
    ends = sorted(token_id for token_id in {*end_ids, own} if token_id is not None and token_id < vocab_size)
    if not ends:
        raise GrammarError("grammar: this model has no token that ends a text, so no answer could end")
    vocabulary.no_truncation()
    vocabulary.no_padding()
    try:
        return LLTokenizer(vocabulary.to_str(), n_vocab=vocab_size, eos_token=ends)
    except ValueError as error:
        raise GrammarError(f"grammar: {folder}: {grammar.shorten(str(error))}") from None


def _has_any(request: EngineRequest) -> bool:
    is_late = request.min_tokens > 0 and bool(request.stop_token_ids)
    return bool(request.grammar or request.allowed_token_ids or request.bad_token_ids or is_late)


def _words_of(token_ids: Iterable[int] | None, vocab_size: int) -> np.ndarray:
    """Uint32 `[words]` with their bits; None: all bits."""
    num_words = -(-vocab_size // _WORD_BITS)
    if token_ids is None:
        return np.full(num_words, 0xFFFFFFFF, np.uint32)
    bits = np.zeros(num_words * _WORD_BITS, np.uint8)
    bits[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _clear(words: np.ndarray, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        words[token_id // _WORD_BITS] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % _WORD_BITS))
