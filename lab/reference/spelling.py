"""Encode text word by word from a cache, so that a worker can write a million tokens a second.

The invariant: for text without special tokens the ids are those of the tokenizer itself, since no token crosses a word
of the pattern.
"""

import re
from pathlib import Path

from tokenizers import Tokenizer

BEGIN, END_OF_TEXT, USER, ASSISTANT, SYSTEM, END = range(6)
WORD = re.compile(r"[0-9]|'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[^\sA-Za-z0-9']+|'|\s+(?=[0-9])|\s+(?!\S)|\s+")
PLAIN = re.compile(r"[A-Za-z0-9,.:?\- \n=]*\Z")


class Spelling:
    """One tokenizer, and a cache of the words it has encoded."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self._words: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text. Plain ASCII is encoded by the cache, anything else by the tokenizer."""
        if not PLAIN.match(text):
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        found: list[int] = []
        words = self._words
        for word in WORD.findall(text):
            known = words.get(word)
            if known is None:
                known = words[word] = self.tokenizer.encode(word, add_special_tokens=False).ids
            found += known
        return found

    def text(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def single(self, words: list[str]) -> list[str]:
        """Return the words that are one token after a space."""
        return [word for word in words if len(self.ids(f" {word}")) == 1]
