"""Bad input: a 4xx that names the field, an error object, and nothing else in flight disturbed."""

import asyncio
import json
import threading

import httpx
import pytest

from tests.server.live_server import Running, fake_command, make_deployment, running_server
from tests.tolerances import LOOP_STALL_S

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
LONG = "word " * 20000
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": "g"}}
DEEP = "[" * 100_000 + "]" * 20_000


def tool_with(function: dict) -> dict:
    return {"type": "function", "function": {"name": "f"} | function}


# path, body, the field that the message must name
TABLE = [
    (COMPLETION, {}, "prompt"),
    (COMPLETION, {"prompt": None}, "prompt"),
    (COMPLETION, {"prompt": 5}, "prompt"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": ["a", ""]}, "prompt[1]"),
    (COMPLETION, {"prompt": [[]]}, "prompt[0]"),
    (COMPLETION, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETION, {"prompt": [1, 2.5]}, "prompt[1]"),
    (COMPLETION, {"prompt": [True]}, "prompt[0]"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETION, {"prompt": [8192]}, "prompt"),
    (COMPLETION, {"prompt": [[1], [-1]]}, "prompt[1]"),
    (COMPLETION, {"prompt": [10**30]}, "prompt"),
    (COMPLETION, {"prompt": LONG}, "prompt"),
    (COMPLETION, {"prompt": [7] * 16384}, "prompt"),
    (COMPLETION, {"prompt": [7] * 16000, "max_tokens": 385}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "max_tokens": 5.5}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "max_tokens": True}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "temperature": -0.1}, "temperature"),
    (COMPLETION, {"prompt": "a", "temperature": 2.1}, "temperature"),
    (COMPLETION, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETION, {"prompt": "a", "top_p": 0}, "top_p"),
    (COMPLETION, {"prompt": "a", "top_p": 1.5}, "top_p"),
    (COMPLETION, {"prompt": "a", "top_k": -2}, "top_k"),
    (COMPLETION, {"prompt": "a", "min_p": 2}, "min_p"),
    (COMPLETION, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETION, {"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    (COMPLETION, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    (COMPLETION, {"prompt": "a", "seed": 2**63}, "seed"),
    (COMPLETION, {"prompt": "a", "seed": "x"}, "seed"),
    (COMPLETION, {"prompt": "a", "n": 0}, "n"),
    (COMPLETION, {"prompt": "a", "n": 129}, "n"),
    (COMPLETION, {"prompt": ["a"] * 100, "n": 4}, "n"),
    (COMPLETION, {"prompt": ["a"] * 400}, "prompt"),
    (COMPLETION, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETION, {"prompt": "a", "echo": "yes"}, "echo"),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETION, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (COMPLETION, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETION, {"prompt": "a", "stop": ["s"] * 17}, "stop"),
    (COMPLETION, {"prompt": "a", "stop": ""}, "stop"),
    (COMPLETION, {"prompt": "a", "stop": [1]}, "stop[0]"),
    (COMPLETION, {"prompt": "a", "stop_token_ids": [9999]}, "stop_token_ids"),
    (COMPLETION, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    (COMPLETION, {"prompt": "a", "repetition_penalty": 1e-39}, "repetition_penalty"),
    (COMPLETION, {"prompt": "a", "min_tokens": -1}, "min_tokens"),
    (COMPLETION, {"prompt": "a", "ignore_eos": 1}, "ignore_eos"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"the": 1}}, "logit_bias"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"-5": 1}}, "logit_bias"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"8192": 1}}, "logit_bias"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias"),
    (COMPLETION, {"prompt": "a", "logit_bias": [5]}, "logit_bias"),
    (COMPLETION, {"prompt": "a", "attention_profile": "psychic"}, "attention_profile"),
    (COMPLETION, {"prompt": "a", "stream": "yes"}, "stream"),
    (COMPLETION, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (
        COMPLETION,
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    (COMPLETION, {"prompt": "a", "return_progress": True}, "return_progress"),
    (COMPLETION, {"prompt": "a", "model": 5}, "model"),
    (COMPLETION, {"prompt": "a", "user": 5}, "user"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": 1, "content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "a", "content": "", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": ""}]}]}, "messages[0].tool_calls[0].id"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}]},
        "messages[0].tool_calls[0].type",
    ),
    (CHAT, {"messages": [*HI, {"role": "tool", "content": "4"}]}, "messages[1].tool_call_id"),
    (CHAT, {"messages": [*HI, {"role": "tool", "content": "4", "tool_call_id": "a"}]}, "messages[1].tool_call_id"),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "", "tool_call_id": "b"},
            ]
        },
        "messages[1].tool_call_id",
    ),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": HI, "tools": [{}]}, "tools[0].type"),
    (CHAT, {"messages": HI, "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {"messages": HI, "tools": [TOOL, tool_with({"name": ""})]}, "tools[1].function.name"),
    (CHAT, {"messages": HI, "tools": [tool_with({"name": "a b"})]}, "tools[0].function.name"),
    (CHAT, {"messages": HI, "tools": [tool_with({"name": "f\n"})]}, "tools[0].function.name"),
    (CHAT, {"messages": HI, "tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (CHAT, {"messages": HI, "tools": [tool_with({"parameters": []})]}, "tools[0].function.parameters"),
    (
        CHAT,
        {"messages": HI, "tools": [tool_with({"parameters": {"type": "array"}})]},
        "tools[0].function.parameters.type",
    ),
    (
        CHAT,
        {"messages": HI, "tools": [tool_with({"parameters": {"properties": []}})]},
        "tools[0].function.parameters.properties",
    ),
    (CHAT, {"messages": HI, "tools": [tool_with({"name": f"f{i}"}) for i in range(1025)]}, "tools"),
    (CHAT, {"messages": HI, "tools": [tool_with({"description": LONG})]}, "messages"),
    (
        CHAT,
        {"messages": HI, "tools": [tool_with({"parameters": {"not": {}}})], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": NAMED}, "tool_choice.function.name"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    (CHAT, {"messages": HI, "tools": [TOOL], "parallel_tool_calls": 2}, "parallel_tool_calls"),
    (CHAT, {"messages": HI, "reasoning_effort": "some"}, "reasoning_effort"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {f"x{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": 5}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HI, "functions": [{}]}, "functions"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": HI, "response_format": {}}, "response_format.type"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    (CHAT, {"messages": HI, "guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        CHAT,
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    (COMPLETION, {"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"json": False}}, "structured_outputs.json"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"json": False, "regex": "a"}}, "structured_outputs"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"json": '{"format": "x"}'}}, "structured_outputs.json"),
    (
        COMPLETION,
        {"prompt": "a", "structured_outputs": {"whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        COMPLETION,
        {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    (COMPLETION, {"prompt": "a", "bad_words": ["a"] * 129}, "bad_words"),
    (COMPLETION, {"prompt": "a", "bad_words": ["a", ""]}, "bad_words[1]"),
    (COMPLETION, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETION, {"prompt": "a", "allowed_token_ids": [8192]}, "allowed_token_ids"),
    (CHAT, {"messages": HI, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": HI, "audio": {"voice": "x"}}, "audio"),
    (CHAT, {"messages": HI, "logprobs": 5}, "logprobs"),
    (
        CHAT,
        {"messages": HI, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name",
    ),
    (CHAT, {"messages": HI, "tools": "f"}, "tools"),
    (CHAT, {"messages": HI, "top_logprobs": 5}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 16384}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": [8192]}, "tokens"),
]

RAW = [
    (b"", "body"),
    (b"{", "body"),
    (b'{"prompt": "a",}', "body"),
    (b'{"prompt": "a"} x', "body"),
    (b"[]", "body"),
    (b'"prompt"', "body"),
    (b"null", "body"),
    (b'{"prompt": "a", "temperature": NaN}', "body"),
    (b'{"prompt": "a", "temperature": Infinity}', "body"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "\xff\xfe"}', "body"),
    (b'{"prompt": "\\ud800 alone"}', "body"),
    (b'{"prompt": "\\udc00"}', "body"),
    (b'{"prompt": ' + DEEP.encode() + b"}", "body"),
    (b'{"prompt": "a", "metadata": ' + DEEP.encode() + b"}", "body"),
]


def error_of(answer: httpx.Response) -> dict:
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert "\n" not in error["message"]
    assert answer.headers["x-request-id"]
    return error


async def undisturbed(live: Running, stream: "asyncio.Task[str]") -> None:
    assert await stream == "one two three four five six"
    assert (await live.http.get("/health")).status_code == 200


def slow_stream(live: Running) -> "asyncio.Task[str]":
    async def read() -> str:
        body = {"prompt": "one two three four five six", "temperature": 0, "stream": True}
        text = ""
        async with live.http.stream("POST", COMPLETION, json=body | {"attention_profile": "slow"}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    return asyncio.create_task(read())


async def test_each_bad_field_is_a_400_that_names_it(live):
    stream = slow_stream(live)
    wrong = []
    for path, body, field in TABLE:
        answer = await live.http.post(path, json=body)
        error = error_of(answer)
        named = error["param"] == field and error["message"].startswith(f"{field}: ")
        if answer.status_code != 400 or not named:
            wrong.append((path, str(body)[:80], field, answer.status_code, error))
    assert not wrong
    await undisturbed(live, stream)


async def test_each_bad_body_is_a_400_and_nothing_else_notices(live):
    stream = slow_stream(live)
    for raw, field in RAW:
        answer = await live.http.post(COMPLETION, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 400, raw[:60]
        assert error_of(answer)["message"].startswith(f"{field}: "), (raw[:60], answer.text)
    await undisturbed(live, stream)


async def test_unknown_profiles_are_refused_with_the_list(live):
    error = error_of(await live.http.post(COMPLETION, json={"prompt": "a", "attention_profile": "x"}))
    assert "exact, slow" in error["message"]


async def test_a_profile_of_host_memory_is_refused_where_there_is_none(live):
    error = error_of(await live.http.post(COMPLETION, json={"prompt": "a", "attention_profile": "sampled"}))
    assert "this deployment has no `host` section" in error["message"]
    assert error["param"] == "attention_profile"


async def test_an_error_that_is_too_large_is_named_only_beside_a_profile_that_bounds_its_errors(live):
    body = {"prompt": "a", "max_tokens": 2, "attention_epsilon": 0.05}
    assert (await live.http.post(COMPLETION, json=body)).status_code == 200
    error = error_of(await live.http.post(COMPLETION, json=body | {"attention_profile": "narrow"}))
    assert error["param"] == "attention_epsilon"
    assert error["message"].startswith(
        "attention_epsilon: got 0.05, and profile 'narrow' bounds no error of a step; leave it out, or name as "
        "attention_profile one of exact, slow"
    )
    error = error_of(await live.http.post(COMPLETION, json=body | {"attention_epsilon": 0}))
    assert error["message"] == "attention_epsilon: got 0, wanted above 0 to 1000"


async def test_each_profile_has_a_longest_context_of_its_own(live):
    body = {"prompt": [7] * 90, "temperature": 0, "max_tokens": 20}
    assert (await live.http.post(COMPLETION, json=body)).status_code == 200
    error = error_of(await live.http.post(COMPLETION, json=body | {"attention_profile": "narrow"}))
    assert "110, the context has 100" in error["message"]
    cut = await live.http.post(COMPLETION, json=body | {"attention_profile": "narrow", "max_tokens": None})
    assert cut.json()["usage"]["completion_tokens"] == 10


async def test_a_50_mb_body_is_refused_unread(live):
    stream = slow_stream(live)
    answer = await live.http.post(COMPLETION, content=b"x" * 50_000_000, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"

    async def endless():
        for _ in range(50):
            yield b"x" * 1_000_000

    answer = await live.http.post(COMPLETION, content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    await undisturbed(live, stream)


async def test_other_media_types_and_encodings_are_a_415(live):
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "gzip"}):
        answer = await live.http.post(COMPLETION, content=b"{}", headers=headers)
        assert answer.status_code == 415
        error_of(answer)
    with_charset = {"content-type": "application/json; charset=utf-8"}
    answer = await live.http.post(COMPLETION, content=b'{"prompt":"a"}', headers=with_charset)
    assert answer.status_code == 200


async def test_unknown_routes_methods_and_models_are_error_objects(live):
    for method, path, status in (
        ("GET", "/nope", 404),
        ("POST", "/v1/audio/speech", 404),
        ("GET", "/v1/models/other/model", 404),
        ("GET", COMPLETION, 405),
        ("DELETE", "/health", 405),
    ):
        answer = await live.http.request(method, path)
        assert answer.status_code == status
        error_of(answer)
    answer = await live.http.post(CHAT, json={"model": "gpt-5", "messages": HI})
    assert (answer.status_code, error_of(answer)["param"]) == (404, "model")


async def test_a_request_id_is_taken_if_sane_and_made_otherwise(live):
    async def returned(given: str) -> str:
        return (await live.http.get("/health", headers={"x-request-id": given})).headers["x-request-id"]

    assert await returned("trace-42.a:b") == "trace-42.a:b"
    for strange in ("", "x" * 129, "two words", 'quo"te', "new\tline"):
        made = await returned(strange)
        assert made != strange
        assert len(made) == 32
    bad = await live.http.post(COMPLETION, json={}, headers={"x-request-id": "mine"})
    assert bad.headers["x-request-id"] == "mine"


async def test_keys_guard_everything_but_health_version_and_metrics(tmp_path):
    (tmp_path / "keys").write_text("from-file\n\n")
    deployment = make_deployment(api_keys=["secret"], api_keys_file=tmp_path / "keys")
    async with running_server(deployment, fake_command()) as live:
        for path in ("/health", "/version", "/metrics"):
            assert (await live.http.get(path)).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic secret"},
            {"authorization": ""},
        ):
            for path in ("/v1/models", "/nope"):
                answer = await live.http.get(path, headers=headers)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("secret", "from-file"):
            assert (await live.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200


@pytest.mark.parametrize(
    ("repeats", "lets_others_in", "patience_s"),
    [(400, True, 20), (4, False, LOOP_STALL_S)],
    ids=["long", "short_and_so_on_the_event_loop"],
)
async def test_a_long_text_is_tokenised_without_stopping_the_others(
    live, tokenizer, monkeypatch, repeats, lets_others_in, patience_s
):
    """The tokenizer waits for another request's answer, which never comes while it holds the event loop."""
    began, answered, seen = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        loop.call_soon_threadsafe(began.set)
        seen.append(answered.wait(patience_s))
        return tokenizer.encode(text, add_special_tokens)

    monkeypatch.setattr(live.service.tokenizer, "encode", encode)
    text = "It was the best of times, it was the worst of times. " * repeats
    asked = asyncio.create_task(live.http.post("/tokenize", json={"prompt": text}))
    async with asyncio.timeout(20):
        await began.wait()
        assert (await live.http.get("/version")).status_code == 200
        answered.set()
        assert (await asked).json()["tokens"] == tokenizer.encode(text, True)
    assert seen == [lets_others_in]


async def test_too_many_sequences_are_refused_before_anything_is_tokenised(live, monkeypatch):
    encoded = []
    encode = live.service.tokenizer.encode_within
    monkeypatch.setattr(live.service.tokenizer, "encode_within", lambda *given: encoded.append(given) or encode(*given))
    for prompt, field in ((["a few words"] * 300_000, "prompt"), ([[7]] * 200, "n")):
        answer = await live.http.post(COMPLETION, json={"prompt": prompt, "n": 2})
        message = error_of(answer)["message"]
        assert message.startswith(f"{field}: {2 * len(prompt)} sequences in one request (prompts times n), at most ")
    assert encoded == []
    assert (await live.http.post(COMPLETION, json={"prompt": ["a"] * 3, "n": 2})).status_code == 200
    assert len(encoded) == 3


async def test_tokenize_and_detokenize_are_inverse(live, tokenizer):
    text = "naïve 東京 <|end|>"
    tokens = (await live.http.post("/tokenize", json={"prompt": text})).json()
    assert tokens == {"tokens": tokenizer.encode(text, True), "count": len(tokens["tokens"]), "max_model_len": 16384}
    back = (await live.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert back == {"prompt": text}
    rendered = (await live.http.post("/tokenize", json={"messages": HI})).json()["tokens"]
    assert tokenizer.decode(rendered, False) == "<|begin_of_text|><|user|>\nHi<|end|><|assistant|>\n"
