"""Convert token ids to text as they arrive, without broken characters and without stop strings.

`TextDecoder` turns tokens into characters, holding back bytes until a character is whole. `StopMatcher` holds back
what may be the start of a stop string. Both give the same text however their input is cut into pieces.
"""

import codecs

from server.text.model_tokenizer import Tokenizer


class TextDecoder:
    """Decode token ids as they come, with an incremental UTF-8 decoder: a text is its tokens' bytes joined.

    True of byte-level BPE and of SentencePiece vocabularies with byte fallback. A leading space is kept, since the text
    goes on from a prompt. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def step(self, token_id: int) -> str:
        """Return the characters that this token completes; skipped tokens have none."""
        return "" if token_id in self._skipped else self._decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """Return what is left: the beginning of a character that never became one, as U+FFFD."""
        return self._decode(b"", True)


class StopMatcher:
    """Cut a text before the stop string that is completed first (the longest of those completed together).

    With `keeps_stop` the text is cut after it. Text is held back from where a stop string may begin; earlier text is
    not searched again. So a character costs a few string comparisons for each stop string, however long they are and
    however far they had matched.
    """

    def __init__(self, stops: list[str], keeps_stop: bool) -> None:
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._longest = max(map(len, stops))
        self._held = ""
        self.num_emitted = 0
        self.matched = ""  # the stop string that ended it

    def feed(self, text: str) -> str:
        """Take more of the text, and return what is certain. After a match: the last piece, and `matched` is set."""
        num_held = len(self._held)
        text = self._held + text
        ends = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0  # it ends among what is new
        ]
        if ends:
            end, at = min(ends)
            self.matched = text[at:end]
            keep = end if self._keeps_stop else at
            self._held = ""
        else:
            keep = self._first_beginning(text)
            self._held = text[keep:]
        self.num_emitted += keep
        return text[:keep]

    def finish(self) -> str:
        """End the text: what was held back was no stop string."""
        text, self._held = self._held, ""
        self.num_emitted += len(text)
        return text

    def _first_beginning(self, text: str) -> int:
        """Return where the first stop string could begin that the text ends within; its length if none does."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[begin:]
            if any(stop.startswith(end) for stop in self._stops):
                return begin
        return len(text)
