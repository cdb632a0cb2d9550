"""Rewrite a JSON schema, as clients' libraries generate it, in the keywords that llguidance can enforce.

Zod, zod-to-json-schema and pydantic use some other keywords. What no rule here covers is left as it is. Every value
that is valid under the rewritten schema is valid under the original one.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

from server.grammar.schema_formats import rewrite_format
from server.grammar.schema_places import find_reference, map_schemas, walk

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
)
_OF_OPENAPI = ("deprecated", "discriminator", "example", "externalDocs", "xml")  # llguidance takes them for assertions
_MOST_VALUES = 1000  # of the names of a record: what it takes to compile them grows with their square
_MOST_NAMES = 16  # of an object's properties, that are looked at for the tag of a union
_MOST_BRANCHES = 256  # of a union, with those of unions in it


def rewrite_schema(schema: Any) -> Any:
    """Return the schema in keywords that llguidance can enforce, as far as the rules cover it."""
    rewriting = _Rewriting(schema)
    rewritten = rewriting.rewrite(schema)
    if rewriting.values:
        rewritten["$defs"] = _dict_of(rewritten.get("$defs")) | rewriting.values
    return rewritten


def allows_nothing(schema: Any) -> bool:
    """Return whether a schema is `false`, or zod's `never`: `{"not": {}}`."""
    return schema is False or (isinstance(schema, dict) and "not" in schema and _allows_all(schema["not"]))


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and _ANNOTATIONS.issuperset(schema))


class _Rewriting:
    """Rewrites one document.

    _tags: by a schema's id, properties that it will require. _unions: ids of schemas whose `oneOf` then means the same
    as `anyOf`. values: schemas of records' values, by new names in `$defs`.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._tags: dict[int, list[str]] = {}
        self._unions: set[int] = set()
        self.values: dict[str, Any] = {}
        schemas = [(place, one) for place, one in walk(root) if isinstance(one, dict)]
        self._ids = {id(one) for _, one in schemas}
        self._has_bases = any("$id" in one for place, one in schemas if place != "#")  # then a pointer may be elsewhere
        for _, one in schemas:
            if isinstance(one.get("oneOf"), list) and "anyOf" not in one:
                self._tell_apart(one)

    def rewrite(self, schema: Any) -> Any:
        """Return one schema of the document rewritten, with all in it."""
        if not isinstance(schema, dict):
            return schema
        if allows_nothing(schema) or allows_nothing(self._resolve(schema)):
            return False
        changed = map_schemas(schema, self.rewrite)
        for keyword in _OF_OPENAPI:
            changed.pop(keyword, None)
        if changed.get("not") is False:
            del changed["not"]
        for name in self._tags.get(id(schema), ()):
            required = changed.get("required", [])
            changed["required"] = required if name in required else [*required, name]
        if id(schema) in self._unions:
            changed["anyOf"] = changed.pop("oneOf")
        self._rewrite_names(changed)
        rewrite_format(changed)
        return changed

    def _resolve(self, schema: Any) -> Any:
        """Return the schema that a reference names, or the schema itself if it is not a reference."""
        seen = set()
        while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            if self._has_bases or reference in seen or not (reference == "#" or reference.startswith("#/")):
                return schema
            seen.add(reference)
            schema = find_reference(reference, self._root)
        return schema

    def _tell_apart(self, union: dict[str, Any]) -> None:
        """Note a `oneOf` whose alternatives differ by a tag. Each will require its tag, so that at most one can match.

        Tags of Pydantic and zod have defaults and so are not required; an object without its tag would match several
        alternatives.
        """
        branches, told = union["oneOf"], _dict_of(union.get("discriminator")).get("propertyName")
        first = _dict_of(_dict_of(self._resolve(branches[0]) if branches else None).get("properties"))
        for name in [told] if isinstance(told, str) else list(first)[:_MOST_NAMES]:
            leaves: list[dict[str, Any]] = []
            if self._find_tags(branches, name, leaves, set()) is None:
                continue
            is_required = all(name in leaf.get("required", []) for leaf in leaves)
            if is_required and not any("$ref" in _dict_of(branch) for branch in branches):
                return  # llguidance tells these apart itself
            for leaf in leaves:
                self._tags.setdefault(id(leaf), []).append(name)
            self._unions.add(id(union))
            return

    def _find_tags(
        self, branches: Sequence[Any], name: str, leaves: list[dict[str, Any]], met: set[int]
    ) -> frozenset[str | int] | None:
        """Return the values that the property `name` has in some objects, each in one alone, and add these to `leaves`;
        None where two may have the same, or one any. `met`: ids of those that were looked at."""
        found: frozenset[str | int] = frozenset()
        for branch in branches:
            one = self._resolve(branch)
            if allows_nothing(one):
                continue
            if not isinstance(one, dict) or id(one) in met or id(one) not in self._ids or len(met) == _MOST_BRANCHES:
                return None
            met.add(id(one))
            inner = one.get("oneOf", one.get("anyOf"))
            if isinstance(inner, list):
                tags = self._find_tags(inner, name, leaves, met)
            else:
                leaves.append(one)
                is_object = one.get("type") == "object" and isinstance(one.get("required", []), list)
                tags = _tags_of(self._resolve(_dict_of(one.get("properties")).get(name))) if is_object else None
            if tags is None or found & tags:
                return None
            found |= tags
        return found

    def _rewrite_names(self, schema: dict[str, Any]) -> None:
        """Drop `propertyNames` without effect; write those with a pattern, values or a length as pattern properties."""
        if "propertyNames" not in schema:
            return
        names = self._resolve(schema["propertyNames"])
        told = set(_dict_of(names)) - _ANNOTATIONS
        if _may_be_text(_dict_of(names)):
            told -= {"type"}
        if names is True or (
            isinstance(names, dict) and (not told or (told == {"minLength"} and not names["minLength"]))
        ):
            del schema["propertyNames"]
            return
        if schema.get("properties") or schema.get("patternProperties"):
            return
        values, pattern = _texts_of(_dict_of(names), told), _pattern_of(_dict_of(names), told)
        if values and not self._has_bases:
            schema["properties"] = dict.fromkeys(values, self._share(schema.get("additionalProperties", True)))
        elif pattern:
            schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        else:
            return
        del schema["propertyNames"]
        schema["additionalProperties"] = False

    def _share(self, value: Any) -> Any:
        """Return a reference to the given schema, which is written only once in `$defs`."""
        if not isinstance(value, dict):
            return value
        taken = _dict_of(_dict_of(self._root).get("$defs")).keys() | self.values.keys()
        name = next(name for i in count(len(self.values)) if (name := f"values-{i}") not in taken)
        self.values[name] = value
        return {"$ref": f"#/$defs/{name}"}


def _texts_of(names: dict[str, Any], told: set[str]) -> list[str]:
    """Return the allowed names, if they are listed one by one."""
    values = names.get("enum") if told == {"enum"} else [names["const"]] if told == {"const"} else None
    texts = [one for one in values if isinstance(one, str)] if isinstance(values, list) else []
    return texts if len(texts) <= _MOST_VALUES else []


def _pattern_of(names: dict[str, Any], told: set[str]) -> str:
    """Return a pattern for the allowed names; "" if a pattern cannot express them."""
    if told == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if told and told <= {"minLength", "maxLength"} and isinstance(least, int) and (most == "" or isinstance(most, int)):
        return f"^[\\s\\S]{{{least},{most}}}$"
    return ""


def _tags_of(schema: Any) -> frozenset[str | int] | None:
    """Return the values of a property that may be one of some texts or whole numbers; None for any other."""
    values = [schema["const"]] if "const" in _dict_of(schema) else _dict_of(schema).get("enum")
    if not isinstance(values, list) or not all(
        isinstance(one, str | int) and not isinstance(one, bool) for one in values
    ):
        return None
    return frozenset(values)


def _may_be_text(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", "string")
    return "string" in kinds if isinstance(kinds, list) else kinds == "string"


def _dict_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
