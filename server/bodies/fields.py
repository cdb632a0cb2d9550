"""What becomes of a field of a request, and the walk that checks a body against a table of them.

A field is served (a body's struct has it), free of effect whatever it says, or accepted at the values that ask for
nothing and refused by name at any other. What the table (`field_table.py`) lacks is unknown. The walk looks at names
and small values; types are the structs' business. Invariant: what it keeps does not grow with the number of fields that
are sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from server.api_error import ApiError, invalid
from transfer.nearest_name import nearest_hint

_LONGEST_NEUTRAL = 64  # bytes; a longer value is none of the neutral ones, and is refused unread
MOST_IGNORED = 64  # unknown fields of a body that are named
_LONGEST_NAME = 64  # characters of an unknown field's name that a message repeats
_UNKNOWN = "Object contains unknown field `"  # what msgspec says, and then the name and a "`"
_decode = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class Served:
    """Mark a field that a body's struct has. `what`: what it does, where it is this server's or vLLM's own."""

    what: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    """Mark a field that is accepted and changes nothing, whatever it says. `reason`: why it changes nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Neutral:
    """Accepted as null or at one of `values`, which ask for nothing; `reason` ends a refusal's message, which says what
    came and what is wanted."""

    values: tuple[object, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Each:
    """A list whose items are objects; of any other JSON type, its struct decides."""

    item: "Fields"


@dataclass(frozen=True, slots=True)
class Found:
    """A value to look into, and where it stood."""

    path: str
    raw: Raw
    inside: "Fields | Each"


class Fields:
    """The known fields of one JSON object."""

    def __init__(self, name: str, fates: "Mapping[str, Fate]") -> None:
        self.fates = dict(fates)
        known: list[tuple[str, Any, Any]] = [(field, Raw, UNSET) for field in fates]
        self._strict = msgspec.defstruct(f"Strict{name}", known, forbid_unknown_fields=True)
        self._lenient = msgspec.defstruct(f"Lenient{name}", known)

    def look(self, raw: bytes | Raw, path: str, ignored: list[str] | None) -> list[Found]:
        """Check the names and neutral values of one object. Returns what is nested in it; unknown names are added to
        `ignored`.

        Raises ApiError 400 that names the field: unknown (if `ignored` is None), or refused. Raises msgspec's errors
        for JSON that is broken or no object.
        """
        try:
            scan = _decode(raw, type=self._strict)
        except msgspec.ValidationError as error:
            what = str(error)
            if not what.startswith(_UNKNOWN):
                raise
            if ignored is None:
                raise self._unknown(path, what[len(_UNKNOWN) : -1]) from None
            scan = _decode(raw, type=self._lenient)
            unknown = (name for name in _decode(raw, type=dict[str, Raw]) if name not in self.fates)
            ignored += [
                _join(path, name[:_LONGEST_NAME]) for name in islice(unknown, max(0, MOST_IGNORED - len(ignored)))
            ]
        found = []
        for name, fate in self.fates.items():
            value = getattr(scan, name)
            if value is UNSET:
                continue
            if isinstance(fate, Neutral):
                _require_neutral(_join(path, name), value, fate)
            elif isinstance(fate, Fields | Each):
                found.append(Found(_join(path, name), value, fate))
        return found

    def _unknown(self, path: str, name: str) -> ApiError:
        shown = name[:_LONGEST_NAME]
        if not shown.strip() or not shown.isprintable():
            shown = repr(shown)
        nearest = nearest_hint(name[:_LONGEST_NAME], self.fates)
        return invalid(_join(path, shown), f"unknown field{nearest}", "unknown_parameter")


Fate = Served | Free | Neutral | Fields | Each


def look_into(found: list[Found], ignored: list[str] | None) -> None:
    """Check everything nested in what `Fields.look` returned. Raises ApiError 400."""
    pending = list(found)
    while pending:
        one = pending.pop()
        first = bytes(memoryview(one.raw)[:1])
        if isinstance(one.inside, Fields):
            if first == b"{":
                pending += one.inside.look(one.raw, one.path, ignored)
        elif first == b"[":
            for i, item in enumerate(_decode(one.raw, type=list[Raw])):
                pending.append(Found(f"{one.path}[{i}]", item, one.inside.item))


def _require_neutral(path: str, raw: Raw, fate: Neutral) -> None:
    small = len(memoryview(raw)) <= _LONGEST_NEUTRAL
    value = _decode(raw) if small else None
    if small and (value is None or any(_is_same(value, neutral) for neutral in fate.values)):
        return
    accepted = " or ".join(["none", *(msgspec.json.encode(value).decode() for value in fate.values)])
    raise invalid(path, f"got {_show(raw)}, wanted {accepted}: {fate.reason}", "unsupported_value")


def _show(raw: Raw) -> str:
    """A value as it was sent, on one line, cut where it is long."""
    shown = " ".join(bytes(memoryview(raw)[:_LONGEST_NEUTRAL]).decode(errors="replace").split())
    return shown if len(memoryview(raw)) <= _LONGEST_NEUTRAL else f"{shown}..."


def _is_same(value: object, neutral: object) -> bool:
    """Whether two JSON values are one: 1 is 1.0, but 0 is not false."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def served(*names: str) -> dict[str, Fate]:
    return dict.fromkeys(names, Served())


def does(what: str, *names: str) -> dict[str, Fate]:
    """Return served fields, with what they do."""
    return dict.fromkeys(names, Served(what))


def free(reason: str, *names: str) -> dict[str, Fate]:
    """Return fields without effect, and why they have none."""
    return dict.fromkeys(names, Free(reason))


def refused(reason: str, *names: str, at: tuple[object, ...] = ()) -> dict[str, Fate]:
    """Refused with `reason`, but for null and the values of `at`."""
    return dict.fromkeys(names, Neutral(at, reason))
