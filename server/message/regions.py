"""An answer's text cut into the regions of a response template, as it comes.

Every character comes out once, as a delimiter or inside a region, so what turns out to be none can be given back.
Refuses to know what regions mean. Invariant: however the text is cut into pieces, the regions are the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from server.message.json_scanner import JsonScanner
from server.message.response_template import Field, Pattern


@dataclass(frozen=True, slots=True)
class Opened:
    field: Field
    begin: int
    end: int
    captures: dict[str, str]


@dataclass(frozen=True, slots=True)
class Inside:
    """More of the region that is open; of the text outside, where none is."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Closed:
    """`is_cut`: the text ended, not the region. With no region open: a mark outside, which means nothing."""

    begin: int
    end: int
    is_cut: bool


Event = Opened | Inside | Closed


class RegionReader:
    """`feed` until the text ends, then `finish`. Positions count from the beginning of all text."""

    def __init__(self, fields: Iterable[Field]) -> None:
        fields = list(fields)
        self._marks: list[tuple[Pattern, bool, Field | None]]
        self._marks = [(field.opens, field.opens_can_grow, field) for field in fields if field.opens is not None]
        self._marks += [
            (field.closes, field.closes_can_grow, None)
            for field in fields
            if field.opens is None and field.closes is not None
        ]
        self._text = ""
        self._base = 0  # where `_text` begins
        self._at = 0  # in `_text`: what lies before is in some event
        self._field: Field | None = None
        self._scanner: JsonScanner | None = None
        self._ends = False
        self._opened_at = self._barren_at = -1

    @property
    def position(self) -> int:
        return self._base + self._at

    def text(self, begin: int, end: int) -> str:
        return self._text[begin - self._base : end - self._base]

    def release(self, position: int) -> None:
        """What lies before will not be asked for."""
        cut = position - self._base
        if cut > len(self._text) // 2:
            self._text = self._text[cut:]
            self._base, self._at = position, self._at - cut

    def feed(self, text: str) -> None:
        self._text += text

    def finish(self) -> None:
        self._ends = True

    def open_no_more(self) -> None:
        """All that is not in an open region is outside."""
        self._marks = []

    def next(self) -> Event | None:
        """The next event; None if more text is needed."""
        if self._field is None:
            return self._outside()
        if self._scanner is not None:
            return self._in_value(self._scanner)
        return self._in_region(self._field)

    def _outside(self) -> Event | None:
        held = len(self._text)
        begin = self._at + (self.position == self._barren_at)  # a region without any text is not opened there again
        found: tuple[int, int, Field | None, dict[str, str]] | None = None
        for pattern, can_grow, field in self._marks:
            match = pattern.search(self._text, begin, partial=not self._ends)
            if match is None:
                continue
            if not self._ends and (match.partial or (match.end() == len(self._text) and can_grow)):
                held = min(held, match.start())
            elif (field or match.end() > match.start()) and (
                found is None or (match.start(), -match.end()) < found[:2]
            ):
                named = {name: text for name, text in match.groupdict().items() if text is not None}
                found = match.start(), -match.end(), field, named
        if found is None or found[0] >= held:
            return self._inside(held)
        if found[0] > self._at:
            return self._inside(found[0])
        begin, field = self.position, found[2]
        self._at = -found[1]
        if field is None:
            return Closed(begin, self.position, is_cut=False)
        self._field, self._opened_at = field, begin
        if field.closes is None and field.content == "json":
            self._scanner = JsonScanner(0)
        return Opened(field, begin, self.position, found[3])

    def _in_region(self, field: Field) -> Event | None:
        begin, end, held = self._find_close(field.closes, field.closes_can_grow)
        if begin is None:
            return self._inside(held) or (self._close(self._at, is_cut=True) if self._ends else None)
        return self._inside(begin) or self._close(end, is_cut=False)

    def _find_close(self, closes: Pattern | None, can_grow: bool) -> tuple[int | None, int, int]:
        """Where the delimiter begins and ends, if it is there; and how far there is certainly none."""
        length = len(self._text)
        match = closes.search(self._text, self._at, partial=not self._ends) if closes is not None else None
        if match is None:
            return None, length, length
        if not self._ends and (match.partial or (match.end() == length and (can_grow or match.start() == length))):
            return None, length, match.start()
        return match.start(), match.end(), match.start()

    def _in_value(self, scanner: JsonScanner) -> Event | None:
        end = scanner.find_end(self._text, self._at)
        if end is not None:
            self._scanner = _ENDED
            return self._inside(end) or self._close(self._at, is_cut=False)
        return self._inside(len(self._text)) or (self._close(self._at, is_cut=True) if self._ends else None)

    def _inside(self, end: int) -> Inside | None:
        if end <= self._at:
            return None
        begin, self._at = self.position, end
        return Inside(begin, self.position)

    def _close(self, end: int, is_cut: bool) -> Closed:
        begin, self._at = self.position, end
        self._field = self._scanner = None
        self._barren_at = self.position if self.position == self._opened_at else -1
        return Closed(begin, self.position, is_cut)


class _Ended(JsonScanner):
    """Of a value that is over: it ends where the text goes on."""

    def find_end(self, text: str, begin: int) -> int | None:
        return begin


_ENDED = _Ended(0)
