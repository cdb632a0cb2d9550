"""The assistant's last turn, continued: what the prompt is, and that the answer is the new text alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from server.parsing.answer_parts import join_parts
from tests.server.grammar_texts import allows
from tests.server.live_server import Running, fake_command, make_deployment, running_server, with_documents
from tests.server.scripted_model import Script
from tests.server.test_held_answers import ADA, CALLS, FORM
from tests.server.test_held_calls import TOOLS, Service, hold
from tests.server.test_message_reader import own_format

HI = [{"role": "user", "content": "Hi"}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
CALL = CALLS["<tool_call>"]
CALLED = [("weather", {"city": "Rome", "days": 2})]
# Opening marks and closing marks of each way to reason, and the sign of a template that has it.
REASONING = {
    "<tool_call></think>": ("<think>\n", "\n</think>\n\n"),
    "[ARGS][THINK]": ("[THINK]", "[/THINK]"),
    "<|tool_call><|channel>": ("<|channel>thought\n", "<channel|>"),
}
Served = tuple[Running, Script]


def begun(text: str) -> list[dict[str, str]]:
    return [*HI, {"role": "assistant", "content": text}]


def read(make_reader: Any, pieces: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = make_reader()
    parts = [part for piece in pieces for part in reader.feed(piece, False)] + reader.finish()
    answer = join_parts(parts)
    return answer.content, answer.reasoning, [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("source", REASONING)
async def test_wherever_a_turn_is_cut_the_rest_is_told_as_what_it_is_and_nothing_twice(source: str) -> None:
    opens, closes = REASONING[source]
    thought, words = "Let me see, then. ", "So it is. Yes."
    text = opens + thought + closes + words
    service = Service(source)
    for end in (0, *range(len(opens), len(text))):
        _, make_reader = await hold(service, tool_choice="auto", messages=begun(text[:end]), **CONTINUED)
        rest = text[end:]
        content, reasoning, calls = read(make_reader, [rest])
        assert read(make_reader, rest) == (content, reasoning, calls), text[:end]
        assert calls == []
        assert content == words[-len(rest) :].lstrip() or content == rest, text[:end]
        is_thinking = end < len(opens + thought)
        assert reasoning == (rest[: rest.index(closes)].removeprefix(opens).strip() if is_thinking and end == 0 else
                             rest.partition(closes)[0].rstrip() if is_thinking else ""), text[:end]  # fmt: skip


async def test_marks_in_what_others_say_open_no_reasoning() -> None:
    messages = [{"role": "user", "content": "What does <think> mean?"}, {"role": "assistant", "content": "It"}]
    _, make_reader = await hold(Service("</think>"), tool_choice="auto", messages=messages, **CONTINUED)
    assert read(make_reader, [" opens."]) == (" opens.", "", [])


async def test_what_a_turn_ends_with_is_not_told_again_when_it_turns_out_to_be_no_mark() -> None:
    _, make_reader = await hold(
        Service("</think>"), tool_choice="auto", messages=begun("<think>I write </"), **CONTINUED
    )
    assert read(make_reader, "b>.</think>Yes.") == ("Yes.", "b>.", [])


@pytest.mark.parametrize("prefix", ["I look. ", "<think>\nhm\n</think>\n\nI look.\n", "<think>hm"])
async def test_a_call_may_follow_and_must_where_one_is_required(prefix: str) -> None:
    rest = f"</think>{CALL}" if prefix.endswith("hm") else CALL
    for choice in ("auto", "required"):
        grammar, make_reader = await hold(
            Service("<tool_call> </think>"), tool_choice=choice, messages=begun(prefix), **CONTINUED
        )
        assert read(make_reader, rest) == ("", "", CALLED)
        if choice == "required":
            assert allows(grammar, rest)
            assert not allows(grammar, "No.", is_whole=False) or prefix.endswith("hm")


@pytest.mark.parametrize("source", CALLS)
async def test_a_turn_that_ends_inside_of_a_call_is_continued_as_text(source: str) -> None:
    call, service = CALLS[source], Service(source)
    for end in range(1, len(call), 5):
        _, make_reader = await hold(service, tool_choice="auto", messages=begun(call[:end]), **CONTINUED)
        content, _, calls = read(make_reader, [call[end:]])
        assert content + "".join(map(str, calls)), "nothing is lost"
        assert all(name == "weather" for name, _ in calls)


async def test_a_template_that_came_with_the_tokenizer_reads_the_rest_too() -> None:
    service = Service("")
    service.answer_format = own_format()
    for prefix, rest, wanted in (
        ("<think>a", " b</think>Yes.", ("Yes.", "b", [])),
        ('Now <call f>{"n', '": 1}</call>', ('": 1}</call>', "", [])),
        ("Now ", '<call f>{"n": 1}</call>', ("", "", [("f", {"n": 1})])),
    ):
        prompt = f"<|user|>\nHi<|end|><|assistant|>\n{prefix}"
        _, make_reader = await hold(service, prompt, tool_choice="auto", messages=begun(prefix), **CONTINUED)
        content, reasoning, calls = read(make_reader, [rest])
        assert (content, reasoning.strip(), calls) == wanted


async def test_a_form_holds_the_new_text_behind_the_reasoning_that_is_open() -> None:
    for prefix, may, may_not in (
        ('So: {"name": ', ADA, '"Ada", "age": 36}'),
        ("<think>hm</think>\n", ADA, "hm"),
        ("<think>\nhm", f" so</think>\n{ADA}", ADA),
    ):
        grammar, make_reader = await hold(
            Service("<tool_call> </think>"), tools=[], tool_choice=None, response_format=FORM, messages=begun(prefix),
            **CONTINUED,
        )  # fmt: skip
        assert allows(grammar, may)
        assert not allows(grammar, may_not)
        assert read(make_reader, may)[0] == ADA


async def ask(served: Served, path: str, says: str, **body: Any) -> dict[str, Any]:
    """Return what is told of an answer, the same whole and streamed."""
    running, script = served
    script.add(says, says)
    body = {"max_tokens": 400} | body
    whole = (await running.http.post(path, json=body)).json()
    raw = (await running.http.post(path, json=body | {"stream": True})).text
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    told, streamed = {"text": "", "reasoning": "", "calls": []}, {"text": "", "reasoning": "", "calls": []}
    if path == "/v1/messages":
        for block in whole["content"]:
            told["text"] += block.get("text", "")
            told["reasoning"] += block.get("thinking", "")
            told["calls"] += [block["name"]] if block["type"] == "tool_use" else []
        for event in events:
            streamed["text"] += event.get("delta", {}).get("text", "")
            streamed["reasoning"] += event.get("delta", {}).get("thinking", "")
            streamed["calls"] += filter(None, [event.get("content_block", {}).get("name")])
    else:
        message = whole["choices"][0]["message"]
        told["text"], told["reasoning"] = message.get("content") or "", message.get("reasoning_content") or ""
        told["calls"] = [call["function"]["name"] for call in message.get("tool_calls") or []]
        for delta in (event["choices"][0]["delta"] for event in events if event["choices"]):
            streamed["text"] += delta.get("content") or ""
            streamed["reasoning"] += delta.get("reasoning_content") or ""
            streamed["calls"] += [call["function"]["name"] for call in delta.get("tool_calls") or [] if call.get("id")]
    assert streamed == told
    return told


async def test_both_routes_tell_the_new_text_whole_and_streamed(hermes: Served) -> None:
    tools = {
        "/v1/chat/completions": {"tools": TOOLS},
        "/v1/messages": {"tools": [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]},
    }
    for path, offered in tools.items():
        more = CONTINUED if path != "/v1/messages" else {}
        for prefix, says, wanted in (
            ("The capital", " is Rome.", (" is Rome.", "", [])),
            ("Ends in space ", "\n and more ", ("\n and more ", "", [])),
            ("<think>\nLet me", " see.\n</think>\n\nRome.", ("Rome.", "see.", [])),
            ("<think>\nx\n</think>\n\nRo", "me.", ("me.", "", [])),
            ("I look.\n", CALL, ("", "", ["weather"])),
        ):
            told = await ask(hermes, path, says, messages=begun(prefix), **more, **offered)
            assert (told["text"], told["reasoning"].strip(), told["calls"]) == wanted, (path, prefix)


async def test_a_turn_is_continued_behind_documents(tmp_path: Path) -> None:
    deployment = with_documents(make_deployment(), tmp_path, chunk_tokens=64)
    async with running_server(deployment, fake_command()) as live:
        documents = [{"title": "Bay", "text": "There are 4 boats. " * 20}]
        for messages in (begun("The boats"), begun("The boats")[1:]):
            body = {"messages": messages, "documents": documents, "temperature": 0, "ignore_eos": True} | CONTINUED
            path = "/v1/chat/completions"
            size = (await live.http.post(path, json=body | {"max_tokens": 1})).json()["usage"]["prompt_tokens"]
            answer = (await live.http.post(path, json=body | {"max_tokens": size})).json()
            said = answer["choices"][0]["message"]["content"]  # the engine repeats its prompt
            assert said.startswith("\nDocument 1: Bay")
            assert said.endswith("The boats")
            assert answer["usage"]["prompt_tokens_details"]["reused_tokens"] > 0


# --- what the prompt is -----------------------------------------------------------------------------------------------


async def tokens_of(live: Running, **body: Any) -> list[int]:
    answer = await live.http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


async def test_tokenize_and_count_tokens_make_the_prompt_of_the_chat(live: Running) -> None:
    for text in ("The capital", "ends in space ", "\n", "<|end|>", "東京"):
        tokens = await tokens_of(live, messages=begun(text), **CONTINUED)
        chat = {"messages": begun(text), "max_tokens": 1} | CONTINUED
        usage = (await live.http.post("/v1/chat/completions", json=chat)).json()["usage"]
        counted = (await live.http.post("/v1/messages/count_tokens", json={"messages": begun(text)})).json()
        assert usage["prompt_tokens"] == counted["input_tokens"] == len(tokens)
        closed = await tokens_of(live, messages=begun(text), add_generation_prompt=False)
        opened = await tokens_of(live, messages=begun(text), add_generation_prompt=True)
        assert opened == await tokens_of(live, messages=begun(text))
        assert closed[: len(tokens)] == tokens
        assert opened[: len(closed)] == closed
        assert len(tokens) < len(closed) < len(opened)


async def test_tools_and_variables_are_in_the_prompt_that_tokenize_makes(hermes: Served) -> None:
    running, script = hermes
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    bodies = [
        {"messages": HI},
        {"messages": HI, "tools": TOOLS},
        {"messages": HI} | thinking,
        {"messages": HI, "tools": TOOLS} | thinking,
        {"messages": begun("It"), "tools": TOOLS} | CONTINUED,
    ]
    counts = []
    for body in bodies:
        script.add("x")
        usage = (await running.http.post("/v1/chat/completions", json=body | {"max_tokens": 1})).json()["usage"]
        counts.append(len(await tokens_of(running, **body)))
        assert counts[-1] == usage["prompt_tokens"]
    assert len(set(counts)) == len(counts)


async def test_a_prompt_that_cannot_end_so_is_refused(live: Running) -> None:
    for body, param in (
        ({"messages": begun("It"), "continue_final_message": True}, "add_generation_prompt"),
        ({"messages": begun("It")} | CONTINUED | {"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": HI} | CONTINUED, "continue_final_message"),
        ({"prompt": "a"} | CONTINUED, "continue_final_message"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": HI, "continue_final_message": "yes"}, "continue_final_message"),
        ({"prompt": "a", "tools": TOOLS}, "tools"),
        ({"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"messages": HI, "tools": [*TOOLS, *TOOLS]}, "tools[2].function.name"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ):
        answer = await live.http.post("/tokenize", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body


async def test_an_empty_last_turn_begins_an_answer_as_if_it_was_not_there(live: Running) -> None:
    for empty in ("", [], [{"type": "text", "text": ""}]):
        messages = [*HI, {"role": "assistant", "content": empty}]
        bodies = [{"messages": one, "max_tokens": 9, "temperature": 0} for one in (messages, HI)]
        with_it, without = [(await live.http.post("/v1/messages", json=body)).json() for body in bodies]
        assert (with_it["content"], with_it["usage"]) == (without["content"], without["usage"])
    alone = await live.http.post("/v1/messages", json={"messages": [messages[-1]], "max_tokens": 9})
    assert alone.status_code == 200
    spaces = {"messages": begun(" \n"), "max_tokens": 9, "temperature": 0}
    said = (await live.http.post("/v1/messages", json=spaces)).json()["usage"]
    assert said["input_tokens"] == with_it["usage"]["input_tokens"] + len(
        await tokens_of(live, prompt=" \n", add_special_tokens=False)
    )
    chat = {"messages": begun(""), "max_tokens": 1} | CONTINUED
    assert (await live.http.post("/v1/chat/completions", json=chat)).status_code == 200
    assert await tokens_of(live, messages=begun(""), **CONTINUED) == await tokens_of(live, messages=HI)


# --- prompts that are too long ----------------------------------------------------------------------------------------


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_anthropics_clients_read(live: Running) -> None:
    options = {"attention_profile": "narrow", "max_tokens": 5}  # a context of 100 tokens
    sizes = {}
    for num_words in (60, 90, 95, 99, 100, 101, 140, 20_000):
        body = options | {"messages": [{"role": "user", "content": "a " * num_words}]}
        count = await tokens_of(live, messages=body["messages"])
        answer = await live.http.post("/v1/messages", json=body)
        sizes[len(count)] = (answer.status_code, answer.json().get("error", {}).get("message"))
        if len(count) > 100:
            error = answer.json()["error"]
            numbers = re.search(
                r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", error["message"]
            )  # Claude Code's
            assert error["type"] == "invalid_request_error"
            assert numbers is not None, error
            assert 100 == int(numbers[2]) < int(numbers[1]) <= len(count)
            counted = {key: body[key] for key in body if key != "max_tokens"}
            told = await live.http.post("/v1/messages/count_tokens", json=counted)
            assert told.json() in ({"input_tokens": len(count)}, answer.json())
            chat = (await live.http.post("/v1/chat/completions", json=body)).json()["error"]
            assert (chat["param"], chat["code"]) == ("messages", "context_length_exceeded")
        elif len(count) > 95:
            words = f"input length and `max_tokens` exceed context limit: {len(count)} + 5 > 100, decrease input length"
            assert answer.json()["error"]["message"].startswith(words)
        else:
            assert answer.status_code == 200
    assert {size > 100 for size in sizes} == {True, False}
    assert any(95 < size <= 100 for size in sizes), sizes
