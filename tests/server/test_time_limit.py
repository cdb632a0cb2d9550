"""A request's own limits: its time, which the engine is freed after, and how much of its prompt is read."""

import pytest
from starlette.datastructures import Headers

from server.api_error import ApiError
from server.generation.time_limit import choose_limit
from tests.server.live_server import Running, fake_command, make_deployment, running_server

LONG = {"prompt": "one two three", "temperature": 0, "max_tokens": 8000, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "one two three"}], "temperature": 0, "max_tokens": 8000}
SLOW = {"attention_profile": "slow"}  # 50 ms a token
NEVER = {"attention_profile": "long_prefill"}


async def until_idle(live: Running) -> None:
    async def idle() -> bool:
        return await live.metric("tandem_requests_running") == 0

    await live.until(idle, 3)


@pytest.mark.parametrize("sent", ["field", "header", "setting"])
async def test_what_was_generated_in_time_is_the_answer_and_the_engine_is_free(sent):
    settings = {"max_request_seconds": 0.4} if sent == "setting" else {}
    body = LONG | SLOW | ({"max_seconds": 0.4} if sent == "field" else {"max_seconds": 50})
    headers = {"x-request-timeout": "0.4"} if sent == "header" else {}
    async with running_server(make_deployment(**settings), fake_command()) as live:
        answer = (await live.http.post("/v1/completions", json=body | {"n": 2}, headers=headers)).json()
        for choice in answer["choices"]:
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "time_limit")
            assert choice["text"].startswith("one two three")
        assert 2 <= answer["usage"]["completion_tokens"] < 40
        await until_idle(live)
        assert await live.metric("tandem_requests_finished_total") == 2


async def test_a_stream_ends_with_its_reason_and_its_usage(live):
    async def choices_of(route: str, body: dict) -> list:
        create = live.openai.chat.completions.create if route == "chat" else live.openai.completions.create
        own = {name: body.pop(name) for name in ("attention_profile", "ignore_eos") if name in body}
        stream = await create(model="reference", stream=True, **body, extra_body={"max_seconds": 0.3, **own})
        return [chunk.choices[0] async for chunk in stream if chunk.choices]

    for route, body in (("completions", LONG | SLOW), ("chat", CHAT | SLOW)):
        *before, last = await choices_of(route, dict(body))
        assert (last.finish_reason, last.stop_reason) == ("length", "time_limit")
        assert len(before) >= 2
        assert all("stop_reason" not in choice.model_fields_set for choice in before)
    await until_idle(live)


async def test_where_nothing_was_generated_the_time_is_an_error(live):
    body = LONG | NEVER | {"max_seconds": 0.1}
    answer = await live.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (408, "max_seconds", "time_limit")
    assert answer.headers["x-should-retry"] == "false"
    assert error["message"].startswith("max_seconds: nothing was generated in 0.1 s")
    streamed = await live.http.post("/v1/completions", json=body | {"stream": True})
    assert '"code":"time_limit"' in streamed.text
    await until_idle(live)


async def test_a_request_that_ends_before_its_limit_is_as_it_was_and_its_clock_stops(live):
    plain = (await live.http.post("/v1/completions", json=LONG | {"max_tokens": 5})).json()
    limited = (await live.http.post("/v1/completions", json=LONG | {"max_tokens": 5, "max_seconds": 0.2})).json()
    assert limited["choices"] == plain["choices"]
    assert "stop_reason" not in limited["choices"][0]


async def test_the_least_of_the_limits_counts_and_a_header_that_is_no_number_of_seconds_is_refused():
    def chosen(header: str | None, asked: float | None, most: float | None) -> float | None:
        return choose_limit(Headers({} if header is None else {"x-request-timeout": header}), asked, most)

    assert chosen(None, None, None) is None
    assert [chosen("2.5", 3, 4), chosen("5", 3, 4), chosen("5", 6, 4), chosen("1e1", None, None)] == [2.5, 3, 4, 10]
    for header in ("", "soon", "-1", "0", "nan", "1e999", "5s", "1" * 400, "³"):
        with pytest.raises(ApiError, match=r"^x-request-timeout: got .*, wanted seconds"):
            chosen(header, None, None)


# --- how much of a prompt is read -------------------------------------------------------------------------------------

WORDS = "one two three four five six seven eight"


async def test_of_a_prompt_that_is_cut_the_last_tokens_are_read_or_the_first(live, tokenizer, subtests):
    for side in [None, "left", "right"]:
        with subtests.test(side=side):
            ids = tokenizer.encode(WORDS, True)
            kept = ids[:3] if side == "right" else ids[-3:]
            for prompt in (WORDS, ids):
                body = {"prompt": prompt, "temperature": 0, "max_tokens": 50, "truncate_prompt_tokens": 3}
                body |= {} if side is None else {"truncation_side": side}
                answer = (await live.http.post("/v1/completions", json=body)).json()
                assert answer["usage"]["prompt_tokens"] == 3
                assert answer["choices"][0]["text"] == tokenizer.decode(kept, True)
                echoed = (await live.http.post("/v1/completions", json=body | {"echo": True})).json()
                spelled = b"".join(map(tokenizer.token_bytes, kept)).decode()
                assert echoed["choices"][0]["text"] == spelled + tokenizer.decode(kept, True)


async def test_minus_one_keeps_what_the_context_leaves_beside_the_answer(live):
    long = {"prompt": [7] * 500, "attention_profile": "narrow", "temperature": 0}  # a context of 100
    assert (await live.http.post("/v1/completions", json=long)).status_code == 400
    for asked, prompt_tokens in ((None, 84), (30, 70), (0, 100)):
        body = long | {"truncate_prompt_tokens": -1} | ({} if asked is None else {"max_tokens": asked})
        answer = (await live.http.post("/v1/completions", json=body)).json()
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
    chat = {"messages": [{"role": "user", "content": "word " * 5000}], "attention_profile": "narrow"}
    assert (await live.http.post("/v1/chat/completions", json=chat)).status_code == 400
    answer = await live.http.post("/v1/chat/completions", json=chat | {"truncate_prompt_tokens": -1, "max_tokens": 10})
    assert answer.json()["usage"]["prompt_tokens"] == 90
    short = WORDS, {"prompt": WORDS, "temperature": 0, "truncate_prompt_tokens": 1000}
    assert (await live.http.post("/v1/completions", json=short[1])).json()["choices"][0]["text"] == WORDS


async def test_a_limit_that_means_nothing_is_refused_by_name(live, subtests):
    for field, value in [
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 2**31),
        ("truncate_prompt_tokens", "5"),
        ("truncation_side", "middle"),
        ("priority", 2**31),
        ("priority", 1.5),
        ("max_seconds", 0),
        ("max_seconds", -1),
        ("max_seconds", 1e7),
        ("include_stop_str_in_output", 1),
    ]:
        with subtests.test(field=field, value=value):
            answer = await live.http.post("/v1/completions", json={"prompt": "a", field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


# --- what ended it ----------------------------------------------------------------------------------------------------


async def test_the_stop_string_ends_the_text_where_it_is_asked_for(live, subtests):
    for stop in ["three", ["five", "ee fo"], " four"]:
        with subtests.test(stop=stop):
            body = {"prompt": WORDS, "temperature": 0, "max_tokens": 50, "stop": stop, "logprobs": 0}
            cut = (await live.http.post("/v1/completions", json=body)).json()["choices"][0]
            kept = (await live.http.post("/v1/completions", json=body | {"include_stop_str_in_output": True})).json()
            kept = kept["choices"][0]
            found = min(([stop] if isinstance(stop, str) else stop), key=lambda one: WORDS.index(one) + len(one))
            assert cut["text"] + found == kept["text"] == WORDS[: WORDS.index(found) + len(found)]
            assert kept["finish_reason"] == "stop"
            assert kept["logprobs"]["text_offset"][-1] < len(kept["text"])
            events = (
                await live.http.post(
                    "/v1/completions", json=body | {"include_stop_str_in_output": True, "stream": True}
                )
            ).text
            assert events.count('"finish_reason":"stop"') == 1


async def test_the_stop_token_is_text_where_it_is_asked_for_unless_it_is_special(live, tokenizer):
    three = tokenizer.encode(" three", False)[0]
    body = {"prompt": WORDS, "temperature": 0, "max_tokens": 50, "stop_token_ids": [three]}
    answer = (await live.http.post("/v1/completions", json=body | {"include_stop_str_in_output": True})).json()
    assert answer["choices"][0]["text"] == "one two three"
    del body["stop_token_ids"]
    whole = (await live.http.post("/v1/completions", json=body | {"include_stop_str_in_output": True})).json()
    assert whole["choices"][0]["text"] == WORDS
