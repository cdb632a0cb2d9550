"""Several models behind one address: engines come and go as requests want, and nothing is lost on the way."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import ollama
import psutil
import pytest

from server.api_error import ApiError
from server.bodies.keep_alive import FOREVER, read_keep_alive
from server.deployment import Deployment
from server.loading.model_registry import ModelRegistry
from server.loading.served_model import ServedModel
from server.planning.side_by_side import Room
from tests.server.live_server import REFERENCE, Running, fake_command, running_server

PROMPT = "The capital of France is on the fifth street, that is all there is to say."
NAMES = ("a", "b", "c")
SHIFTS = {name: shift for shift, name in enumerate(NAMES)}
LOAD_S = 0.05


def make_models(*names: str, idle_seconds: float | None = None, **server: object) -> list[Deployment]:
    tree = {"server": {"port": 0, "retry_after_seconds": 3, **server}, "idle_seconds": idle_seconds}
    return [
        Deployment.model_validate(tree | {"model": {"path": REFERENCE, "name": name, "aliases": [f"{name}-too"]}})
        for name in names
    ]


def command_of(each: dict[str, Any] | None = None, **of_all: object) -> list[str]:
    """Return the fake engine's command: model number n says the prompt, turned by n tokens."""
    own = {name: {"shift": SHIFTS[name], **(each or {}).get(name, {})} for name in NAMES}
    return fake_command(**{"load_s": LOAD_S, **of_all}, models=own)


def text_of(service: Any, name: str, num_tokens: int, prompt: str = PROMPT) -> str:
    ids = service.tokenizer.encode(prompt, add_special_tokens=True)
    return service.tokenizer.decode([ids[(i + SHIFTS[name]) % len(ids)] for i in range(num_tokens)], True)


def models_of(running: Running) -> dict[str, ServedModel]:
    registry = running.app.state.models
    assert isinstance(registry, ModelRegistry)
    return {model.name: model for model in registry.models}


async def states_of(running: Running) -> dict[str, str]:
    told = (await running.http.get("/v1/models")).json()["data"]
    return {one["id"]: one["state"] for one in told if "-" not in one["id"]}


async def complete(running: Running, model: str, max_tokens: int = 8, **more: object) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return await running.http.post("/v1/completions", json=body | more)


@pytest.fixture
async def three() -> AsyncIterator[Running]:
    first, *others = make_models(*NAMES)
    async with running_server(first, command_of(), others=others) as running:
        yield running


async def test_one_is_loaded_at_a_time_and_each_answers_as_itself(three: Running) -> None:
    assert await states_of(three) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
    pids = set()
    for name in ("b", "a-too", "c:latest", "b-too"):
        answer = await complete(three, name)
        assert answer.status_code == 200, answer.text
        own = name[0]
        assert answer.json()["choices"][0]["text"] == text_of(three.service, own, 8)
        assert await states_of(three) == {one: "loaded" if one == own else "unloaded" for one in NAMES}
        pids.add(models_of(three)[own].supervisor.engine_pid)
        engines = [child for child in psutil.Process().children() if child.pid in pids]
        assert [child.pid for child in engines] == [models_of(three)[own].supervisor.engine_pid], "others are gone"
    missing = await complete(three, "d")
    assert missing.status_code == 404
    assert "this server has 'a', 'a-too', 'b', 'b-too', 'c', 'c-too'" in missing.json()["error"]["message"]
    for name, loads, unloads in (("a", 2, 2), ("b", 2, 1), ("c", 1, 1)):
        text = (await three.http.get("/metrics")).text
        assert f'tandem_model_loads_total{{model="{name}"}} {loads}.0' in text
        assert f'tandem_model_unloads_total{{model="{name}"}} {unloads}.0' in text
        assert f'tandem_model_state{{model="{name}",state="loaded"}} {float(name == "b")}' in text
        assert f'tandem_generated_tokens_total{{model="{name}"}}' in text, "all else is by model, too"
    assert await three.metric("tandem_model_load_seconds_total") >= 5 * LOAD_S


async def test_under_load_with_swaps_nothing_is_lost_and_memory_comes_back() -> None:
    """Ask three models at once, whole and streamed, with clients that leave."""
    first, *others = make_models(*NAMES)
    async with running_server(first, command_of(token_s=0.002), others=others) as live:
        registry = live.app.state.models

        async def ask(number: int) -> None:
            name, length = NAMES[number * 7 % 3], 3 + number % 11
            if number % 10 == 9:  # one that leaves
                with pytest.raises(httpx.TimeoutException):
                    await live.http.post("/v1/completions", timeout=0.02, json={
                        "model": name, "prompt": PROMPT, "max_tokens": 500, "ignore_eos": True})  # fmt: skip
                return
            if number % 2:
                text = (await complete(live, name, length)).json()["choices"][0]["text"]
            else:
                stream = await live.openai.completions.create(
                    model=name, prompt=PROMPT, max_tokens=length, temperature=0, stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == text_of(live.service, name, length)

        async def all_of(numbers: range) -> None:
            async with asyncio.TaskGroup() as group:
                for number in numbers:
                    group.create_task(ask(number))
                    await asyncio.sleep(0.004)

        await all_of(range(24))
        before = psutil.Process().memory_info().rss
        for begin in (24, 48):
            await all_of(range(begin, begin + 24))

        async def is_quiet() -> bool:
            return not any(model.num_open or model.waiters for model in registry.models)

        await live.until(is_quiet)
        loads = await live.metric("tandem_model_loads_total")
        assert loads > 4, "the models took turns"
        assert psutil.Process().memory_info().rss - before < 2**24
        loaded = [model.supervisor.engine_pid for model in registry.models if model.is_started]
        engines = [child for child in psutil.Process().children() if "fake_engine" in " ".join(child.cmdline())]
        assert [child.pid for child in engines] == loaded
        assert len(loaded) == 1


async def test_a_swap_waits_for_what_was_begun_and_lets_nobody_else_in() -> None:
    first, second = make_models("a", "b")
    async with running_server(first, command_of(token_s=0.01), others=[second]) as live:
        a = models_of(live)["a"]
        a.load_seconds = 0.0
        long = asyncio.create_task(complete(live, "a", 100))
        await live.until(lambda: _holds(a.num_open == 1))
        other = asyncio.create_task(complete(live, "b"))
        await live.until(lambda: _holds(a.is_closing))
        assert await states_of(live) == {"a": "unloading", "b": "unloaded"}
        late = asyncio.create_task(complete(live, "a"))
        await live.until(lambda: _holds(len(a.waiters) == 1))
        assert not long.done()
        assert not other.done()
        answers = await asyncio.gather(long, other, late)
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts == [text_of(live.service, *asked) for asked in (("a", 100), ("b", 8), ("a", 8))]


async def test_a_model_that_nobody_wants_any_more_takes_no_place() -> None:
    first, second = make_models("a", "b")
    async with running_server(first, command_of(token_s=0.01), others=[second]) as live:
        long = asyncio.create_task(complete(live, "a", 150))
        await live.until(lambda: _holds(models_of(live)["a"].num_open == 1))
        gone = await complete(live, "b", max_seconds=0.1)
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "model_loading")
        assert "'b' is not loaded after 0.1" in gone.json()["error"]["message"]
        assert int(gone.headers["retry-after"]) == 3
        again = await complete(live, "a")
        assert not long.done(), "the model lets requests in again"
        assert again.json()["choices"][0]["text"] == text_of(live.service, "a", 8)
        await long
        assert await live.metric("tandem_model_loads_total") == 1


async def _holds(what: bool) -> bool:
    return what


async def test_one_that_was_just_loaded_serves_for_as_long_as_its_load_took() -> None:
    first, second = make_models("a", "b")
    async with running_server(first, command_of(token_s=0.005), others=[second]) as live:
        began = time.monotonic()
        models_of(live)["a"].load_seconds, models_of(live)["a"].ready_since_s = 0.5, began
        long = asyncio.create_task(complete(live, "a", 400))
        await live.until(lambda: _holds(models_of(live)["a"].num_open == 1))
        other = asyncio.create_task(complete(live, "b"))
        await live.until(lambda: _holds(bool(models_of(live)["b"].waiters)))
        assert (await complete(live, "a", 3)).status_code == 200
        await live.until(lambda: _holds(models_of(live)["a"].is_closing))
        assert time.monotonic() - began >= 0.5
        assert not long.done()
        await asyncio.gather(long, other)


async def test_a_stream_that_waits_says_for_what_and_then_streams() -> None:
    first, second = make_models("a", "b", keepalive_seconds=0.05)
    slow = {"b": {"load_s": 0.5}}
    async with running_server(first, command_of(slow), others=[second]) as live:
        body = {"model": "b", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
        text = (await live.http.post("/v1/completions", json=body)).text
        comments = [line for line in text.splitlines() if line.startswith(":")]
        assert ": b: loading, weights 50 %" in comments
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == text_of(live.service, "b", 8)
        assert text.endswith("data: [DONE]\n\n")
        async with ollama.AsyncClient(live.url) as client:
            parts = [part async for part in await client.generate("a", PROMPT, raw=True, stream=True)]
            assert "".join(part.response for part in parts) == PROMPT
            waited = [part async for part in await client.chat("b", [{"role": "user", "content": "x"}], stream=True)]
        assert sum(not part.message.content for part in waited[:-1]) > 3
        assert (waited[0].model, waited[-1].done_reason) == ("b", "stop")


async def test_a_load_that_fails_is_told_to_its_requests_and_hurts_nobody(tmp_path: Path) -> None:
    first, *others = make_models(*NAMES, keepalive_seconds=0.05)
    broken = tmp_path / "broken"
    broken.touch()
    fails = {"b": {"fails_if": str(broken), "load_s": 0.2}}
    async with running_server(first, command_of(fails), others=others, room=Room({}, is_shared=True)) as live:
        b = models_of(live)["b"]
        long = asyncio.create_task(complete(live, "a", 300))
        asked = [complete(live, "b") for _ in range(3)]
        body = {"model": "b", "prompt": PROMPT, "max_tokens": 8, "stream": True}
        streamed = live.http.post("/v1/completions", json=body)
        message = {"model": "b", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "stream": True}
        *whole, stream, said, lines, response = await asyncio.gather(
            *asked, streamed, live.http.post("/v1/messages", json=message),
            live.http.post("/api/chat", json={"model": "b", "messages": message["messages"]}),
            live.http.post("/v1/responses", json={"model": "b", "input": "x", "stream": True}),
        )  # fmt: skip
        why = "model: 'b' could not be loaded: checkpoint: model.safetensors is cut short"
        for answer in whole:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["message"]) == (503, "model_failed", why)
            assert 8 <= int(answer.headers["retry-after"]) <= 10
        assert [json.loads(line[6:])["error"]["message"] for line in stream.text.splitlines() if "data" in line] == [
            why
        ]
        assert said.text.endswith('"message":"' + why + '"}}\n\n')
        assert "event: error\n" in said.text
        assert json.loads(lines.text.splitlines()[-1])["error"] == why
        assert 'event: error\ndata: {"type":"error","code":"model_failed"' in response.text
        again = await complete(live, "b")
        assert again.json()["error"]["message"] == why, "at once, and nothing is loaded for it"
        assert await live.metric("tandem_model_load_failures_total") == 1
        assert (await states_of(live))["b"] == "failed"
        [told] = [one for one in (await live.http.get("/v1/models")).json()["data"] if one["id"] == "b"]
        assert told["load_error"] == "checkpoint: model.safetensors is cut short"
        assert (await long).json()["choices"][0]["text"] == text_of(live.service, "a", 300)
        assert (await live.http.get("/health")).status_code == 200
        broken.unlink()
        b.retry_s = 0.0
        assert (await complete(live, "b")).json()["choices"][0]["text"] == text_of(live.service, "b", 8)
        assert (await states_of(live))["b"] == "loaded"


async def test_an_engine_that_dies_is_started_again_and_others_go_on() -> None:
    first, second = make_models("a", "b")
    async with running_server(first, command_of(), others=[second], room=Room({}, is_shared=True)) as live:
        await complete(live, "b")
        dead = await complete(live, "a", attention_profile="dies")
        assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")
        after = asyncio.create_task(complete(live, "a"))
        assert (await complete(live, "b")).status_code == 200
        assert (await after).json()["choices"][0]["text"] == text_of(live.service, "a", 8)


class WaitingProcess:
    """Stand for a `HeadStart` from which engines take a process that they then start themselves."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.num_renewed = 0

    def renew(self) -> None:
        self.num_renewed += 1
        self.is_waiting = True

    def take(self) -> None:
        self.is_waiting = False


async def test_a_process_waits_for_the_next_model_also_where_an_engine_that_died_took_one() -> None:
    first, second = make_models("a", "b")
    async with running_server(first, command_of(), others=[second], room=Room({}, is_shared=True)) as live:
        waiting = cast(Any, WaitingProcess())
        live.app.state.models._ahead = waiting
        for model in live.app.state.models.models:
            model.supervisor._ahead = waiting

        async def is_renewed(times: int) -> bool:
            return waiting.num_renewed == times

        await complete(live, "a")
        await live.until(partial(is_renewed, 1))
        assert (await complete(live, "a", attention_profile="dies")).status_code == 503
        await live.until(partial(is_renewed, 2))
        assert waiting.is_waiting
        assert (await states_of(live)) == {"a": "loaded", "b": "unloaded"}
        for name in ("b", "a", "b"):
            assert (await complete(live, name)).status_code == 200
        assert (waiting.is_waiting, waiting.num_renewed) == (False, 2), "all are loaded"


async def test_keep_alive_says_how_long_a_model_stays() -> None:
    first, second = make_models("a", "b", idle_seconds=0.3)
    room = Room({}, is_shared=True)
    async with (
        running_server(first, command_of(), others=[second], room=room) as live,
        ollama.AsyncClient(live.url) as client,
    ):

        async def until_unloaded(name: str) -> None:
            async def is_unloaded() -> bool:
                return (await states_of(live))[name] == "unloaded"

            await live.until(is_unloaded)

        await complete(live, "a", keep_alive=-1)
        began = time.monotonic()
        await complete(live, "b")
        await until_unloaded("b")
        assert time.monotonic() - began > 0.3, "the deployment's own"
        assert (await states_of(live))["a"] == "loaded"
        loaded = (await client.ps()).models
        assert [(one.name, one.expires_at.year) for one in loaded] == [("a:latest", 9999)]
        assert [one.model for one in (await client.list()).models] == [
            "a:latest",
            "a-too:latest",
            "b:latest",
            "b-too:latest",
        ]
        await complete(live, "b", keep_alive="1h")
        [expires] = [one.expires_at.timestamp() for one in (await client.ps()).models if one.name == "b:latest"]
        assert abs(expires - time.time() - 3600) < 20
        await client.chat("b", [{"role": "user", "content": "x"}], keep_alive=0)
        await until_unloaded("b")
        assert (await client.generate("b", keep_alive="10m")).done_reason == "load"
        assert (await states_of(live))["b"] == "loaded"
        assert (await client.generate("b", keep_alive=0)).done_reason == "unload"
        await until_unloaded("b")
        assert (await client.chat("b", keep_alive=0)).done_reason == "unload"
        assert await states_of(live) == {"a": "loaded", "b": "unloaded"}, "nothing is loaded to be unloaded"
        wrong = await complete(live, "a", keep_alive="soon")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "keep_alive")
        assert "got 'soon', wanted seconds, or a text like" in wrong.json()["error"]["message"]


async def test_one_model_with_an_idle_time_is_loaded_again_when_it_is_asked_for() -> None:
    [alone] = make_models("a", idle_seconds=0.1)
    async with running_server(alone, command_of()) as live:
        a = models_of(live)["a"]
        await live.until(lambda: _holds(not a.is_started))
        assert (await live.http.get("/health")).json() == {"status": "ready"}
        assert (await live.http.get("/slots")).json() == [], "in memory is nothing"
        assert not a.is_started
        assert (await complete(live, "a")).json()["choices"][0]["text"] == text_of(live.service, "a", 8)


async def test_too_many_that_wait_are_told_to_come_again() -> None:
    first, second = make_models("a", "b")
    crowded = second.model_copy(
        update={"scheduler": second.scheduler.model_copy(update={"max_queue": 1, "max_running": 1})}
    )
    async with running_server(first, command_of({"b": {"load_s": 0.4}}), others=[crowded]) as live:
        waiting = [asyncio.create_task(complete(live, "b")) for _ in range(2)]
        await live.until(lambda: _holds(len(models_of(live)["b"].waiters) == 2))
        full = await complete(live, "b")
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_the_least_that_is_needed_goes_and_what_was_to_stay_goes_last() -> None:
    """Of a room for two, the third takes the place of the one that would go first."""
    first, *others = make_models(*NAMES)

    class RoomForTwo(Room):
        def holds(self, plans: Any) -> bool:
            return len(plans) <= 2

    async with running_server(first, command_of(), others=others, room=RoomForTwo({})) as live:
        await complete(live, "a", keep_alive=600)
        await complete(live, "b", keep_alive=-1)
        assert await states_of(live) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        await complete(live, "c")
        assert await states_of(live) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        await complete(live, "a")
        assert await states_of(live) == {"a": "loaded", "b": "unloaded", "c": "loaded"}, "b was asked for longer ago"


def served() -> ServedModel:
    """A model without a process, of a deployment that keeps models for ever."""
    supervisor = SimpleNamespace(on_change=lambda: None)
    service = SimpleNamespace(
        deployment=SimpleNamespace(idle_seconds=None), supervisor=supervisor, memory=None, metrics=SimpleNamespace()
    )
    return ServedModel(cast(Any, service))


def test_what_makes_room_goes_first_though_requests_for_it_come() -> None:
    """Or each of them would have another begin to make room, and none would be done with it."""
    closing, other, wanted = served(), served(), served()
    room = SimpleNamespace(holds=lambda plans: len(plans) <= 2)
    started = SimpleNamespace(_started=lambda: [closing, other], _room=room)
    closing.used_s, other.used_s = 1.0, 2.0
    assert ModelRegistry._in_the_way(cast(Any, started), wanted) == [closing]
    closing.is_closing, closing.used_s = True, 3.0
    assert ModelRegistry._in_the_way(cast(Any, started), wanted) == [closing]


def test_a_model_that_is_told_to_go_goes_behind_what_it_has_begun_unless_it_is_asked_for_again() -> None:
    model = served()
    running = model.admit()
    model.goes_when_idle, model.expires_s = True, 0.0
    running.release()
    assert model.expires_s == 0.0
    again = model.admit()
    again.release()
    assert model.expires_s == math.inf


async def test_a_drain_ends_what_waits_for_a_load() -> None:
    first, second = make_models("a", "b")
    async with running_server(first, command_of({"b": {"load_s": 5}}), others=[second]) as live:
        waiting = asyncio.create_task(complete(live, "b"))
        await live.until(lambda: _holds(models_of(live)["b"].is_started))
        live.app.state.models.abandon("the server shut down before this request was done", "draining")
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


async def test_routes_without_a_body_take_a_models_name_in_the_query(three: Running) -> None:
    for path in ("/v1/activity", "/server_info", "/v1/sessions", "/tokenizer_info"):
        assert (await three.http.get(path, params={"model": "nobody"})).status_code == 404
        assert (await three.http.get(path)).status_code == 200
    told = (await three.http.get("/v1/activity", params={"model": "b-too"})).json()
    assert (told["model"], told["status"]) == ("b", "unloaded")
    assert (await three.http.get("/v1/models/c-too")).json()["state"] == "unloaded"
    assert (await three.http.post("/api/show", json={"model": "c"})).status_code == 200
    assert await states_of(three) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}, "nothing was loaded for it"


def test_durations_are_read_as_ollama_reads_them(subtests: pytest.Subtests) -> None:
    for given, seconds in (
        (0, 0.0), (5, 5.0), (1.5, 1.5), (-1, FOREVER), ("5m", 300.0), ("1h30m", 5400.0), ("300ms", 0.3),
        ("-1", FOREVER), ("-5m", FOREVER), ("0", 0.0), ("90", 90.0), ("1.5h", 5400.0), (None, None),
    ):  # fmt: skip
        with subtests.test(given=given):
            assert read_keep_alive(given) == seconds
    for given in ("", "m", "5 m", "5x", "5m3", "1e3", "5m\n", "٥m", "9" * 40):
        with subtests.test(given=given), pytest.raises(ApiError, match="keep_alive: got"):
            read_keep_alive(given)
