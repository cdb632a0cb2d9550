"""The tools that a request offers, as far as reading their calls needs them: names, and schemas of their arguments."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.message.response_template import load_json

_PYTHONS = {"True": True, "False": False, "None": None}  # as models that have read much Python write them


@dataclass(frozen=True, slots=True)
class Tools:
    """`parameters`: for each name the JSON Schema of its arguments. `most_calls`: None for any number."""

    parameters: Mapping[str, Mapping[str, Any]]
    most_calls: int | None = None

    def argument(self, name: str, key: str, value: Any) -> Any:
        """A value that came as text, as the type that the tool's schema gives it; others as they are."""
        properties = self.parameters.get(name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if isinstance(value, list):
            return value if "array" in _types(schema) else [_typed(item, _types(schema)) for item in value]
        return _typed(value, _types(schema))


def _types(schema: Any, depth: int = 0) -> frozenset[str]:
    """The types that a schema names, also behind one `anyOf` or `oneOf`; of one with an enum of texts, none."""
    if not isinstance(schema, dict) or depth > 4:
        return frozenset()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
    for either in ("anyOf", "oneOf"):
        for choice in schema.get(either) or []:
            types |= _types(choice, depth + 1)
    if schema.get("nullable"):
        types.add("null")
    return frozenset(types)


def _typed(value: Any, types: frozenset[str]) -> Any:
    """The value that a text spells, if it is of one of the types; else the text."""
    if not isinstance(value, str):
        return value
    spelled = value.strip()
    try:
        read = _PYTHONS[spelled] if spelled in _PYTHONS else load_json(spelled)
    except (ValueError, RecursionError):
        return value
    if isinstance(read, float) and read.is_integer() and "integer" in types:
        return int(read)
    return read if types & _TYPE_NAMES[type(read)] else value


_TYPE_NAMES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset(),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


def encode_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
