"""Make the token masks of draws from grammars, allowed and banned tokens, and the minimum length.

Grammars are compiled in threads, each once for all requests that use it. If only one token may follow, the mask has
that token alone, and it is known before it is drawn. In a draft, each row has the mask that it would have if all
drafted tokens before it were drawn. A copy of the constraint is advanced to make these masks. Invariants: a matcher
has consumed its request's output and the forced tokens in the steps in flight. A matcher that fails ends only its own
request.
"""

import copy
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
from scheduler.constraints import grammar
from scheduler.messages import EngineRequest, MaskStats

_COMPILING_THREADS = 2
_MOST_COMPILED = 64  # compiled grammars that are kept for later requests
_LOOK_SECONDS = 1e-3
_PATIENCE = 10.0  # wall seconds to wait, for each second of processor time that a grammar's check may take
_WORD_BITS = 32


class GrammarError(Exception):
    """A request's grammar cannot be compiled for this model's vocabulary."""


class Constraint:
    """The constraint on one request's tokens. matcher: None if the request has no grammar.

    Forced tokens are **taken**: the matcher consumes them before the request has them, so it is ahead of the output.
    """

    def __init__(self, request: EngineRequest, vocab_size: int, matcher: LLMatcher | None) -> None:
        self.matcher = matcher
        self._has_rules = bool(matcher or request.allowed_token_ids or request.bad_token_ids)
        self._min_tokens = request.min_tokens
        self._allowed = _words_of(request.allowed_token_ids or None, vocab_size)
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._followers: dict[int, list[tuple[int, ...]]] = {}  # banned sequences, by their last token but one
        for sequence in request.bad_token_ids:
            if len(sequence) == 1:
                _clear(self._allowed, sequence)
            else:
                self._followers.setdefault(sequence[-2], []).append(tuple(sequence))
        self._before_end = self._allowed.copy()
        _clear(self._before_end, request.stop_token_ids)
        self._forced: deque[int] | None = None  # the next forced tokens, from the matcher; None: not asked yet
        self._taken: deque[int] = deque()

    def binds(self, number: int) -> bool:
        """Return whether draw `number` or a later one may be constrained."""
        return self._has_rules or number < self._min_tokens

    @property
    def needs_output(self) -> bool:
        """Return whether masks depend on the tokens drawn before."""
        return self.matcher is not None or bool(self._followers)

    @property
    def error(self) -> str:
        """Return why the grammar cannot be followed any further; "" while it can, or while taken tokens are left."""
        failed = self.has_failed and not self._taken
        return grammar.shorten(self.matcher.get_error()) if failed and self.matcher is not None else ""

    @property
    def has_failed(self) -> bool:
        """Return whether the grammar failed after the taken tokens."""
        return self.matcher is not None and self.matcher.is_error()

    @property
    def is_over(self) -> bool:
        """Return whether the grammar allows nothing more after the request's output."""
        return not self._taken and self.has_stopped

    @property
    def has_stopped(self) -> bool:
        """Return whether the grammar allows nothing more after the taken tokens."""
        return self.matcher is not None and self.matcher.is_stopped()

    @property
    def num_taken(self) -> int:
        """Count the taken tokens: forced ones that the request does not have yet."""
        return len(self._taken)

    def consume(self, token_id: int) -> None:
        """Consume the request's next token; do nothing if the grammar had stopped."""
        if self._taken:
            taken = self._taken.popleft()
            assert taken == token_id, "consume: what must come did not"
        elif not self.has_stopped:
            self._advance(token_id)

    def take_next(self, number: int, output: Sequence[int]) -> int | None:
        """Take and return the forced token with number `number`, or None.

        None: several tokens may come, another rule forbids the forced one, or the tokens before it are not known yet.
        output: the tokens that the request has.
        """
        if self.matcher is None or len(output) + len(self._taken) != number or self.matcher.is_stopped():
            return None
        if self._forced is None:
            self._forced = deque(self.matcher.compute_ff_tokens())
        if not self._forced or not self._allows(self._forced[0], number, output):
            return None
        token_id = self._forced[0]
        self._advance(token_id)
        self._taken.append(token_id)
        return token_id

    def take_run(self, number: int, output: Sequence[int], most: int) -> list[int]:
        """Take and return up to `most` forced tokens, from number `number` on. A stop token is left to be drawn."""
        run: list[int] = []
        while len(run) < most and not (self._forced and self._forced[0] in self._stop_token_ids):
            token_id = self.take_next(number + len(run), output)
            if token_id is None:
                break
            run.append(token_id)
        return run

    def go_ahead(self) -> "Constraint":
        """Return a copy that may take drafted tokens.

        Copying takes 2 to 10 us for answers of up to 1,000 tokens and 0.2 ms at 5,000: the grammar's state grows.
        """
        ahead = copy.copy(self)
        ahead.matcher = None if self.matcher is None else self.matcher.deep_copy()
        ahead._forced = None if self._forced is None else self._forced.copy()
        ahead._taken = self._taken.copy()
        return ahead

    def suppose(self, token_id: int, number: int, output: Sequence[int]) -> bool:
        """Take a drafted token as if it were drawn as number `number`. Returns False if another token is forced."""
        if not self.needs_output:
            return True
        place = number - len(output)
        if place < len(self._taken):
            return self._taken[place] == token_id
        if self.matcher is not None:
            self._advance(token_id)
        self._taken.append(token_id)
        return True

    def allows(self, token_id: int, words: np.ndarray) -> bool:
        """Return whether a mask has a token and the grammar has not stopped."""
        return _has(words, token_id) and not self.has_stopped

    def _advance(self, token_id: int) -> None:
        assert self.matcher is not None, "consume: this constraint has no grammar"
        if self._forced is not None and len(self._forced) > 1 and self._forced[0] == token_id:
            self._forced.popleft()
        else:
            self._forced = None  # the matcher is asked again
        self.matcher.consume_token(token_id)  # 5 us, less than it takes to wake a thread

    def _allows(self, token_id: int, number: int, output: Sequence[int]) -> bool:
        """Return whether the rules other than the grammar allow a token."""
        words = self._before_end if number < self._min_tokens else self._allowed
        return _has(words, token_id) and token_id not in self._banned(output)

    def _banned(self, output: Sequence[int]) -> list[int]:
        """Return the tokens banned after the request's output and the tokens taken ahead."""
        if not self._followers:
            return []
        behind = (*output, *self._taken)
        runs = self._followers.get(behind[-1], ()) if behind else ()
        return [run[-1] for run in runs if behind[-len(run) + 1 :] == run[:-1]]

    def narrow(self, words: np.ndarray, number: int, output: Sequence[int]) -> None:
        """Clear from a mask, uint32 `[words]`, the tokens that draw `number` after `output` may not be."""
        words &= self._before_end if number < self._min_tokens else self._allowed
        _clear(words, self._banned(output))


# The constraint, the number of the draw, the output before it, and the drafted tokens after the input token.
MaskedRow = tuple[Constraint, int, Sequence[int], Sequence[int]]


class Constraints:
    """The constraints of an engine's requests. read_tokens: makes the vocabulary for grammars when the first one comes;
    it raises GrammarError if there is none.
    """

    def __init__(self, vocab_size: int, read_tokens: Callable[[], LLTokenizer]) -> None:
        self._vocab_size = vocab_size
        self._read_tokens = read_tokens
        self._threads = ThreadPoolExecutor(_COMPILING_THREADS, "grammar")
        self._tokens: LLTokenizer | None = None
        self._tokens_lock = Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._num_requests = 0
        self._words = np.empty((0, 0), np.uint32)
        self._num_masks = 0
        self._num_runs = 0
        self._num_run_tokens = 0
        self._seconds = 0.0

    def prepare(self, requests: Iterable[EngineRequest], rest: Callable[[], None]) -> list[Constraint | None]:
        """Return the constraint of each request, or None. Raises GrammarError.

        Any thread may call, but only one at a time. `rest` is called while a grammar is being compiled.
        """
        return [self._make(request, rest) if _has_any(request) else None for request in requests]

    def consume(self, drawn: Sequence[tuple[Constraint, int]]) -> None:
        """Consume drawn tokens, in order. A constraint whose grammar does not allow its token has an `error` then."""
        began = time.perf_counter()
        for one, token_id in drawn:
            if one.matcher is not None:
                one.consume(token_id)
        self._seconds += time.perf_counter() - began

    def take_run(self, one: Constraint, number: int, output: Sequence[int], most: int) -> list[int]:
        """Take forced tokens as `Constraint.take_run` does, and count them."""
        if not most:
            return []
        began = time.perf_counter()
        run = one.take_run(number, output, most)
        self._num_runs += bool(run)
        self._num_run_tokens += len(run)
        self._seconds += time.perf_counter() - began
        return run

    def fill(self, rows: Sequence[MaskedRow]) -> list[np.ndarray]:
        """Return a mask for each row, uint32 `[ceil(vocab / 32)]`, or `[1 + drafted, ..]` for a row with a draft.

        A constraint that has failed or stopped has all tokens, since its draw is not used. The next call overwrites
        the masks.
        """
        began = time.perf_counter()
        num_words = sum(1 + len(draft) for *_, draft in rows)
        if len(self._words) < num_words:
            self._words = np.empty((num_words, -(-self._vocab_size // _WORD_BITS)), np.uint32)
        words = self._words[:num_words]  # fresh memory of 16 KiB a row would cost its first touch in every step
        words.fill(0xFFFFFFFF)
        masks, first = [], 0
        for one, number, output, draft in rows:
            own = words[first : first + 1 + len(draft)]
            _fill(own[0], one, number, output)
            if draft and not one.needs_output:  # masks depend only on the number, not on the drafted tokens
                for step in range(1, len(own)):
                    _fill(own[step], one, number + step, output)
            elif draft:
                _fill_along(own, one.go_ahead(), number, output, draft)
            masks.append(own if draft else own[0])
            first += len(own)
        self._num_masks += num_words
        self._seconds += time.perf_counter() - began
        return masks

    def stats(self) -> MaskStats:
        return MaskStats(
            held_requests=self._num_requests,
            masks=self._num_masks,
            mask_seconds=self._seconds,
            jumps=self._num_runs,
            jumped_tokens=self._num_run_tokens,
        )

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
        until = time.monotonic() + _PATIENCE * grammar.MOST_SECONDS
        while not wait([future], _LOOK_SECONDS).done:
            if time.monotonic() > until:  # the compiler's own limits end it later
                raise GrammarError(f"grammar: not compiled within {_PATIENCE * grammar.MOST_SECONDS:g} s; try later")
            rest()
        return Constraint(request, self._vocab_size, future.result().deep_copy())

    def _compile(self, text: str) -> LLMatcher:
        """Compile a grammar and compute its first mask, which makes the lexer's first states."""
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
    """Raise GrammarError, for an engine without a vocabulary."""
    raise GrammarError("grammar: this engine has no tokenizer; set model.tokenizer to a folder that has one")


def read_tokens(model: ModelConfig, vocab_size: int) -> LLTokenizer:
    """Read a model's vocabulary for llguidance, with the model's end tokens. Raises GrammarError.

    vocab_size: the width of the logits.
    """
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
        raise GrammarError("grammar: this model has no end token, so no answer could end")
    vocabulary.no_truncation()
    vocabulary.no_padding()
    try:
        return LLTokenizer(vocabulary.to_str(), n_vocab=vocab_size, eos_token=ends)
    except ValueError as error:
        raise GrammarError(f"grammar: {folder}: {grammar.shorten(str(error))}") from None


def _fill(words: np.ndarray, one: Constraint, number: int, output: Sequence[int]) -> None:
    """Narrow a mask of all tokens, uint32 `[words]`, to what draw number `number` may be."""
    token_id = one.take_next(number, output)
    if token_id is not None:
        words[:] = 0
        words[token_id // _WORD_BITS] = 1 << token_id % _WORD_BITS
        return
    if one.matcher is not None and not one.has_stopped:
        # one after another: a mask takes 26 us, and waking threads takes ten times that
        fill_next_token_bitmask(one.matcher, words[None].view(np.int32))
        if one.matcher.is_error():  # it failed in this mask
            words[:] = 0xFFFFFFFF
    one.narrow(words, number, output)


def _fill_along(words: np.ndarray, ahead: Constraint, number: int, output: Sequence[int], draft: Sequence[int]) -> None:
    """Narrow the masks after each token of a draft, up to the first token that is not allowed.

    Later rows are drawn too, but their draws are rejected. words: uint32 `[1 + drafted, words]`; the first mask is
    narrowed already. If a grammar fails on the way, that row may draw any token; consuming it then reports the error.
    """
    for step, token_id in enumerate(draft):
        if not ahead.allows(token_id, words[step]) or not ahead.suppose(token_id, number + step, output):
            return
        _fill(words[step + 1], ahead, number + step + 1, output)
        if ahead.has_failed:
            words[step + 1] = 0xFFFFFFFF
            return


def _has(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // _WORD_BITS] >> np.uint32(token_id % _WORD_BITS) & 1)


def _has_any(request: EngineRequest) -> bool:
    is_late = request.min_tokens > 0 and bool(request.stop_token_ids)
    return bool(request.grammar or request.allowed_token_ids or request.bad_token_ids or is_late)


def _words_of(token_ids: Iterable[int] | None, vocab_size: int) -> np.ndarray:
    """Return a mask, uint32 `[words]`, with the bits of these tokens; None: all bits."""
    num_words = -(-vocab_size // _WORD_BITS)
    if token_ids is None:
        return np.full(num_words, 0xFFFFFFFF, np.uint32)
    bits = np.zeros(num_words * _WORD_BITS, np.uint8)
    bits[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _clear(words: np.ndarray, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        words[token_id // _WORD_BITS] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % _WORD_BITS))
