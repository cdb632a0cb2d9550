"""Define tables of request fields, and check a body against its table.

A field is served (the body's struct has it), accepted without effect, or refused unless its value is neutral. Every
other field is unknown. The check reads only names and small values; msgspec checks types.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw

from server.api_error import ApiError, invalid
from server.bodies.schema_limits import SchemaLimits
from transfer.nearest_name import nearest_hint

Body = TypeVar("Body", bound=msgspec.Struct)

_LONGEST_NEUTRAL = 64  # bytes; a longer value cannot be neutral, and is refused unread
MOST_IGNORED = 64  # most unknown fields of a body that are named
_LONGEST_NAME = 64  # most characters of an unknown field's name that a message repeats
_UNKNOWN = "Object contains unknown field `"  # msgspec's message; the name and a "`" follow
_decode = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class Served:
    """A field that a body's struct has. what: its description, if it is not one of OpenAI's."""

    what: str = ""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A field that is accepted with any value and changes nothing. reason: why it changes nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused unless it is null or one of the neutral `values`. reason: ends the error message."""

    values: tuple[object, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Each:
    """A field that is a list of objects. Values of any other JSON type are left to the struct."""

    item: "Fields[Any]"


@dataclass(frozen=True, slots=True)
class Nested:
    """A value to check with another table, and its path in the body."""

    path: str
    raw: Raw
    table: "Fields[Any] | Each"


ReplaceUnknown = Callable[[Any, list[str]], Any]


class Fields(Generic[Body]):
    """List the known fields of one JSON object, which `struct` decodes.

    `limits`: what its JSON Schema says beyond the struct's types. `replace_unknown`: for bodies whose clients send new
    kinds of items with each release, rewrites the decoded JSON and adds the paths that it replaced to a list. An
    unknown field of such a body has no effect unless the deployment says otherwise.
    """

    def __init__(
        self,
        struct: type[Body],
        rules: "Mapping[str, Rule]",
        limits: SchemaLimits | None = None,
        replace_unknown: ReplaceUnknown | None = None,
    ) -> None:
        self.struct = struct
        self.rules = dict(rules)
        self.limits = limits or SchemaLimits()
        self.replace_unknown = replace_unknown
        known: list[tuple[str, Any, Any]] = [(field, Raw, UNSET) for field in rules]
        self._strict = msgspec.defstruct(f"Strict{struct.__name__}", known, forbid_unknown_fields=True)
        self._lenient = msgspec.defstruct(f"Lenient{struct.__name__}", known)

    def walk(self) -> "Iterator[Fields[Any]]":
        """Yield this table and each that is nested in it."""
        yield self
        for rule in self.rules.values():
            if isinstance(rule, Fields | Each):
                yield from (rule.item if isinstance(rule, Each) else rule).walk()

    def check_names(self, raw: bytes | Raw, path: str, ignored: list[str] | None) -> list[Nested]:
        """Check the names and neutral values of one object, and return what is nested in it.

        Unknown names are added to `ignored`. Raises ApiError 400 for a refused field, and for an unknown one if
        `ignored` is None. Raises msgspec's errors for JSON that is broken or not an object.
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
            unknown = (name for name in _decode(raw, type=dict[str, Raw]) if name not in self.rules)
            ignored += [
                _join(path, name[:_LONGEST_NAME]) for name in islice(unknown, max(0, MOST_IGNORED - len(ignored)))
            ]
        nested = []
        for name, rule in self.rules.items():
            value = getattr(scan, name)
            if value is UNSET:
                continue
            if isinstance(rule, Refused):
                _require_neutral(_join(path, name), value, rule)
            elif isinstance(rule, Fields | Each):
                nested.append(Nested(_join(path, name), value, rule))
        return nested

    def _unknown(self, path: str, name: str) -> ApiError:
        shown = name[:_LONGEST_NAME]
        if not shown.strip() or not shown.isprintable():
            shown = repr(shown)
        nearest = nearest_hint(name[:_LONGEST_NAME], self.rules)
        return invalid(_join(path, shown), f"unknown field{nearest}", "unknown_parameter")


Rule = Served | NoEffect | Refused | Fields[Any] | Each


def check_nested(nested: list[Nested], ignored: list[str] | None) -> None:
    """Check everything that `Fields.check_names` returned. Raises ApiError 400."""
    pending = list(nested)
    while pending:
        one = pending.pop()
        first = bytes(memoryview(one.raw)[:1])
        if isinstance(one.table, Fields):
            if first == b"{":
                pending += one.table.check_names(one.raw, one.path, ignored)
        elif first == b"[":
            for i, item in enumerate(_decode(one.raw, type=list[Raw])):
                pending.append(Nested(f"{one.path}[{i}]", item, one.table.item))


def _require_neutral(path: str, raw: Raw, rule: Refused) -> None:
    small = len(memoryview(raw)) <= _LONGEST_NEUTRAL
    value = _decode(raw) if small else None
    if small and (value is None or any(_is_same(value, neutral) for neutral in rule.values)):
        return
    accepted = " or ".join(["none", *(msgspec.json.encode(value).decode() for value in rule.values)])
    raise invalid(path, f"got {_show(raw)}, wanted {accepted}: {rule.reason}", "unsupported_value")


def _show(raw: Raw) -> str:
    """Return a value as it was sent, on one line, and shortened if it is long."""
    shown = " ".join(bytes(memoryview(raw)[:_LONGEST_NEUTRAL]).decode(errors="replace").split())
    return shown if len(memoryview(raw)) <= _LONGEST_NEUTRAL else f"{shown}..."


def _is_same(value: object, neutral: object) -> bool:
    """Return whether two JSON values are equal: 1 is 1.0, but 0 is not false."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def served(*names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Served())


def does(what: str, *names: str) -> dict[str, Rule]:
    """Return served fields with their description."""
    return dict.fromkeys(names, Served(what))


def no_effect(reason: str, *names: str) -> dict[str, Rule]:
    """Return fields without effect, with the reason why."""
    return dict.fromkeys(names, NoEffect(reason))


def refused(reason: str, *names: str, at: tuple[object, ...] = ()) -> dict[str, Rule]:
    """Return fields that are refused with `reason`, except at null and the values of `at`."""
    return dict.fromkeys(names, Refused(at, reason))
