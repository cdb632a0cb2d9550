"""One sequence being generated, as text: its pieces, its logprobs with offsets, how it ended.

Knows tokens and text; nothing of HTTP or of the shape of a response.
"""

from dataclasses import dataclass

from scheduler.messages import Delta, Logprob
from server.text import StopMatcher, TextDecoder
from server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token with its logprob (None: the first of a prompt) and where its text begins, in characters."""

    token_id: int
    logprob: Logprob | None
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain: text, the tokens that it is of, and at the end the finish reason."""

    text: str
    entries: list[TokenEntry]
    finish_reason: str | None


class Choice:
    """Feed it the deltas of one engine request; it gives pieces. The offsets count from the start of its own text.

    The stop token that ended it is counted and has an entry, but no text. After a stop string, tokens that lie at or
    behind it have no entry either: nothing of a stop string leaves the server. One that begins in the first
    `min_tokens` tokens is plain text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[str], min_tokens: int) -> None:
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=True)
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_plain = 0  # characters that came before the matcher looks
        self._num_chars = 0  # decoded, including what the matcher holds back
        self._pending: list[TokenEntry] = []
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_reused_tokens = 0
        self.num_recomputed_tokens = 0
        self.finish_reason: str | None = None

    def feed(self, delta: Delta) -> Piece:
        """Stop strings may finish it before the engine does; then `finish_reason` is set and the caller cancels."""
        if delta.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        self.num_reused_tokens = max(self.num_reused_tokens, delta.reused_tokens)
        self.num_recomputed_tokens = max(self.num_recomputed_tokens, delta.recomputed_tokens)
        text = ""
        last = len(delta.token_ids) - 1
        for i, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if delta.logprobs is not None:
                self._pending.append(TokenEntry(token_id, delta.logprobs[i], self._num_chars))
            if i == last and delta.finish_reason == "stop":
                break
            text += self._advance(self._decoder.step(token_id))
            if self.finish_reason is not None:
                return Piece(text, self._entries_before(self._num_emitted()), self.finish_reason)
        if delta.finish_reason is not None:
            text += self._advance(self._decoder.finish())
            if self.finish_reason is not None:
                return Piece(text, self._entries_before(self._num_emitted()), self.finish_reason)
            if self._matcher is not None:
                text += self._matcher.finish()
            self.finish_reason = delta.finish_reason
            entries, self._pending = self._pending, []
            return Piece(text, entries, self.finish_reason)
        return Piece(text, self._entries_before(self._num_emitted()) if self._pending else [], None)

    def _advance(self, text: str) -> str:
        self._num_chars += len(text)
        if self._matcher is None or not text:
            return text
        if self.num_tokens <= self._min_tokens:
            self._num_plain += len(text)
            return text
        text = self._matcher.feed(text)
        if self._matcher.matched:
            self.finish_reason = "stop"
        return text

    def _num_emitted(self) -> int:
        return self._num_chars if self._matcher is None else self._num_plain + self._matcher.num_emitted

    def _entries_before(self, offset: int) -> list[TokenEntry]:
        """Take the pending entries whose text begins before `offset`; they are in the order of their offsets."""
        num = 0
        while num < len(self._pending) and self._pending[num].offset < offset:
            num += 1
        taken, self._pending = self._pending[:num], self._pending[num:]
        return taken


def prompt_entries(
    tokenizer: Tokenizer, token_ids: list[int], num_added: int, logprobs: list[Logprob]
) -> list[TokenEntry]:
    """Entries of an echoed prompt. Its first `num_added` tokens (BOS) have no text; `logprobs[i]` is of token i + 1."""
    decoder = TextDecoder(tokenizer, skip_special_tokens=False)
    entries = []
    offset = 0
    for i, token_id in enumerate(token_ids):
        entries.append(TokenEntry(token_id, logprobs[i - 1] if i else None, offset))
        if i >= num_added:
            offset += len(decoder.step(token_id))
    return entries
