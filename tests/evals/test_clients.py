"""Each sample comes back once from a URL, as a text or a counted failure; tries and concurrency are bounded."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from evals import clients
from evals.clients import Endpoint, ProbeError, Reply, ask_all, probe, request_body
from evals.samples import Sample


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.001)


def endpoint(mode: str = "completions", **changes: object) -> Endpoint:
    settings = {
        "url": "http://server/v1/", "model": "m", "mode": mode, "api_key": "k", "concurrency": 3, "max_retries": 2,
        "timeout_s": 5.0, "extra": {"profile": "exact"},
    }  # fmt: skip
    return Endpoint(**(settings | changes))


def make_samples(count: int) -> list[Sample]:
    return [
        Sample("needle", str(number), f"prompt {number}", ["7"], "exact_match", 8, 4, None) for number in range(count)
    ]


async def collect(where: Endpoint, samples: list[Sample], serve: Callable[..., object]) -> list[Reply]:
    return [reply async for reply in ask_all(where, samples, httpx.MockTransport(serve))]


def completion(text: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"text": text}]})


async def test_every_sample_comes_back_once_with_its_own_text() -> None:
    async def serve(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert request.url == "http://server/v1/completions"
        assert request.headers["authorization"] == "Bearer k"
        assert (body["model"], body["temperature"], body["max_tokens"], body["profile"]) == ("m", 0, 8, "exact")
        return completion(body["prompt"].replace("prompt", "answer"))

    replies = await collect(endpoint(), make_samples(20), serve)
    assert sorted(int(reply.sample.sample_id) for reply in replies) == list(range(20))
    assert all(reply.text == f"answer {reply.sample.sample_id}" and reply.failure is None for reply in replies)


async def test_no_more_requests_are_under_way_than_allowed() -> None:
    under_way, most = 0, 0

    async def serve(request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        return completion("x")

    await collect(endpoint(), make_samples(12), serve)
    assert most == 3


async def test_passing_trouble_is_tried_again_and_lasting_trouble_is_a_failure() -> None:
    tries: dict[str, int] = {}

    async def serve(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        tries[prompt] = tries.get(prompt, 0) + 1
        if prompt == "prompt 0" and tries[prompt] < 3:
            return httpx.Response(503, text="busy")
        if prompt == "prompt 1":
            raise httpx.ConnectError("refused")
        if prompt == "prompt 2":
            return httpx.Response(400, text="prompt too long")
        if prompt == "prompt 3":
            return httpx.Response(200, json={"choices": []})
        return completion("fine")

    replies = {reply.sample.sample_id: reply for reply in await collect(endpoint(), make_samples(5), serve)}
    assert (replies["0"].text, replies["0"].num_tries, replies["0"].failure) == ("fine", 3, None)
    assert (replies["1"].text, replies["1"].num_tries) == ("", 3)
    assert "ConnectError" in (replies["1"].failure or "")
    assert (replies["2"].num_tries, replies["2"].failure) == (1, "status 400: prompt too long")
    assert "without choices" in (replies["3"].failure or "")
    assert replies["4"].failure is None


async def test_a_server_that_never_answers_is_a_failure() -> None:
    async def serve(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return completion("late")

    (reply,) = await collect(endpoint(timeout_s=0.02, max_retries=1), make_samples(1), serve)
    assert (reply.failure, reply.num_tries) == ("no answer in 0.02 s", 2)


@pytest.mark.parametrize("mode", ["completions", "chat"])
async def test_a_probe_names_what_was_asked_and_what_came(mode: str) -> None:
    path = "/completions" if mode == "completions" else "/chat/completions"
    asked = []

    async def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(404, text="no such place")

    with pytest.raises(ProbeError) as refused:
        await probe(endpoint(mode), httpx.MockTransport(refuse))
    assert asked == [f"/v1{path}"], "what no second try mends is tried once"
    for part in ("--url http://server/v1/", f"POST {path}", "'m'", '{"profile": "exact"}', "status 404: no such place"):
        assert part in str(refused.value)


async def test_a_probe_of_a_server_that_answers_asks_for_one_token() -> None:
    bodies = []

    async def serve(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return completion("")

    await probe(endpoint(), httpx.MockTransport(serve))
    assert [(body["max_tokens"], body["profile"]) for body in bodies] == [(1, "exact")]


async def test_chat_reads_the_message() -> None:
    async def serve(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/chat/completions"
        return httpx.Response(200, json={"choices": [{"message": {"content": "hello"}}]})

    (reply,) = await collect(endpoint("chat"), make_samples(1), serve)
    assert reply.text == "hello"


def test_chat_sends_the_turn_without_special_tokens_and_answer_prefix() -> None:
    raw = "<|begin_of_text|><|user|>\nA text.\n\nWhat?<|end|><|assistant|>\n"
    sample = Sample("needle", "0", raw, ["7"], "exact_match", 8, 4, None, {"raw": True})
    assert request_body(endpoint("chat"), sample)["messages"] == [{"role": "user", "content": "A text.\n\nWhat?"}]
    assert request_body(endpoint(), sample)["prompt"] == raw
    prefixed = Sample("vt", "0", "Find. Answer:", ["7"], "exact_match", 8, 4, None, {"answer_prefix": " Answer:"})
    assert request_body(endpoint("chat"), prefixed)["messages"][0]["content"] == "Find."
    assert request_body(endpoint(), prefixed)["prompt"] == "Find. Answer:"


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="completions"):
        endpoint("telepathy")
