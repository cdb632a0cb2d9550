"""Build one choice of an answer as text: its pieces, its logprobs with offsets, and how it ended."""

from collections import deque
from dataclasses import dataclass

from scheduler.messages import ACCEPTED, REJECTED, Delta, Logprob
from server.parsing.answer_parts import Content, Part
from server.parsing.message_reader import MessageReader
from server.text.model_tokenizer import Tokenizer
from server.text.text_stream import StopMatcher, TextDecoder

TIME_LIMIT = "time_limit"
"""Why a choice ended for which there was no more time; clients read `length`, which theirs know, and beside it this."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token with its logprob (None: the first of a prompt) and the offset of its text, in characters."""

    token_id: int
    logprob: Logprob | None
    offset: int


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The part of an answer that became certain: text, its tokens, and at the end the finish reason.

    parts: the text as parts of a message; without a reader, all is content. token_ids: the counted tokens, even if
    their text is not certain yet.
    """

    text: str
    entries: list[TokenEntry]
    finish_reason: str | None
    parts: list[Part]
    token_ids: list[int]


class Choice:
    """One choice of an answer: turns the deltas of one engine request into pieces. Offsets count from its own start.

    The stop token that ended it is counted and has an entry, but no text. A stop string, and all tokens from there on,
    have no entries, since nothing of a stop string leaves the server. With `keeps_stop`, the stop token or string is
    part of the text (special tokens have none), and what follows is cut. A stop string that begins in the first
    `min_tokens` tokens is plain text. A reader also sees special tokens, which the text lacks. It may finish the
    choice. An answer with calls that ended by itself has the finish reason `tool_calls`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: list[str],
        min_tokens: int,
        keeps_stop: bool,
        reader: MessageReader | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._specials: deque[tuple[int, str]] = deque()  # where in the text, and how they are spelled
        self._num_read = 0
        self._decoder = TextDecoder(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stops, keeps_stop) if stops else None
        self._keeps_stop = keeps_stop
        self._min_tokens = min_tokens
        self._num_plain = 0  # characters that came before the matcher looks
        self._num_chars = 0  # decoded, including what the matcher holds back
        self._pending: list[TokenEntry] = []
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.figures: dict[str, int] = {}
        self.finish_reason: str | None = None

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that ended the choice."""
        return (self._matcher.matched or None) if self._matcher is not None else None

    def feed(self, delta: Delta) -> AnswerPiece:
        """Take a delta and return the next piece.

        If a stop string or the reader ends the choice before the engine does, `finish_reason` is set, and the caller
        cancels the request.
        """
        if delta.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        num_accepted = self.figures.get(ACCEPTED, 0)
        for name, number in delta.figures.items():
            self.figures[name] = max(self.figures.get(name, 0), number)
        text = ""
        parts: list[Part] = []
        last = len(delta.token_ids) - 1
        token_ids: list[int] = []
        for i, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            token_ids.append(token_id)
            if delta.logprobs is not None:
                self._pending.append(TokenEntry(token_id, delta.logprobs[i], self._num_chars))
            if i == last and delta.finish_reason == "stop" and not self._keeps_stop:
                break
            if self._reader is not None and token_id in self._tokenizer.special_ids:
                self._specials.append((self._num_chars, self._tokenizer.token_bytes(token_id).decode()))
            text += self._advance(self._decoder.step(token_id), parts)
            if self.finish_reason is not None:
                self._cut_drafts(num_accepted + len(token_ids))
                return self._end_early(text, parts, token_ids)
        if delta.finish_reason is not None:
            text += self._advance(self._decoder.finish(), parts)
            if self.finish_reason is not None:
                return self._end_early(text, parts, token_ids)
            if self._matcher is not None:
                left = self._matcher.finish()
                self._read(left, parts)
                text += left
            self._finish(delta.finish_reason, parts)
            entries, self._pending = self._pending, []
            return AnswerPiece(text, entries, self.finish_reason, parts, token_ids)
        entries = self._entries_before(self._num_emitted()) if self._pending else []
        return AnswerPiece(text, entries, None, parts, token_ids)

    def _cut_drafts(self, most_accepted: int) -> None:
        """Count drafted tokens after the answer's end as rejected."""
        num_behind = self.figures.get(ACCEPTED, 0) - most_accepted
        if num_behind > 0:
            self.figures[ACCEPTED] -= num_behind
            self.figures[REJECTED] = self.figures.get(REJECTED, 0) + num_behind

    def _end_early(self, text: str, parts: list[Part], token_ids: list[int]) -> AnswerPiece:
        """End the choice because of a stop string or the reader."""
        self._finish("stop", parts)
        return AnswerPiece(text, self._entries_before(self._num_emitted()), self.finish_reason, parts, token_ids)

    def _finish(self, reason: str, parts: list[Part]) -> None:
        self.finish_reason = reason
        if self._reader is not None:
            parts += self._reader.cut() if reason in ("length", TIME_LIMIT) else self._reader.finish()
            if reason == "stop" and self._reader.num_calls:
                self.finish_reason = "tool_calls"

    def _read(self, text: str, parts: list[Part]) -> None:
        """Read text that became certain, and the special tokens up to its end."""
        if self._reader is None:
            if text:
                parts.append(Content(text))
            return
        end = self._num_read + len(text)
        while self._specials and self._specials[0][0] <= end:
            offset, spelled = self._specials.popleft()
            parts += self._reader.feed(text[: offset - self._num_read], False)
            parts += self._reader.feed(spelled, True)
            text, self._num_read = text[offset - self._num_read :], offset
        parts += self._reader.feed(text, False)
        self._num_read = end

    def _advance(self, text: str, parts: list[Part]) -> str:
        self._num_chars += len(text)
        if text and self._matcher is not None:
            if self.num_tokens <= self._min_tokens:
                self._num_plain += len(text)
            else:
                text = self._matcher.feed(text)
                if self._matcher.matched:
                    self.finish_reason = "stop"
        self._read(text, parts)
        if self._reader is not None and self._reader.is_done:
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
    """Return the entries of an echoed prompt.

    The first `num_added` tokens (BOS) have no text; `logprobs[i]` belongs to token i + 1.
    """
    decoder = TextDecoder(tokenizer, skip_special_tokens=False)
    entries = []
    offset = 0
    for i, token_id in enumerate(token_ids):
        entries.append(TokenEntry(token_id, logprobs[i - 1] if i else None, offset))
        if i >= num_added:
            offset += len(decoder.step(token_id))
    return entries
