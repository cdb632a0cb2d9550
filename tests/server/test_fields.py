"""Every field of a request is known: served, free of effect, accepted where it asks for nothing, or refused by name."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import openai.types as openai_types
import pytest
from openai.types import chat as openai_chat

from server.api_error import ApiError
from server.bodies.body_reader import decode_body
from server.bodies.field_table import (
    CHAT,
    COMPLETION,
    CUSTOM,
    FUNCTION,
    JSON_SCHEMA,
    MESSAGE,
    PART,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    TOOL,
)
from server.bodies.fields import Each, Fields, Refused, Served
from server.bodies.generation_bodies import (
    check_chat,
    check_completion,
)
from server.routes.catalogue import find_routes, nested_tables
from server.routes.messages.message_bodies import MESSAGES
from server.routes.tokens.token_bodies import DETOKENIZE, TOKENIZE
from tests.server.live_server import fake_command, make_deployment, running_server

HI = [{"role": "user", "content": "Hi"}]
LEAST = {
    COMPLETION: {"prompt": "a"},
    CHAT: {"messages": HI},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [1]},
}
TABLES = [pytest.param(table, id=table.struct.__name__) for table in nested_tables(find_routes())]
BODIES = [pytest.param(table, id=table.struct.__name__) for table in LEAST]


def decode(wanted: Fields, tree: dict[str, Any], refuse_unknown: bool = True) -> Any:
    return decode_body(json.dumps(LEAST[wanted] | tree).encode(), wanted, None if refuse_unknown else [])


def refusal(wanted: Fields, tree: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as refused:
        decode(wanted, tree)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize("table", TABLES)
def test_served_fields_are_those_that_a_body_reads(table: Fields) -> None:
    read = {name for name, rule in table.rules.items() if isinstance(rule, Served | Fields | Each)}
    assert read == set(table.struct.__struct_fields__)


@pytest.mark.parametrize("body", BODIES)
def test_a_neutral_field_passes_at_its_neutral_values_and_is_refused_by_name_at_others(
    body: Fields,
) -> None:
    for name, rule in body.rules.items():
        if not isinstance(rule, Refused):
            continue
        for value in (None, *rule.values):
            decode(body, {name: value})
        for value in ("anything else", {"a": 1}, ["x" * 100]):
            error = refusal(body, {name: value})
            assert (error.param, error.code) == (name, "unsupported_value")
            assert error.message.startswith(f"{name}: got ")
            assert error.message.endswith(f": {rule.reason}")
            assert len(error.message) < len(name) + len(rule.reason) + 200


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b'"guided_json": {"type":\n  "object"}',
         'guided_json: got {"type": "object"}, wanted none: send it as structured_outputs.json'),
        (b'"guided_regex": "a+"', 'guided_regex: got "a+", wanted none: send it as structured_outputs.regex'),
        (b'"use_beam_search": "%s"' % (b"x" * 100),
         f'use_beam_search: got "{"x" * 63}..., wanted none or false: this decoding method is not supported'),
        (b'"response_format": {"type": "json_object", "schema": {}}', "response_format.schema: got {}, wanted none: "
         "a schema is sent as json_schema.schema, with type 'json_schema'"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_came_and_what_is_wanted_on_one_line(sent: bytes, told: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(b'{"prompt": "a", %s}' % sent, COMPLETION, ignored=None)
    assert refused.value.message == told
    assert refused.value.param == told.partition(":")[0]


def test_a_missing_field_of_an_object_inside_is_named() -> None:
    with pytest.raises(ApiError, match=r"^output_config\.format\.schema: missing$") as refused:
        decode_body(
            b'{"model": "m", "max_tokens": 1, "messages": [%s], "output_config": {"format": {"type": "json_schema"}}}'
            % b'{"role": "user", "content": "Hi"}',
            MESSAGES,
            ignored=None,
        )
    assert refused.value.param == "output_config.format.schema"


def test_zero_is_not_false_nor_one_true_but_one_is_one_in_any_spelling() -> None:
    decode(
        COMPLETION,
        {"length_penalty": 1.0, "routed_experts_prompt_start": 0.0, "watermarking": False, "add_special_tokens": True},
    )
    for name, value in (
        ("watermarking", 0),
        ("routed_experts_prompt_start", False),
        ("length_penalty", True),
        ("add_special_tokens", 1),
    ):
        assert refusal(COMPLETION, {name: value}).code == "unsupported_value"


@pytest.mark.parametrize(
    ("body", "given", "nearest"),
    [
        (COMPLETION, "max_token", "max_tokens"),
        (COMPLETION, "temprature", "temperature"),
        (CHAT, "guided_jsn", "guided_json"),
        (CHAT, "stop_tokens_ids", "stop_token_ids"),
        (TOKENIZE, "add_special_token", "add_special_tokens"),
        (DETOKENIZE, "token", "tokens"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_known_one(body: Fields, given: str, nearest: str) -> None:
    error = refusal(body, {given: 1})
    assert (error.param, error.code) == (given, "unknown_parameter")
    assert error.message == f"{given}: unknown field; the nearest known one is {nearest!r}"


@pytest.mark.parametrize("given", ["num_ctx", "low_vram", "mirostat"])
def test_an_unknown_field_that_is_near_no_known_one_is_named_alone(given: str) -> None:
    assert refusal(CHAT, {given: 1}).message == f"{given}: unknown field"


def test_a_misspelt_needed_field_is_named_before_the_missing_one() -> None:
    with pytest.raises(ApiError, match=r"^promt: unknown field; the nearest known one is 'prompt'$"):
        decode_body(b'{"promt": "a"}', COMPLETION, ignored=None)


NESTED = [
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
    ({"messages": [*HI, {"role": "user", "content": "a", "nme": "b"}]}, "messages[1].nme", "name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "txt": "b"}]}]},
        "messages[0].content[1].txt",
        "text",
    ),
    ({"tools": [{"type": "function", "function": {"nam": "f"}}]}, "tools[0].function.nam", "name"),
    ({"response_format": {"typ": "text"}}, "response_format.typ", "type"),
]


@pytest.mark.parametrize(("tree", "path", "nearest"), NESTED)
def test_an_unknown_nested_field_is_named_with_its_path(tree: dict[str, Any], path: str, nearest: str) -> None:
    error = refusal(CHAT, tree)
    assert error.param == path
    assert error.message == f"{path}: unknown field; the nearest known one is {nearest!r}"
    decode(CHAT, tree, refuse_unknown=False)


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"messages": [{"role": "assistant", "content": "a", "function_call": {}}]}, "messages[0].function_call"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": {"url": "b"}}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_a_nested_field_that_is_not_served_is_refused_by_name_whatever_the_setting(
    tree: dict[str, Any], path: str
) -> None:
    assert refusal(CHAT, tree).param == path
    with pytest.raises(ApiError):
        decode(CHAT, tree, refuse_unknown=False)


def test_unknown_names_are_cut_and_made_printable() -> None:
    for name in ("x" * 1_000_000, "two\nlines", "back`tick", "` - at `$.n`"):
        message = refusal(COMPLETION, {name: 1}).message
        assert len(message) < 250
        assert message.isprintable()


def test_fields_that_were_dropped_unseen_are_refused_by_name() -> None:
    for name, value in {
        "guided_json": {"type": "object"},
        "guided_regex": "a+",
        "structural_tag": "{}",
        "service_tier": "flex",
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
    }.items():
        assert refusal(CHAT, {name: value}).param == name


def typed_fields(kind: Any) -> set[str]:
    return set(kind.__required_keys__ | kind.__optional_keys__)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (openai_types.completion_create_params.CompletionCreateParamsStreaming, COMPLETION),
        (openai_chat.completion_create_params.CompletionCreateParamsStreaming, CHAT),
        (openai_chat.ChatCompletionStreamOptionsParam, STREAM_OPTIONS),
        (openai_chat.ChatCompletionAssistantMessageParam, MESSAGE),
        (openai_chat.ChatCompletionUserMessageParam, MESSAGE),
        (openai_chat.ChatCompletionSystemMessageParam, MESSAGE),
        (openai_chat.ChatCompletionDeveloperMessageParam, MESSAGE),
        (openai_chat.ChatCompletionToolMessageParam, MESSAGE),
        (openai_chat.ChatCompletionFunctionMessageParam, MESSAGE),
        (openai_chat.ChatCompletionContentPartTextParam, PART),
        (openai_chat.ChatCompletionContentPartImageParam, PART),
        (openai_chat.ChatCompletionContentPartInputAudioParam, PART),
        (openai_chat.ChatCompletionContentPartRefusalParam, PART),
        (openai_chat.chat_completion_content_part_param.File, PART),
        (openai_chat.ChatCompletionFunctionToolParam, TOOL),
        (openai_chat.ChatCompletionCustomToolParam, TOOL),
        (openai_chat.chat_completion_custom_tool_param.Custom, CUSTOM),
        (openai_types.shared_params.FunctionDefinition, FUNCTION),
        (openai_types.shared_params.ResponseFormatText, RESPONSE_FORMAT),
        (openai_types.shared_params.ResponseFormatJSONObject, RESPONSE_FORMAT),
        (openai_types.shared_params.ResponseFormatJSONSchema, RESPONSE_FORMAT),
        (openai_types.shared_params.response_format_json_schema.JSONSchema, JSON_SCHEMA),
    ],
)
def test_every_field_of_the_official_client_is_known(kind: Any, fields: Fields) -> None:
    assert typed_fields(kind) <= set(fields.rules)


def test_every_field_of_vllm_is_known() -> None:
    names = tomllib.loads((Path(__file__).parent / "vllm_fields.toml").read_text())
    for fields, own, num_least in ((COMPLETION, "completion", 60), (CHAT, "chat", 70)):
        wanted = {*names["both"], *names[own], *names["former"]}
        assert len(wanted) >= num_least
        assert wanted <= set(fields.rules)


def test_tools_are_taken_with_any_choice_of_them() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "anything": {}}}}]
    check_chat(decode(CHAT, {"tools": [], "tool_choice": "auto"}))
    for choice in (None, "none", "auto", "required", {"type": "function", "function": {"name": "f"}}):
        check_chat(decode(CHAT, {"tools": tools, "tool_choice": choice}))
    check_chat(decode(CHAT, {"tools": tools}))


def test_whole_floats_are_integers_and_others_are_not() -> None:
    body = decode(COMPLETION, {"max_tokens": 16.0, "n": 2.0, "seed": 1e3, "stop_token_ids": [7.0, 8], "top_p": 1})
    assert (body.max_tokens, body.n, body.seed, body.stop_token_ids) == (16, 2, 1000, [7, 8])
    assert all(type(value) is int for value in (body.max_tokens, body.n, body.seed, *body.stop_token_ids))
    assert decode(COMPLETION, {"prompt": [1.0, 2.0]}).prompt == [1, 2]
    for tree, path in (({"max_tokens": 5.5}, "max_tokens"), ({"n": 1.5, "max_tokens": 2.0}, "n")):
        assert refusal(COMPLETION, tree).param == path


async def test_usage_goes_with_each_chunk_when_asked() -> None:
    body = {"prompt": "one two three", "temperature": 0, "max_tokens": 3, "stream": True}
    async with running_server(make_deployment(), fake_command()) as live:

        async def counts(**options: bool) -> list[int | None]:
            answer = await live.http.post("/v1/completions", json=body | {"stream_options": options})
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            return [(event.get("usage") or {}).get("completion_tokens") for event in events]

        running = await counts(include_usage=True, continuous_usage_stats=True)
        assert running == sorted(running)
        assert (min(running) >= 1, running[-2:]) == (True, [3, 3])
        plain = await counts(include_usage=True, continuous_usage_stats=False)
        assert plain == [None] * (len(plain) - 1) + [3]
        assert set(await counts(include_usage=False, continuous_usage_stats=True)) == {None}


MESSAGE = {"model": "reference", "max_tokens": 4, "messages": HI}


async def test_vendors_own_routes_take_fields_and_variants_that_nobody_knows_yet_and_name_them() -> None:
    count = {key: value for key, value in MESSAGE.items() if key != "max_tokens"}
    image = {"type": "image", "source": {"type": "base64", "data": ""}}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [
        *HI,
        {"role": "system", "content": "Today is Friday."},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}, image]},
    ]
    managed = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    item = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    items = [{"type": "web_search_call", "id": "w"}, {"role": "user", "content": [{"type": "input_image"}]}]
    shell = [  # its output has the type of a function's
        {"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]},
    ]
    codex = {"model": "reference", "max_output_tokens": 4, "input": "Hi"}
    taken = [
        ("/v1/messages", MESSAGE | managed, None),
        ("/v1/messages", MESSAGE | {"no_such": 1}, "no_such"),
        ("/v1/messages/count_tokens", count | {"no_such": {"a": 1}}, "no_such"),
        ("/v1/messages", MESSAGE | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        (
            "/v1/messages",
            MESSAGE | {"messages": turns},
            "messages[2].content[0], messages[3].content[1], messages[3].content[0].content[0]",
        ),
        ("/v1/responses", codex | {"client_metadata": {"a": "b"}}, None),
        ("/v1/responses", codex | {"no_such": 1}, "no_such"),
        ("/v1/responses", codex | {"tools": [item, {"type": "web_search", "name": "f"}]}, "tools[1]"),
        ("/v1/responses", codex | {"input": items}, "input[0], input[1].content[0]"),
        ("/v1/responses", codex | {"input": shell}, "input[0], input[1].output[0]"),
        (
            "/v1/responses",
            codex
            | {
                "messages": [],
                "tools": [item, {"type": "web_search"}],
                "tool_choice": {"type": "function", "name": "f"},
            },
            "messages, tools[1]",
        ),
        (
            "/v1/messages",
            MESSAGE | {"input": [{"type": "a"}], "tools": [{"type": "b", "name": "b"}]},
            "input, tools[0]",
        ),
    ]
    async with running_server(make_deployment(), fake_command()) as live:
        for path, body, names in taken:
            answer = await live.http.post(path, json=body)
            assert (answer.status_code, answer.headers.get("x-tandem-ignored")) == (200, names), answer.text
        refused = await live.http.post("/v1/messages", json=MESSAGE | {"container": "x", "no_such": 1})
        assert (refused.status_code, "container" in refused.text) == (400, True)
        many = await live.http.post("/v1/messages", json=MESSAGE | {f"\u6771{'x' * 99}{i}": 1 for i in range(999)})
        assert (many.status_code, len(many.headers["x-tandem-ignored"]) <= 1024) == (200, True)
        long = await live.http.post("/v1/messages", json=MESSAGE | {"max_tokens": 32000})
        words = r"input length and `max_tokens` exceed context limit: (\d+) \+ 32000 > (\d+), decrease input length or "
        assert re.match(words, long.json()["error"]["message"]), long.text
    async with running_server(make_deployment(unknown_fields="refuse"), fake_command()) as live:
        for path, body, names in taken:
            answer = await live.http.post(path, json=body)
            assert answer.status_code == (200 if names is None else 400), answer.text


async def test_unknown_fields_are_dropped_where_the_deployment_says_so() -> None:
    body = {"prompt": "one two", "temperature": 0, "no_such_field": {"a": [1]}, "stop": None, "n": None}
    async with running_server(make_deployment(unknown_fields="ignore"), fake_command()) as live:
        assert (await live.http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "one two"
        assert (await live.http.post("/v1/completions", json=body | {"guided_json": {}})).status_code == 400
    async with running_server(make_deployment(), fake_command()) as live:
        assert (await live.http.post("/v1/completions", json=body)).json()["error"]["param"] == "no_such_field"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "body: empty; wanted a JSON object"),
        (b'{"prompt": "a"', "ends before it is complete, after '"),
        (b'{"prompt": "a",}', "line 1, column 16, '}': trailing comma in object"),
        (b'{"prompt": "a",\n "n": NaN}', "line 2, column 7, 'NaN}': NaN is not JSON"),
        (b'{"prompt": "a", "n": -Infinity}', "Infinity is not JSON"),
        (b"{'prompt': 'a'}", "strings stand in double quotes"),
        (b'{"echo": True}', "small letters"),
        (b'{"n": None}', "None is null"),
        (b'{"prompt": "\\ud800 x"}', "column 13, "),
        (b'{"prompt": "\\ud800 x"}', "half a character (a lone surrogate)"),
        (b'{"prompt": "a\nb"}', "a line's end as \\n"),
        (b"prompt=a", "line 1, column 1, 'prompt=a': invalid character"),
    ],
)
def test_a_body_that_is_not_json_is_told_what_is_wrong_with_it(raw: bytes, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(raw, COMPLETION, ignored=None)
    assert words in refused.value.message
    assert "\n" not in refused.value.message
    for other in ("NaN", "surrogate"):
        assert (other in refused.value.message) <= (other in words or b"\\ud800" in raw), "what is wrong with this one"


def test_ranges_are_printed_as_people_write_them() -> None:
    for tree, words in (
        ({"seed": 2**63}, "got 9223372036854775808, wanted from -9223372036854775808 to 9223372036854775807"),
        ({"max_tokens": -1}, "got -1, wanted from 0 to 2147483647"),
        ({"top_p": 1.25}, "got 1.25, wanted above 0 to 1"),
    ):
        body = decode(COMPLETION, tree)
        with pytest.raises(ApiError, match=words):
            check_completion(body)


def test_numbers_that_are_far_too_large_are_not_repeated_digit_by_digit() -> None:
    for tree in ({"max_tokens": 1e300}, {"best_of": -1e300}, {"prompt": [1e300]}, {"logprobs": 1e300}):
        error = refusal(COMPLETION, tree)
        assert error.param.partition("[")[0] == next(iter(tree))
        assert len(error.message) < 100
