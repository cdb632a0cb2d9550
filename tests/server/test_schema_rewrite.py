"""Schemas as zod 4, zod 3 with zod-to-json-schema, and pydantic write them are held; what they do not allow is not."""

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, create_model

from scheduler.constraints import grammar
from server.api_error import ApiError
from server.grammar import structured
from server.grammar.schema_formats import OWN_FORMATS, PATTERNS
from server.grammar.schema_rewrite import rewrite_schema
from server.grammar.structured import schema_grammar, schema_in_lark
from tests.server.grammar_texts import allows

INTEGER = {"type": "integer"}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "check_in_process", lambda written, _: grammar.check(written))


def allowed(schema: Any, *texts: str) -> list[str]:
    held = schema_grammar("x", schema)
    return [text for text in texts if allows(held, text)]


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def record(names: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": INTEGER} | others


@pytest.mark.parametrize(
    "names",
    [
        True,
        {},
        {"type": "string"},
        {"type": ["string", "null"]},
        {"type": "string", "description": "who", "title": "Key", "examples": ["a"]},
        {"type": "string", "minLength": 0},
        {"$ref": "#/$defs/any"},
    ],
)
def test_names_of_properties_that_may_be_any_are_passed_over(names: Any) -> None:
    defs = {"$defs": {"any": {"type": "string", "title": "Any"}}, "type": "object"}
    schema = defs | {"properties": {"m": record(names), "propertyNames": {}}}
    plain = defs | {"properties": {"m": {"type": "object", "additionalProperties": INTEGER}, "propertyNames": {}}}
    assert schema_grammar("f", schema) == schema_grammar("f", plain)
    assert schema_in_lark("f", schema) == schema_in_lark("f", plain)


@pytest.mark.parametrize(
    ("names", "kept", "refused"),
    [
        (
            {"type": "string", "enum": ["a", "b.c"]},
            ["{}", '{"a": 1}', '{"a": 1, "b.c": 2}'],
            ['{"c": 1}', '{"bxc": 1}'],
        ),
        ({"const": 'q"\n'}, ['{"q\\"\\n": 1}'], ['{"q": 1}']),
        ({"$ref": "#/$defs/colour"}, ['{"red": 1}'], ['{"blue": 1}']),
        ({"type": "string", "pattern": "^a"}, ['{"ab": 1}'], ['{"ba": 1}', '{"ab": "x"}']),
        ({"minLength": 2}, ['{"ab": 1}', '{"a\\nb": 1}'], ['{"a": 1}']),
        ({"minLength": 1, "maxLength": 2}, ['{"ab": 1}'], ['{"abc": 1}', '{"": 1}']),
        ({"type": "string", "format": "cuid2"}, ['{"a1": 1}'], ['{"A": 1}']),
    ],
)
def test_a_record_whose_names_are_values_a_pattern_or_of_a_length_is_held(
    names: Any, kept: list[str], refused: list[str]
) -> None:
    schema = record(names) | {"$defs": {"colour": {"enum": ["red", "green"], "title": "Colour"}}}
    assert allowed(schema, *kept, *refused) == kept


def test_a_record_that_must_have_all_names_has_them_and_ends() -> None:
    schema = record({"type": "string", "enum": ["a", "b"]}, required=["a", "b"])
    assert allowed(schema, '{"a": 1, "b": 2}', '{"a": 1}', '{"a": 1, "b": 2, "c": 3}') == ['{"a": 1, "b": 2}']
    assert not allows(schema_grammar("x", schema), '{"a": 1, "b": 2,', is_whole=False)


def test_records_of_records_do_not_grow_with_their_names() -> None:
    names = {"enum": [f"n{i}" for i in range(30)]}
    schema: dict[str, Any] = INTEGER
    for _ in range(12):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    schema["$defs"] = {"values-0": {"type": "null"}}
    schema["properties"] = {}
    text = '{"n0": ' * 12 + "1" + "}" * 12
    assert allowed(schema, text, text.replace("1", "null")) == [text]


def test_names_of_a_record_below_another_base_are_refused_by_name() -> None:
    schema = {"type": "object", "properties": {"a": record({"enum": ["a"]}) | {"$id": "https://a.b/c"}}}
    with pytest.raises(ApiError, match=r"^x: #/properties/a/propertyNames: it cannot be enforced"):
        schema_grammar("x", schema)


@pytest.mark.parametrize(
    "names",
    [
        {"pattern": "^a", "minLength": 2},
        {"format": "uuid"},
        {"anyOf": [{"const": "a"}, {"const": "b"}]},
        {"not": {"const": "a"}},
        {"enum": [3]},
        {"type": "integer"},
        False,
    ],
)
def test_names_that_no_pattern_says_are_refused_by_name(names: Any) -> None:
    with pytest.raises(
        ApiError, match=r"^x: #/propertyNames(, #/propertyNames/not)?: it cannot be enforced while tokens are generated"
    ):
        schema_grammar("x", record(names))


NEVER = [
    {"not": {}},
    {"not": True},
    {"title": "Never", "not": {"description": "any"}},
    {"$ref": "#/$defs/never"},
    False,
]


@pytest.mark.parametrize("never", NEVER)
def test_what_nothing_is_valid_by_is_left_out_wherever_it_stands(never: Any) -> None:
    def held(schema: dict[str, Any], *texts: str) -> list[str]:
        return allowed(schema | {"$defs": {"never": {"not": {}}}}, *texts)

    optional = {"type": "object", "properties": {"a": never, "b": INTEGER}, "required": ["b"]}
    assert held(optional, '{"b": 1}', '{"a": 1, "b": 1}', '{"b": 1, "a": 1}') == ['{"b": 1}']
    assert held(closed(b=INTEGER) | {"additionalProperties": never}, '{"b": 1}', '{"b": 1, "c": 1}') == ['{"b": 1}']
    assert held({"type": "array", "items": never}, "[]", "[1]") == ["[]"]
    for union in ("anyOf", "oneOf"):
        assert held({union: [{"type": "null"}, never]}, "null", "1") == ["null"]
    assert held({"type": "object", "patternProperties": {"^a": never}}, '{"b": 1}', '{"a": 1}') == ['{"b": 1}']
    assert held(INTEGER | {"not": never}, "1", '"a"') == ["1"]


@pytest.mark.parametrize("never", NEVER)
def test_what_must_be_there_and_cannot_be_valid_is_refused(never: Any) -> None:
    with pytest.raises(ApiError, match=r"^x: no value satisfies this schema: required property 'a' is unsatisfiable"):
        schema_grammar("x", closed(a=never) | {"$defs": {"never": {"not": {}}}})


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
TEXTS = {
    "base64": (["", "aGk=", "aGVsbG8h"], ["aGk", "a===", "a-b_"]),
    "base64url": (["", "aGk", "a-b_"], ["aGk=", "a"]),
    "cuid": (["cjld2cjxh0000qzrmn831i7rn"], ["xjld2cjxh", "cab"]),
    "cuid2": (["tz4a98xxat96iws9zmbrgj3a"], ["", "A1", "a-b"]),
    "e164": (["+14155552671"], ["14155552671", "+04155552671", "+1234567890123456"]),
    "hex": (["", "09afAF"], ["g"]),
    "jwt": ([JWT, JWT.rpartition(".")[0] + "."], ["a.b.c", JWT.rpartition(".")[0], JWT + ".a"]),
    "ksuid": (["0ujtsYcgvSTl8PAuAdqWYSMnLOv"], ["0ujtsYcgvSTl8PAuAdqWYSMnLO"]),
    "lowercase": (["", "a1 é"], ["aB"]),
    "nanoid": (["V1StGXR8_Z5jdHi6B-myT"], ["V1StGXR8_Z5jdHi6B-my"]),
    "ulid": (["01ARZ3NDEKTSV4RRFFQ69G5FAV"], ["81ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEK"]),
    "uppercase": (["", "A1"], ["Ab"]),
    "xid": (["9m4e2mr0ui3e8a215n4g"], ["9m4e2mr0ui3e8a215n4z"]),
    "uri-reference": (
        ["", "#top", "?q=1", "/a/b", "a/b.html", "../up", "//host:80/x", "https://a.b/c?d#e", "mailto:a@b.c", "%41"],
        ["a b", "\\\\", "1:2", "%4", "http://[", "a#b#c"],
    ),
}


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_a_format_that_a_pattern_says_is_held(name: str) -> None:
    kept, refused = TEXTS[name]
    texts = [f'"{text}"' for text in (*kept, *refused)]
    assert allowed({"type": "string", "format": name}, *texts) == [f'"{text}"' for text in kept]


def test_a_pattern_beside_a_format_is_held_too_and_the_same_one_once() -> None:
    both = {"type": "string", "format": "cuid2", "pattern": "^a"}
    assert allowed(both, '"ab"', '"b"', '"aB"') == ['"ab"']
    for name, pattern in PATTERNS.items():
        assert rewrite_schema({"format": name, "pattern": pattern}) == {"pattern": pattern}


@pytest.mark.parametrize("encoding", ["base64", "base64url"])
def test_an_encoding_is_held_as_the_format_of_its_name(encoding: str) -> None:
    schema = {"type": "string", "contentEncoding": encoding}
    both = schema | {"format": encoding, "pattern": PATTERNS[encoding]}  # as zod writes it
    for one in (schema, both):
        assert allowed(one, '"aGVsbG8h"', '"a"') == ['"aGVsbG8h"']
        assert rewrite_schema(one).get("allOf") is None


ZOD_TEXTS = [
    ({"format": "starts_with", "pattern": "^ab\\.c.*"}, ["ab.c", "ab.cd"], ["abxc", "xab.c"]),
    ({"format": "ends_with", "pattern": ".*\\.a$"}, [".a", "x.a"], ["x.ab", "xa"]),
    ({"format": "includes", "pattern": "b\\."}, ["b.", "xb.y"], ["bx"]),
    ({"format": "includes", "pattern": "^.{3,}b"}, ["xyzb", "xyzzby"], ["xb"]),
    (
        {"format": "includes", "allOf": [{"pattern": "^a.*"}, {"pattern": ".*z$"}, {"pattern": "m"}]},
        ["amz", "a-m-z"],
        ["az", "mz", "am"],
    ),
    ({"minLength": 3, "maxLength": 5, "format": "starts_with", "pattern": "^a.*"}, ["abc"], ["ab", "abcdef", "xbc"]),
    ({"pattern": "^a\\.b"}, ["a.bc"], ["axb"]),  # zod 3
    ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["ab", "a-b"], ["a", "b"]),
]


@pytest.mark.parametrize(("schema", "kept", "refused"), ZOD_TEXTS)
def test_how_a_text_begins_ends_and_what_it_includes_is_held(schema: Any, kept: list[str], refused: list[str]) -> None:
    texts = [f'"{text}"' for text in (*kept, *refused)]
    assert allowed({"type": "string"} | schema, *texts) == [f'"{text}"' for text in kept]


@pytest.mark.parametrize("name", ["starts_with", "ends_with", "includes", "iri", "binary"])
def test_a_format_that_no_pattern_says_is_refused_by_name(name: str) -> None:
    with pytest.raises(ApiError, match=rf'^x: #/format: got "{name}", wanted one of '):
        schema_grammar("x", {"type": "string", "format": name})
    if name in ("iri", "binary"):
        with pytest.raises(ApiError, match=rf'^x: #/format: got "{name}", wanted one of '):
            schema_grammar("x", {"type": "string", "format": name, "pattern": "^a"})


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog", "wolf"] = "dog"
    name: str


class Box(BaseModel):
    kind: Literal["box"] = "box"
    inside: "list[Thing]" = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Thing = Annotated[Pet | Box, Field(discriminator="kind")]
Box.model_rebuild()


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("kind", [Pet, Thing, list[Pet], dict[str, Thing]])
@pytest.mark.parametrize("default", [..., None])
def test_a_union_that_is_told_apart_by_a_tag_with_a_default_is_held(mode: Any, kind: Any, default: Any) -> None:
    model = create_model("Model", it=(kind, default))
    schema = model.model_json_schema(mode=mode)
    held = schema_grammar("x", schema)
    for pet in ('{"kind": "cat"}', '{"kind": "cat", "lives": 3}', '{"kind": "wolf", "name": "x"}'):
        it = {list[Pet]: f"[{pet}]", dict[str, Thing]: f'{{"a": {pet}}}'}.get(kind, pet)
        text = f'{{"it": {it}}}'
        assert allows(held, text)
        model.model_validate_json(text)
    for it in ('{"lives": 3}', '{"kind": "cow"}'):
        assert not allows(held, f'{{"it": {it}}}')


def test_a_tag_in_a_union_of_unions_and_in_itself_is_held() -> None:
    model = create_model("Model", it=(Thing, Cat()))
    text = '{"it": {"kind": "box", "inside": [{"kind": "box", "inside": []}, {"kind": "dog", "name": "x"}]}}'
    assert allowed(model.model_json_schema(), text) == [text]
    model.model_validate_json(text)


def cat(**others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"t": {"const": "cat", "default": "cat"}, "x": INTEGER}} | others


def cow(tag: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"t": tag, "x": INTEGER}}


def test_a_tag_needs_no_discriminator_to_be_found() -> None:
    """As zod writes what goes in, where tags have defaults."""
    schema = {"default": {"t": "cat"}, "oneOf": [cat(), cow({"enum": ["cow", "ox"], "default": "cow"})]}
    assert allowed(schema, '{"t": "ox", "x": 1}', '{"t": "cat"}', '{"x": 1}') == ['{"t": "ox", "x": 1}', '{"t": "cat"}']


@pytest.mark.parametrize(
    "branches",
    [
        [cat(), cow({"enum": ["cow", "cat"]})],
        [cat(), cow({"type": "string"})],
        [cat(), cow({"const": 1.5})],
        [cat(), {"properties": {"t": {"const": "cow"}}}],  # what is no object is valid by it
        [cat(), cat()],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cat"}],
        [{"$ref": "#/x-cat"}, {"$ref": "#/$defs/cow"}],  # where no schema stands
        [cat(), {"$ref": "#/$defs/loop"}],
        [],
    ],
)
def test_alternatives_that_no_tag_tells_apart_stay_as_they_are(branches: list[Any]) -> None:
    loop = {"oneOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/cow"}]}
    defs = {"cat": cat(), "cow": cow({"const": "cow"}), "loop": loop}
    schema = {"oneOf": branches, "$defs": defs, "x-cat": cat()}
    assert rewrite_schema(schema)["oneOf"] == branches


def test_references_below_another_base_are_not_followed() -> None:
    inner = {"$id": "https://a.b/c", "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cow"}]}
    schema = {"properties": {"a": inner}, "$defs": {"cat": cat(), "cow": cow({"const": "cow"})}}
    assert rewrite_schema(schema) == schema


def test_many_unions_that_share_their_branches_are_looked_through_once() -> None:
    defs: dict[str, Any] = {"d40": cat()}
    for i in range(40):
        defs[f"d{i}"] = {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
    defs |= {f"e{i}": {"oneOf": [{"$ref": f"#/$defs/e{i + 1}"}, cow({"const": i})]} for i in range(3000)}
    schema = {"oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/e0"}], "$defs": defs}
    assert rewrite_schema(schema)["oneOf"] == schema["oneOf"]


def test_what_no_rule_knows_is_not_changed() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"not": {}}}, "propertyNames": {"enum": [{"format": "jwt"}]}},
        "default": {"propertyNames": {}},
        "x-own": {"not": {}},
        "oneOf": [{"required": ["not"]}, {"required": ["propertyNames"]}],
    }
    assert rewrite_schema(schema) == schema


def test_patterns_are_valid_by_another_engine() -> None:
    for name, (kept, refused) in TEXTS.items():
        if name in PATTERNS:
            assert all(re.search(PATTERNS[name], text) for text in kept)
            assert not any(re.search(PATTERNS[name], text) for text in refused)
