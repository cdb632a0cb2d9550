"""Find arguments between tags while the text arrives, by the pattern of one argument.

A value may contain anything, so a mark ends it only if another argument or the end of the region follows. If the text
ends before that, the first mark counts; without any mark there is no value.
"""

from dataclasses import dataclass
from typing import Any

import regex

Pattern = Any  # of `regex`, which has no types

_VALUE = "(?P<value>.*?)"
_SPACE = regex.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Ends:
    """What is known of a text's end: more text follows, it is complete, or a limit cut it."""

    more: bool
    is_cut: bool


MORE, OVER, CUT = Ends(True, False), Ends(False, False), Ends(False, True)


@dataclass(frozen=True, slots=True)
class Mark:
    """The range of a mark. end: None if the text's end may be the mark's beginning."""

    begin: int
    end: int | None
    groups: dict[str, str]


def find_mark(pattern: Pattern, can_grow: bool, text: str, at: int, ends: Ends) -> Mark | None:
    """Return the first match, or what may become one. `can_grow`: a match at the text's end may become longer."""
    match = pattern.search(text, at, partial=ends.more)
    if match is None and ends.is_cut:
        match = pattern.search(text, at, partial=True)
    if match is None:
        return None
    is_at_end = match.end() == len(text) and (can_grow or match.start() == len(text))
    if match.partial or (ends.more and is_at_end):
        return Mark(match.start(), None, {})
    named = {name: found for name, found in match.groupdict().items() if found is not None}
    return Mark(match.start(), match.end(), named)


@dataclass(frozen=True, slots=True)
class TagForm:
    """The patterns before a value, with a group `key`, and after it."""

    opening: Pattern
    closing: Pattern


def split_tag_pattern(pattern: str) -> TagForm | None:
    """Return the form of a pattern with groups `key` and `value`, whose value is any text; None for other patterns."""
    opening, is_any, closing = pattern.partition(_VALUE)
    if not is_any or "(?P<key>" not in opening or not closing:
        return None
    try:
        return TagForm(regex.compile(opening, regex.DOTALL), regex.compile(closing, regex.DOTALL))
    except regex.error:  # the value is inside of another group
        return None


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a scan: the text belongs to the region up to `inside`, where its end (up to `close`) or an argument
    begins.
    """

    inside: int
    close: int | None = None
    argument: "Argument | None" = None


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument. end: its end in the text. is_whole: it was not cut by a limit."""

    key: str
    value: str
    end: int
    is_whole: bool


class TagScanner:
    """Scan one region. Between two calls of `scan`, `at` goes on to where the step before said."""

    def __init__(self, form: TagForm, closes: Pattern | None, closes_can_grow: bool) -> None:
        self._form = form
        self._closes = closes
        self._closes_can_grow = closes_can_grow
        self._key: str | None = None  # of the argument that is open
        self._value_begin = self._searched = 0  # behind `at`

    def scan(self, text: str, at: int, ends: Ends) -> Step:
        if self._key is None:
            opening = find_mark(self._form.opening, True, text, at, ends)
            closing = None
            if self._closes is not None:
                closing = find_mark(self._closes, self._closes_can_grow, text, at, ends)
            if closing is not None and (opening is None or closing.begin <= opening.begin):
                return Step(closing.begin, closing.end)
            if opening is None:
                return Step(len(text))
            if opening.begin > at or opening.end is None:
                return Step(opening.begin)
            self._key = opening.groups["key"]
            self._value_begin = self._searched = opening.end - at
        return self._scan_value(text, at, ends)

    def _scan_value(self, text: str, at: int, ends: Ends) -> Step:
        begin = at + self._value_begin
        mark = find_mark(self._form.closing, False, text, at + self._searched, ends)
        while mark is not None and mark.end is not None:
            follows = self._follows(text, mark.end, ends)
            if follows:
                return self._close(at, text[begin : mark.begin], mark.end, is_whole=True)
            if follows is None:
                break
            mark = find_mark(self._form.closing, False, text, mark.end, ends)
        if ends.more:
            self._searched = (len(text) if mark is None else mark.begin) - at
            return Step(at)
        if ends.is_cut:
            end = len(text) if mark is None else mark.begin
            return self._close(at, text[begin:end], len(text), is_whole=False)
        first = self._form.closing.search(text, begin)
        if first is not None:
            return self._close(at, text[begin : first.start()], first.end(), is_whole=True)
        self._key = None
        return Step(begin)

    def _close(self, at: int, value: str, end: int, is_whole: bool) -> Step:
        key, self._key = self._key, None
        assert key is not None
        return Step(at, argument=Argument(key, value, end, is_whole))

    def _follows(self, text: str, at: int, ends: Ends) -> bool | None:
        """Return whether another argument or the region's end is behind white space at `at`; None: it may yet come."""
        at = _SPACE.match(text, at).end()
        if at == len(text):
            return True if ends == OVER else None
        found = [
            pattern.match(text, at, partial=ends != OVER)
            for pattern in (self._form.opening, self._closes)
            if pattern is not None
        ]
        if any(match and not match.partial and not (ends.more and match.end() == len(text)) for match in found):
            return True
        return None if any(found) else False


def split_tags(form: TagForm, text: str) -> list[tuple[str, str]]:
    """Return the keys and values of a complete region."""
    scanner = TagScanner(form, None, False)
    found, at = [], 0
    while at < len(text):
        step = scanner.scan(text, at, OVER)
        if step.argument is not None:
            found.append((step.argument.key, step.argument.value))
        at = step.inside if step.argument is None else step.argument.end
    return found
