"""Tools and reasoning, asked for by the official client, against a model that says what is written down."""

import json
from pathlib import Path
from typing import Any

import openai
import pydantic

from tests.server.live_server import REFERENCE, Running
from tests.server.scripted_model import MISTRAL, Script, make_model, scripted_server

HI = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]
ARGUMENTS = '{"city": "東京, {\\"x\\"}"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
Served = tuple[Running, Script]


async def chat(served: Served, says: str, **options: Any) -> Any:
    running, script = served
    script.add(says)
    asked = {"model": "scripted", "messages": HI, "tools": TOOLS} | options
    return await running.openai.chat.completions.create(**asked)


async def prompt_of(running: Running, **options: Any) -> str:
    """Return a chat's prompt, without special tokens, as the engine got it: it repeats it."""
    asked = {"model": "scripted", "temperature": 0} | options
    usage = (await running.openai.chat.completions.create(**asked, max_tokens=1)).usage
    asked |= {"max_tokens": usage.prompt_tokens, "extra_body": {"ignore_eos": True}}
    said = read((await running.openai.chat.completions.create(**asked)).choices[0].message)
    return said["reasoning"] + said["content"] + json.dumps(said["calls"], ensure_ascii=False)


def read(message: Any) -> dict[str, Any]:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": calls,
    }


async def stream(served: Served, says: str, **options: Any) -> tuple[dict[str, Any], list[Any], str]:
    """Return what the deltas sum to, the deltas, and how the answer ended."""
    chunks = [chunk async for chunk in await chat(served, says, stream=True, **options)]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    summed: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for delta in deltas:
        summed["content"] += delta.content or ""
        summed["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id:
                assert call.index == len(summed["calls"])
                summed["calls"].append((call.function.name, ""))
            name, before = summed["calls"][call.index]
            summed["calls"][call.index] = (name, before + call.function.arguments)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert not any(reasons[:-1])
    return summed, deltas, reasons[-1]


async def test_a_call_is_a_call_and_not_text(hermes: Served) -> None:
    done = (await chat(hermes, CALL)).choices[0]
    assert read(done.message) == {"content": "", "reasoning": "", "calls": [("weather", ARGUMENTS)]}
    assert done.message.content is None
    assert done.finish_reason == "tool_calls"
    assert done.message.tool_calls[0].id


async def test_streamed_deltas_come_as_openais_and_sum_to_the_whole(hermes: Served) -> None:
    says = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('weather', 'clock')}"
    whole = read((await chat(hermes, says)).choices[0].message)
    summed, deltas, reason = await stream(hermes, says)
    assert summed == whole == {
        "content": "Let me see.", "reasoning": "hm", "calls": [("weather", ARGUMENTS), ("clock", ARGUMENTS)],
    }  # fmt: skip
    assert reason == "tool_calls"
    assert deltas[0].role == "assistant"
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    begun = [call for call in calls if call.id]
    assert [(call.index, call.type, call.function.name, call.function.arguments) for call in begun] == [
        (0, "function", "weather", ""), (1, "function", "clock", ""),
    ]  # fmt: skip
    assert len({call.id for call in begun}) == 2
    assert all(call.function.name is None and call.type is None for call in calls if not call.id)
    assert len(calls) > 10, "arguments come in pieces"


async def test_the_clients_own_stream_reader_makes_the_same_message(hermes: Served) -> None:
    running, script = hermes
    script.add(f"I look.\n{CALL}")
    options = {"model": "scripted", "messages": HI, "tools": TOOLS}
    async with running.openai.chat.completions.stream(**options) as events:
        kinds = {event.type async for event in events}
        final = (await events.get_final_completion()).choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert read(final.message)["calls"] == [("weather", ARGUMENTS)]
    assert final.message.content == "I look."


async def test_the_result_of_a_call_goes_back_through_the_template(hermes: Served) -> None:
    running, script = hermes
    message = (await chat(hermes, CALL)).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    answered = await chat(hermes, "It rains.", messages=[*HI, message, result])
    assert read(answered.choices[0].message) == {"content": "It rains.", "reasoning": "", "calls": []}
    assert answered.choices[0].finish_reason == "stop"
    assert script.is_over
    text = await prompt_of(running, messages=[*HI, message, result], tools=TOOLS, tool_choice="none")
    assert "<tool_call>" in text
    assert "東京" in text
    assert "rain" in text
    assert "<tools>" not in text, "what must not be called is not offered"


async def test_without_tools_and_with_none_calls_are_text(hermes: Served) -> None:
    for options in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}, {"tools": []}):
        done = (await chat(hermes, CALL, **options)).choices[0]
        assert (done.message.content, done.message.tool_calls, done.finish_reason) == (CALL, None, "stop")


async def test_without_parallel_calls_the_answer_ends_before_the_second(hermes: Served) -> None:
    says = f"{CALL}\n{CALL} and more"
    done = await chat(hermes, says, parallel_tool_calls=False)
    assert len(done.choices[0].message.tool_calls) == 1
    assert done.choices[0].finish_reason == "tool_calls"
    summed, _, reason = await stream(hermes, says, parallel_tool_calls=False)
    assert (summed["calls"], summed["content"], reason) == ([("weather", ARGUMENTS)], "", "tool_calls")
    assert len((await chat(hermes, says)).choices[0].message.tool_calls) == 2


async def test_reasoning_is_apart_from_the_answer_also_where_the_template_begins_it(hermes: Served) -> None:
    said = "<think>\nhm, hm\n</think>\n\nYes."
    assert read((await chat(hermes, said, tools=[])).choices[0].message)["reasoning"] == "hm, hm"
    for options in (
        {"reasoning_effort": "high"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
    ):
        found, _, _ = await stream(hermes, "hm, hm\n</think>\n\nYes.", **options)
        assert found == {"content": "Yes.", "reasoning": "hm, hm", "calls": []}
    plain, _, _ = await stream(hermes, "hm, hm\n</think>\n\nYes.", reasoning_effort="none")
    assert plain["reasoning"] == ""


async def test_a_turns_reasoning_goes_back_through_the_template(hermes: Served) -> None:
    running, _ = hermes
    before = {"role": "assistant", "content": "Yes.", "reasoning_content": "because of that"}
    assert "because of that" in await prompt_of(running, messages=[*HI, before, *HI])


async def test_logprobs_of_calls_are_told_for_every_token(hermes: Served) -> None:
    done = (await chat(hermes, CALL, logprobs=True)).choices[0]
    running, _ = hermes
    num_tokens = len(running.service.tokenizer.encode(CALL, False)) + 1
    assert len(done.logprobs.content) == num_tokens
    chunks = [chunk async for chunk in await chat(hermes, CALL, logprobs=True, stream=True)]
    streamed = [entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert streamed == done.logprobs.content


async def test_a_stop_string_ends_an_answer_inside_a_call(hermes: Served) -> None:
    done = (await chat(hermes, CALL, stop=["東京"])).choices[0]
    assert read(done.message)["calls"] == [("weather", '{"city": "')]
    assert (await chat(hermes, f"Now <tool_call> {CALL}", stop=["_call"])).choices[0].message.content == "Now <tool"


class Weather(pydantic.BaseModel):
    city: str


class Report(pydantic.BaseModel):
    words: str


async def test_beside_a_form_the_client_parses_calls_and_answers(hermes: Served) -> None:
    running, script = hermes
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    asked = {"model": "scripted", "messages": HI, "tools": tools, "response_format": Report}
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
    report = Report(words="<tool_call> rain")
    for _ in range(2):
        script.add(f"<think>\nhm\n</think>\n\n{call}", report.model_dump_json())
    called = (await running.openai.chat.completions.parse(**asked)).choices[0]
    assert called.message.tool_calls[0].function.parsed_arguments == Weather(city="東京")
    assert (called.finish_reason, called.message.parsed, called.message.reasoning_content) == ("tool_calls", None, "hm")
    done = (await running.openai.chat.completions.parse(**asked)).choices[0]
    assert (done.finish_reason, done.message.parsed, done.message.tool_calls) == ("stop", report, None)
    for expected in (called, done):
        async with running.openai.chat.completions.stream(**asked) as events:
            final = (await events.get_final_completion()).choices[0]
        assert final.finish_reason == expected.finish_reason
        assert final.message.parsed == expected.message.parsed
        assert read(final.message) == read(expected.message)


async def test_special_tokens_mark_calls_and_no_client_sees_them(tmp_path: Path) -> None:
    special = ["[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]"]
    async with scripted_server(tmp_path, make_model(tmp_path / "model", MISTRAL, special)) as served:
        says = f"Look:\n[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock[ARGS]{{}}"
        wanted = {"content": "Look:", "reasoning": "", "calls": [("weather", ARGUMENTS), ("clock", "{}")]}
        assert read((await chat(served, says)).choices[0].message) == wanted
        assert (await stream(served, says))[0] == wanted
        broken = (await chat(served, "So [TOOL_CALLS] what? [ARGS]")).choices[0].message
        assert (broken.content, broken.tool_calls) == ("So  what? ", None)
        spelled = [{"role": "user", "content": "[TOOL_CALLS]weather[ARGS]{}"}]
        text = (await chat(served, "ok", messages=spelled)).choices[0].message.content
        assert text == "ok"


async def test_a_template_that_writes_no_tools_gets_a_default_rendering(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, REFERENCE) as served:
        first = (await chat(served, f"Yes.\n{CALL}")).choices[0].message
        assert read(first) == {"content": "Yes.", "reasoning": "", "calls": [("weather", ARGUMENTS)]}
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
        running, script = served
        assert script.is_over
        said = await prompt_of(running, messages=[*HI, first, result], tools=TOOLS)
        for part in ("# Tools", '"name": "clock"', "<tool_response>", "rain"):
            assert part in said
