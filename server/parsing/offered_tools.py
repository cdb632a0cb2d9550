"""Read the tools that a request offers, with what reading calls needs: names and schemas of arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server.grammar.schema_places import find_reference
from server.parsing.response_template import encode_json, load_json

_PYTHONS = {"True": True, "False": False, "None": None}  # as models that have read much Python write them


@dataclass(slots=True)
class Kinds:
    """What a schema allows: names of types, and texts that are values as they are."""

    types: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Tools:
    """The JSON Schema of each tool's arguments, by name. max_calls: None: any number."""

    parameters: Mapping[str, Mapping[str, Any]]
    max_calls: int | None = None

    def argument(self, name: str, key: str, value: Any) -> Any:
        """Return a value that came as text, as the type in the tool's schema; others as they are."""
        kinds = self.kinds(name, key)
        if isinstance(value, list):
            return value if "array" in kinds.types else [_typed(item, kinds) for item in value]
        return _typed(value, kinds)

    def begin_argument(self, name: str, key: str, text: str) -> str:
        """Return the JSON of a value whose text a limit cut, as far as it came."""
        types = self.kinds(name, key).types
        return encode_json(text)[:-1] if not types or "string" in types else text.strip()

    def kinds(self, name: str, key: str) -> Kinds:
        """Return what the tool's schema allows as an argument."""
        found = Kinds()
        root = self.parameters.get(name, {})
        properties = root.get("properties")
        if isinstance(properties, dict):
            _gather(properties.get(key), root, found, set())
        return found


def _gather(schema: Any, root: Mapping[str, Any], found: Kinds, seen: set[str]) -> None:
    """Add what a schema allows, by its type or, without one, by its values and the keywords of a type."""
    if not isinstance(schema, dict):
        return
    named = schema.get("type")
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [*values, schema["const"]]
    found.texts.update(value for value in values if isinstance(value, str))
    if named is not None:
        found.types.update(name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
    else:
        found.types.update(name for value in values for name in _TYPE_NAMES[type(value)])
        found.types.update(name for keyword, name in _KEYWORDS.items() if keyword in schema)
    if schema.get("nullable"):
        found.types.add("null")
    for several in ("anyOf", "oneOf", "allOf"):
        for one in schema[several] if isinstance(schema.get(several), list) else []:
            _gather(one, root, found, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        _gather(find_reference(reference, root), root, found, seen)


def _typed(value: Any, kinds: Kinds) -> Any:
    """Return the value that a text spells if it has one of the types, else the text."""
    if not isinstance(value, str) or value in kinds.texts:
        return value
    spelled = value.strip()
    try:
        read = _PYTHONS[spelled] if spelled in _PYTHONS else load_json(spelled)
    except (ValueError, RecursionError):
        return value
    if isinstance(read, float) and read.is_integer() and "integer" in kinds.types:
        return int(read)
    return read if not isinstance(read, str) and kinds.types.intersection(_TYPE_NAMES[type(read)]) else value


_TYPE_NAMES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_KEYWORDS = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
