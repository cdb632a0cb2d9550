"""Cut an answer's text into the regions of a response template, while it arrives.

Every character comes out once, as part of a mark or of a region, so text that turns out not to be a region can be given
back. The regions do not depend on how the text is cut into pieces.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import regex

from server.parsing.json_scanner import ValuesScanner
from server.parsing.response_template import Field
from server.parsing.tags import CUT, MORE, OVER, Argument, Ends, Pattern, Step, TagScanner, find_mark

_KEPT_CHARS = 32  # of the text before, behind which a mark may have to stand
_IS_MARK = regex.compile(r"[^\s\w.-]")  # what a beginning of a mark has, and a beginning of a word has not


@dataclass(frozen=True, slots=True)
class Opened:
    field: Field
    begin: int
    end: int
    captures: dict[str, str]


@dataclass(frozen=True, slots=True)
class Inside:
    """More text of the open region, or of the outside if none is open."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Between:
    """An argument between tags of the open region."""

    begin: int
    end: int
    argument: Argument


@dataclass(frozen=True, slots=True)
class Closed:
    """The region is closed. is_cut: because the text ended.

    If no region was open, it is a mark outside, without meaning; with `is_cut`, the part of a mark before a limit.
    """

    begin: int
    end: int
    is_cut: bool


Event = Opened | Inside | Between | Closed


class Scanner(Protocol):
    """Find where a region ends."""

    def scan(self, text: str, at: int, ends: Ends) -> Step: ...


class TextScanner:
    """Scan a region of any text up to its mark."""

    def __init__(self, field: Field) -> None:
        self._closes, self._can_grow = field.closes, field.closes_can_grow

    def scan(self, text: str, at: int, ends: Ends) -> Step:
        mark = None if self._closes is None else find_mark(self._closes, self._can_grow, text, at, ends)
        return Step(len(text)) if mark is None else Step(mark.begin, mark.end)


def choose_scanner(field: Field) -> Scanner:
    if field.tags is not None:
        return TagScanner(field.tags, field.closes, field.closes_can_grow)
    if field.content == "json" and not field.arguments.get("allow_non_json"):
        delimiters = [(begin, end) for begin, end in field.arguments.get("string_delims", ())]
        return ValuesScanner(field.closes, field.closes_can_grow, delimiters)
    return TextScanner(field)


def _apart(pattern: Pattern) -> Pattern:
    """Return what a mark's pattern matches where no region has just closed: nothing that `\\G` begins."""
    return regex.compile(pattern.pattern.replace(r"\G", "(?!)"), pattern.flags) if r"\G" in pattern.pattern else pattern


class RegionReader:
    """Reads regions: call `feed` until the text ends, then `finish`. Positions count from the beginning of all text. In
    a mark's pattern, `\\G` matches right after a region.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        fields = list(fields)
        self._marks: list[tuple[Pattern, bool, Field | None]]
        self._marks = [(field.opens, field.opens_can_grow, field) for field in fields if field.opens is not None]
        self._marks += [
            (field.closes, field.closes_can_grow, None)
            for field in fields
            if field.opens is None and field.closes is not None
        ]
        self._apart_marks = [(_apart(pattern), can_grow, field) for pattern, can_grow, field in self._marks]
        self._text = ""
        self._base = 0  # where `_text` begins
        self._at = 0  # in `_text`: what lies before is in some event
        self._field: Field | None = None
        self._scanner: Scanner | None = None
        self._ends = MORE
        self._opened_at = self._barren_at = self._closed_at = -1

    @property
    def position(self) -> int:
        return self._base + self._at

    def text(self, begin: int, end: int) -> str:
        return self._text[begin - self._base : end - self._base]

    def release(self, position: int) -> None:
        """Release the text before a position, except for a few characters, which patterns of marks may look back at."""
        cut = position - self._base - _KEPT_CHARS
        if cut > len(self._text) // 2:
            self._text = self._text[cut:]
            self._base, self._at = self._base + cut, self._at - cut

    def feed(self, text: str) -> None:
        self._text += text

    def finish(self, is_cut: bool) -> None:
        """End the text. is_cut: by a limit, so that what may be the beginning of a mark counts as one."""
        self._ends = CUT if is_cut else OVER

    def open_no_more(self) -> None:
        """Open no more regions; all text after the open region is outside."""
        self._marks = self._apart_marks = []

    def next(self) -> Event | None:
        """Return the next event, None if more text is needed."""
        return self._outside() if self._scanner is None else self._in_region(self._scanner)

    def _outside(self) -> Event | None:
        is_barren = self.position == self._barren_at  # a region without any text is not opened there again
        begin = self._at + is_barren
        is_behind = self.position == self._closed_at and not is_barren
        held = len(self._text)
        found: tuple[int, int, Field | None, dict[str, str]] | None = None
        for pattern, can_grow, field in self._marks if is_behind else self._apart_marks:
            mark = find_mark(pattern, can_grow, self._text, begin, self._ends)
            if mark is None:
                continue
            if mark.end is None:
                held = min(held, mark.begin)
            elif (field or mark.end > mark.begin) and (found is None or (mark.begin, -mark.end) < found[:2]):
                found = mark.begin, -mark.end, field, mark.groups
        if found is None or found[0] >= held:
            return self._inside(held) or self._drop_mark()
        if found[0] > self._at:
            return self._inside(found[0])
        opened_at, field = self.position, found[2]
        self._at = -found[1]
        if field is None:
            return Closed(opened_at, self.position, is_cut=False)
        self._field, self._opened_at, self._scanner = field, opened_at, choose_scanner(field)
        return Opened(field, opened_at, self.position, found[3])

    def _drop_mark(self) -> Event | None:
        """Return the text that is left where it ended, which may be the beginning of a mark."""
        if self._ends.more or self._at == len(self._text):
            return None
        if _IS_MARK.search(self._text, self._at) is None:
            return self._inside(len(self._text))
        begin, self._at = self.position, len(self._text)
        return Closed(begin, self.position, is_cut=True)

    def _in_region(self, scanner: Scanner) -> Event | None:
        step = scanner.scan(self._text, self._at, self._ends)
        if step.inside > self._at:
            return self._inside(step.inside)
        if step.argument is not None:
            begin, self._at = self.position, step.argument.end
            return Between(begin, self.position, step.argument)
        if step.close is not None:
            return self._close(step.close, is_cut=False)
        return None if self._ends.more else self._close(len(self._text), is_cut=True)

    def _inside(self, end: int) -> Inside | None:
        if end <= self._at:
            return None
        begin, self._at = self.position, end
        return Inside(begin, self.position)

    def _close(self, end: int, is_cut: bool) -> Closed:
        begin, self._at = self.position, end
        self._field = self._scanner = None
        self._closed_at = self.position
        self._barren_at = self.position if self.position == self._opened_at else -1
        return Closed(begin, self.position, is_cut)
