"""Ollama's own client against this server: answers, streams, tools, forms, figures, and what is refused."""

import json
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pydantic
import pytest

from server.routes.ollama.ollama_bodies import OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_GENERATE, OPTIONS
from server.routes.ollama.ollama_model_routes import REFUSED
from tests.server.live_server import Running, fake_command, make_deployment, running_server
from tests.server.scripted_model import Script

PROMPT = "The capital of 東京 é on the 5th street, that is all."
HI = [{"role": "user", "content": PROMPT}]
COLD = {"temperature": 0}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'


@pytest.fixture(scope="module")
async def asking(live: Running) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(live.url) as client:
        yield client


@pytest.fixture
async def scripted(hermes: tuple[Running, Script]) -> AsyncIterator[tuple[ollama.AsyncClient, Script]]:
    running, script = hermes
    async with ollama.AsyncClient(running.url) as client:
        yield client, script


async def test_a_chat_is_an_answer_of_the_chat_whole_and_streamed(live, asking):
    chat = await live.openai.chat.completions.create(model="reference", messages=HI, temperature=0)
    whole = await asking.chat("reference", HI, options=COLD)
    assert whole.message.content == chat.choices[0].message.content
    assert (whole.done, whole.done_reason, whole.message.role) == (True, "stop", "assistant")
    assert whole.prompt_eval_count == chat.usage.prompt_tokens
    assert whole.eval_count == chat.usage.completion_tokens
    assert whole.total_duration >= whole.eval_duration > 0
    assert whole.total_duration < 60e9, "nanoseconds"
    parts = [part async for part in await asking.chat("reference:latest", HI, options=COLD, stream=True)]
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    assert parts[-1].model == "reference:latest"


async def test_a_prompt_goes_through_the_template_and_a_raw_one_does_not(live, asking):
    chat = [{"role": "system", "content": "Be brief."}, *HI]
    same = await asking.chat("reference", chat, options=COLD)
    told = await asking.generate("reference", PROMPT, system="Be brief.", options=COLD)
    assert (told.response, told.prompt_eval_count) == (same.message.content, same.prompt_eval_count)
    raw = await asking.generate("reference", PROMPT, raw=True, options=COLD)
    assert raw.response == PROMPT
    parts = [part async for part in await asking.generate("reference", PROMPT, raw=True, options=COLD, stream=True)]
    assert "".join(part.response for part in parts) == PROMPT
    assert parts[-1].done_reason == "stop"


async def test_a_stream_is_lines_of_json_unless_it_is_turned_off(live):
    body = {"model": "reference", "messages": HI, "options": COLD}
    answer = await live.http.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["done"]
    assert len(lines) > 2
    whole = await live.http.post("/api/chat", json=body | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"]["content"] == "".join(line["message"]["content"] for line in lines)


async def test_a_stream_that_waits_says_so_in_lines_that_every_client_reads():
    async with (
        running_server(make_deployment(keepalive_seconds=0.02), fake_command(token_s=0.05)) as live,
        ollama.AsyncClient(live.url) as client,
    ):
        stream = await client.chat("reference", HI, options=COLD | {"num_predict": 4}, stream=True)
        parts = [part async for part in stream]
    assert sum(not part.message.content for part in parts) > 3
    assert parts[-1].done_reason == "length"


async def test_options_draw_as_their_fields_in_chats_do(asking):
    for options, num in (({"num_predict": 3}, 3), ({"num_predict": -1}, None), ({"num_predict": 10**6}, None)):
        done = await asking.chat("reference", HI, options=COLD | options)
        assert (done.done_reason, done.eval_count) == (("length", 3) if num else ("stop", done.eval_count))
    cut = await asking.generate("reference", PROMPT, raw=True, options=COLD | {"stop": ["street"]})
    assert cut.response == PROMPT[: PROMPT.index("street")]
    drawn = {"temperature": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 4, "repeat_penalty": 1.1}
    first, again = [(await asking.generate("reference", PROMPT, raw=True, options=drawn)).response for _ in range(2)]
    assert first == again
    assert first != PROMPT, "the fake engine shifts by the seed"
    longest = await asking.generate("reference", PROMPT, raw=True, options={"num_predict": 20_000, "temperature": 0})
    assert longest.done_reason == "stop"


async def test_a_prompt_beyond_the_clients_own_limit_is_read_and_the_answer_says_so(live):
    body = {"model": "reference", "messages": HI, "stream": False}
    short = await live.http.post("/api/chat", json=body | {"options": {"num_ctx": 4}})
    assert short.json()["warn"].startswith("options.num_ctx: got 4, less than the ")
    streamed = await live.http.post("/api/generate", json={
        "model": "reference", "prompt": PROMPT, "options": {"num_ctx": 4}})  # fmt: skip
    assert [("warn" in json.loads(line)) for line in streamed.text.splitlines()][-2:] == [False, True]
    for options in ({"num_ctx": 4096}, {"num_ctx": 0}, {}):
        assert "warn" not in (await live.http.post("/api/chat", json=body | {"options": options})).json()


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(asking):
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\]|messages") as long:
        await asking.chat("reference", [{"role": "user", "content": "word " * 20_000}])
    assert long.value.status_code == 400
    assert "16384" in long.value.error
    with pytest.raises(ollama.ResponseError, match=r"^prompt: "):
        await asking.generate("reference", "word " * 20_000, raw=True)


async def test_nothing_asked_is_a_model_that_is_loaded(live, asking):
    for path in ("/api/chat", "/api/generate"):
        answer = await live.http.post(path, json={}, headers={"x-request-timeout": "soon"})
        assert answer.status_code == 400
        for body in ({"attention_profile": "none"}, {"options": {"temperature": -1}}, {"format": "xml"}):
            answer = await live.http.post(path, json=body)
            assert (answer.status_code, next(iter(body)) in answer.json()["param"]) == (400, True)
    assert (await asking.generate("reference")).done_reason == "load"
    assert (await asking.chat("reference", [])).done_reason == "load"


async def test_tools_are_called_with_objects_and_their_results_find_them(scripted):
    asking, script = scripted
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
    script.add(f"Let me look.{CALL}{CALL}", f"Let me look.{CALL}{CALL}")
    given = await asking.chat(**asked)
    assert given.message.content.strip() == "Let me look."
    assert [call.function.arguments for call in given.message.tool_calls] == [{"city": "東京"}] * 2
    parts = [part async for part in await asking.chat(**asked, stream=True)]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", {"city": "東京"})] * 2
    assert parts[-1].done_reason == "stop"
    turns = [*asked["messages"], given.message, {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    script.add("It is fine.", "It is fine.")
    assert (await asking.chat("scripted", turns, tools=TOOLS)).message.content == "It is fine."
    two = [*turns, {"role": "tool", "content": "wet"}]
    assert (await asking.chat("scripted", two, tools=TOOLS)).message.content == "It is fine."
    for wrong in ([*two, {"role": "tool", "content": "more"}], [*asked["messages"], two[-1]]):
        with pytest.raises(ollama.ResponseError, match="answers no call before it"):
            await asking.chat("scripted", wrong, tools=TOOLS)


async def test_thinking_is_apart_and_goes_back(scripted):
    asking, script = scripted
    says = "It rains.\n</think>\n\nWet."
    script.add(says, says, says, "More.")
    whole = await asking.chat("scripted", HI, think=True)
    assert (whole.message.thinking.strip(), whole.message.content) == ("It rains.", "Wet.")
    parts = [part async for part in await asking.chat("scripted", HI, think="low", stream=True)]
    assert "".join(part.message.thinking or "" for part in parts).strip() == "It rains."
    assert "".join(part.message.content for part in parts) == "Wet."
    told = await asking.generate("scripted", PROMPT, think=True)
    assert (told.thinking.strip(), told.response) == ("It rains.", "Wet.")
    turns = [*HI, whole.message, *HI]
    assert (await asking.chat("scripted", turns, think=False)).message.content == "More."


class City(pydantic.BaseModel):
    name: str


async def test_a_form_is_json_or_a_schema(scripted):
    asking, script = scripted
    said = '{"name": "東京"}'
    script.add(said, said, said)
    for form in (City.model_json_schema(), "json"):
        given = await asking.chat("scripted", HI, format=form)
        assert City.model_validate_json(given.message.content) == City(name="東京")
    assert (await asking.generate("scripted", PROMPT, raw=True, format="json")).response == said


async def test_texts_are_vectors_of_length_one(asking):
    many = await asking.embed("reference", ["one two", "three"])
    assert [round(sum(entry**2 for entry in row), 5) for row in many.embeddings] == [1.0, 1.0]
    assert many.prompt_eval_count > 2
    assert (await asking.embed("reference", "one two")).embeddings == many.embeddings[:1]
    assert (await asking.embeddings("reference", "one two")).embedding == many.embeddings[0]
    long = "word " * 20_000
    assert (await asking.embed("reference", long)).prompt_eval_count == 16384
    with pytest.raises(ollama.ResponseError, match=r"^input: "):
        await asking.embed("reference", long, truncate=False)


async def test_the_model_is_listed_shown_and_loaded(asking):
    [listed] = (await asking.list()).models
    assert listed.model == "reference:latest"
    assert listed.size > 1_000_000
    assert (listed.details.format, listed.details.family) == ("safetensors", "llama")
    [loaded] = (await asking.ps()).models
    assert (loaded.model, loaded.digest, loaded.context_length) == (listed.model, listed.digest, 16384)
    shown = await asking.show("reference:latest")
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] > 0
    assert {"completion", "tools", "embedding"} <= set(shown.capabilities)
    assert shown.template


async def test_a_version_is_told_that_clients_take(live):
    answer = (await live.http.get("/api/version")).json()
    assert tuple(map(int, answer["version"].split("."))) >= (0, 6, 4)
    assert set(answer) == {"version", "tandem"}


async def test_work_on_models_is_refused_by_name_with_what_to_do(live, asking):
    for (method, path), told in REFUSED.items():
        answer = await live.http.request(method, path.replace("{digest}", "sha256:0"))
        assert (answer.status_code, answer.json()["error"]) == (400, told)
    with pytest.raises(ollama.ResponseError, match="tandem serve hf:OWNER/NAME"):
        await asking.pull("llama3.2")
    for refused in (asking.push("a"), asking.create("a", from_="b"), asking.copy("a", "b"), asking.delete("a")):
        with pytest.raises(ollama.ResponseError):
            await refused


async def test_what_is_wrong_with_a_body_is_named_in_ollamas_words(live, subtests):
    for path, body, named in (
        ("chat", {"model": "other", "messages": HI}, "model"),
        ("chat", {"messages": HI, "model": "reference", "options": {"temperature": 5}}, "options.temperature"),
        ("chat", {"messages": HI, "model": "reference", "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("chat", {"messages": HI, "model": "reference", "options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"messages": HI, "model": "reference", "options": {"stop": [""]}}, "options.stop"),
        ("chat", {"messages": HI, "model": "reference", "options": {"num_predict": -3}}, "options.num_predict"),
        ("chat", {"messages": HI, "model": "reference", "format": "xml"}, "format"),
        ("chat", {"messages": HI, "model": "reference", "format": {"not": {}}}, "format"),
        ("chat", {"messages": HI, "model": "reference", "think": "some"}, "think"),
        ("chat", {"messages": [HI[0] | {"images": ["aGk="]}], "model": "reference"}, "messages[0].images"),
        ("chat", {"messages": [{"role": "a b", "content": "x"}], "model": "reference"}, "messages[0]"),
        ("chat", {"messages": HI, "model": "reference", "tools": [{"function": {"name": "a b"}}]},
         "tools[0].function.name"),
        ("generate", {"prompt": PROMPT, "model": "reference", "suffix": "x"}, "suffix"),
        ("generate", {"prompt": PROMPT, "model": "reference", "context": [1]}, "context"),
        ("generate", {"prompt": PROMPT, "model": "reference", "raw": True, "system": "x"}, "system"),
        ("generate", {"prompt": PROMPT, "model": "reference", "raw": True, "options": {"top_p": 2}}, "options.top_p"),
        ("embed", {"input": [], "model": "reference"}, "input"),
        ("embed", {"input": "a", "model": "reference", "dimensions": 4}, "dimensions"),
    ):  # fmt: skip
        with subtests.test(body=body, named=named):
            answer = await live.http.post(f"/api/{path}", json=body)
            assert answer.status_code in (400, 404)
            told = answer.json()
            assert isinstance(told["error"], str)
            assert told["error"].startswith(f"{named}: ") or told["error"].startswith(f"{named}.")
            assert told["param"].startswith(named)


async def test_an_engine_that_fails_is_told_on_a_line(live):
    body = {"model": "reference", "messages": HI, "attention_profile": "breaks"}
    answer = await live.http.post("/api/chat", json=body)
    assert "not finite" in json.loads(answer.text.splitlines()[-1])["error"]
    whole = await live.http.post("/api/chat", json=body | {"stream": False})
    assert (whole.status_code, "not finite" in whole.json()["error"]) == (500, True)


async def test_a_field_that_nobody_knows_has_no_effect_and_is_named(live):
    body = {"model": "reference", "messages": HI, "stream": False, "new_one": 1, "options": {"other": 2}}
    answer = await live.http.post("/api/chat", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-tandem-ignored"] == "new_one, options.other"


async def test_the_routes_are_under_the_keys():
    async with running_server(make_deployment(api_keys=["k"]), fake_command()) as live:
        with pytest.raises(ollama.ResponseError) as refused:
            await ollama.AsyncClient(live.url).list()
        assert refused.value.status_code == 401
        known = ollama.AsyncClient(live.url, headers={"authorization": "Bearer k"})
        assert (await known.list()).models


async def test_every_field_of_the_official_client_is_known():
    from ollama._types import ChatRequest, EmbedRequest, GenerateRequest, Options

    kinds: list[tuple[Any, Any]] = [
        (ChatRequest, OLLAMA_CHAT), (GenerateRequest, OLLAMA_GENERATE), (EmbedRequest, OLLAMA_EMBED),
        (Options, OPTIONS),
    ]  # fmt: skip
    for kind, table in kinds:
        assert set(kind.model_fields) <= set(table.rules)
