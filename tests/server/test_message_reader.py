"""Answers as messages: each format, split everywhere, broken, and beside transformers' own parser."""

import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.config import ModelConfig
from gpu.model.declared_formats import call_formats, reasoning_formats
from server.deployment import ConfigError
from server.parsing.answer_formats import AnswerFormat, choose_format, make_format
from server.parsing.answer_parts import CallArguments, CallBegun, Part, ReadAnswer, join_parts
from server.parsing.message_reader import MessageReader
from server.parsing.offered_tools import Tools
from server.parsing.response_template import load_response_template

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "yes": {"type": "boolean"},
        "text": {"type": "string"},
        "list": {"type": "array"},
        "tree": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}
TOOLS = Tools({"f": SCHEMA, "g-2": {}})
Read = tuple[str, str, list[tuple[str, Any]]]

# A text of each format, and what it is read as; arguments as JSON.
WHOLE: list[tuple[str, str, Read]] = [
    ("hermes", "words alone \n", ("words alone \n", "", [])),
    (
        "hermes",
        'Now:\n<tool_call>\n{"name": "f", "arguments": {"text": "}{\\"\\\\ é 東 </tool", "tree": {"a": [{}]}}}\n'
        '</tool_call>\n<tool_call>{"name": "g-2", "arguments": {}}</tool_call>\nThen.',
        ("Now:\nThen.", "", [("f", {"text": '}{"\\ é 東 </tool', "tree": {"a": [{}]}}), ("g-2", {})]),
    ),
    ("hermes", "<think>\nhm\n\n</think>\n\nYes. ", ("Yes. ", "hm", [])),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm, 2 < 3<|end|><|start|>assistant<|channel|>final<|message|>Yes, to=day."
        "<|return|>",
        ("Yes, to=day.", "hm, 2 < 3", []),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"text": "<|end|>"}<|call|>',
        ("I look.", "a", [("f", {"text": "<|end|>"})]),
    ),
    (
        "harmony",
        " to=functions.g-2<|channel|>commentary json<|message|>{}<|call|><|start|>assistant to=functions.f<|channel|>"
        'analysis code<|message|>{"n": 1}',
        ("", "", [("g-2", {}), ("f", {"n": 1})]),
    ),
    ("harmony", "<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("", "1 + 1", [])),
    ("harmony", "words alone", ("words alone", "", [])),
    (
        "atem",
        " to=self<|message|>hm, 2 < 3<|eom|><|start|>assistant to=user<|message|>Yes, to=day.<|eot|>",
        ("Yes, to=day.", "hm, 2 < 3", []),
    ),
    (
        "atem",
        ' to=self<|message|>a <atem:invoke name="f"><|eom|><|start|>assistant to=f.f<|message|>'
        '<atem:function_calls>\n<atem:invoke name="f.f">\n<atem:parameter name="text"> 5\n<|eom|> </atem:parameter>\n'
        '<atem:parameter name="tree">{"a": [1]}</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
        '<|start|>assistant to=g-2<|message|><atem:function_calls>\n<atem:invoke name="g-2">\n</atem:invoke>\n'
        "</atem:function_calls>",
        ("", 'a <atem:invoke name="f">', [("f", {"text": " 5\n<|eom|> ", "tree": {"a": [1]}}), ("g-2", {})]),
    ),
    (
        "atem",
        ' to=x.f<|message|><atem:function_calls><atem:invoke name="x.f"></atem:invoke>\n'
        '<atem:invoke name="f"><atem:parameter name="n">1</atem:parameter></atem:invoke></atem:function_calls><|eot|>',
        ("", "", [("x.f", {}), ("f", {"n": 1})]),
    ),
    (
        "atem",
        ' to=user<|message|>Write <atem:invoke name="f">, to=f.<|eot|>',
        ('Write <atem:invoke name="f">, to=f.', "", []),
    ),
    (
        "atem",
        ' to=user<|message|>Write <b>so</b>\n<atem:invoke name="f"></atem:invoke>\n<atem:invoke name="f"></atem:invoke>'
        "\n</atem:function_calls> and go on.<|eot|>",
        (
            'Write <b>so</b>\n<atem:invoke name="f"></atem:invoke>\n<atem:invoke name="f"></atem:invoke>\n'
            "</atem:function_calls> and go on.",
            "",
            [],
        ),
    ),
    (
        "atem",
        ' to=user<|message|><atem:function_calls>\n<atem:invoke name="f"></atem:invoke> is how.<|eot|>',
        ('<atem:function_calls>\n<atem:invoke name="f"></atem:invoke> is how.', "", []),
    ),
    (
        "atem",
        ' to=self<|message|>a</atem:invoke><|eom|><atem:invoke name="f"></atem:invoke><|eot|>',
        ('<atem:invoke name="f"></atem:invoke>', "a</atem:invoke>", []),
    ),
    (
        "atem",
        ' to=f<|message|><atem:invoke name="f"></atem:invoke> then </atem:invoke><atem:invoke name="f"></atem:invoke>',
        ('then </atem:invoke><atem:invoke name="f"></atem:invoke>', "", [("f", {})]),
    ),
    ("atem", "<|message|>bare words", ("bare words", "", [])),
    ("atem", " to=self<|message|>no end<|start|>assistant to=user<|message|>so", ("so", "no end", [])),
    ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', ("", "", [("f", {"n": 1})])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', ("", "", [("f", {"n": 1})])),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": null}}</tool_call>',
        ("", "", [("f", {})]),
    ),
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"n": 2}}]</tool_call>',
        ("", "", [("f", {}), ("f", {"n": 2})]),
    ),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', ("", "", [("unknown", {})])),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1}}', ("", "", [("f", {"n": 1})])),
    (
        "llama3_json",
        'So: <|python_tag|>{"name": "f", "parameters": {"tree": {}}}; {"name": "g-2", "parameters": {}} there',
        ("So: there", "", [("f", {"tree": {}}), ("g-2", {})]),
    ),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', ("", "", [("f", {})])),
    (
        "qwen3_xml",
        "A\n<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=text>\n5\n\n 6\n</parameter>\n"
        "<parameter=list>\n[1, {}]\n</parameter>\n<parameter=yes>\nTrue\n</parameter>\n<parameter=tree>\nnull\n"
        "</parameter>\n</function>\n</tool_call>\nB",
        ("A\nB", "", [("f", {"n": 5, "text": "5\n\n 6", "list": [1, {}], "yes": True, "tree": None})]),
    ),
    ("qwen3_xml", "<tool_call><function=g-2></function></tool_call>", ("", "", [("g-2", {})])),
    ("qwen3_xml", "<function=f><parameter=text>5</parameter></function>", ("", "", [("f", {"text": "5"})])),
    (
        "qwen3_xml",
        "<function=f><parameter=n>x</parameter></function><function=g-2></function>",
        ("", "", [("f", {"n": "x"}), ("g-2", {})]),
    ),
    (
        "mistral",
        'One[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g-2[CALL_ID]a1[ARGS]{} two',
        ("One two", "", [("f", {"n": 1}), ("g-2", {})]),
    ),
    (
        "mistral_json",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}, "id": "a"}, {"name": "g-2", "arguments": {}}]',
        ("", "", [("f", {"n": 1}), ("g-2", {})]),
    ),
    (
        "glm",
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n<arg_key>text</arg_key>\n<arg_value>5"
        "</arg_value>\n</tool_call>\n<tool_call>g-2</tool_call>",
        ("", "", [("f", {"n": 5, "text": "5"}), ("g-2", {})]),
    ),
    (
        "glm4",
        '\ng-2\n{}\nwords\n<|assistant|>f\n{"text": "\\ng-2\\n{}"}',
        ("words", "", [("g-2", {}), ("f", {"text": "\ng-2\n{}"})]),
    ),
    (
        "gemma",
        '<|tool_call>call:f{n:1,text:<|"|>a, "b":{c}<|"|>,tree:{k:[1,true]}}<tool_call|>',
        ("", "", [("f", {"n": 1, "text": 'a, "b":{c}', "tree": {"k": [1, True]}})]),
    ),
    (
        "gemma",
        "<start_function_call>call:f{text:<escape>é<escape>}<end_function_call>ok",
        ("ok", "", [("f", {"text": "é"})]),
    ),
]

# Texts that look like calls and are none: words, to the last character.
BROKEN = [
    ("hermes", "<tool_call>f(1)</tool_call> so"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {broken}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "a <tool_call>"),
    ("hermes", "a <tool_ca"),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": NaN}</tool_call>'),
    ("hermes", "<tool_call>" + '{"name": ' * 3000 + "</tool_call>"),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("llama3_json", '{"name": "Ada", "parameters": {"age": 36}}'),
    ("llama3_json", '{"city": "Rome", "name": "f"}'),
    ("llama3_json", '{"name": "f", "parameters": 5} and {"name": "f"'),
    ("qwen3_xml", "<tool_call>\n<function=f>\nno\n</function>\n</tool_call>\nafter"),
    ("qwen3_xml", "<function=f>\n<parameter=n>\n5"),
    ("mistral", "[TOOL_CALLS] what? [ARGS]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{no}"),
    ("mistral_json", '[TOOL_CALLS] no [{"name": "f", "arguments": {}}]'),
    ("glm", "<tool_call>f <arg_key>n</arg_key></tool_call>"),
    ("gemma", "<|tool_call>call:f{n:}<tool_call|>"),
    ("glm4", "\nunknown\n{}\nf"),
    ("glm4", "call f\n{}"),
    ("glm4", "f\n{no}\nf\n"),
]


def read(answer_format: AnswerFormat, pieces: list[str], opening: str = "", tools: Tools | None = TOOLS) -> Read:
    reader = MessageReader(answer_format, opening, tools, False)
    parts = [part for piece in pieces for part in reader.feed(piece, False)] + reader.finish()
    answer = join_parts(parts)
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def format_of(name: str) -> AnswerFormat:
    made = make_format(name, {"harmony": "harmony", "atem": "to_self"}.get(name, "think"))
    assert made is not None
    return made


def parsed(found: Read) -> Read:
    return found[0], found[1], [(name, json.loads(arguments)) for name, arguments in found[2]]


def cut(text: str, at: list[int]) -> list[str]:
    ends = [0, *sorted(at), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


@pytest.mark.parametrize(("name", "text", "wanted"), [*WHOLE, *((name, text, (text, "", [])) for name, text in BROKEN)])
def test_calls_are_read_and_all_else_is_content_wherever_the_text_is_cut(name: str, text: str, wanted: Read) -> None:
    answer_format = format_of(name)
    assert parsed(read(answer_format, [text])) == wanted
    text = text[:400]
    whole = read(answer_format, [text])
    for i in range(len(text)):
        assert read(answer_format, cut(text, [i])) == whole, (i, text[:i])
    assert read(answer_format, list(text)) == whole


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=200), st.sampled_from(sorted({name for name, _, _ in WHOLE})))
def test_words_come_through_as_they_are(text: str, name: str) -> None:
    if not any(mark in text for mark in ("<", "[", "{")):
        assert read(format_of(name), list(text)) == (text, "", [])


def test_a_call_is_told_before_its_arguments_and_they_in_pieces() -> None:
    reader = MessageReader(format_of("hermes"), "", TOOLS, False)
    parts = reader.feed('<tool_call>{"name": "f", "arguments": {"', False)
    assert [type(part) for part in parts] == [CallBegun, CallArguments]
    assert reader.feed("text", False) == [CallArguments(0, "text")]
    assert reader.feed('": 1}}', False) == [CallArguments(0, '": 1}')]


def test_an_argument_between_tags_is_told_once_it_is_whole() -> None:
    reader = MessageReader(format_of("qwen3_xml"), "", TOOLS, False)
    assert reader.feed("<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=text", False) == []
    parts = reader.feed(">\na", False)
    assert isinstance(parts[0], CallBegun)
    assert parts[1:] == [CallArguments(0, '{"n": 5')]
    assert reader.feed("\n</parameter>\n</function>\n</tool_call>", False) + reader.finish() == [
        CallArguments(0, ', "text": "a"'), CallArguments(0, "}"),
    ]  # fmt: skip


def test_a_call_that_begins_stays_one_with_the_arguments_that_came() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"n": oops'
    assert read(format_of("hermes"), [text]) == ("", "", [("f", '{"n": oops')])
    junk = '<tool_call>{"name": "f", "arguments": {}} junk</tool_call>'
    assert read(format_of("hermes"), [junk]) == ("junk</tool_call>", "", [("f", "{}")])


PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}}
TYPED = [
    ({"$ref": "#/$defs/place"}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, "null", None),
    ({"allOf": [{"$ref": "#/$defs/place"}]}, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/a~1b%20c"}, "5", 5),
    ({"$ref": "#/$defs/all/allOf/0"}, "5", 5),
    ({"$ref": "#/$defs/loop"}, "5", 5),
    ({"$ref": "#/$defs/nowhere"}, "5", "5"),
    ({"$ref": "https://elsewhere.example/x"}, "5", "5"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["1", 2]}, "1", "1"),
    ({"enum": ["1", 2]}, "2", 2),
    ({"const": 5}, "5", 5),
    ({"const": "5"}, "5", "5"),
    ({"properties": {"x": {}}}, '{"x": 1}', {"x": 1}),
    ({"items": {}}, "[1]", [1]),
    ({"type": "string", "enum": ["true"]}, "true", "true"),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
    ({"type": 5, "anyOf": 5, "enum": 5, "$ref": 5}, "5", "5"),
    ({}, "5", "5"),
]


@pytest.mark.parametrize(("schema", "text", "wanted"), TYPED)
def test_an_argument_that_came_as_text_is_of_the_type_that_its_schema_names_anywhere(
    schema: Any, text: str, wanted: Any
) -> None:
    places = {
        "place": PLACE, "a/b c": {"type": "integer"}, "all": {"allOf": [{"type": "integer"}]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
    }  # fmt: skip
    tools = Tools({"f": {"type": "object", "properties": {"a": schema}, "$defs": places}})
    assert tools.argument("f", "a", text) == wanted
    assert type(tools.argument("f", "a", text)) is type(wanted)


def test_reasoning_that_the_prompt_begins_or_ends_is_known() -> None:
    think = format_of("hermes")
    for prompt, wanted in (
        ("<|assistant|>\n<think>\n", ("Yes.", "hm", [])),
        ("<|assistant|>\n<think>", ("Yes.", "hm", [])),
        ("<think>a</think><|assistant|>\n", ("hm</think>\nYes.", "", [])),
        ("<|assistant|>\n<think>\n\n</think>\n\n", ("hm</think>\nYes.", "", [])),
    ):
        assert read(think, ["hm</think>\nYes."], think.template.opening(prompt)) == wanted


def test_special_tokens_are_read_and_not_told() -> None:
    reader = MessageReader(format_of("mistral"), "", TOOLS, False)
    texts = [("a", False), ("<|x|>", True), ("b ", False), ("[TOOL_CALLS]", True), ("c", False), ("[ARGS]", True)]
    parts = [part for text, special in texts for part in reader.feed(text, special)] + reader.finish()
    assert join_parts(parts).content == "ab c"
    reader = MessageReader(format_of("mistral"), "", TOOLS, False)
    texts = [("[TOOL_CALLS]", True), ("f", False), ("[ARGS]", True), ('{"text": "[ARGS]', False), ("<|x|>", True)]
    texts.append(('"}', False))
    parts = [part for text, special in texts for part in reader.feed(text, special)] + reader.finish()
    assert join_parts(parts).calls[0].arguments == '{"text": "[ARGS]"}'


def test_what_is_read_of_a_long_answer_is_not_kept() -> None:
    reader = MessageReader(format_of("hermes"), "", TOOLS, False)
    for _ in range(2000):
        reader.feed("some words of it, ", False)
    assert len(reader._regions._text) < 100
    reader.feed('<tool_call>{"name": "f", "arguments": {"text": "', False)
    for _ in range(2000):
        reader.feed("some words of it, ", False)
    assert len(reader._regions._text) < 200


# --- which format --------------------------------------------------------------------------------------------------

SIGNS = [
    ("{{ '<tool_call>' }}", "hermes"),
    ("<tool_call>\n<function=", "qwen3_xml"),
    ("<tool_call>{{ name }}<arg_key>", "glm"),
    ("[TOOL_CALLS] [{", "mistral_json"),
    ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
    ("<|observation|>", "glm4"),
    ("<|observation|><arg_key>", "glm"),
    ("<|tool_call>call:", "gemma"),
    ('{"name": function name, "parameters": dictionary}', "llama3_json"),
    ("what nobody knows", "llama3_json"),
]


@pytest.mark.parametrize(("source", "wanted"), SIGNS)
def test_a_templates_look_tells_its_format(source: str, wanted: str) -> None:
    model = ModelConfig(random_weights="x")
    found = choose_format(model, source, True, {})
    assert found.template.fields["tool_calls"] == make_format(wanted, "none").template.fields["tool_calls"]
    assert "reasoning_content" not in found.template.fields
    assert "reasoning_content" in choose_format(model, source + "</think>", True, {}).template.fields


def test_a_template_of_channels_is_read_as_harmony() -> None:
    found = choose_format(ModelConfig(random_weights="x"), "{{ '<|channel|>analysis<|message|>' }}", True, {})
    assert found == make_format("harmony", "harmony")
    assert found.opening("<|start|>assistant", None) == ""
    begun = "<|channel|>analysis<|message|>"
    assert found.opening(f"<|start|>assistant{begun}", None).endswith(begun)


def test_a_template_of_recipients_is_read_as_atem_and_what_a_prompt_has_begun_goes_on() -> None:
    source = (
        "{{ '<|start|>assistant to=self<|message|>' }} <atem:function_calls>\n<atem:invoke name=\"$FUNCTION_NAME\">"
    )
    found = choose_format(ModelConfig(random_weights="x"), source, True, {})
    assert found == make_format("atem", "to_self")
    assert found.opening("<|start|>assistant", None) == ""
    assert read(found, ["hm<|eom|><|start|>assistant", " to=user<|message|>so"], " to=self<|message|>") == (
        "so",
        "hm",
        [],
    )


def test_a_template_without_tools_is_read_as_what_is_written_in_its_place() -> None:
    found = choose_format(ModelConfig(random_weights="x"), "[TOOL_CALLS]", False, {})
    assert found.template.fields["tool_calls"] == format_of("hermes").template.fields["tool_calls"]


def test_a_setting_goes_before_the_template() -> None:
    model = ModelConfig(random_weights="x", tool_parser="glm", reasoning_parser="mistral")
    found = choose_format(model, "<tool_call></think>", True, {"response_template": 5})
    assert found.template.fields["tool_calls"] == make_format("glm", "none").template.fields["tool_calls"]
    assert read(found, ["[THINK]hm[/THINK]Yes."]) == ("Yes.", "hm", [])
    none = ModelConfig(random_weights="x", tool_parser="none", reasoning_parser="none")
    assert choose_format(none, "<tool_call></think>", True, {}) is None


def test_every_parser_that_may_be_set_is_there() -> None:
    assert {"hermes", "llama3_json", "harmony", "gemma", "glm", "glm4", "mistral_json", "atem"} <= {*call_formats()}
    assert {"think", "harmony", "gemma", "mistral", "to_self"} <= {*reasoning_formats()}
    for name in call_formats():
        assert make_format(name, "none") is not None
    for name in reasoning_formats():
        assert make_format("none", name) is not None


# --- response templates of the tokenizer ---------------------------------------------------------------------------

OWN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*<\|end\|>"},
    },
}
LINES = {
    "open_pattern": r"<call (?P<name>\w+)>",
    "close": "</call>",
    "content": "kv-lines",
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}


def own_format(**fields: Any) -> AnswerFormat:
    spec = OWN | {"fields": OWN["fields"] | fields}
    found = choose_format(ModelConfig(random_weights="x"), "", True, {"response_template": spec})
    assert found is not None
    return found


def test_a_template_that_comes_with_the_tokenizer_is_read() -> None:
    text = '<think>hm</think>Yes. <call f>{"n": 1}</call>\n<call g>{}</call><|end|>'
    wanted = ("Yes.", "hm", [("f", {"n": 1}), ("g", {})])
    assert parsed(read(own_format(), [text])) == wanted
    assert parsed(read(own_format(), list(text))) == wanted
    assert parsed(read(own_format(tool_calls=LINES), ["<call f>\nn: 1\ntext: 2\n</call>"])) == (
        "", "", [("f", {"n": 1, "text": "2"})],
    )  # fmt: skip
    begun = own_format().template.opening("<|assistant|>\nold<|end|><|assistant|>\n<think>")
    assert read(own_format(), ["hm</think>Yes."], begun) == ("Yes.", "hm", [])


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (5, "got int, wanted an object"),
        ({"version": 2, "fields": {"content": {}}}, "got version 2"),
        ({"fields": {}}, "fields: wanted an object that is not empty"),
        ({"fields": {"a": {}, "b": {}}}, "have no open"),
        ({"fields": {"a": {"open": ""}}}, "none of them empty"),
        ({"fields": {"a": {"open": "x", "open_pattern": "y"}}}, "wanted one of them"),
        ({"fields": {"a": {"open_pattern": "("}}}, "missing )"),
        ({"fields": {"a": {"content": "yaml"}}}, "wanted one of"),
        ({"fields": {"a": {"opens": "x"}}}, "unknown keys"),
        ({"fields": {"a": {"content": "xml-inline"}}}, "wanted a pattern with a group `key`"),
        ({"fields": {"content": {}}, "begin": 1}, "unknown keys"),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error_of_the_deployment(spec: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what.replace(")", r"\)").replace("`", "`")) as refused:
        choose_format(ModelConfig(random_weights="x"), "", True, {"response_template": spec})
    assert str(refused.value).startswith("tokenizer_config.json: response_template: ")


def transformers_read(spec: dict[str, Any], text: str, tools: list[dict[str, Any]]) -> Read:
    from transformers.utils.chat_parsing import parse_response

    message = parse_response(text, spec, prefix="", tools=tools)
    reasoning = message.get("thinking") or message.get("reasoning_content") or ""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message.get("content", ""), reasoning, calls


def test_transformers_reads_the_same_of_what_a_model_should_write() -> None:
    draw = random.Random(3)
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    specs = {
        "json": OWN["fields"]["tool_calls"],
        "xml-inline": {
            "open_pattern": r"\s*<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    }
    for _ in range(60):
        kind = draw.choice(sorted(specs))
        arguments = {"n": draw.randint(-9, 9), "text": draw.choice(["é", "5", "a b", "{"]), "yes": draw.random() < 0.5}
        written = json.dumps(arguments, ensure_ascii=False)
        if kind == "xml-inline":
            written = "".join(f"<{key}>{value}</{key}>" for key, value in arguments.items())
        text = draw.choice(["", "<think>hm</think>"]) + draw.choice(["", "Yes."])
        text += f"\n<call f>{written}</call>" * draw.randint(0, 2)
        spec = OWN | {"fields": OWN["fields"] | {"tool_calls": specs[kind]}}
        wanted = transformers_read(spec, text, tools)
        assert parsed(read(own_format(tool_calls=specs[kind]), cut(text, [draw.randint(0, len(text))]))) == wanted
        assert load_response_template(spec, "it").fields["thinking"].opens is not None


LONG = "a < b and c > d\n" * 2500
LONG_CALLS = {
    "qwen3_xml": f"<tool_call>\n<function=write>\n<parameter=text>\n{LONG}\n</parameter>\n</function>\n</tool_call>",
    "glm": f"<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{LONG}\n</arg_value>\n</tool_call>",
    "hermes": f'<tool_call>\n{{"name": "write", "arguments": {{"text": {json.dumps(LONG)}}}}}\n</tool_call>',
}


def read_in_time(name: str, text: str) -> ReadAnswer:
    """Read in pieces as small as tokens, within a hundred times what it takes on a slow machine."""
    reader = MessageReader(make_format(name, "think"), "", Tools({"write": {"type": "object"}}), False)
    parts: list[Part] = []
    began = time.process_time()
    for i in range(0, len(text), 4):
        parts += reader.feed(text[i : i + 4], False)
        assert time.process_time() - began < 5
    return join_parts([*parts, *reader.finish()])


@pytest.mark.parametrize("name", LONG_CALLS)
def test_a_long_argument_is_not_read_again_with_each_piece_of_it(name: str) -> None:
    (call,) = read_in_time(name, LONG_CALLS[name]).calls
    assert json.loads(call.arguments)["text"].strip() == LONG.strip()


@pytest.mark.parametrize("name", ["llama3_json", "qwen3_xml", "mistral", "glm", "glm4", "gemma", "harmony", "atem"])
@pytest.mark.parametrize(
    "begun", [" \n", " to=functions.a", "<function=", "[TOOL_CALLS]a", "<tool_call>a", " ;", "\na"]
)
def test_what_goes_on_and_on_as_a_call_begins_is_words(name: str, begun: str) -> None:
    text = begun + (begun if begun in (" \n", " ;", "<function=") else "a") * 3000
    answer = read_in_time(name, f"x{text}x")
    assert (answer.content, answer.calls) == (f"x{text}x", [])
