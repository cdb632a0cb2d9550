"""Write the arguments of a call as grammar rules in which texts are enclosed in marks: `{key:value}`, as with Gemma.

Otherwise the format is JSON without white space. Properties are sorted by name, as the model's template shows them.
Enforced are types, `properties`, `required`, `items` and their number, `enum`, `const`, alternatives, references and
the bounds of numbers. Texts may be any texts. Properties that are not named are not allowed. The notation is
llguidance's Lark.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import regex

from server.grammar.schema_places import find_reference

Schema = Mapping[str, Any]

_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_TYPES = {"properties": "object", "required": "object", "additionalProperties": "object", "items": "array"}
# What says which values are valid, and is written by no rule here.
_UNWRITTEN = (
    "not", "if", "then", "else", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
    "dependencies", "prefixItems", "additionalItems", "contains", "uniqueItems", "minProperties", "maxProperties",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_PLAIN_KEY = regex.compile(r"[A-Za-z_][\w.-]*", regex.ASCII)


class UnwrittenSchema(Exception):
    """A keyword cannot be enforced by these rules. place: a pointer to it."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


class MarkedWriter:
    """Writes the rules of one tool's arguments; their names begin with `prefix`."""

    def __init__(self, root: Schema, prefix: str, spell: Callable[[str], str], mark: str, text: str) -> None:
        """Prepare the rules of the schema `root`, in which references are found.

        `spell` writes a text as a term. `mark` stands before and behind a text. `text` is the rule of any text and the
        mark behind it.
        """
        self._root = root
        self._prefix = prefix
        self._spell = spell
        self._mark = mark
        self._text = text
        self._of_references: dict[str, str] = {}
        self._any = ""
        self.rules: list[str] = []

    def write_arguments(self) -> str:
        """Return an expression of what stands between a call's braces; '""' for nothing. Raises UnwrittenSchema."""
        for keyword in (*_UNWRITTEN, *_ALTERNATIVES, "$ref", "enum", "const"):
            if self._root.get(keyword):
                raise UnwrittenSchema(f"#/{keyword}")
        return self._write_members(self._root, "#") or '""'

    def _write_members(self, schema: Schema, place: str) -> str:
        """Return an expression of an object's inside."""
        required = schema.get("required") or ()
        known = {k: one for k, one in (schema.get("properties") or {}).items() if one is not False or k in required}
        known |= {name: {} for name in required if name not in known}
        if not known:
            return self._write_free_members(schema.get("additionalProperties", True), place)
        names = sorted(known, key=lambda name: (name.lower(), name))
        first: list[str] = []
        after = ""  # what may follow a member
        for name in reversed(names):
            value = self._write_value(known[name], f"{place}/properties/{name}")
            key = name if _PLAIN_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)
            member = f"{self._spell(f'{key}:')} {value}"
            first = [] if name in required else first
            first.append(" ".join(filter(None, (member, after))))
            following = f'"," {member}' if name in required else f'("," {member})?'
            after = self._add(" ".join(filter(None, (following, after))))
        members = " | ".join(reversed(first))
        return f"({members})" if set(names) & set(required) else f"({members})?"

    def _write_value(self, schema: Any, place: str) -> str:
        """Return a term of one value."""
        if isinstance(schema, bool):
            if not schema:
                raise UnwrittenSchema(place)
            return self._write_any()
        unwritten = next((keyword for keyword in _UNWRITTEN if schema.get(keyword)), None)
        if unwritten is not None:
            raise UnwrittenSchema(f"{place}/{unwritten}")
        if "$ref" in schema:
            return self._write_reference(schema["$ref"], f"{place}/$ref")
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._add(" | ".join(map(self._write_literal, values)))
        for several in _ALTERNATIVES:
            if several in schema:
                return self._write_alternatives(schema, several, place)
        named = schema.get("type")
        types = [named] if isinstance(named, str) else named
        if types is None:
            types = {kind for keyword, kind in _OF_TYPES.items() if keyword in schema}
        if not types or set(types) >= set(_TYPES):
            return self._write_any()
        return self._add(" | ".join(self._write_type(kind, schema, place) for kind in sorted(types)))

    def _write_type(self, kind: str, schema: Schema, place: str) -> str:
        if kind == "string":
            return f"{self._spell(self._mark)} {self._text}"
        if kind == "object":
            return " ".join(filter(None, ('"{"', self._write_members(schema, place), '"}"')))
        if kind == "array":
            return self._write_array(schema, place)
        bounds = {
            keyword: schema[keyword] for keyword in _BOUNDS if keyword in schema and kind in ("integer", "number")
        }
        return self._add(f"%json {json.dumps({'type': kind} | bounds)}")

    def _write_array(self, schema: Schema, place: str) -> str:
        item = self._write_value(schema.get("items", True), f"{place}/items")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" ({item} {more}){"" if least else "?"} "]"'

    def _write_free_members(self, values: Any, place: str) -> str:
        if values is False:
            return ""
        value = self._write_value(values, f"{place}/additionalProperties")
        key = r"/[A-Za-z_][A-Za-z0-9_.-]*/"
        return f'({key} ":" {value} ("," {key} ":" {value})*)?'

    def _write_alternatives(self, schema: Schema, several: str, place: str) -> str:
        """Write the alternatives of a schema that says nothing else of the value."""
        beside = set(schema) & {*_OF_TYPES, *_BOUNDS, *_ALTERNATIVES, "minItems", "maxItems"} - {several}
        if beside or (several == "allOf" and len(schema[several]) != 1):
            raise UnwrittenSchema(f"{place}/{several}")
        terms = [
            self._write_value(one, f"{place}/{several}/{i}")
            for i, one in enumerate(schema[several])
            if one is not False or several == "allOf"
        ]
        return self._add(" | ".join(terms))

    def _write_reference(self, reference: str, place: str) -> str:
        """Write a rule for each place that is named, so that a schema may refer to itself."""
        if reference not in self._of_references:
            schema = find_reference(reference, self._root)
            if not isinstance(schema, dict | bool):
                raise UnwrittenSchema(place)
            name = self._of_references[reference] = f"{self._prefix}_of_{len(self._of_references)}"
            self.rules.append(f"{name}: {self._write_value(schema, reference)}")
        return self._of_references[reference]

    def _write_literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self._spell(f"{self._mark}{value}{self._mark}")
        if isinstance(value, list):
            return " ".join(['"["', ' "," '.join(map(self._write_literal, value)), '"]"'])
        if isinstance(value, dict):
            members = (f"{self._spell(f'{key}:')} {self._write_literal(each)}" for key, each in value.items())
            return " ".join(['"{"', ' "," '.join(members), '"}"'])
        return self._spell(json.dumps(value))

    def _write_any(self) -> str:
        if not self._any:
            self._any = f"{self._prefix}_any"
            text, array, members = self._write_type("string", {}, ""), self._write_array({}, ""), ""
            members = self._write_free_members(True, "")
            plain = '%json {"type": ["number", "boolean", "null"]}'
            self.rules.append(f'{self._any}: {text} | {array} | "{{" {members} "}}" | {self._add(plain)}')
        return self._any

    def _add(self, expression: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name
