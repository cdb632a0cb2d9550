"""Answers that must call: what the grammar allows is read as calls whose arguments their schema accepts."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from gpu.config import ModelConfig
from server.api_error import ApiError
from server.bodies.generation_bodies import ChatBody
from server.generation.prompt_tokens import Prompt
from server.generation.tool_use import choose_tools, constrain_answer, make_reader
from server.parsing.answer_formats import choose_format
from server.parsing.answer_parts import join_parts
from server.prompting.plain_chat import read_conversation
from server.text.model_tokenizer import Tokenizer
from server.text.text_pool import TextPool
from tests.server.drawn_answers import Drawer
from tests.server.grammar_texts import allows
from tests.server.live_server import REFERENCE
from tests.server.scripted_model import make_model

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
        "tags": {"type": "array", "items": {"enum": ["}", "é", "</tool_call>"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 4}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
BARE = CALL.replace("arguments", "parameters")


class Service:
    """Hold what constraining and reading need of a service."""

    def __init__(self, source: str, tokenizer: Tokenizer | None = None) -> None:
        self.answer_format = choose_format(ModelConfig(random_weights="x"), source, True, {})
        self.tokenizer = tokenizer or Tokenizer(REFERENCE, REFERENCE)
        self.texts = TextPool(1)


async def hold(service: Any, prompt: str = "", **fields: Any) -> tuple[str, Any]:
    """Return the grammar, and what makes a reader."""
    tree = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "tool_choice": "required"} | fields
    body = msgspec.convert(tree, ChatBody)
    use = choose_tools(body, read_conversation(body))
    given = Prompt([1], "", 0, end=prompt)
    return await constrain_answer(service, body, use, given), make_reader(service, use, given)


async def test_a_call_must_come_in_the_models_own_form() -> None:
    grammar, _ = await hold(Service("<tool_call>"))
    assert allows(grammar, HERMES)
    assert allows(grammar, f"{HERMES}\n{HERMES}")
    clock = HERMES.replace("weather", "clock").replace('{"city": "Rome", "days": 2}', '{"any": [1]}')
    assert allows(grammar, clock)
    for text in ("", "No.", CALL, HERMES.replace("weather", "other"), HERMES.replace("2", "9"), f"{HERMES} so"):
        assert not allows(grammar, text), text


@pytest.mark.parametrize("source", ['{"name": "x", "parameters": {}}', "<|tool_call>", "<arg_key>", "<function="])
async def test_formats_that_no_grammar_writes_call_in_json(source: str) -> None:
    grammar, read = await hold(Service(source))
    assert allows(grammar, BARE)
    assert allows(grammar, f"{BARE}; {BARE}")
    reader = read()
    answer = join_parts([*reader.feed(f"{BARE}; {BARE}", False), *reader.finish()])
    assert [(call.name, call.arguments) for call in answer.calls] == [("weather", '{"city": "Rome", "days": 2}')] * 2
    assert answer.content == ""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("[TOOL_CALLS]", f"[TOOL_CALLS][{CALL}, {CALL}]"),
        ("[ARGS]", '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}' * 2),
    ],
)
async def test_mistrals_formats_are_held_as_they_are(source: str, text: str) -> None:
    grammar, read = await hold(Service(source))
    assert allows(grammar, text)
    assert not allows(grammar, BARE)
    assert not allows(grammar, text.replace("2", "9"))
    reader = read()
    answer = join_parts([*reader.feed(text, False), *reader.finish()])
    assert [(call.name, call.arguments) for call in answer.calls] == [("weather", '{"city": "Rome", "days": 2}')] * 2


async def test_one_call_alone_where_one_is_named_or_none_may_be_beside_it() -> None:
    for fields in ({"tool_choice": NAMED}, {"parallel_tool_calls": False}):
        grammar, read = await hold(Service("<tool_call>"), **fields)
        assert allows(grammar, HERMES)
        assert not allows(grammar, f"{HERMES}\n{HERMES}")
        assert allows(grammar, HERMES.replace("weather", "clock"), is_whole=False) is ("tool_choice" not in fields)
        assert read() is not None


async def test_reasoning_may_come_first_and_must_end_where_the_prompt_began_it() -> None:
    service = Service("<tool_call> </think>")
    grammar, _ = await hold(service)
    assert allows(grammar, HERMES)
    assert allows(grammar, f"<think>\nhm < / </think>\n\n{HERMES}")
    assert not allows(grammar, "<think>\nhm</think>\n\nNo")
    grammar, read = await hold(service, "<|assistant|>\n<think>\n")
    assert allows(grammar, f"hm</think>\n\n{HERMES}")
    assert not allows(grammar, f"hm {HERMES}")
    assert not allows(grammar, HERMES)
    reader = read()
    answer = join_parts([*reader.feed(f"hm</think>\n\n{HERMES}", False), *reader.finish()])
    assert (answer.reasoning, len(answer.calls)) == ("hm", 1)


async def test_nothing_is_held_where_no_call_must_come() -> None:
    for fields in ({"tool_choice": "auto"}, {"tool_choice": None}, {"tools": [], "tool_choice": None}):
        grammar, _ = await hold(Service("<tool_call>"), **fields)
        assert grammar == ""


async def test_arguments_that_cannot_be_kept_are_a_400_that_names_the_keyword() -> None:
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    with pytest.raises(ApiError, match=r"tools\[1\]\.function\.parameters: #/not: ") as refused:
        await hold(Service("<tool_call>"), tools=tools)
    assert refused.value.param == "tools[1].function.parameters"
    await hold(Service("<tool_call>"), tools=tools, tool_choice="auto")
    await hold(Service("<tool_call>"), tools=tools, tool_choice={"type": "function", "function": {"name": "clock"}})


async def test_too_many_schemas_at_once_are_a_400() -> None:
    enums = [{"enum": [f"value {i} of {j}" for i in range(1000)]} for j in range(10)]
    schemas = [{"type": "object", "properties": {"x": enum}} for enum in enums]
    tools = [{"type": "function", "function": {"name": f"f{j}", "parameters": one}} for j, one in enumerate(schemas)]
    with pytest.raises(ApiError) as refused:
        await hold(Service("<tool_call>"), tools=tools)
    assert refused.value.param == "tools"


@pytest.mark.parametrize("source", ["<tool_call></think>", "[TOOL_CALLS][THINK]"])
async def test_whatever_the_grammar_lets_a_model_draw_is_read_as_calls(source: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_model(tmp_path / "m", "", ["[THINK]", "[/THINK]", "[TOOL_CALLS]"]), REFERENCE)
    grammar, read = await hold(Service(source, tokenizer))
    drawer = Drawer(tokenizer, grammar, 5)
    answers = [answer for _ in range(12) if (answer := drawer.read_answer(read(), "")) is not None]
    assert len(answers) > 2
    for answer in answers:
        assert answer.content == ""
        assert answer.calls
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA if call.name == "weather" else {"type": "object"})
