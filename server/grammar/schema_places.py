"""Walk through the schemas inside a JSON schema with their places, and resolve its references."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

OF_ONE = ("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else",
          "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LONGEST = 80  # characters of a value, and of a name, that a message repeats


def walk(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield each schema inside a schema with its place, also invalid values at places for schemas.

    Names of properties are not taken for keywords, nor values for schemas.
    """
    pending = [("#", schema)]
    while pending:
        place, one = pending.pop()
        yield place, one
        if not isinstance(one, dict):
            continue
        inside = []
        for keyword, value in one.items():
            if keyword in OF_NAMES and isinstance(value, dict):
                inside += [(f"{place}/{keyword}/{show(name)[1:-1]}", each) for name, each in value.items()]
            elif keyword in OF_LISTS and isinstance(value, list):
                inside += [(f"{place}/{keyword}/{i}", each) for i, each in enumerate(value)]
            elif keyword in OF_ONE:
                inside.append((f"{place}/{keyword}", value))
        pending += reversed(inside)


def map_schemas(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of the schema in which `change` was applied to each schema directly inside."""
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword in OF_NAMES and isinstance(value, dict):
            changed[keyword] = {name: change(one) for name, one in value.items()}
        elif keyword in OF_LISTS and isinstance(value, list):
            changed[keyword] = [change(one) for one in value]
        elif keyword in OF_ONE:
            changed[keyword] = change(value)
    return changed


def find_reference(reference: str, root: Any) -> Any:
    """Return the value at a JSON pointer (`#/$defs/a`) in the same document; None if there is none."""
    at: Any = root if reference.startswith("#") else None
    for key in filter(None, unquote(reference[1:]).split("/")):
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list):
            at = at[int(key)] if key.isdecimal() and int(key) < len(at) else None
        else:
            at = at.get(key) if isinstance(at, Mapping) else None
    return at


def show(value: Any) -> str:
    """Return a value as JSON on one line, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
