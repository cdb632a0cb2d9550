"""Describe why a JSON schema does not compile: the place, the value there, and what was wanted.

It only explains schemas that llguidance has refused, and refuses none itself.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import regex_to_lark

from scheduler.constraints.lexeme_trial import GROWS
from server.grammar.schema_formats import OWN_FORMATS
from server.grammar.schema_places import OF_LISTS, OF_NAMES, OF_ONE, show, walk

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
FORMATS = tuple(
    sorted(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid", *OWN_FORMATS))
)
LEAVE_OUT = "leave it out of the schema, or check it yourself"

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*)")
_BAD_PATTERN = re.compile(r"regex parse error: .*error: (?P<what>.*?)(?: 1 \| start: .*)?$")  # and the line it is in
_UNSATISFIABLE = "Unsatisfiable schema: "
_OF_REFERENCES = ("Pointer", "Resource", "anchor", "Anchor")
_OF_OTHERS = (
    ("patternProperty", "patternProperties"),
    ("regex", "pattern"),
    ("Regex", "pattern"),
    ("min/maxProperties", "minProperties"),
)


def describe_schema_fault(schema: Any, why: str) -> str:
    """Explain in one line why a schema was refused. why: the message of llguidance, or of a trial of its patterns."""
    if why.endswith(GROWS):
        return why
    unimplemented = _UNIMPLEMENTED.search(why)
    if unimplemented is not None:
        places = ", ".join(name_place(schema, keyword) for keyword in json.loads(unimplemented[1]))
        return f"{places}: it cannot be enforced while tokens are generated; {LEAVE_OUT}"
    misshapen = next(_find_misshapen(schema), None)
    if misshapen is not None:
        return misshapen
    unknown = _UNKNOWN_FORMAT.search(why)
    if unknown is not None:
        place = name_place(schema, "format", lambda value: value == unknown[1])
        return f"{place}: got {show(unknown[1])}, wanted one of {', '.join(FORMATS)}; {LEAVE_OUT}"
    if _BAD_PATTERN.search(why) is not None:
        return _name_pattern(schema, why)
    if any(sign in why for sign in _OF_REFERENCES):
        return _describe_reference(schema, why)
    if "oneOf" in why and not why.startswith(_UNSATISFIABLE):
        place = name_place(schema, "oneOf")
        return f"{place}: several alternatives may match; use anyOf, or give each a different const"
    if why.startswith(_UNSATISFIABLE):
        return f"no value satisfies this schema: {why.removeprefix(_UNSATISFIABLE)}"
    keyword = next((keyword for sign, keyword in _OF_OTHERS if sign in why), None)
    return why if keyword is None else f"{name_place(schema, keyword)}: {why}; {LEAVE_OUT}"


def name_place(schema: Any, keyword: str, is_meant: Callable[[Any], bool] = lambda _: True) -> str:
    """Return a pointer to the keyword with a value that is meant; the keyword alone if several places have one."""
    places = [
        f"{place}/{keyword}"
        for place, one in walk(schema)
        if isinstance(one, dict) and keyword in one and is_meant(one[keyword])
    ]
    return places[0] if len(places) == 1 else keyword


def _find_misshapen(schema: Any) -> Iterator[str]:
    """Yield values that no draft gives a meaning, and numbers that are out of range."""
    for place, one in walk(schema):
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            yield f"{place}: got {show(one)}, wanted a schema: an object, true or false"
            continue
        for keyword, value in one.items():
            is_sound, wanted = _WANTED.get(keyword, (_is_any, ""))
            if not is_sound(value):
                yield f"{place}/{keyword}: got {show(value)}, wanted {wanted}"
            elif keyword not in (*OF_ONE, *OF_LISTS, *OF_NAMES) and _has_number_too_large(value):
                yield f"{place}/{keyword}: number out of range, wanted one that a float of 64 bits can be"


def describe_pattern_fault(pattern: str, why: str) -> str:
    """Explain in one line why a regular expression was refused. why: llguidance's message."""
    found = _BAD_PATTERN.search(why)
    if found is None:
        return why
    return f"{refuse_pattern(pattern)}: {found['what']}"


def refuse_pattern(pattern: str) -> str:
    return f"got {show(pattern)}, wanted a regular expression that can be kept token by token"


def _name_pattern(schema: Any, why: str) -> str:
    """Return the fault of a pattern: the longest that the message repeats, as llguidance reads it, less whitespace."""
    text, found = _squeeze(why), []
    for place, one in walk(schema):
        if isinstance(one, dict):
            found += [(one["pattern"], f"{place}/pattern")] if isinstance(one.get("pattern"), str) else []
            found += [(name, f"{place}/patternProperties") for name in one.get("patternProperties") or ()]
    repeated = [(pattern, place) for pattern, place in found if _squeeze(regex_to_lark(pattern, "dw")) in text]
    if not repeated:
        return f"pattern: {why}"
    pattern, place = max(repeated, key=lambda one: len(one[0]))
    return f"{place}: {describe_pattern_fault(pattern, why)}"


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _describe_reference(schema: Any, why: str) -> str:
    for keyword in ("$ref", "$schema", "$id"):
        for place, one in walk(schema):
            value = one.get(keyword) if isinstance(one, dict) else None
            if isinstance(value, str) and value.lstrip("#") and value.lstrip("#") in why:
                wanted = "a place in this schema" if keyword == "$ref" else "a draft's, or none"
                return f"{place}/{keyword}: got {show(value)}, wanted {wanted}"
    return f"$ref: {why}"


def _has_number_too_large(value: Any) -> bool:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, list | dict):
            pending += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int) and abs(one) >= 1 << 1024:
            return True
    return False


def _is_any(_: Any) -> bool:
    return True


def _is_type(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _is_list(value) and all(one in TYPES for one in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_Shape = tuple[Callable[[Any], bool], str]
_NAMED: _Shape = (lambda value: isinstance(value, dict), "an object whose values are schemas")
_TEXT: _Shape = (lambda value: isinstance(value, str), "a string")
_COUNT: _Shape = (_is_count, "a whole number from 0, written without a point")
_NUMBER: _Shape = (_is_number, "a number")
_ALTERNATIVES: _Shape = (_is_list, "a list of at least one schema")
_WANTED: dict[str, _Shape] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
        "a list of names",
    ),
    "enum": (_is_list, "a list of at least one value"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(OF_NAMES, _NAMED),
    **dict.fromkeys(("anyOf", "oneOf"), _ALTERNATIVES),
    **dict.fromkeys(("allOf", "prefixItems"), (lambda value: isinstance(value, list), "a list of schemas")),
    **dict.fromkeys(("pattern", "format", "$ref", "$id", "$schema"), _TEXT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
}
