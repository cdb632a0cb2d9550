"""Calls whose arguments hold what marks calls: read whole, cut into pieces, and cut off at every place."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.messages import Delta
from server.generation.answer_choice import Choice
from server.parsing.answer_formats import AnswerFormat, make_format
from server.parsing.answer_parts import ReadAnswer, join_parts
from server.parsing.message_reader import MessageReader
from server.parsing.offered_tools import Tools
from server.text.model_tokenizer import Tokenizer
from tests.server.live_server import REFERENCE

SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "more": {}, "n": {"type": "integer"}, "tree": {"type": "object"}},
}
TOOLS = Tools({"f": SCHEMA, "get-it": SCHEMA})
TOKENIZER = Tokenizer(REFERENCE, REFERENCE)
Calls = Sequence[tuple[str, dict[str, Any]]]

MARKS = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", "<think>",
    "</think>", "<|assistant|>", "\nf\n{}", '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "',
    '"', "\\", "\\\"", "{", "}", "[", "]", "'", "\n", " ", "; ", ",", "é", "東京", "😀", "\x00", "\u2028",
    "a", "<", "</",
]  # fmt: skip
HOSTILE = st.lists(st.sampled_from(MARKS), max_size=4).map("".join)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": HOSTILE,
        "more": HOSTILE,
        "n": st.integers(-99, 99),
        "tree": st.dictionaries(HOSTILE, HOSTILE | st.lists(HOSTILE, max_size=1), max_size=1),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS.parameters)), ARGUMENTS), min_size=1, max_size=2)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def in_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return "[" + ",".join(map(in_gemma, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{dump(key)}:{in_gemma(item)}" for key, item in value.items()) + "}"
    return dump(value)


def write(name: str, calls: Calls) -> str:
    """Write calls as a model writes them in a format."""
    match name:
        case "hermes":
            return "\n".join(
                f"<tool_call>\n{dump({'name': tool, 'arguments': given})}\n</tool_call>" for tool, given in calls
            )
        case "llama3_json":
            return "; ".join(dump({"name": tool, "parameters": given}) for tool, given in calls)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{tool}[ARGS]{dump(given)}" for tool, given in calls)
        case "mistral_json":
            return "[TOOL_CALLS]" + dump([{"name": tool, "arguments": given} for tool, given in calls])
        case "glm4":
            return "".join(f"\n{tool}\n{dump(given)}" for tool, given in calls)
        case "gemma":
            written = [
                (tool, ",".join(f"{key}:{in_gemma(item)}" for key, item in given.items())) for tool, given in calls
            ]
            return "".join(f"<|tool_call>call:{tool}{{{given}}}<tool_call|>" for tool, given in written)
        case "qwen3_xml":
            written = [
                (tool, "".join(f"<parameter={key}>\n{as_text(item)}\n</parameter>\n" for key, item in given.items()))
                for tool, given in calls
            ]
            return "\n".join(
                f"<tool_call>\n<function={tool}>\n{given}</function>\n</tool_call>" for tool, given in written
            )
    written = [
        (
            tool,
            "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(item)}</arg_value>\n" for key, item in given.items()
            ),
        )
        for tool, given in calls
    ]
    return "\n".join(f"<tool_call>{tool}\n{given}</tool_call>" for tool, given in written)


FORMATS = ["hermes", "llama3_json", "mistral", "mistral_json", "glm4", "gemma", "qwen3_xml", "glm"]
# What a format cannot write inside of a string: where a value would end and something of the form follow it.
AMBIGUOUS = {
    "gemma": r'<\|"\|>',
    "qwen3_xml": r"</parameter>\s*(?:<parameter=|</function>)",
    "glm": r"</arg_value>\s*(?:<arg_key>|</tool_call>)",
}


def strings_in(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from (key, *strings_in(value))
    elif isinstance(tree, list):
        for value in tree:
            yield from strings_in(value)


def can_write(name: str, calls: Calls) -> bool:
    pattern = AMBIGUOUS.get(name)
    return pattern is None or not any(
        regex.search(pattern, as_text(value)) for _, given in calls for value in given.values()
    )


def format_of(name: str) -> AnswerFormat:
    made = make_format(name, "think")
    assert made is not None
    return made


def read(name: str, pieces: Sequence[str], is_cut: bool) -> ReadAnswer:
    reader = MessageReader(format_of(name), "", TOOLS, False)
    parts = [part for piece in pieces for part in reader.feed(piece, False)]
    return join_parts(parts + (reader.cut() if is_cut else reader.finish()))


def told(answer: ReadAnswer) -> tuple[str, str, list[tuple[str, str]]]:
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def pieces_of(text: str, draw: random.Random) -> list[str]:
    pieces = []
    while text:
        size = draw.choice([1, 2, 3, 5, 8, 40])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=25)
@given(CALLS, st.sampled_from(["", "So:\n", "é "]), st.randoms(use_true_random=False))
def test_arguments_survive_whatever_they_hold_and_however_the_text_is_cut(
    name: str, calls: Calls, words: str, draw: random.Random
) -> None:
    if not can_write(name, calls):
        return
    text = words + write(name, calls)
    whole = read(name, [text], False)
    assert whole.content == words.rstrip()
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == list(calls)
    for pieces in (list(text), pieces_of(text, draw)):
        assert told(read(name, pieces, False)) == told(whole)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=6)
@given(CALLS, st.randoms(use_true_random=False))
def test_calls_that_a_limit_cuts_anywhere_are_calls_with_the_arguments_so_far(
    name: str, calls: Calls, draw: random.Random
) -> None:
    if not can_write(name, calls):
        return
    text = write(name, calls)
    whole = told(read(name, [text], False))[2]
    for end in draw.sample(range(len(text)), min(len(text), 80)):
        given = text[:end]
        content, reasoning, found = told(read(name, [given], True))
        # Without marks, a name whose line has not ended may be words.
        assert content.strip() in (("", *words_of_names()) if name == "glm4" else ("",)), given
        assert reasoning == ""
        assert found[:-1] == whole[: len(found[:-1])], given
        if found:
            tool, arguments = whole[len(found) - 1]
            assert found[-1][0] == tool
            assert squeeze(arguments, name).startswith(squeeze(found[-1][1], name)), given
        assert told(read(name, pieces_of(given, draw), True)) == (content, reasoning, found), given


def words_of_names() -> list[str]:
    return [name[: end + 1] for name in TOOLS.parameters for end in range(len(name))]


def squeeze(arguments: str, name: str) -> str:
    """Return JSON without white space; Gemma's is JSON of another look until it is whole."""
    return "".join(arguments.split()).rstrip(",") if name == "gemma" else arguments


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.sampled_from(
            [*MARKS, "<parameter=n>\n5\n</parameter>", "call:f{", "<arg_key>n</arg_key><arg_value>", "f\n"]
        ),
        max_size=9,
    ).map("".join),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_whatever_a_model_writes_it_is_read_alike_in_any_pieces(
    name: str, text: str, is_cut: bool, draw: random.Random
) -> None:
    whole = told(read(name, [text], is_cut))
    for pieces in (list(text), pieces_of(text, draw)):
        assert told(read(name, pieces, is_cut)) == whole


ONE = [("f", {"text": "x", "n": 5})]


@pytest.mark.parametrize("name", FORMATS)
def test_a_word_that_stands_anywhere_in_a_call_is_told(name: str) -> None:
    call = write(name, ONE)
    for at in range(len(call) + 1):
        text = f"{call[:at]}JUNK{call[at:]} Bye"
        content, reasoning, calls = told(read(name, [text], False))
        assert "JUNK" in content + str(calls), text
        assert reasoning == ""
        assert content.endswith("Bye") or calls[-1][1].endswith("Bye"), text
        assert told(read(name, list(text), False)) == (content, reasoning, calls), text


BESIDE = [
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"n": 5}} {"no": 1 </tool_call> Bye',
        '{"no": 1 </tool_call> Bye',
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 5} a}</tool_call> Bye', "a}</tool_call> Bye"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 5} a</tool_call> Bye', "a</tool_call> Bye"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 5}, "id": "a"}</tool_call> Bye', "Bye"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 5}, "id": "a"</tool_call> Bye', "Bye"),
    ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"n": 5}, "x": 1}}</tool_call> Bye', "Bye"),
    ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"n": 5}} a}</tool_call>', "} a}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 5}}}</tool_call></tool_call>', "}</tool_call></tool_call>"),
    ("llama3_json", '{"name": "f", "parameters": {"n": 5} Bye', "Bye"),
    ("llama3_json", '{"name": "f", "parameters": {"n": 5}}}; {"no": 1}', '}; {"no": 1}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 5}[TOOL_CALLS] {"a": 1}', '[TOOL_CALLS] {"a": 1}'),
    ("mistral_json", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 5}}, {"no": 1}] Bye', '{"no": 1}] Bye'),
    ("glm4", 'f\n{"n": 5}}\nother\n{} Bye', "}\nother\n{} Bye"),
    ("gemma", "<|tool_call>call:f{n:5} a<tool_call|><tool_call|> Bye", "a<tool_call|><tool_call|> Bye"),
    ("qwen3_xml", "<function=f>\n<parameter=n>\n5\n</parameter>\n</function>a\n</tool_call>", "a\n</tool_call>"),
    ("glm", "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>a</tool_call> Bye", "a</tool_call> Bye"),
]


@pytest.mark.parametrize(("name", "text", "wanted"), BESIDE)
def test_what_stands_beside_a_call_is_told_as_it_is(name: str, text: str, wanted: str) -> None:
    assert told(read(name, [text], False)) == (wanted, "", [("f", '{"n": 5}')])
    assert told(read(name, list(text), False)) == (wanted, "", [("f", '{"n": 5}')])


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral_json"])
def test_an_object_without_arguments_is_a_call_only_if_it_says_nothing_else(name: str) -> None:
    around = {"hermes": "<tool_call>{}</tool_call>", "llama3_json": "{}", "mistral_json": "[TOOL_CALLS][{}]"}[name]
    for said, is_call in (
        ({"name": "f"}, True),
        ({"name": "f", "id": "a"}, True),
        ({"name": "f", "input": {"n": 5}}, False),
        ({"name": "f", "description": "of a tool"}, False),
    ):
        text = around.replace("{}", dump(said))
        assert told(read(name, [text], False)) == (("", "", [("f", "{}")]) if is_call else (text, "", []))


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_inside_of_reasoning_that_does_not_end_is_reasoning(name: str) -> None:
    text = f"I see: {write(name, ONE)} so"
    for pieces in ([f"<think>{text}"], list(f"<think>{text}"), ["<think>", *text]):
        for is_cut in (False, True):
            assert told(read(name, pieces, is_cut)) == ("", text, [])
    token_ids = TOKENIZER.encode(f"<think>{text}", False)
    assert answer_of(name, [token_ids]) == answer_of(name, [[one] for one in token_ids]) == (("", text, []), "length")


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_of_any_number_of_tokens_is_told_alike_whole_and_streamed(name: str) -> None:
    calls = [("f", {"text": 'use </tool_call> and "<tool_call>" é東', "n": 5}), ("get-it", {"tree": {"a": [""]}})]
    token_ids = TOKENIZER.encode(write(name, calls), False)
    for num_tokens in range(1, len(token_ids)):
        given = token_ids[:num_tokens]
        whole = answer_of(name, [given])
        assert answer_of(name, [[token_id] for token_id in given]) == whole
        assert whole[1] == "length"
        content = whole[0][0].strip()
        assert content == "" or (name == "glm4" and content in words_of_names()), content


def answer_of(name: str, steps: Sequence[list[int]]) -> tuple[Any, str | None]:
    reader = MessageReader(format_of(name), "", TOOLS, False)
    choice = Choice(TOKENIZER, [], 0, False, reader)
    parts = []
    for i, token_ids in enumerate(steps):
        reason = "length" if i == len(steps) - 1 else None
        parts += choice.feed(Delta(request_id="a", token_ids=token_ids, finish_reason=reason)).parts
    return told(join_parts(parts)), choice.finish_reason
