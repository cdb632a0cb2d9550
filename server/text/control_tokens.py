"""Treat control tokens that a message spells out as text: only the chat template's own end a turn or begin another.

The template gets messages with a mark inside every control token that they spell out. The text between the template's
own control tokens is then tokenised without these marks. So the tokenised texts, joined, are the template's text
without marks.
"""

import re
from collections.abc import Iterable

from server.api_error import invalid
from server.text.model_tokenizer import Tokenizer

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: Unicode keeps them from being interchanged


class ControlTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spelled = sorted((tokenizer.token_bytes(index).decode() for index in tokenizer.special_ids), key=len)
        self._pattern = re.compile("|".join(re.escape(text) for text in reversed(spelled) if text) or r"(?!)")

    def choose_mark(self, texts: Iterable[str]) -> str | None:
        """Return a character that none of the texts has, None if none spells out a control token.

        Raises ApiError 400.
        """
        texts = list(texts)
        if not any(self._pattern.search(text) for text in texts):
            return None
        for mark in _MARKS:
            if not any(mark in text for text in texts):
                return mark
        raise invalid("messages", "they hold all noncharacters from U+FDD0 to U+FDEF, and control tokens")

    def hide(self, text: str, mark: str) -> str:
        """Return the text with a mark behind each character of a control token that it spells out."""
        return self._pattern.sub(lambda found: "".join(char + mark for char in found[0]), text)

    def encode(self, text: str, mark: str, most_tokens: int, is_inside: bool = False) -> list[int]:
        """Return the ids of a template's text with hidden control tokens, or of a part of it. Raises TooManyTokens."""
        specials = self._tokenizer.special_ids
        self._tokenizer.check_fits(text.replace(mark, ""), most_tokens)
        token_ids, offsets = self._tokenizer.encode_with_offsets(text, is_inside)
        found: list[int] = []
        begin = first = 0
        for i in [*(i for i, token_id in enumerate(token_ids) if token_id in specials), len(token_ids)]:
            end = offsets[i][0] if i < len(token_ids) else len(text)
            piece = text[begin:end]
            found += self._tokenizer.encode_plain(piece.replace(mark, "")) if mark in piece else token_ids[first:i]
            if i < len(token_ids):
                found.append(token_ids[i])
                begin, first = offsets[i][1], i + 1
        return found
