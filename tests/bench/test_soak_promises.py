"""A soak sees each promise that a server breaks: servers here are scripted, those of `tests/end_to_end` are real."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from bench.soak import gauges, soak_run
from bench.soak.processes import fit_trend
from bench.soak.requests import LEFT_SESSIONS, Mix, Served, make_requests
from bench.soak.soak_answers import Answer, compare
from bench.soak.soak_report import FLAT_BYTES, judge_memory, write_result
from bench.soak.soak_run import Kill, SoakPlan, SoakResult, run_soak

PLAN = SoakPlan("http://scripted.test", None, 0.25, 0, 8, Mix(2, 60, 4, None), 1e-3, 0, patience_s=0.5)
SERVED = Served("scripted", {"exact": 1000, "sampled": 1000}, "exact", True, True)
NAMES = (*gauges._AT_REST, *gauges._ONCE_FORGOTTEN, "tandem_pages_capacity", "tandem_pages_committed",
         "tandem_chunks_memory_bytes")  # fmt: skip
Answers = Callable[[int, dict[str, Any]], httpx.Response]


def say(body: dict[str, Any], word: str = "yes", finish: str | None = "length") -> httpx.Response:
    """Return an answer of two tokens, whole or streamed, as a completion."""
    tops = [{word: -0.1, "no": -2.0}] * 2
    choice = {"text": word * 2, "finish_reason": finish, "logprobs": {"tokens": [word] * 2, "top_logprobs": tops}}
    if not body["stream"]:
        return httpx.Response(200, json={"choices": [choice]})
    return httpx.Response(200, text=f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")


def refuse(status: int, code: str | None) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": "scripted", "code": code}})


async def soak(answers: Answers, monkeypatch: pytest.MonkeyPatch, **held: float) -> SoakResult:
    """Soak a server of completions: `answers` gets the number of a request that is compared or drawn, and its body."""
    monkeypatch.setattr(gauges, "REST_S", 0.1)
    monkeypatch.setattr(soak_run, "_RETRY_S", 0.05)
    numbers = iter(range(10**6))

    async def handle(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.001)
        path = request.url.path
        if path == "/v1/activity":
            tree = {"status": "ready", "model": "scripted", "profiles": {"exact": 1000}, "default_profile": "exact"}
            return httpx.Response(200, json=tree | {"has_chat": False, "has_documents": False, "memory": []})
        if path == "/metrics":
            values = dict.fromkeys(NAMES, 0.0) | held
            return httpx.Response(200, text="".join(f"# TYPE {n} gauge\n{n} {v}\n" for n, v in values.items()))
        if path != "/v1/completions":
            return httpx.Response(200, json={})
        body = json.loads(request.content)
        return say(body) if body["session_id"] in LEFT_SESSIONS else answers(next(numbers), body)

    return await run_soak(PLAN, httpx.MockTransport(handle))


async def test_a_server_that_keeps_its_promises_has_no_fault(monkeypatch, tmp_path):
    result = await soak(lambda number, body: say(body), monkeypatch)
    assert result.faults == {}
    kinds = result.counts
    assert kinds["text, exact"]["same"] == kinds["text, exact"]["answered"] == kinds["text, exact"]["asked"] > 0
    assert sum(kinds[way]["cancelled"] for way in ("leaves at once", "leaves a stream", "never reads")) > 0
    assert set(result.at_rest.values()) == {0}
    assert result.notes == ["the server's processes are not this user's on this machine: no kills, no memory"]
    write_result(result, {}, tmp_path / "soak.json")
    assert json.loads((tmp_path / "soak.json").read_text())["broken"] == {}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (lambda number, body: say(body, "yes" if number < 4 else "other"), "text, exact: said 'otherother'"),
        (lambda number, body: say(body, finish=None if number > 3 else "length"), "ends without a finish_reason"),
        (lambda number, body: refuse(500, None) if number > 3 else say(body), "status 500, code ''"),
        (lambda number, body: refuse(503, "engine_dead") if number > 3 else say(body), "code 'engine_dead'"),
        (lambda number, body: refuse(500, None) if number > 3 else say(body), "not answered within 0 s"),
    ],
    ids=["another text", "a cut answer", "an unclear error", "an engine that died unkilled", "never answered"],
)
async def test_each_broken_promise_is_seen(answers: Answers, said: str, monkeypatch):
    result = await soak(answers, monkeypatch)
    assert any(said in fault for fault in result.faults), result.faults


@pytest.mark.parametrize("name", ["tandem_pages_used", "tandem_host_leases", "tandem_host_bytes_used"])
async def test_what_is_not_given_back_is_seen(name: str, monkeypatch):
    result = await soak(lambda number, body: say(body), monkeypatch, **{name: 3.0})
    assert list(result.faults) == [f"{name} is 3 after 0 s of rest, wanted 0"]


async def test_a_server_that_goes_away_is_seen_and_the_rest_is_reported(monkeypatch):
    def go_away(number: int, body: dict[str, Any]) -> httpx.Response:
        if number > 3:
            raise httpx.ConnectError("gone")
        return say(body)

    result = await soak(go_away, monkeypatch)
    assert any(fault.endswith("the connection broke: ConnectError gone") for fault in result.faults)
    assert result.at_rest, "it still tells what it holds"


async def test_a_server_that_is_not_there_is_an_error_in_one_line():
    with pytest.raises(ValueError, match=r"^http://127\.0\.0\.1:9: .+; is the server up\?$"):
        await run_soak(replace(PLAN, url="http://127.0.0.1:9"))


async def test_a_full_queue_is_asked_again_and_no_fault(monkeypatch):
    result = await soak(lambda number, body: refuse(429, "queue_full") if number == 4 else say(body), monkeypatch)
    assert result.faults == {}
    assert sum(counts["queue full"] for counts in result.counts.values()) == 1


async def test_a_server_that_refuses_a_first_request_is_not_soaked(monkeypatch):
    with pytest.raises(ValueError, match="text, exact: the server refuses the first request of this kind: status 400"):
        await soak(lambda number, body: refuse(400, "bad"), monkeypatch)


def test_an_error_is_right_only_of_what_was_in_flight_at_a_kill_or_came_before_the_next_engine() -> None:
    for sent, now, column in ((5.0, 11.0, "lost at a kill"), (12.0, 13.0, "refused meanwhile"), (21.0, 22.0, None)):
        one = object.__new__(soak_run._Soak)
        one.result = SoakResult(kills=[Kill(10.0, 20.0)])
        counts: Counter[str] = Counter()
        request = make_requests(SERVED, PLAN.mix)[0]
        one._judge(request, sent, soak_run.RefusedError(503, "engine_dead", "gone"), counts, now)
        assert counts == ({column: 1} if column else {})
        assert bool(one.result.faults) == (column is None)


def test_a_text_may_part_only_where_two_tokens_are_level() -> None:
    first = Answer("abc", ["a", "b", "c"], [0.5, 1e-4, 0.5], "length")
    assert compare(replace(first), first, 1e-3) == "same"
    assert compare(replace(first, text="axc", tokens=["a", "x", "c"]), first, 1e-3) == "level"
    assert compare(replace(first, text="abx", tokens=["a", "b", "x"]), first, 1e-3) == "other"
    assert compare(replace(first, text="ab", tokens=["a", "b"]), first, 1e-3) == "other", "a token is missing"
    assert compare(replace(first, text="abd"), first, 1e-3) == "other", "the text is not that of its tokens"


def test_memory_that_grows_with_each_request_is_seen_and_noise_is_not() -> None:
    noise = [(float(second), 10**9 + (second % 7) * 2**20) for second in range(300)]
    leak = [(at, size + int(at * 2**20)) for at, size in noise]  # a MiB a second
    result = SoakResult(memory={("engine", 0): noise, ("server", 0): noise})
    judge_memory(result)
    assert result.faults == {}
    result = SoakResult(memory={("engine", 0): noise, ("engine", 1): leak, ("server", 0): noise})
    trends = judge_memory(result)
    assert [fault.startswith("memory of the engine grew by 1") for fault in result.faults] == [True]
    assert trends["engine"].growth_bytes > 2 * FLAT_BYTES
    assert fit_trend(noise[:1]) is None


def test_all_that_is_served_is_asked_for_in_lengths_up_to_the_longest() -> None:
    requests = make_requests(SERVED, Mix(3, 600, 8, None))
    assert [request.kind for request in requests[::3]] == [
        "text, exact", "text, sampled", "text, drawn", "chat", "chat, tools", "chat, documents",
    ]  # fmt: skip
    assert {request.kind for request in requests if not request.is_compared} == {"text, sampled", "text, drawn"}
    assert [len(request.body["prompt"]) for request in requests[:3]] == [60, 294, 1440], (
        "480 tokens fit beside the answer"
    )
    assert len({json.dumps(request.body) for request in requests}) == len(requests)
    with pytest.raises(ValueError, match="--profiles: got mac; the server has exact, sampled"):
        make_requests(SERVED, Mix(3, 600, 8, ("mac",)))
