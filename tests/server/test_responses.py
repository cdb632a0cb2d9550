"""`/v1/responses`, asked by the official client: text, tools, reasoning, events, and what follows an earlier one."""

import json
from typing import Any

import openai
import pydantic
import pytest

from server.bodies.chat_message import CalledFunction, Message, MessageCall
from server.generation.history_truncation import list_cuts
from server.stores import response_store
from server.stores.response_store import ResponseStore
from tests.server.live_server import Running, fake_command, make_deployment, running_server
from tests.server.scripted_model import Script

FROM_CARD = {"card": 7, "host": 0, "disk": 0}
PROMPT = "The café on the 5th street, 東京, is open."
Served = tuple[Running, Script]
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'


def respond(live: Running, **options: Any):
    return live.openai.responses.create(**{"model": "reference", "input": PROMPT, "temperature": 0} | options)


def told(text: str) -> str:
    """What the fake engine repeats of the reference's template."""
    return f"\n{text}\n"


async def test_a_response_is_an_answer_of_the_chat(live):
    given = await respond(live, max_output_tokens=500, metadata={"a": "b"})
    assert given.output_text.strip() == PROMPT
    assert (given.status, given.object, given.model, given.error) == ("completed", "response", "reference", None)
    assert given.metadata == {"a": "b"}
    chat = await live.openai.chat.completions.create(
        model="reference", messages=[{"role": "user", "content": PROMPT}], temperature=0
    )
    assert chat.choices[0].message.content == given.output_text
    assert given.usage.input_tokens == chat.usage.prompt_tokens
    assert given.usage.output_tokens == chat.usage.completion_tokens
    assert given.usage.input_tokens_details.cached_tokens == 7
    assert given.usage.input_tokens_details.cached_tokens_from == FROM_CARD
    parts = [{"role": "user", "content": [{"type": "input_text", "text": part} for part in (PROMPT[:9], PROMPT[9:])]}]
    assert (await respond(live, input=parts)).output_text == given.output_text.replace(PROMPT[:9], f"{PROMPT[:9]}\n")


async def test_a_response_that_is_cut_is_incomplete_and_says_why(live):
    cut = await respond(live, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"
    late = await respond(live, extra_body={"attention_profile": "slow", "max_seconds": 0.3})
    assert (late.status, late.incomplete_details.reason) == ("incomplete", "time_limit")


async def test_the_events_of_a_stream_are_the_clients_and_end_with_the_whole(live):
    whole = await respond(live, max_output_tokens=500)
    events = [event async for event in await respond(live, max_output_tokens=500, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events if event.type.endswith(".delta")) == whole.output_text
    assert events[-4].text == whole.output_text
    final = events[-1].response
    assert (final.output_text, final.usage, final.status) == (whole.output_text, whole.usage, "completed")
    assert final.output[0].id == events[2].item.id == events[5].item_id
    async with live.openai.responses.stream(model="reference", input=PROMPT, temperature=0) as stream:
        gathered = [event async for event in stream]
        assert (await stream.get_final_response()).output_text == whole.output_text
    assert gathered[-1].type == "response.completed"


async def test_a_stream_that_breaks_ends_as_failed(live):
    create = respond(live, stream=True, extra_body={"attention_profile": "breaks"})
    events = [event async for event in await create]
    assert events[-1].type == "response.failed"
    assert "not finite" in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError):
        await respond(live, extra_body={"attention_profile": "breaks"})


async def test_calls_of_tools_are_items_streamed_and_not(hermes):
    running, script = hermes
    asked = {"model": "scripted", "input": "Weather?", "tools": TOOLS}
    script.add(f"Let me look.{CALL}", f"Let me look.{CALL}")
    message, call = (await running.openai.responses.create(**asked)).output
    assert message.content[0].text.strip() == "Let me look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "東京"})
    async with running.openai.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments == final.output[1].arguments
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert (done.arguments, done.name, done.output_index) == (call.arguments, "weather", 1)


async def test_a_function_in_a_namespace_is_offered_and_called_by_both_names(hermes):
    running, script = hermes
    unseen = {"type": "web_search", "name": "weather"}
    inner = [{"type": "namespace", "name": space, "tools": [*TOOLS, unseen]} for space in ("maps", "news")]
    asked = {"model": "scripted", "input": "Weather?", "tools": [*TOOLS, *inner]}
    in_namespace = CALL.replace('"weather"', '"news.weather"')
    script.add(in_namespace, in_namespace, CALL, "It is fine.", "It is fine.")
    answer = await running.http.post("/v1/responses", json=asked)
    assert answer.headers["x-tandem-ignored"] == "tools[1].tools[1], tools[2].tools[1]"
    (call,) = answer.json()["output"]
    assert (call["namespace"], call["name"], json.loads(call["arguments"])) == ("news", "weather", {"city": "東京"})
    streamed = await running.http.post("/v1/responses", json=asked | {"stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    (done,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert (done["namespace"], done["name"]) == ("news", "weather")
    (plain,) = (await running.http.post("/v1/responses", json=asked)).json()["output"]
    assert (plain.get("namespace"), plain["name"]) == (None, "weather")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"}
    history = [{"role": "user", "content": "Weather?"}, call, result]
    sent = (await running.http.post("/v1/responses", json=asked | {"input": history})).json()
    kept = {"previous_response_id": answer.json()["id"], "input": [result]}
    followed = (await running.http.post("/v1/responses", json=asked | kept)).json()
    assert sent["usage"]["input_tokens"] == followed["usage"]["input_tokens"]


async def test_a_response_follows_another_and_answers_its_call(hermes, tokenizer):
    running, script = hermes
    script.add(CALL, "It is fine.")
    first = await running.openai.responses.create(
        model="scripted", input="Weather?", tools=TOOLS, instructions="Be brief."
    )
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
    asked = {"model": "scripted", "tools": TOOLS, "previous_response_id": first.id}
    second = await running.openai.responses.create(**asked, input=[result])
    assert second.output_text == "It is fine."
    assert second.previous_response_id == first.id
    # the whole conversation in one request is the same prompt; instructions are not taken over
    items = [{"role": "user", "content": "Weather?"}, first.output[0].model_dump(exclude_none=True), result]
    script.add("Yes.")
    whole = await running.openai.responses.create(model="scripted", tools=TOOLS, input=items)
    assert whole.usage.input_tokens == second.usage.input_tokens
    script.add("Third.", "Third.")
    third = await running.openai.responses.create(model="scripted", input="More", previous_response_id=second.id)
    items += [{"role": "assistant", "content": "It is fine."}, {"role": "user", "content": "More"}]
    whole = await running.openai.responses.create(model="scripted", input=items)
    assert third.usage.input_tokens == whole.usage.input_tokens


async def test_reasoning_is_an_item_of_its_own(hermes):
    running, script = hermes
    script.add("It rains.\n</think>\n\nWet.", "It rains.\n</think>\n\nWet.")
    asked = {"model": "scripted", "input": "Weather?", "reasoning": {"effort": "high"}}
    reasoning, message = (await running.openai.responses.create(**asked)).output
    assert (reasoning.type, reasoning.content[0].text.strip()) == ("reasoning", "It rains.")
    assert message.content[0].text == "Wet."
    events = [event async for event in await running.openai.responses.create(**asked, stream=True)]
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thought == reasoning.content[0].text


class City(pydantic.BaseModel):
    name: str


async def test_a_form_is_parsed_by_the_official_client(hermes):
    running, script = hermes
    script.add('{"name": "東京"}')
    given = await running.openai.responses.parse(model="scripted", input="Which?", text_format=City)
    assert given.output_parsed == City(name="東京")
    assert given.text.format.type == "json_schema"


async def test_beside_tools_a_response_is_a_call_or_has_the_form(hermes):
    running, script = hermes
    asked = {"model": "scripted", "input": "Which?", "text_format": City, "tools": [TOOLS[0] | {"strict": True}]}
    script.add(CALL, '{"name": "東京"}')
    called = await running.openai.responses.parse(**asked)
    assert called.output_parsed is None
    assert called.output[0].parsed_arguments == {"city": "東京"}
    assert (await running.openai.responses.parse(**asked)).output_parsed == City(name="東京")


async def test_what_is_kept_is_the_keys_own_for_a_time_and_not_where_nothing_is_stored():
    settings = make_deployment(api_keys=["k", "other"], responses_seconds=0.5)
    async with running_server(settings, fake_command()) as live:
        first = await respond(live)
        assert (await respond(live, previous_response_id=first.id)).previous_response_id == first.id
        other = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="other", max_retries=0)
        with pytest.raises(openai.NotFoundError) as hidden:
            await other.responses.create(model="reference", input="a", previous_response_id=first.id)
        assert hidden.value.code == "response_not_found"
        await other.close()
        unkept = await respond(live, store=False)
        with pytest.raises(openai.NotFoundError):
            await respond(live, previous_response_id=unkept.id)

        async def forgotten() -> bool:
            try:
                await respond(live, previous_response_id=first.id, max_output_tokens=1)
            except openai.NotFoundError:
                return True
            return False

        await live.until(forgotten, 3)


async def test_a_response_is_shown_as_it_was_answered_listed_and_deleted(hermes):
    running, script = hermes
    script.add(f"I look.\n{CALL}", "<think>hm</think>It rains.")
    client = running.openai.responses
    first = await client.create(model="scripted", input="Which weather?", instructions="Be brief.", tools=TOOLS)
    called = first.output[1]
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "rain"}
    events = await client.create(
        model="scripted", input=[result], tools=TOOLS, previous_response_id=first.id, stream=True
    )
    second = [event async for event in events][-1].response
    for one in (first, second):
        assert await client.retrieve(one.id) == one
    items = [item async for item in client.input_items.list(second.id, order="asc", limit=1)]
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
    assert [item.content[0].text for item in items[:2]] == ["Which weather?", "I look."]
    assert (items[2].name, items[2].call_id, items[2].arguments) == ("weather", called.call_id, called.arguments)
    assert (items[3].call_id, items[3].output) == (called.call_id, "rain")
    assert [item async for item in client.input_items.list(second.id)] == items[::-1]
    page = await client.input_items.list(second.id, limit=3)
    assert (page.has_more, page.first_id, page.last_id) == (True, items[3].id, items[1].id)
    await client.delete(first.id)
    for ask in (client.retrieve, client.delete, client.input_items.list):
        with pytest.raises(openai.NotFoundError) as gone:
            await ask(first.id)
        assert gone.value.code == "response_not_found"
        assert gone.value.message.startswith("Error code: 404")
    script.add("ok")
    third = await client.create(model="scripted", input="So?", previous_response_id=second.id)
    thoughts = [item for item in (await client.input_items.list(third.id)).data if item.type == "reasoning"]
    assert [thought.content[0].text for thought in thoughts] == ["hm"]


async def test_another_key_neither_sees_nor_deletes_a_response():
    async with running_server(make_deployment(api_keys=["k", "other"]), fake_command()) as live:
        mine = await respond(live)
        path, other = f"/v1/responses/{mine.id}", {"authorization": "Bearer other"}
        for method, below in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            assert (await live.http.request(method, path + below, headers=other)).status_code == 404
        assert (await live.openai.responses.retrieve(mine.id)).output_text == mine.output_text


async def test_what_is_wrong_with_a_query_is_named(live, subtests):
    for query, param in [
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=ten", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_none", "after"),
        ("?stream=true", "stream"),
    ]:
        with subtests.test(query=query, param=param):
            given = await respond(live)
            answer = await live.http.get(f"/v1/responses/{given.id}{query}")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


def test_the_oldest_goes_when_there_is_no_room_and_the_bytes_are_counted(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(response_store.time, "monotonic", lambda: clock[0])
    store, said = ResponseStore(10, 3000), [Message(role="user", content="x" * 500)]
    answer = b"y" * 500
    for name in ("a", "b", "c"):
        store.keep("owner", name, answer, said)
        assert store.num_bytes <= 3000
    kept = store.find("owner", "c")
    assert (kept.response, kept.messages) == (answer, said)
    assert store.find("owner", "a") is None
    for large in ((b"", [Message(role="user", content="x" * 4000)]), (b"y" * 4000, said)):
        store.keep("owner", "large", *large)
        assert store.find("owner", "large") is None
    assert store.find("owner", "b") is not None
    assert store.find("other", "b") is None
    assert not store.delete("other", "b")
    num_bytes = store.num_bytes
    assert store.delete("owner", "c")
    assert store.num_bytes == num_bytes // 2
    assert not store.delete("owner", "c")
    clock[0] += 10
    assert store.find("owner", "b") is None
    store.keep("owner", "d", answer, said)
    assert store.num_bytes < 2000, "what is too old goes with the next"
    never = ResponseStore(0, 3000)
    never.keep("owner", "a", answer, said)
    assert never.find("owner", "a") is None


async def test_what_is_wrong_with_a_body_is_named(live, subtests):
    for body, param in [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": "a", "tools": [{"type": "function", "name": "bad name"}]}, "tools[0].name"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 10**9}, "max_output_tokens"),
        ({"input": "word " * 20000}, "input"),
        ({"input": "a", "temperature": 3}, "temperature"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ]:
        with subtests.test(body=body, param=param):
            answer = await live.http.post("/v1/responses", json=body)
            assert 400 <= answer.status_code < 500
            assert answer.json()["error"]["param"] == param
            assert answer.json()["error"]["message"].startswith(param.partition("[")[0])


def test_every_field_of_the_official_client_is_known():
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as Params

    from server.routes.responses.response_bodies import RESPONSES

    assert Params.__required_keys__ | Params.__optional_keys__ <= set(RESPONSES.rules)


def turn(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"question {number} " + "word " * 200},
        {"role": "assistant", "content": f"answer {number}"},
    ]


async def test_the_oldest_turns_are_left_out_where_a_history_is_too_long_and_that_is_asked(live):
    history = [item for number in range(100) for item in turn(number)]
    asked = {"instructions": "Be brief.", "input": [*history, {"role": "user", "content": "And now?"}]}
    with pytest.raises(openai.BadRequestError, match="tokens, the attention profile has room for 16384"):
        await respond(live, **asked)
    given = await respond(live, **asked, truncation="auto", max_output_tokens=2000)
    assert given.truncation == "auto"
    assert 16384 - 2000 - 300 < given.usage.input_tokens <= 16384 - 2000
    assert given.output_text.strip().startswith("Be brief."), "the instructions stay"
    whole = await respond(live, truncation="auto", input="And now?", previous_response_id=given.id)
    assert whole.usage.input_tokens > 14_000, "what follows is cut anew from all turns"
    assert (await respond(live, truncation="disabled")).truncation == "disabled"
    with pytest.raises(openai.BadRequestError, match=r"input: at least .* tokens"):
        await respond(live, truncation="auto", input="word " * 20_000)


def test_a_call_is_left_out_with_its_results_and_the_last_question_stays():
    call = [MessageCall(id="a", function=CalledFunction(name="f", arguments="{}"))]
    other = [MessageCall(id="b", function=CalledFunction(name="f", arguments="{}"))]
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content="one"),
        Message(role="assistant", content="two"),
        Message(role="user", content="three"),
        Message(role="assistant", tool_calls=call),
        Message(role="tool", content="four", tool_call_id="a"),
        Message(role="assistant", tool_calls=other),
        Message(role="tool", content="five", tool_call_id="b"),
    ]
    assert list_cuts(messages) == [[0, 3, 4, 5, 6, 7], [0, 3, 6, 7]]
    assert list_cuts(messages[:2]) == list_cuts(messages[:1]) == []
    late = [*messages[:5], Message(role="user", content="so?"), *messages[5:6]]
    assert list_cuts(late) == [[0, 3, 4, 5, 6]], "a result never stands without its call"
