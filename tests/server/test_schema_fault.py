"""A schema that does not compile is told with the place, what stands there and what is wanted."""

import pytest

from scheduler.constraints.grammar import check
from server.api_error import ApiError
from server.grammar.schema_fault import FORMATS, TYPES
from server.grammar.structured import schema_grammar

ONE = "a schema: an object, true or false"
KINDS = f"one of {', '.join(TYPES)}, or a list of them"
NOT_KEPT = "it cannot be enforced while tokens are generated; leave it out of the schema, or check it yourself"
PATTERN = "wanted a regular expression that can be kept token by token"


def of(name: str, schema: object) -> dict[str, object]:
    return {"type": "object", "properties": {"sound": {"type": "string"}, name: schema}}


FAULTS = [
    (of("a", {"type": "strng"}), f'#/properties/a/type: got "strng", wanted {KINDS}'),
    ({"type": ["string", 3]}, f'#/type: got ["string", 3], wanted {KINDS}'),
    ({"type": []}, f"#/type: got [], wanted {KINDS}"),
    (of("a", 3), f"#/properties/a: got 3, wanted {ONE}"),
    ({"anyOf": [{"items": "any", "type": "array"}]}, f'#/anyOf/0/items: got "any", wanted {ONE}'),
    ({"items": [{"type": "null"}, 3], "type": "array"}, f"#/items/1: got 3, wanted {ONE}"),
    ({"additionalProperties": "no", "type": "object"}, f'#/additionalProperties: got "no", wanted {ONE}'),
    ({"properties": []}, "#/properties: got [], wanted an object whose values are schemas"),
    ({"required": "a"}, '#/required: got "a", wanted a list of names'),
    ({"required": [3]}, "#/required: got [3], wanted a list of names"),
    ({"enum": []}, "#/enum: got [], wanted a list of at least one value"),
    ({"anyOf": []}, "#/anyOf: got [], wanted a list of at least one schema"),
    ({"allOf": 3}, "#/allOf: got 3, wanted a list of schemas"),
    ({"minLength": "3"}, '#/minLength: got "3", wanted a whole number from 0, written without a point'),
    ({"maxItems": 2.5}, "#/maxItems: got 2.5, wanted a whole number from 0, written without a point"),
    ({"minimum": "a"}, '#/minimum: got "a", wanted a number'),
    ({"multipleOf": 0}, "#/multipleOf: got 0, wanted a number above 0"),
    ({"pattern": 3}, "#/pattern: got 3, wanted a string"),
    (of("a", {"pattern": "("}), f'#/properties/a/pattern: got "(", {PATTERN}: unclosed group'),
    ({"patternProperties": {"(": {}}}, f'#/patternProperties: got "(", {PATTERN}: unclosed group'),
    ({"items": {"$ref": "#/nope"}}, '#/items/$ref: got "#/nope", wanted a place in this schema'),
    ({"$ref": "#nope"}, '#/$ref: got "#nope", wanted a place in this schema'),
    ({"$schema": "foo"}, '#/$schema: got "foo", wanted a draft\'s, or none'),
    (of("a", {"uniqueItems": True}), f"#/properties/a/uniqueItems: {NOT_KEPT}"),
    (of("a\n", {"not": {"minLength": 2}}), f"#/properties/a\\n/not: {NOT_KEPT}"),
    ({"anyOf": [{"not": {"type": "null"}}, {"not": {"const": 3}}]}, f"not: {NOT_KEPT}"),
    ({"not": {}}, "#/not: no value satisfies this schema"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "#/$ref: no value satisfies this schema"),
    (
        {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
        "no value satisfies this schema: required property 'a' is unsatisfiable",
    ),
    (
        of("a", {"pattern": r"\d(?=\d)"}),
        rf'#/properties/a/pattern: got "\\d(?=\\d)", {PATTERN}: look-around, '
        "including look-ahead and look-behind, is not supported",
    ),
    (of("a", {"propertyNames": {"pattern": "^a", "maxLength": 3}}), f"#/properties/a/propertyNames: {NOT_KEPT}"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "it allows no token"),
]


@pytest.mark.parametrize(("schema", "told"), FAULTS)
def test_a_fault_is_told_with_its_place_what_stands_there_and_what_is_wanted(schema: object, told: str) -> None:
    with pytest.raises(ApiError) as caught:
        schema_grammar("text.format.schema", schema)
    assert caught.value.param == "text.format.schema"
    assert caught.value.message == f"text.format.schema: {told}"


def test_formats_that_are_named_as_kept_are_and_another_is_told_with_them() -> None:
    for name in FORMATS:
        assert check(schema_grammar("x", {"type": "string", "format": name})) == ""
    with pytest.raises(ApiError, match=rf'^x: #/items/format: got "iri", wanted one of {", ".join(FORMATS)}; leave'):
        schema_grammar("x", {"type": "array", "items": {"type": "string", "format": "iri"}})


def test_of_several_patterns_the_bad_one_is_named() -> None:
    schema = of("a", {"pattern": "(?=ab)c"}) | {"patternProperties": {"^x": {"pattern": "a"}}}
    with pytest.raises(ApiError, match=r"^x: #/properties/a/pattern: got .*: look-around, .* is not supported$"):
        schema_grammar("x", schema)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ApiError, match=r"^x: #/required: got \"y{79}\.\.\., wanted a list of names$"):
        schema_grammar("x", {"required": "y" * 1000})


@pytest.mark.parametrize("schema", [{"x-own": {"type": 3}}, {"properties": {"type": {}, "enum": {}}}, {"allOf": []},
                                    {"enum": [{"type": 3}]}, {"$defs": {"unused": {"type": 3}}}])  # fmt: skip
def test_what_compiles_is_not_looked_into(schema: object) -> None:
    assert check(schema_grammar("x", schema)) == ""
