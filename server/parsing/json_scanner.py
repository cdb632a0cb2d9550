"""Find the end of JSON by its brackets and strings alone, while its text arrives.

The text between brackets is not checked. A mark that ends a region counts only outside of strings.
"""

from collections.abc import Sequence

import regex

from server.parsing.tags import OVER, Ends, Mark, Pattern, Step, find_mark

_STRING_REST = regex.compile(r'(?:[^"\\]|\\.)*+', regex.DOTALL)
_SPACE = regex.compile(r"\s*")
_JSON_TOKEN = regex.compile(r'["{}\[\]]')
_SEPARATORS = regex.compile(r"[\s,;]*")


class JsonScanner:
    def __init__(self, depth: int) -> None:
        """Begin inside `depth` open brackets; 0: the value has not begun."""
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def find_end(self, text: str, begin: int) -> int | None:
        """Return where the value ends in `text`, reading from `begin` on; if none begins, where it should have."""
        for i in range(begin, len(text)):
            char = text[i]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0:
                if not char.isspace():
                    return i
            elif char == '"':
                self._in_string = True
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


class ValuesScanner:
    """Scans a region of JSON values.

    The region ends at its mark outside of strings, or if something else than another value follows a value. A region
    without a mark is one value, and ends after it, or at once if no value begins.
    """

    def __init__(self, closes: Pattern | None, can_grow: bool, delimiters: Sequence[tuple[str, str]]) -> None:
        """Prepare the tokens. `delimiters`: of strings, besides JSON's own."""
        self._closes = closes
        self._can_grow = can_grow
        self._string_ends = {'"': '"'} | dict(delimiters)
        # One by one: in one pattern, a `"` would go before a longer delimiter that has it, and is not all there.
        self._tokens = [_JSON_TOKEN, *(regex.compile(regex.escape(begin)) for begin, _ in delimiters)]
        self._depth = 0
        self._has_begun = False
        self._string_end = ""  # of the string that is open

    def scan(self, text: str, at: int, ends: Ends) -> Step:
        closing = self._find_close(text, at, ends)
        while True:
            if self._string_end:
                at, is_over = self._skip_string(text, at, ends)
                if not is_over:
                    return Step(at)
            if self._depth == 0 and (self._has_begun or self._closes is None):
                found = self._between(text, at, ends)
                if isinstance(found, Step):
                    return found
                at = found
            if closing is not None and closing.begin < at:
                closing = self._find_close(text, at, ends)
            found_tokens = (find_mark(pattern, False, text, at, ends) for pattern in self._tokens)
            token = min(filter(None, found_tokens), key=lambda mark: mark.begin, default=None)
            if closing is not None and (token is None or closing.begin <= token.begin):
                return Step(closing.begin, closing.end)
            if token is None or token.end is None:
                return Step(len(text) if token is None else token.begin)
            at = token.end
            self._read_token(text[token.begin : at])

    def _find_close(self, text: str, at: int, ends: Ends) -> Mark | None:
        return None if self._closes is None else find_mark(self._closes, self._can_grow, text, at, ends)

    def _read_token(self, token: str) -> None:
        if token in "{[":
            self._depth += 1
            self._has_begun = True
        elif token in "}]":
            self._depth = max(self._depth - 1, 0)
        elif self._depth:
            self._string_end = self._string_ends[token]

    def _skip_string(self, text: str, at: int, ends: Ends) -> tuple[int, bool]:
        """Return where the open string ends, or how far it has certainly come."""
        mark = self._string_end
        if mark == '"':
            end = _STRING_REST.match(text, at).end()
            is_over = text[end : end + 1] == mark
        else:
            end = text.find(mark, at)
            is_over = end >= 0
            if not is_over:
                lengths = range(min(len(mark) - 1, len(text) - at), 0, -1)
                end = len(text) - next((length for length in lengths if text.endswith(mark[:length])), 0)
        if is_over:
            self._string_end = ""
            return end + len(mark), True
        return (len(text) if ends == OVER else end), False

    def _between(self, text: str, at: int, ends: Ends) -> Step | int:
        """Return how the region goes on outside of values, or where the next value begins."""
        if self._closes is None and self._has_begun:
            return Step(at, at)
        begin = _SPACE.match(text, at).end()
        if self._closes is not None:
            match = self._closes.match(text, begin, partial=ends != OVER)
            is_sure = match is not None and not match.partial
            if is_sure and not (ends.more and match.end() == len(text) and self._can_grow):
                return Step(at, int(match.end()))
            if match is not None and begin < len(text):
                return Step(at) if ends.more else Step(at, len(text))
            begin = _SEPARATORS.match(text, at).end()
        if begin == len(text):
            return Step(at) if ends.more and self._has_begun else Step(begin, begin if self._has_begun else None)
        if text[begin] in "{[":
            return int(begin)
        return Step(at, at) if self._has_begun else Step(begin, begin)
