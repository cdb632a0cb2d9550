"""`/v1/messages`, asked by Anthropic's client: text, tools, thinking, events, counts and errors."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import msgspec
import pydantic
import pytest
from anthropic import AsyncAnthropic

from server.bodies.generation_bodies import ChatBody
from server.routes.messages.message_bodies import MessagesBody
from server.routes.messages.message_translation import translate_messages
from tests.server.live_server import Running, fake_command, make_deployment, running_server
from tests.server.scripted_model import Script

FROM_CARD = {"card": 7, "host": 0, "disk": 0}
PROMPT = "The café on the 5th street, 東京, is open."
HI = [{"role": "user", "content": PROMPT}]
TOOLS = [
    {
        "name": "weather",
        "description": "of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'


def client(live: Running, key: str = "k") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=live.url, api_key=key, max_retries=0, timeout=20)


@pytest.fixture(scope="module")
async def claude(live: Running) -> AsyncIterator[AsyncAnthropic]:
    async with client(live) as asking:
        yield asking


@pytest.fixture
async def scripted(hermes: tuple[Running, Script]) -> AsyncIterator[tuple[AsyncAnthropic, Script]]:
    async with client(hermes[0]) as one:
        yield one, hermes[1]


def ask(asking: AsyncAnthropic, **options: Any):
    own = {"temperature": 0} | options.pop("extra_body", {})
    return asking.messages.create(**{"model": "reference", "messages": HI, "max_tokens": 500} | options, extra_body=own)


async def test_a_message_is_an_answer_of_the_chat(live, claude):
    given = await ask(claude)
    chat = await live.openai.chat.completions.create(model="reference", messages=HI, temperature=0)
    assert [block.type for block in given.content] == ["text"]
    assert given.content[0].text == chat.choices[0].message.content
    assert (given.role, given.stop_reason, given.stop_sequence) == ("assistant", "end_turn", None)
    usage = given.usage
    assert (usage.input_tokens + 7, usage.cache_read_input_tokens) == (chat.usage.prompt_tokens, 7)
    assert usage.cached_tokens_from == chat.usage.prompt_tokens_details.cached_tokens_from == FROM_CARD
    assert usage.output_tokens == chat.usage.completion_tokens
    parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in (PROMPT[:9], PROMPT[9:])]}]
    joined = given.content[0].text.replace(PROMPT[:9], f"{PROMPT[:9]}\n")
    assert (await ask(claude, messages=parts)).content[0].text == joined
    with_system = await ask(claude, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}])
    chat = [{"role": "system", "content": "Be\nbrief."}, *HI]
    other = await live.openai.chat.completions.create(model="reference", messages=chat, temperature=0)
    assert with_system.content[0].text == other.choices[0].message.content


async def test_why_it_stopped_is_told_in_anthropics_words(claude):
    assert (await ask(claude, max_tokens=3)).stop_reason == "max_tokens"
    for stops in (["street"], ["zzz", "5th st"]):
        cut = await ask(claude, stop_sequences=stops)
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stops[-1])
        assert cut.content[0].text.strip() == PROMPT[: PROMPT.index(stops[-1])].strip()
    late = await ask(claude, extra_body={"attention_profile": "slow", "max_seconds": 0.3})
    assert late.stop_reason == "max_tokens"


async def test_the_events_of_a_stream_are_the_clients(claude):
    whole = await ask(claude)
    async with claude.messages.stream(
        model="reference", messages=HI, max_tokens=500, extra_body={"temperature": 0}
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = [event async for event in await ask(claude, stream=True)]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2].usage.cached_tokens_from == FROM_CARD
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_calls_of_tools_are_blocks_and_are_answered(scripted):
    asking, script = scripted
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
    script.add(f"Let me look.{CALL}", f"Let me look.{CALL}")
    given = await ask(asking, **asked)
    text, call = given.content
    assert text.text.strip() == "Let me look."
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "東京"})
    assert given.stop_reason == "tool_use"
    async with asking.messages.stream(**asked, max_tokens=500) as stream:
        final = await stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in given.content
    ]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    own = [block.model_dump(exclude_none=True) for block in given.content]
    turns = [*asked["messages"], {"role": "assistant", "content": own}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "And?"}]})
    script.add("It is fine.")
    answered = await ask(asking, **asked | {"messages": turns})
    assert answered.content[0].text == "It is fine."
    counted = await asking.messages.count_tokens(**asked | {"messages": turns})
    assert counted.input_tokens == answered.usage.input_tokens + answered.usage.cache_read_input_tokens


async def test_a_call_that_max_tokens_cuts_is_a_block_with_the_input_so_far_whole_and_streamed(scripted):
    asking, script = scripted
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
    call = CALL.replace("東京", "a city with a long name " * 3)
    num_inputs = 0
    for max_tokens in range(1, 60, 6):
        script.add(call, call)
        given = await ask(asking, **asked, max_tokens=max_tokens)
        async with asking.messages.stream(**asked, max_tokens=max_tokens) as stream:
            final = await stream.get_final_message()
        assert given.stop_reason == final.stop_reason == "max_tokens"
        assert not any(block.text for message in (given, final) for block in message.content if block.type == "text")
        own, streamed = ([block.input for block in one.content if block.type == "tool_use"] for one in (given, final))
        assert len(own) == len(streamed)
        assert all(one | some == one for one, some in zip(own, streamed, strict=True)), "a client drops an open text"
        num_inputs += any("city" in one for one in own)
    assert num_inputs > 2


async def test_a_tool_that_must_be_called_is_offered_with_the_words_of_chats(scripted):
    asking, script = scripted
    script.add(CALL)
    given = await ask(asking, model="scripted", tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert [block.type for block in given.content] == ["tool_use"]
    script.add("No.")
    given = await ask(asking, model="scripted", tools=TOOLS, tool_choice={"type": "none"})
    assert given.content[0].text == "No."


async def test_thinking_is_a_block_of_its_own_and_goes_back(scripted):
    asking, script = scripted
    says = "It rains.\n</think>\n\nWet."
    script.add(says, says, "More.")
    asked = {"model": "scripted", "thinking": {"type": "enabled", "budget_tokens": 1024}}
    thinking, text = (await ask(asking, **asked)).content
    assert (thinking.type, thinking.thinking.strip(), text.text) == ("thinking", "It rains.", "Wet.")
    async with asking.messages.stream(messages=HI, max_tokens=500, **asked) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    turns = [*HI, {"role": "assistant", "content": [thinking.model_dump(), text.model_dump(exclude_none=True)]}, *HI]
    assert (await ask(asking, model="scripted", messages=turns)).content[0].text == "More."


class City(pydantic.BaseModel):
    name: str


async def test_a_form_is_parsed_by_the_official_client_beside_tools_too(scripted):
    asking, script = scripted
    script.add('{"name": "東京"}', CALL, '{"name": "東京"}')
    asked = {"model": "scripted", "messages": HI, "max_tokens": 500, "output_format": City}
    given = await asking.messages.parse(**asked)
    assert given.parsed_output == City(name="東京")
    asked["tools"] = [TOOLS[0] | {"strict": True}]
    called = await asking.messages.parse(**asked)
    assert (called.stop_reason, called.content[0].input) == ("tool_use", {"city": "東京"})
    async with asking.messages.stream(**asked) as stream:
        assert (await stream.get_final_message()).parsed_output == City(name="東京")


def chat_of(**fields: Any) -> ChatBody:
    body = {"messages": HI, "max_tokens": 5} | fields
    return translate_messages(msgspec.convert(body, MessagesBody)).chat


def test_effort_is_the_chats_and_thinking_says_whether_there_is_any():
    assert chat_of().reasoning_effort is None
    assert chat_of(output_config={"effort": "low"}).reasoning_effort == "low"
    assert chat_of(thinking={"type": "adaptive"}).reasoning_effort == "medium"
    assert chat_of(thinking={"type": "adaptive"}, output_config={"effort": "max"}).reasoning_effort == "max"
    assert chat_of(thinking={"type": "disabled"}, output_config={"effort": "max"}).reasoning_effort == "none"


def test_a_format_is_the_chats_and_a_strict_tool_is_one():
    chat = chat_of(output_config={"format": {"type": "json_schema", "schema": {"type": "null"}}})
    assert chat.response_format.json_schema.schema == {"type": "null"}
    strict = [tool.function.strict for tool in chat_of(tools=[TOOLS[0] | {"strict": True}, TOOLS[0]]).tools]
    assert strict == [True, None]


async def test_errors_are_the_clients_own_kinds(claude):
    with pytest.raises(anthropic.BadRequestError) as bad:
        await ask(claude, extra_body={"temperature": 5})
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.body["error"]["message"].startswith("temperature: ")
    with pytest.raises(anthropic.NotFoundError):
        await ask(claude, model="claude")
    with pytest.raises(anthropic.InternalServerError):
        await ask(claude, extra_body={"attention_profile": "breaks"})
    with pytest.raises(anthropic.APIStatusError, match="not finite"):
        _ = [event async for event in await ask(claude, stream=True, extra_body={"attention_profile": "breaks"})]


async def test_a_key_may_come_as_anthropics_clients_send_it_and_there_alone():
    async with running_server(make_deployment(api_keys=["k"]), fake_command()) as live:
        async with client(live) as known:
            assert (await ask(known)).content
        async with client(live, "wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await ask(stranger)
        assert refused.value.body["error"]["type"] == "authentication_error"
        body = {"messages": HI, "max_tokens": 5}
        bearer = {"authorization": "Bearer k"}
        assert (await live.http.post("/v1/messages", json=body, headers=bearer)).status_code == 200
        both = {"authorization": "Bearer wrong", "x-api-key": "k"}
        assert (await live.http.post("/v1/messages", json=body, headers=both)).status_code == 401
        chats = await live.http.post("/v1/chat/completions", json=body, headers={"x-api-key": "k"})
        assert chats.status_code == 401


async def test_what_is_wrong_with_a_body_is_named(live, subtests):
    for body, named in [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[1].content[0]",
        ),
        ({"tools": [{"name": "bad name", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -5}, "top_k"),
        ({"container": "x"}, "container"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
    ]:
        with subtests.test(body=body, named=named):
            answer = await live.http.post("/v1/messages", json={"messages": HI, "max_tokens": 5} | body)
            assert answer.status_code == 400
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["message"].startswith(f"{named}: ")


async def test_tokens_are_counted_for_a_profile_that_is_served(live):
    for path, more in (("/v1/messages", {"max_tokens": 5}), ("/v1/messages/count_tokens", {})):
        answer = await live.http.post(path, json={"messages": HI, "attention_profile": "other"} | more)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("attention_profile: ")


def test_every_field_of_the_official_client_is_known():
    from anthropic.types.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsStreaming

    from server.routes.messages.message_bodies import COUNT_TOKENS, MESSAGES

    for params, fields in ((MessageCreateParamsStreaming, MESSAGES), (MessageCountTokensParams, COUNT_TOKENS)):
        assert params.__required_keys__ | params.__optional_keys__ <= set(fields.rules)
