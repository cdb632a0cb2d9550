"""Cut texts into chunks of token ids of bounded length, which end with a sentence where one is near.

The chunks' ids, joined, are those of the text in the middle of a prompt, with control tokens as text. They depend on
the text alone. Those of the last texts are cached.
"""

import hashlib
import re
from array import array
from collections import OrderedDict
from threading import Lock

from server.text.model_tokenizer import Tokenizer, TooManyTokens

_NEAR_SHARE = 4  # a sentence's end within the last quarter of a chunk is near
_MOST_KEPT_TOKENS = 4_000_000  # 16 MB
_LOOK_BACK_CHARS = 16
_SENTENCE_END = re.compile(r"""([.!?…]["'”’)\]»]*|[。！？]["'”’）」』]*|\n)\s*$""")
_ENDS_ALONE = "。！？”’）」』"  # no space follows them

Chunks = tuple["array[int]", ...]


class Chunker:
    """Cut texts, for any thread."""

    def __init__(self, tokenizer: Tokenizer, chunk_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._kept: OrderedDict[bytes, Chunks] = OrderedDict()
        self._num_kept_tokens = 0
        self._lock = Lock()

    def cut(self, text: str, most_tokens: int) -> Chunks:
        """Return int32 token ids, `[chunks][tokens]`. Raises TooManyTokens, cheaply for a text that is far too long."""
        name = hashlib.sha256(text.encode()).digest()
        with self._lock:
            chunks = self._kept.get(name)
            if chunks is not None:
                self._kept.move_to_end(name)
        if chunks is None:
            self._tokenizer.check_fits(text, most_tokens)
            chunks = self._cut(text)
            self._keep(name, chunks)
        num_tokens = count_tokens(chunks)
        if num_tokens > most_tokens:
            raise TooManyTokens(num_tokens)
        return chunks

    def _cut(self, text: str) -> Chunks:
        token_ids, offsets = self._tokenizer.encode_plain_with_offsets(text)
        chunks = []
        begin, size = 0, self._chunk_tokens
        while begin < len(token_ids):
            end = min(begin + size, len(token_ids))
            if end < len(token_ids):
                near = range(end, end - size // _NEAR_SHARE, -1)
                end = next((cut for cut in near if ends_sentence(text, offsets[cut - 1][1])), end)
            chunks.append(array("i", token_ids[begin:end]))
            begin = end
        return tuple(chunks)

    def _keep(self, name: bytes, chunks: Chunks) -> None:
        with self._lock:
            if name not in self._kept:
                self._num_kept_tokens += count_tokens(chunks)
            self._kept[name] = chunks
            while self._num_kept_tokens > _MOST_KEPT_TOKENS:
                _, oldest = self._kept.popitem(last=False)
                self._num_kept_tokens -= count_tokens(oldest)


def count_tokens(chunks: Chunks) -> int:
    return sum(map(len, chunks))


def ends_sentence(text: str, position: int) -> bool:
    """Return whether a sentence or line ends at a character position, or before the space there."""
    if _SENTENCE_END.search(text[max(0, position - _LOOK_BACK_CHARS) : position]) is None:
        return False
    is_between = position == len(text) or text[position].isspace() or text[position - 1].isspace()
    return is_between or text[position - 1] in _ENDS_ALONE
