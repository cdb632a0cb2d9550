"""Answers in a form, behind reasoning and beside tools: calls in the model's own form, or what was asked for."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from gpu.config import ModelConfig
from scheduler.constraints.constraints import read_tokens
from server.api_error import ApiError
from server.parsing.answer_formats import choose_format
from server.parsing.answer_parts import ReadAnswer, join_parts
from server.text.model_tokenizer import Tokenizer
from tests.server.drawn_answers import Drawer, allowed_ids
from tests.server.grammar_texts import allows
from tests.server.live_server import REFERENCE
from tests.server.scripted_model import make_model
from tests.server.test_held_calls import SCHEMA, TOOLS, Service, hold

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 200}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
IN_TAGS = SCHEMA | {"$defs": {"city": {"type": "string"}}}  # texts between tags are as long as they like
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
ADA = '{"name": "Ada", "age": 36}'
HARMONY = "<|channel|>"
ATEM = "<atem:invoke"
# The sign of each template, and a call in its form.
CALLS = {
    "<tool_call>": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
    '{"name": "x", "parameters": {}}': '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}',
    "<function=": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    HARMONY: '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": 2}',
    ATEM: ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">Rome</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "[ARGS]": '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}',
    "<arg_key>": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "<|tool_call>": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    "<start_function_call>": "<start_function_call>call:weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
}
BETWEEN = {
    '{"name": "x", "parameters": {}}': "; ",
    "[ARGS]": "",
    HARMONY: "<|call|><|start|>assistant",
    ATEM: "<|eom|><|start|>assistant",
    "<|tool_call>": "",
    "<start_function_call>": "",
}
BEFORE_CONTENT = {HARMONY: "<|channel|>final<|message|>", ATEM: " to=user<|message|>"}


def read(reader: Any, text: str) -> ReadAnswer:
    return join_parts([*reader.feed(text, False), *reader.finish()])


async def hold_form(service: Any, prompt: str = "", **fields: Any) -> tuple[str, Any]:
    """May call, or is a person."""
    return await hold(service, prompt, **({"tool_choice": "auto", "response_format": FORM} | fields))


@pytest.mark.parametrize("source", CALLS)
async def test_beside_tools_an_answer_is_calls_or_has_the_form(source: str) -> None:
    grammar, make_reader = await hold_form(Service(source))
    call = CALLS[source]
    calls, ada = call + BETWEEN.get(source, "\n") + call, BEFORE_CONTENT.get(source, "") + ADA
    for text in (ada, call, calls):
        assert allows(grammar, text), text
    for text in ("No", ada + "\n", f"{ada}{call}", f"{call}{ada}", call.replace("weather", "other")):
        assert not allows(grammar, text, is_whole=False), text
    assert read(make_reader(), ada).content == ADA
    answer = read(make_reader(), calls)
    assert answer.content == ""
    expected = [("weather", {"city": "Rome", "days": 2})] * 2
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == expected


async def test_channels_stand_behind_reasoning_as_the_model_writes_them() -> None:
    """Content in a form, or a call, each in a message of its own; calls within free content are not held."""
    grammar, make_reader = await hold_form(Service(HARMONY))
    reasoning = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    written = json.loads(grammar)["grammars"][0]["lark_grammar"]
    assert (
        'start: ("<|channel|>analysis<|message|>" thought WS)? (calls | "<|channel|>final<|message|>" @form)' in written
    )
    assert '<[5]> "<|start|>assistant"' in written, "where <|end|> is a special token, reasoning ends at that"
    form, call = f"{reasoning}{BEFORE_CONTENT[HARMONY]}{ADA}", f"{reasoning}{CALLS[HARMONY]}"
    found = [read(make_reader(), text) for text in (form, call)]
    assert [(one.reasoning, one.content, len(one.calls)) for one in found] == [("hm", ADA, 0), ("hm", "", 1)]
    grammar, _ = await hold(Service(HARMONY), tools=strict("clock"), tool_choice="auto")
    assert grammar == ""


async def test_a_strict_call_in_a_channel_is_held_to_its_schema(tmp_path: Path) -> None:
    """Where Harmony's marks are special tokens, as in gpt-oss; other messages, and answers without a call, are free."""
    marks = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>"]
    tokenizer = Tokenizer(make_model(tmp_path / "m", "", marks), REFERENCE)
    service = Service(HARMONY, tokenizer)
    (ends,) = tokenizer.encode("<|return|>", False)  # <|end|>, of every message, ends no answer there
    vocabulary = LLTokenizer(tokenizer.vocabulary.to_str(), n_vocab=8192 + len(marks), eos_token=[ends])
    call, hm = CALLS[HARMONY], "<|channel|>analysis<|message|>hm 9<|end|><|start|>assistant"
    begun = "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant"
    clock = call.replace("weather", "clock").replace('{"city": "Rome", "days": 2}', '{"any": [1]}')
    final = "<|channel|>final<|message|>Well, {it} is."

    def may(grammar: str, text: str, is_whole: bool = True) -> bool:
        ids = tokenizer.encode(text, False)
        matcher = LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids) == len(ids) and (not is_whole or matcher.is_accepting())

    grammar, make_reader = await hold(service, tools=strict("clock"), tool_choice="auto")
    for text in (call, clock, hm + call, hm + begun + call, hm + final, final, begun + hm + clock):
        assert may(grammar, text), text
    for wrong in (call.replace("2", "9"), call.replace("days", "years"), call.replace("weather", "wether")):
        assert not may(grammar, hm + wrong, is_whole=False), wrong
    assert not may(grammar, (hm + call)[:-3]), "a call that begins must end"
    answer = read(make_reader(), hm + begun + call)
    assert answer.reasoning == "hm 9"
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [("weather", {"city": "Rome", "days": 2})]
    grammar, _ = await hold(service, "<|channel|>analysis<|message|>", tools=strict(), tool_choice="auto")
    for text in ("hm", f"hm<|end|><|start|>assistant{call}", f"hm<|end|><|start|>assistant{final}"):
        assert may(grammar, text), text
    assert not may(grammar, f"hm<|end|><|start|>assistant{call.replace('2', '9')}", is_whole=False)
    must, _ = await hold(service, tools=TOOLS, tool_choice="required")
    assert may(must, hm + call)
    assert not may(must, hm + final, is_whole=False)


async def test_a_strict_call_to_a_recipient_is_held_to_its_schema(tmp_path: Path) -> None:
    """Where a message's marks are special tokens, as in a Muse Glimmer; what is said to itself and the user is free."""
    tokenizer = Tokenizer(make_model(tmp_path / "m", "", ["<|message|>", "<|start|>", "<|eom|>", "<|eot|>"]), REFERENCE)
    service = Service(f"{ATEM} to=self", tokenizer)
    (ends,) = tokenizer.encode("<|eot|>", False)
    vocabulary = LLTokenizer(tokenizer.vocabulary.to_str(), n_vocab=8192 + 4, eos_token=[ends])
    call, hm = CALLS[ATEM], " to=self<|message|>hm to=you 9<|eom|><|start|>assistant"
    final = " to=user<|message|>Well, <atem: it is."

    def may(grammar: str, text: str, is_whole: bool = True) -> bool:
        ids = tokenizer.encode(text, False)
        matcher = LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids) == len(ids) and (not is_whole or matcher.is_accepting())

    grammar, make_reader = await hold(service, tools=strict("clock"), tool_choice="auto")
    for text in (call, hm + call, hm + call + BETWEEN[ATEM] + call, hm + final, final, hm + hm + final):
        assert may(grammar, text), text
    for wrong in (call.replace("2", "9"), call.replace("days", "years"), call.replace("weather", "wether")):
        assert not may(grammar, hm + wrong, is_whole=False), wrong
    assert not may(grammar, (hm + call)[:-3]), "a call that begins must end"
    answer = read(make_reader(), hm + call + BETWEEN[ATEM] + call)
    assert (answer.reasoning, answer.content) == ("hm to=you 9", "")
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("weather", {"city": "Rome", "days": 2})
    ] * 2


async def test_calls_of_a_list_are_one_list() -> None:
    call = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
    grammar, make_reader = await hold_form(Service("[TOOL_CALLS]"))
    for text in (ADA, f"[TOOL_CALLS][{call}]", f"[TOOL_CALLS][{call}, {call}]"):
        assert allows(grammar, text), text
    assert not allows(grammar, f"[TOOL_CALLS]{call}", is_whole=False)
    assert len(read(make_reader(), f"[TOOL_CALLS][{call}, {call}]").calls) == 2


@pytest.mark.parametrize("source", CALLS)
async def test_one_call_alone_where_none_may_be_beside_it(source: str) -> None:
    grammar, _ = await hold_form(Service(source), parallel_tool_calls=False)
    assert allows(grammar, CALLS[source])
    assert not allows(grammar, CALLS[source] + BETWEEN.get(source, "\n") + CALLS[source])


async def test_tools_that_must_not_be_called_leave_the_form_alone() -> None:
    grammar, make_reader = await hold_form(Service("<tool_call>"), tool_choice="none")
    assert allows(grammar, ADA)
    assert not allows(grammar, "<", is_whole=False)
    assert make_reader() is None


async def test_a_call_that_must_come_is_no_answer_in_a_form() -> None:
    grammar, _ = await hold_form(Service("<tool_call>"), tool_choice="required")
    assert allows(grammar, CALLS["<tool_call>"])
    assert not allows(grammar, "{", is_whole=False)


async def test_arguments_are_held_to_their_schema_where_that_is_strict() -> None:
    wrong = CALLS["<tool_call>"].replace("2", "9")
    for strict in (True, False):
        function = {"name": "weather", "parameters": SCHEMA, "strict": strict}
        grammar, _ = await hold_form(Service("<tool_call>"), tools=[{"type": "function", "function": function}])
        assert allows(grammar, CALLS["<tool_call>"])
        assert allows(grammar, wrong) is not strict


def strict(*others: str) -> list[dict[str, Any]]:
    """The weather's arguments hold, of others none."""
    function = TOOLS[0]["function"] | {"strict": True}
    return [{"type": "function", "function": one} for one in (function, *({"name": name} for name in others))]


@pytest.mark.parametrize("source", [*(source for source in CALLS if source not in BEFORE_CONTENT), "<|observation|>"])
async def test_a_strict_tool_is_held_to_its_schema_wherever_a_call_of_it_begins(source: str) -> None:
    grammar, make_reader = await hold(Service(source), tools=strict("clock"), tool_choice="auto")
    call = CALLS.get(source, '\nweather\n{"city": "Rome", "days": 2}')
    clock = call.replace("weather", "clock")
    for text in ("", "Yes, {it} <is> [so].", f"So: {call}", f"{call}\nand {call}{clock} well.", '{"name": "Ada"}'):
        assert allows(grammar, text), text
    for wrong in (call.replace("2", "9"), call.replace("days", "years"), call.replace("weather", "wether")):
        if wrong != call.replace("weather", "wether") or source not in ("<|observation|>", [*CALLS][1]):
            assert not allows(grammar, f"So: {wrong}", is_whole=False), wrong
    assert not allows(grammar, f"So: {call[:-12]}"), "a call that begins must end"
    answer = read(make_reader(), f"So: {call}\nand {call}")
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("weather", {"city": "Rome", "days": 2})
    ] * 2


@pytest.mark.parametrize(
    ("source", "end", "never"),
    [
        ("<tool_call>", "}}", ', "never": 1}}'),
        ("<function=", "</function>", "<parameter=never>\n1\n</parameter>\n</function>"),
        ("<|tool_call>", "}", ",never:1}"),
    ],
)
async def test_a_schema_as_zod_writes_it_is_held_in_every_form_of_calls(source: str, end: str, never: str) -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    more = {"record": record, "never": {"not": {}}, "zero": {"anyOf": [{"const": 0}, {"not": {}}]}}
    parameters = SCHEMA | {"properties": SCHEMA["properties"] | more}
    function = {"name": "weather", "strict": True, "parameters": parameters}
    grammar, _ = await hold(Service(source), tools=[{"type": "function", "function": function}], tool_choice="auto")
    assert allows(grammar, CALLS[source])
    assert not allows(grammar, CALLS[source].replace(end, never))


async def test_calls_of_a_list_are_held_among_words_too() -> None:
    call = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
    grammar, _ = await hold(Service("[TOOL_CALLS]"), tools=strict(), tool_choice="auto")
    assert allows(grammar, f"So: [TOOL_CALLS][{call}, {call}]")
    assert not allows(grammar, f"So: [TOOL_CALLS][{call.replace('2', '9')}", is_whole=False)


async def test_nothing_is_held_where_no_tool_is_strict_or_calls_are_of_a_form_that_no_schema_holds() -> None:
    own = Service("")
    own.answer_format = _own_format({"open": "<t>", "close": "</t>"})
    for service, tools in ((Service("<tool_call>"), TOOLS), (Service("<|tool_call>"), TOOLS), (own, strict())):
        assert (await hold(service, tools=tools, tool_choice="auto"))[0] == ""
    assert (await hold(Service("<tool_call>"), tools=strict(), tool_choice="none"))[0] == ""


async def test_reasoning_before_a_strict_call_is_free_and_may_stay_open() -> None:
    call, wrong = CALLS["<tool_call>"], CALLS["<tool_call>"].replace("2", "9")
    service = Service("<tool_call> </think>")
    grammar, _ = await hold(service, tools=strict(), tool_choice="auto")
    for text in (call, "No.", f"<think>hm {wrong}</think>\n\n{call} so"):
        assert allows(grammar, text), text
    assert not allows(grammar, f"<think>hm</think>\n{wrong}", is_whole=False)
    grammar, _ = await hold(service, "<|assistant|>\n<think>\n", tools=strict(), tool_choice="auto")
    for text in ("hm", f"hm {wrong}", f"hm</think>\n{call}", "hm</think> No."):
        assert allows(grammar, text), text
    assert not allows(grammar, f"hm</think>\n{wrong}", is_whole=False)


@pytest.mark.parametrize("source", ["<tool_call></think>", "[ARGS][THINK]", "<function="])
async def test_whatever_is_drawn_of_free_words_has_calls_that_are_valid(source: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_model(tmp_path / "m", "", ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]), REFERENCE)
    grammar, make_reader = await hold(Service(source, tokenizer), tools=strict(), tool_choice="auto")
    begins = {"<function=": CALLS["<function="].split("2\n")[0], "[ARGS][THINK]": "[TOOL_CALLS]"}
    drawer = Drawer(tokenizer, grammar, 3)
    begin = "Words.\n" + begins.get(source, "<tool_call>")
    answers = [answer for _ in range(12) if (answer := drawer.read_answer(make_reader(), begin)) is not None]
    assert answers
    for answer in answers:
        assert answer.content.startswith("Words.")
        assert answer.calls
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA if source != "<function=" else IN_TAGS)


async def test_many_tools_that_are_not_strict_take_little_room() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "strict": False}} for i in range(1000)]
    grammar, _ = await hold_form(Service("<tool_call>"), tools=tools)
    for name in ("tool_0", "tool_999"):
        assert allows(grammar, f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>')
    own = [{"name": f"t{i}", "strict": True, "parameters": SCHEMA | {"title": str(i)}} for i in range(200)]
    strict = [{"type": "function", "function": function} for function in own]
    with pytest.raises(ApiError, match=r"^tools: .* bytes, at most"):
        await hold_form(Service("<tool_call>"), tools=strict)


async def test_a_strict_schema_that_cannot_be_kept_is_a_400_that_names_it() -> None:
    function = {"name": "f", "parameters": {"not": {}}, "strict": True}
    tools = [TOOLS[1], {"type": "function", "function": function}]
    with pytest.raises(ApiError, match=r"tools\[1\]\.function\.parameters: #/not: "):
        await hold_form(Service("<tool_call>"), tools=tools)
    function["strict"] = False
    await hold_form(Service("<tool_call>"), tools=tools)


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"regex": r'\{"name": "[A-Z][a-z]+", "age": \d+\}'}},
        {"structured_outputs": {"choice": [ADA, "nobody"]}},
        {"structured_outputs": {"grammar": 'start: "{\\"name\\": \\"Ada\\", \\"age\\": " /[0-9]+/ "}"'}},
        {"structured_outputs": {"grammar": 'root ::= "{\\"name\\": \\"Ada\\", \\"age\\": " [0-9]+ "}"'}},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_every_form_holds_what_follows_the_reasoning(form: dict[str, Any]) -> None:
    form = {"response_format": None} | form
    grammar, make_reader = await hold_form(Service("<tool_call> </think>"), **form)
    for text in (ADA, f"<think>\n{{ hm\n</think>\n\n{ADA}", f"<think></think>{CALLS['<tool_call>']}"):
        assert allows(grammar, text), text
    for text in ("hm", "<think>hm</think>hm", f"{ADA}<think>"):
        assert not allows(grammar, text, is_whole=False), text
    answer = read(make_reader(), f"<think>\n{{ hm\n</think>\n\n{ADA}")
    assert (answer.reasoning, answer.content, answer.calls) == ("{ hm", ADA, [])


async def test_reasoning_that_the_prompt_began_comes_before_the_form() -> None:
    service, prompt = Service("<tool_call> </think>"), "<|assistant|>\n<think>\n"
    for fields in ({"tools": []}, {}):
        grammar, make_reader = await hold_form(service, prompt, tool_choice=None, **fields)
        assert allows(grammar, f"Any: {ADA} </think>\n\n{ADA}")
        assert not allows(grammar, ADA)
        assert not allows(grammar, f"</think>\n\n{ADA} or", is_whole=False)
        answer = read(make_reader(), f"Any: {ADA} </think>\n\n{ADA}")
        assert (answer.reasoning, answer.content) == (f"Any: {ADA}", ADA)


async def test_reasoning_may_be_begun_by_a_mark_that_could_be_longer() -> None:
    service = Service("<|tool_call><|channel>")
    grammar, make_reader = await hold_form(service, "<|channel>thought\n", tools=[], tool_choice=None)
    assert allows(grammar, f"hm<channel|>{ADA}")
    assert not allows(grammar, ADA)
    answer = read(make_reader(), f"hm<channel|>{ADA}")
    assert (answer.reasoning, answer.content) == ("hm", ADA)


async def test_reasoning_that_ends_as_no_grammar_can_write_is_a_400() -> None:
    service = Service("<tool_call>")
    service.answer_format = _own_format({"open_pattern": "<t>", "close_pattern": "</?t>"})
    with pytest.raises(ApiError, match="response_format: this model's reasoning ends") as refused:
        await hold_form(service, "<t>")
    assert refused.value.param == "response_format"


async def test_calls_that_no_grammar_can_write_are_a_400_beside_a_form() -> None:
    service = Service("<tool_call>")
    service.answer_format = _own_format({"open": "<t>", "close": "</t>"}, {"open_pattern": "<f>+"})
    with pytest.raises(ApiError, match="structured_outputs: beside tools: this model's calls"):
        await hold_form(service, response_format=None, structured_outputs={"regex": "a"})
    grammar, _ = await hold_form(service, tool_choice="none")
    assert allows(grammar, f"<t>hm</t>{ADA}")


async def test_calls_of_a_template_that_came_with_the_tokenizer_are_any_text_between_its_marks() -> None:
    service = Service("<tool_call>")
    call = "<f>weather(Rome)</f>"
    service.answer_format = _own_format({"open": "<t>", "close": "</t>"}, {"open": "<f>", "close": "</f>"})
    grammar, _ = await hold_form(service)
    for text in (ADA, call, f"<t>hm</t>{call}\n{call}"):
        assert allows(grammar, text), text
    assert not allows(grammar, f"{call} so", is_whole=False)


def _own_format(reasoning: dict[str, Any], calls: dict[str, Any] | None = None) -> Any:
    fields = {"content": {}, "reasoning": reasoning, "tool_calls": calls or {"open": "<f>", "close": "</f>"}}
    spec = {"fields": fields, "start_anchor_pattern": r"(?=<t>\Z)|(?<!<t>)\Z"}
    return choose_format(ModelConfig(random_weights="x"), "", True, {"response_template": spec})


async def test_of_an_engines_vocabulary_all_may_come_in_reasoning_and_the_form_alone_behind_it() -> None:
    grammar, _ = await hold_form(Service("</think>"), "<|assistant|>\n<think>\n", tools=[], tool_choice=None)
    tokenizer, tokens = Tokenizer(REFERENCE, REFERENCE), read_tokens(ModelConfig(path=REFERENCE), 8192)
    matcher = LLMatcher(tokens, grammar)
    assert matcher.consume_tokens(tokenizer.encode("hm {", False))
    assert len(allowed_ids(matcher)) > 0.9 * 8192
    assert not {*tokenizer.eos_ids} & {*allowed_ids(matcher).tolist()}
    assert matcher.consume_tokens(tokenizer.encode("</think>\n\n", False))
    left = [tokenizer.token_bytes(token_id).strip() for token_id in allowed_ids(matcher)]
    assert left
    assert all(not raw or raw.startswith(b"{") for raw in left), left


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_marks_inside_a_form_are_part_of_it(size: int) -> None:
    _, make_reader = await hold_form(Service("<tool_call> </think>"))
    text = json.dumps({"name": f"<think>x</think>{CALLS['<tool_call>']}", "age": 3})
    for before in ("", "<think>hm</think>\n"):
        reader = make_reader()
        pieces = [(before + text)[i : i + size] for i in range(0, len(before + text), size)]
        answer = join_parts([part for piece in pieces for part in reader.feed(piece, False)] + reader.finish())
        assert (answer.content, answer.calls) == (text, [])
        assert answer.reasoning == ("hm" if before else "")


@pytest.mark.parametrize("source", ["<tool_call></think>", '"parameters": </think>', "[ARGS][THINK]", "<arg_key>"])
async def test_whatever_is_drawn_is_read_as_calls_or_is_valid(source: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_model(tmp_path / "m", "", ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]), REFERENCE)
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    grammar, make_reader = await hold_form(Service(source, tokenizer), tools=strict)
    drawer = Drawer(tokenizer, grammar, 7)
    # Of all names, one is a tool's; and what is between tags takes long to draw.
    city = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    called = {"<arg_key>": city, '"parameters": </think>': '{"name": "weather", "parameters": '}.get(source, "")
    drawn = [drawer.read_answer(make_reader(), called if i % 2 else "") for i in range(30)]
    answers = [answer for answer in drawn if answer is not None]
    assert {bool(answer.calls) for answer in answers} == {True, False}
    for answer in answers:
        if not answer.calls:
            jsonschema.validate(json.loads(answer.content), PERSON)
            continue
        assert answer.content == ""
        for call in answer.calls:
            assert call.name == "weather"
            jsonschema.validate(json.loads(call.arguments), SCHEMA if source != "<arg_key>" else IN_TAGS)
