"""The regular expressions of a client's form are each tried alone, and one that grows too complex is a 400 in words."""

import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from scheduler.constraints.grammar import MOST_MEMORY_BYTES, MOST_SECONDS
from scheduler.constraints.lexeme_trial import GROWS, grows
from server.api_error import ApiError
from server.grammar import structured
from server.grammar.grammar_checks import GrammarChecks
from server.grammar.lexemes import lark_lexemes, schema_lexemes
from server.grammar.structured import lark_grammar, own_grammar, regex_grammar, schema_grammar, schema_in_lark
from tests.server.live_server import Running

GROWING = "((a{1,50}){1,50}){1,50}"
WANTED = f"wanted a regular expression that can be kept token by token: {GROWS}"


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks(1, MOST_SECONDS, MOST_MEMORY_BYTES)
    yield made
    made.shutdown()


@pytest.fixture(autouse=True)
def checked(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "check_in_process", checks.check)


def of(text: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"fine": {"pattern": "^a{1,9}$"}, "a": text}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (of({"type": "string", "pattern": GROWING}), "#/properties/a/pattern"),
        (of({"type": "array", "items": {"pattern": GROWING, "maxLength": 400}}), "#/properties/a/items/pattern"),
        (of({"type": "object", "patternProperties": {GROWING: {}}}), "#/properties/a/patternProperties"),
        (of({"type": "object", "propertyNames": {"pattern": GROWING}}), "#/properties/a/patternProperties"),
        (of({"allOf": [{"pattern": "^a"}, {"pattern": GROWING}]}), "#/properties/a/allOf/1/pattern"),
    ],
)
def test_a_pattern_of_a_schema_that_grows_is_refused_with_its_place(schema: Any, place: str) -> None:
    for make in (schema_grammar, schema_in_lark):
        with pytest.raises(ApiError) as refused:
            make("x", schema)
        assert (refused.value.status, refused.value.code) == (400, "unsupported_grammar")
        assert refused.value.message == f'x: {place}: got "{GROWING}", {WANTED}'


def test_an_expression_that_grows_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        regex_grammar("structured_outputs.regex", GROWING)
    assert refused.value.code == "unsupported_grammar"
    assert refused.value.message == f'structured_outputs.regex: got "{GROWING}", {WANTED}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"start: /{GROWING}/", f'got "{GROWING}", {WANTED}'),
        (f'start: "/" A "/"\nA: /{GROWING}/i', f'got "{GROWING}", {WANTED}'),
        (
            "start: A\nA: B{1,30}\nB: /[a-z]{1,30}/",
            f'got "A", wanted a terminal that can be kept token by token: {GROWS}',
        ),
        (
            'start: "{" A\nA: "x"\n | B~1..30\nB: /[a-z]{1,30}/',
            f'got "A", wanted a terminal that can be kept token by token: {GROWS}',
        ),
        (f'start: "x" %json {{"type": "string", "pattern": "{GROWING}"}}', f'#/pattern: got "{GROWING}", {WANTED}'),
    ],
)
def test_an_expression_of_a_grammar_that_grows_is_refused(text: str, told: str) -> None:
    with pytest.raises(ApiError) as refused:
        lark_grammar("structured_outputs.grammar", text)
    assert refused.value.message == f"structured_outputs.grammar: {told}"


def test_what_only_looks_like_an_expression_of_a_grammar_is_none() -> None:
    text = f'start: "/{GROWING}/" A // /{GROWING}/\n# /{GROWING}/\nA: /a\\/b/\nb: %json {{"const": "/{GROWING}/"}}'
    assert [one.text for one in lark_lexemes(text)] == ["a\\/b"]
    lark_grammar("x", text)


def test_a_schema_that_no_reader_has_room_for_is_left_to_who_compiles_the_grammar() -> None:
    for schema in (
        '{"pattern": "a", "minLength": NaN}',
        '{"pattern": "a", "maxLength": 1e999}',
        '{"pattern":',
        "{" * 9999,
    ):
        with pytest.raises(ApiError, match=r"^x: "):
            lark_grammar("x", f"start: %json {schema}")


def test_grammars_of_ours_are_not_tried() -> None:
    own_grammar("x", "start: /(.*a){1,40}b{1,50}/")


def test_of_many_patterns_those_with_the_most_counts_are_tried() -> None:
    properties = {f"p{i}": {"pattern": f"^a{i}"} for i in range(500)} | {"last": {"pattern": GROWING}}
    found = schema_lexemes({"type": "object", "properties": properties})
    assert len(found) == 32
    assert found[0].text == GROWING


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": 3},
        {"patternProperties": ["a"]},
        True,
        3,
        {"not": {"pattern": "^a"}},
        {"pattern": "a", "minLength": 10**400},
    ],
)
def test_what_is_no_pattern_is_left_to_who_compiles_it(schema: Any) -> None:
    assert not any(grows(one.grammar, one.text) for one in schema_lexemes(schema))


HOSTILE = [
    "(((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}",
    "(.*a.{1,1000}){1,1000}",
    "a{1000000}",
    "((a?){1000}){1000}",
    "|".join(f".*{chr(97 + i)}.{{{i + 5}}}" for i in range(20)),
    "(" + "|".join("abc"[i % 3] * i for i in range(1, 300)) + "){1,300}",
    ".*".join(["[a-z]{1,500}"] * 30),
]


def test_the_worst_expressions_take_bounded_time_and_memory(checks: GrammarChecks) -> None:
    for pattern in HOSTILE:
        with pytest.raises(ApiError, match=r"grows too complex|too many expressions"):
            regex_grammar("x", pattern)
        with pytest.raises(ApiError, match="grows too complex"):
            schema_grammar("x", {"pattern": pattern})
    (started,) = checks._slots.queue
    process = psutil.Process(started.pid)
    assert sum(process.cpu_times()[:2]) < MOST_SECONDS * len(HOSTILE)
    assert process.memory_info().rss < 128 << 20
    began = time.monotonic()
    many = {f"p{i}": {"pattern": f"^{i}(.*a.{{1,1000}}){{1,1000}}"} for i in range(1000)}
    with pytest.raises(ApiError):
        schema_grammar("x", {"type": "object", "properties": many})
    assert time.monotonic() - began < 10 * MOST_SECONDS


async def test_a_form_that_grows_is_a_400_before_the_stream_begins(live: Running) -> None:
    schema = of({"pattern": GROWING})
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    forms: dict[str, dict[str, Any]] = {
        "structured_outputs.regex": {"structured_outputs": {"regex": GROWING}},
        "structured_outputs.grammar": {"structured_outputs": {"grammar": f"start: /{GROWING}/"}},
        "response_format.json_schema.schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        },
        "tools[0].function.parameters": {"tools": [tool], "tool_choice": "required"},
    }
    for param, form in forms.items():
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream} | form
            answer = await live.http.post("/v1/chat/completions", json=body)
            error = json.loads(answer.content)["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_grammar", param)
            assert GROWS in error["message"]
