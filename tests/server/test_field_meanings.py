"""Fields that clients send often and whose meaning had to be chosen; `docs/API.md` says what each does."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.api_error import ApiError
from server.bodies.chat_message import Message
from server.bodies.fields import NoEffect, Refused
from server.commands.api_page import BEGIN, END, replace_tables, write_tables
from server.routes.catalogue import find_routes, tables_by_path
from server.routes.responses.response_bodies import InputItem
from server.routes.responses.response_routes import resolve_references
from server.stores.response_store import KeptResponse
from server.text.model_tokenizer import Tokenizer
from tests.server.live_server import Running
from tests.server.scripted_model import Script

PAGE = Path(__file__).parents[2] / "docs" / "API.md"
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "clock")
]
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
Served = tuple[Running, Script]


async def post(live: Running, path: str, **body: Any) -> Any:
    answer = await live.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(live: Running, path: str, **body: Any) -> tuple[int, str]:
    answer = await live.http.post(path, json=body)
    return answer.status_code, answer.json()["error"]["message"]


def test_the_tables_on_the_page_are_current() -> None:
    assert replace_tables(PAGE.read_text()) == PAGE.read_text(), "write them anew: make docs"


def test_a_page_without_the_marks_is_not_written() -> None:
    with pytest.raises(ValueError, match="a mark is missing"):
        replace_tables(f"{BEGIN} and no end")
    assert replace_tables(f"a {BEGIN} old {END} b") == f"a {BEGIN}\n\n{write_tables()}\n{END} b"


def test_every_field_without_effect_and_every_refused_one_has_a_reason_on_the_page() -> None:
    page = PAGE.read_text()
    for fields in tables_by_path(find_routes()).values():
        for name, rule in fields.rules.items():
            if isinstance(rule, NoEffect | Refused):
                assert rule.reason, name
                assert any(f"`{name}`" in line and rule.reason in line for line in page.splitlines()), name


async def test_a_seed_of_minus_one_draws_anew_and_any_other_repeats(live: Running) -> None:
    async def draw(seed: int | None) -> str:
        body = await post(live, COMPLETION, prompt=[*range(500, 600)], max_tokens=3, seed=seed, temperature=1)
        return body["choices"][0]["text"]

    assert await draw(7) == await draw(7)
    assert await draw(-2) == await draw(-2)
    assert len({await draw(-1) for _ in range(4)}) > 1


async def test_a_number_of_tokens_out_of_range_is_told_in_one_wording(live: Running, subtests: pytest.Subtests) -> None:
    for path, body, field, least in [
        (CHAT, {"messages": HI}, "max_tokens", 1),
        (CHAT, {"messages": HI}, "max_completion_tokens", 1),
        (COMPLETION, {"prompt": "a"}, "max_tokens", 0),
        (RESPONSES, {"input": "a"}, "max_output_tokens", 1),
        (MESSAGES, {"messages": HI}, "max_tokens", 1),
    ]:
        with subtests.test(path=path, body=body, field=field, least=least):
            for value in (-1, least - 1, 2**31, 2**70):
                told = await refusal(live, path, **body, **{field: value})
                assert told == (400, f"{field}: got {value}, wanted from {least} to 2147483647")


async def test_special_tokens_are_shown_by_completions_alone(live: Running, tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids - set(tokenizer.eos_ids))
    asked = {"prompt": [special, 500], "max_tokens": 2, "temperature": 0}
    shown = await post(live, COMPLETION, **asked, skip_special_tokens=False)
    plain = await post(live, COMPLETION, **asked)
    mark = tokenizer.token_bytes(special).decode()
    assert shown["choices"][0]["text"] == mark + plain["choices"][0]["text"]
    assert mark not in plain["choices"][0]["text"]
    status, told = await refusal(live, CHAT, messages=HI, skip_special_tokens=False)
    assert (status, told.partition(":")[0]) == (400, "skip_special_tokens")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_token_ids_are_told_whole_and_streamed(live: Running, tokenizer: Tokenizer, path: str) -> None:
    asked: dict[str, Any] = {"temperature": 0, "return_token_ids": True, "n": 2, "stop": ["open"]}
    asked |= {"messages": [{"role": "user", "content": "It is open."}]} if path == CHAT else {"prompt": "It is open."}
    whole = await post(live, path, **asked)
    answer = await live.http.post(path, json=asked | {"stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    for choice in whole["choices"]:
        streamed = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        ids = [token_id for one in streamed for token_id in one.get("token_ids", [])]
        assert ids == choice["token_ids"]
        assert "open" in tokenizer.decode(ids, True), "the tokens of a stop string were generated, and are told"
        owner, pieces = (choice, streamed) if path == COMPLETION else (whole, events)
        told = [one["prompt_token_ids"] for one in pieces if "prompt_token_ids" in one]
        assert told[:1] == [owner["prompt_token_ids"]]
        assert owner["prompt_token_ids"]
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert whole["usage"]["prompt_tokens"] == len(
        (whole["choices"][0] if path == COMPLETION else whole)["prompt_token_ids"]
    )
    plain = await post(live, path, **asked | {"return_token_ids": False})
    assert "token_ids" not in json.dumps(plain)


async def test_any_is_required(hermes: Served) -> None:
    live, script = hermes
    script.add(CLOCK, CLOCK)
    for choice in ("any", "required"):
        said = await post(live, CHAT, messages=HI, tools=TOOLS, tool_choice=choice)
        assert said["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "clock"
    assert await refusal(live, CHAT, messages=HI, tool_choice="any") == (
        400,
        "tool_choice: got 'any' without tools; send `tools`, or leave it out",
    )


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_allowed_tools_alone_are_offered_and_called(hermes: Served, path: str) -> None:
    live, script = hermes
    is_chat = path == CHAT
    tools = TOOLS if is_chat else [{"type": "function"} | tool["function"] for tool in TOOLS]

    def asked(mode: str, *names: str) -> dict[str, Any]:
        named = [
            {"type": "function", **({"function": {"name": name}} if is_chat else {"name": name})} for name in names
        ]
        allowed = {"mode": mode, "tools": named}
        choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if is_chat else allowed)}
        return {"tools": tools, "tool_choice": choice} | ({"messages": HI} if is_chat else {"input": "Hi"})

    async def called(mode: str, says: str) -> tuple[list[str], int]:
        script.add(says)
        said = await post(live, path, **asked(mode, "clock"))
        if is_chat:
            calls = [call["function"] for call in said["choices"][0]["message"].get("tool_calls", [])]
            return [call["name"] for call in calls], said["usage"]["prompt_tokens"]
        assert said["tool_choice"]["mode"] == mode
        return [item["name"] for item in said["output"] if item["type"] == "function_call"], said["usage"][
            "input_tokens"
        ]

    assert (await called("required", CLOCK))[0] == ["clock"]
    script.add("x")
    alone = await post(live, path, **asked("auto", "clock") | {"tools": tools[1:], "tool_choice": "auto"})
    usage = alone["usage"]
    assert (await called("auto", "x"))[1] == usage.get("prompt_tokens", usage.get("input_tokens"))
    place = "tool_choice.allowed_tools.tools[1].function.name" if is_chat else "tool_choice.tools[1].name"
    assert await refusal(live, path, **asked("auto", "clock", "g")) == (
        400,
        f"{place}: got 'g', which is none of `tools`",
    )
    status, told = await refusal(live, path, **asked("auto"))
    assert (status, told.endswith("empty; wanted at least one, or tool_choice 'none'")) == (400, True)


async def test_a_choice_of_tools_that_is_not_whole_is_named(live: Running) -> None:
    for choice, field in (
        ({"type": "function"}, "function"),
        ({"type": "allowed_tools"}, "allowed_tools"),
        ({"type": "function", "function": {"name": "clock"}, "allowed_tools": {"mode": "auto", "tools": []}},
         "allowed_tools"),
    ):  # fmt: skip
        status, told = await refusal(live, CHAT, messages=HI, tools=TOOLS, tool_choice=choice)
        assert (status, told.partition(":")[0]) == (400, f"tool_choice.{field}")
    for choice, field in (
        ({"type": "function"}, "name"),
        ({"type": "allowed_tools", "tools": []}, "mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tools"),
    ):
        status, told = await refusal(live, RESPONSES, input="Hi", tool_choice=choice)
        assert (status, told.partition(":")[0]) == (400, f"tool_choice.{field}")


async def test_an_item_is_referred_to_by_its_id_while_its_response_is_kept(hermes: Served) -> None:
    live, script = hermes
    script.add("I am fine.", *["y"] * 5)
    first = await post(live, RESPONSES, input="How are you?")
    item = first["output"][0]
    written = {"role": "assistant", "content": [{"type": "output_text", "text": "I am fine."}]}
    asked = {"role": "user", "content": "Why?"}
    by_id = await post(live, RESPONSES, input=[{"type": "item_reference", "id": item["id"]}, asked])
    by_text = await post(live, RESPONSES, input=[written, asked])
    assert by_id["usage"]["input_tokens"] == by_text["usage"]["input_tokens"]
    second = await post(live, RESPONSES, input="Why?", previous_response_id=first["id"])
    listed = (await live.http.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    again = [{"type": "item_reference", "id": one["id"]} for one in reversed(listed)]
    third = await post(live, RESPONSES, input=again)
    assert third["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    for unknown in ("msg_1", item["id"].replace("out_0", "out_9"), item["id"].replace("msg_", "msg_0")):
        status, told = await refusal(live, RESPONSES, input=[asked, {"type": "item_reference", "id": unknown}])
        assert (status, told.partition(":")[0]) == (404, "input[1].id")
    status, told = await refusal(live, RESPONSES, input=[{"type": "item_reference"}])
    assert (status, told.partition(":")[0]) == (400, "input[0].id")
    await live.http.delete(f"/v1/responses/{first['id']}")
    status, _ = await refusal(live, RESPONSES, input=[{"type": "item_reference", "id": item["id"]}, asked])
    assert status == 404
    private = await post(live, RESPONSES, input="How are you?", store=False)
    reference = {"type": "item_reference", "id": private["output"][0]["id"]}
    assert (await refusal(live, RESPONSES, input=[reference, asked]))[0] == 404


def test_a_kept_response_is_read_once_however_many_items_refer_to_it_and_they_are_no_larger_than_a_body() -> None:
    told = [Message(role="user", content="x" * 1000), Message(role="assistant", content="y")]
    output = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]}
    kept = KeptResponse(json.dumps({"output": [output]}).encode(), told)
    looked_up: list[tuple[str, str]] = []

    def find(*key: str) -> KeptResponse:
        looked_up.append(key)
        return kept

    service: Any = SimpleNamespace(
        responses=SimpleNamespace(find=find), settings=SimpleNamespace(max_body_mib=0.01, responses_seconds=1)
    )
    said, asked = (InputItem(type="item_reference", id=f"msg_{'0' * 32}_{side}_0") for side in ("out", "in"))
    items = resolve_references(service, "me", [asked, *[said] * 50])
    assert isinstance(items, list)
    assert ([item.role for item in items], len(looked_up)) == (["user", *["assistant"] * 50], 2)
    with pytest.raises(ApiError) as refused:
        resolve_references(service, "me", [asked] * 11)
    assert (refused.value.status, refused.value.param) == (413, "input")
