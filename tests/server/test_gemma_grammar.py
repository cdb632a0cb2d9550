"""Strict tools in Gemma's form of calls: what their schema allows may be written, and nothing else."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from server.api_error import ApiError
from server.parsing.answer_parts import join_parts
from server.text.model_tokenizer import Tokenizer
from tests.server.drawn_answers import Drawer
from tests.server.grammar_texts import allows
from tests.server.live_server import REFERENCE
from tests.server.scripted_model import make_model
from tests.server.test_held_calls import Service, hold

MARKS = {
    "<|tool_call>": ("<|tool_call>", '<|"|>', "<tool_call|>"),
    "<start_function_call>": ("<start_function_call>", "<escape>", "<end_function_call>"),
}
PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "inside": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}},
    "required": ["name", "inside"],
    "additionalProperties": False,
}
TEXT, NUMBER = {"type": "string"}, {"type": "number"}


def schema_of(value: Any, is_required: bool = True) -> dict[str, Any]:
    required = ["a"] if is_required else []
    return {"type": "object", "properties": {"a": value}, "required": required, "$defs": {"place": PLACE}}


def properties(required: list[str], **of: Any) -> dict[str, Any]:
    return {"type": "object", "properties": of, "required": required, "additionalProperties": False}


# A schema, arguments that it allows, and ones that it does not.
SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [
    (schema_of(TEXT), [{"a": ""}, {"a": 'é "}{,:\n'}], [{}, {"a": 5}, {"b": "x"}, {"a": "x", "b": "y"}, {"a": None}]),
    (schema_of(TEXT, is_required=False), [{}, {"a": "x"}], [{"a": 5}]),
    (schema_of({"type": "integer", "maximum": 5}), [{"a": 5}, {"a": -1}], [{"a": 6}, {"a": 1.5}, {"a": "5"}]),
    (schema_of({"type": ["number", "null"]}), [{"a": 1.5}, {"a": None}], [{"a": True}, {"a": "x"}]),
    (schema_of({"type": "boolean"}), [{"a": True}, {"a": False}], [{"a": 1}, {"a": "true"}]),
    (schema_of({"enum": ["x", 5, None, ["y"], {"z": 1}]}), [{"a": "x"}, {"a": 5}, {"a": None}, {"a": ["y"]},
        {"a": {"z": 1}}], [{"a": "y"}, {"a": 6}, {"a": []}]),
    (schema_of({"const": "x"}), [{"a": "x"}], [{"a": "xy"}]),
    (schema_of({"type": "array", "items": TEXT}), [{"a": []}, {"a": ["x"]}, {"a": ["x", "y", "z"]}], [{"a": [5]}]),
    (schema_of({"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3}), [{"a": [1, 2]}, {"a": [1, 2, 3]}],
        [{"a": []}, {"a": [1]}, {"a": [1, 2, 3, 4]}]),
    (schema_of({"type": "array", "items": NUMBER, "maxItems": 0}), [{"a": []}], [{"a": [1]}]),
    (schema_of({"anyOf": [TEXT, {"type": "array", "items": NUMBER}]}), [{"a": "x"}, {"a": [1]}], [{"a": 1}]),
    (schema_of({"allOf": [{"$ref": "#/$defs/place"}]}), [{"a": {"inside": None, "name": "x"}}], [{"a": {"name": "x"}}]),
    (schema_of({"$ref": "#/$defs/place"}),
        [{"a": {"inside": {"inside": None, "name": "y"}, "name": "x"}}], [{"a": {"inside": {}, "name": "x"}}]),
    (schema_of({"type": "object", "additionalProperties": NUMBER}), [{"a": {}}, {"a": {"x": 1, "y-2": 2}}],
        [{"a": {"x": "1"}}]),
    (schema_of({}), [{"a": "x"}, {"a": 5}, {"a": [{"b": [None, True, "x"]}, {}]}], [{}]),
    (schema_of({"properties": {"b": NUMBER}}), [{"a": {"b": 1}}, {"a": {}}], [{"a": {"b": "x"}}]),
    (properties([], b=NUMBER, A=NUMBER, c=NUMBER),
        [{}, {"A": 1}, {"b": 2}, {"c": 3}, {"A": 1, "c": 3}, {"A": 1, "b": 2, "c": 3}],
        [{"b": 2, "A": 1}, {"A": 1, "A ": 1}, {"d": 1}]),
    (properties(["b"], A=NUMBER, b=NUMBER, c=NUMBER), [{"b": 2}, {"A": 1, "b": 2}, {"b": 2, "c": 3}], [{"A": 1}, {}]),
    ({"properties": {"b": NUMBER}, "required": ["b", "not said"]}, [{"b": 2, "not said": ["x"]}], [{"b": 2}]),
    (properties([]), [{}], [{"a": 1}]),
]  # fmt: skip


def write(value: Any, mark: str) -> str:
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, list):
        return "[" + ",".join(write(item, mark) for item in value) + "]"
    if isinstance(value, dict):
        keys = (json.dumps(key) if " " in key else key for key in value)
        return (
            "{" + ",".join(f"{key}:{write(item, mark)}" for key, item in zip(keys, value.values(), strict=True)) + "}"
        )
    return json.dumps(value)


def tool(schema: Any, **of: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True} | of}]


@pytest.mark.parametrize("source", MARKS)
async def test_arguments_are_what_the_schema_allows_and_are_read_as_that(source: str) -> None:
    begin, mark, end = MARKS[source]
    service = Service(source)
    for schema, good, bad in SCHEMAS:
        grammar, make_reader = await hold(service, tools=tool(schema), tool_choice="auto")
        for given in good:
            text = f"{begin}call:f{write(given, mark)}{end}"
            assert allows(grammar, f"So: {text}{text} well"), (schema, text)
            reader = make_reader()
            answer = join_parts([*reader.feed(text, False), *reader.finish()])
            assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("f", given)]
        for given in bad:
            text = f"{begin}call:f{write(given, mark)}{end}"
            assert not allows(grammar, text, is_whole=False), (schema, text)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"allOf": [{"type": "object"}, {"properties": {"x": NUMBER}}]}, "#/properties/a/allOf"),
        ({"type": "array", "prefixItems": [NUMBER]}, "#/properties/a/prefixItems"),
        ({"type": "object", "patternProperties": {"^x": NUMBER}}, "#/properties/a/patternProperties"),
        ({"type": "array", "items": {"anyOf": [NUMBER], "minimum": 5}}, "#/properties/a/items/anyOf"),
        ({"type": "object", "properties": {"b": {"type": "object", "minProperties": 1}}},
            "#/properties/a/properties/b/minProperties"),
    ],
)  # fmt: skip
async def test_a_schema_that_the_form_cannot_be_held_to_is_a_400_that_names_the_place(value: Any, place: str) -> None:
    for fields in ({}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(ApiError) as refused:
            await hold(Service("<|tool_call>"), tools=tool(schema_of(value)), tool_choice="auto", **fields)
        assert refused.value.message.startswith(
            f"tools[0].function.parameters: {place}: it cannot be kept in this model's"
        )
        assert (refused.value.param, refused.value.code) == ("tools[0].function.parameters", "unsupported_grammar")
    await hold(Service("<|tool_call>"), tools=tool(schema_of(value), strict=False), tool_choice="auto")
    await hold(Service("<|tool_call>"), tools=tool(schema_of(value)), tool_choice="required")


async def test_a_reference_that_leads_nowhere_but_to_itself_is_a_400() -> None:
    schema = schema_of({"$ref": "#/$defs/loop"}) | {"$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    with pytest.raises(ApiError, match="tools"):
        await hold(Service("<|tool_call>"), tools=tool(schema), tool_choice="auto")


async def test_tools_that_are_not_strict_have_any_arguments_beside_one_that_is() -> None:
    tools = [*tool(schema_of(NUMBER)), *tool(schema_of(NUMBER), name="g", strict=False)]
    for fields in ({}, {"response_format": {"type": "json_object"}}):
        grammar, _ = await hold(Service("<|tool_call>"), tools=tools, tool_choice="auto", **fields)
        assert allows(grammar, '<|tool_call>call:g{a:<|"|>x<|"|>}<tool_call|>')
        assert not allows(grammar, '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>', is_whole=False)
        assert allows(grammar, "<|tool_call>call:f{a:1}<tool_call|>")


@pytest.mark.parametrize("special", [[], ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"]])
async def test_whatever_is_drawn_is_read_as_calls_that_are_valid(special: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_model(tmp_path / "m", "", special), REFERENCE)
    fields = {"x": {"type": "integer", "maximum": 9}, "kinds": {"type": "array", "items": {"enum": ["é", "b"]}}}
    schema = properties(["x", "kinds"], **fields, note=TEXT)
    service = Service("<|tool_call><|channel>", tokenizer)
    grammar, make_reader = await hold(service, tools=tool(schema), tool_choice="auto")
    drawer = Drawer(tokenizer, grammar, 3)
    drawn = [drawer.read_answer(make_reader(), "") for _ in range(4)]
    for _ in range(12):
        drawn.append(read_begun(drawer, tokenizer, make_reader))
    answers = [answer for answer in drawn if answer is not None]
    assert any(answer.calls for answer in answers)
    for call in (call for answer in answers for call in answer.calls):
        jsonschema.validate(json.loads(call.arguments), schema)


def read_begun(drawer: Drawer, tokenizer: Tokenizer, make_reader: Any) -> Any:
    reader = make_reader()
    return drawer.read_answer(reader, "Words.\n<|tool_call>call:f{")
