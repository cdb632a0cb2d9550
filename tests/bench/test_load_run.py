"""The client against a scripted server: what is measured is what was scripted, and nothing that failed is lost."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.load.client import StreamFault
from bench.load.console import print_summary
from bench.load.load_plan import LoadPlan, parse_lengths
from bench.load.measure import LoadResult, measure
from tests.bench.load_plans import make_plan
from tests.bench.scripted_server import Behaviour, ScriptedServer, scripted_server
from tests.tolerances import LOAD_EARLY_S, LOAD_LATE_S

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "reference"


async def run_load(server: ScriptedServer, **changes: Any) -> LoadResult:
    plan: LoadPlan = make_plan(**{"url": server.url, "tokenizer": MODEL, **changes})
    return await measure(plan, Console(file=io.StringIO()))


def assert_took(measured_s: float, scripted_s: float) -> None:
    assert scripted_s - LOAD_EARLY_S <= measured_s <= scripted_s + LOAD_LATE_S


async def test_latencies_are_those_the_server_was_told_to_have() -> None:
    with scripted_server(Behaviour(first_s=0.3, gap_s=0.1, tokens=5, prompt_tokens=50)) as server:
        result = await run_load(server, requests=4)
    for record in result.records:
        assert_took(record.ttft_s, 0.3)
        assert_took(record.e2el_s, 0.7)
        assert record.tpot_s is not None
        assert_took(record.tpot_s, 0.1)
        assert len(record.chunk_times_s) == record.output_tokens == 5
        assert record.output_source == "usage"
    assert result.model == "scripted-model"
    assert result.notes == []


async def test_a_delay_of_half_a_second_more_would_be_seen() -> None:
    with scripted_server(Behaviour(first_s=0.8)) as server:
        result = await run_load(server, requests=1)
    with pytest.raises(AssertionError):
        assert_took(result.records[0].ttft_s, 0.3)


async def test_a_closed_loop_keeps_its_concurrency_and_never_exceeds_it() -> None:
    with scripted_server(Behaviour(first_s=0.02, gap_s=0.005)) as server:
        result = await run_load(server, concurrency=5, requests=40)
        assert server.peak == 5
    assert result.summary.peak_concurrency == 5
    assert result.summary.completed == 40
    assert sorted(record.job for record in result.records) == list(range(40))


async def test_a_closed_loop_of_a_duration_ends_after_it_and_waits_for_the_last_answers() -> None:
    with scripted_server(Behaviour(first_s=0.3)) as server:
        result = await run_load(server, concurrency=2, requests=None, duration_s=0.5)
    assert result.summary.completed == result.summary.due == 4
    assert_took(result.summary.wall_s, 0.6)


async def test_an_open_loop_measures_from_the_arrival_though_a_slow_server_holds_requests_back() -> None:
    with scripted_server(Behaviour(first_s=0.1, tokens=1)) as server:
        result = await run_load(server, rate=100.0, concurrency=1, requests=10)
        assert server.peak == 1
    last = max(result.records, key=lambda record: record.due_s)
    assert_took(last.ttft_s, 1.0 - last.due_s + result.records[0].due_s)
    assert any("--concurrency holds requests back" in note for note in result.notes)


async def test_an_open_loop_sends_at_its_times_whatever_the_server_does() -> None:
    with scripted_server(Behaviour(first_s=0.5, tokens=1)) as server:
        result = await run_load(server, rate=100.0, concurrency=None, requests=30)
        assert server.peak > 15
    assert all(0 <= record.sent_s - record.due_s <= LOAD_LATE_S for record in result.records)
    assert result.summary.asked_rate == 100.0


FAILURES = [
    (Behaviour(kind="error", status=500), "HTTP 500: scripted"),
    (Behaviour(kind="error", status=429), "HTTP 429: scripted"),
    (Behaviour(kind="disconnect"), "disconnected mid-stream"),
    (Behaviour(kind="malformed"), "malformed chunk"),
    (Behaviour(kind="error_object"), "error in the stream: engine died"),
    (Behaviour(kind="no_finish"), "without a finish_reason"),
    (Behaviour(kind="not_a_stream"), "wanted text/event-stream"),
    (Behaviour(kind="empty"), "nothing but [DONE]"),
    (Behaviour(kind="hang"), "timeout after 0.5 s"),
]


async def test_each_failure_is_counted_with_its_reason_and_the_others_complete() -> None:
    script = [behaviour for behaviour, _ in FAILURES] + [Behaviour()]
    with scripted_server(*script) as server:
        result = await run_load(server, concurrency=1, requests=13, timeout_s=0.5)
    summary = result.summary
    assert (summary.due, summary.failed, summary.completed, summary.http_429) == (13, len(FAILURES), 4, 1)
    for record, (_, reason) in zip(result.records, FAILURES, strict=False):
        assert record.outcome == "failed"
        assert reason in record.reason
    assert sum(summary.reasons.values()) == len(FAILURES)
    assert summary.ttft.num == 4
    assert "9 of 13 requests did not complete" in result.notes[0]
    page = io.StringIO()
    print_summary(replace(summary, reasons={f"reason {n};": 2 for n in range(12)}), [], Console(file=page, width=200))
    assert "2 × reason 7;" in page.getvalue()
    assert "reason 8;" not in page.getvalue()
    assert "8 × 4 other reasons" in page.getvalue()


async def test_a_429_is_sent_again_if_asked_and_the_wait_is_part_of_the_latency() -> None:
    with scripted_server(
        Behaviour(kind="error", status=429), Behaviour(kind="error", status=429), Behaviour()
    ) as server:
        result = await run_load(server, requests=1, retries=2)
    assert (result.summary.completed, result.summary.http_429, result.summary.retries) == (1, 2, 2)
    assert_took(result.records[0].ttft_s, 0.1)


async def test_a_server_that_is_not_there_is_one_clear_fault() -> None:
    with scripted_server() as server, pytest.raises(StreamFault, match=r"/no/v1/models: HTTP 404: .*Not Found"):
        await run_load(server, url=f"{server.url}/no")
    with pytest.raises(StreamFault, match="is the server up"):
        await measure(make_plan(), Console(file=io.StringIO()))


async def test_requests_that_cannot_connect_are_failed_not_lost() -> None:
    plan = make_plan(model="m", tokenizer=MODEL, requests=3)
    result = await measure(plan, Console(file=io.StringIO()))
    assert result.summary.failed == result.summary.due == 3
    assert "cannot connect" in result.records[0].reason


async def test_without_usage_tokens_are_counted_from_the_text_or_the_chunks() -> None:
    with scripted_server(Behaviour(usage=False, tokens=6, tokens_per_chunk=2, word=" and")) as server:
        by_text = await run_load(server, requests=2)
        by_chunk = await run_load(server, requests=2, tokenizer=None)
    assert {(record.output_source, record.output_tokens) for record in by_text.records} == {("tokenizer", 6)}
    assert {(record.output_source, record.output_tokens) for record in by_chunk.records} == {("chunks", 3)}
    assert any("2 answers came without usage" in note for note in by_chunk.notes)
    assert any("ESTIMATED at 4.00" in note for note in by_chunk.notes)


async def test_usage_is_checked_against_chunks() -> None:
    with scripted_server(Behaviour(tokens=6, tokens_per_chunk=3)) as server:
        result = await run_load(server, requests=2)
    assert (result.summary.num_chunk_mismatches, result.summary.tokens_per_chunk) == (2, 3.0)


async def test_the_ratio_of_characters_is_learnt_from_one_request() -> None:
    with scripted_server(Behaviour(prompt_tokens=400)) as server:
        result = await run_load(server, requests=2, tokenizer=None)
        assert len(server.bodies) == 3
    assert "ESTIMATED at 5.00 characters a token (from the usage of one request" in result.counting


async def test_the_servers_own_count_is_used_where_it_has_the_route() -> None:
    with scripted_server(Behaviour(), tokenize=True) as server:
        result = await run_load(server, requests=2, tokenizer=None)
    assert "/tokenize" in result.counting
    assert 45 <= len(server.bodies[0]["prompt"].split()) <= 55


async def test_conversations_go_in_order_with_the_models_own_answers(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "theirs"}, {"from": "human", "value": "two"}]
    path.write_text("\n".join(json.dumps({"conversations": turns}) for _ in range(3)))
    with scripted_server(Behaviour(tokens=2, word=" yes")) as server:
        result = await run_load(server, endpoint="chat", conversations=path, concurrency=2, requests=3)
    assert result.summary.completed == 6
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents.count(["one"]) == 3
    assert contents.count(["one", " yes yes", "two"]) == 3
    for job in range(3):
        first, second = sorted((record for record in result.records if record.job == job), key=lambda r: r.turn)
        assert second.sent_s >= first.end_s == second.due_s


async def test_turns_after_a_failed_one_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 3))
    with scripted_server(Behaviour(kind="error", status=500)) as server:
        result = await run_load(server, endpoint="chat", conversations=path, requests=1)
    assert (result.summary.due, result.summary.failed, result.summary.skipped) == (3, 1, 2)


async def test_an_interrupted_run_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.load import measure as module

    runs = []
    original = module.LoadRun.run

    async def interrupt_soon(run: Any) -> None:
        runs.append(run)
        asyncio.get_running_loop().call_later(0.5, run.interrupt)
        await original(run)

    monkeypatch.setattr(module.LoadRun, "run", interrupt_soon)
    script = [Behaviour(first_s=0.01)] * 4 + [Behaviour(kind="hang")]
    for load in ({"concurrency": 2}, {"concurrency": None, "rate": 200.0}, {"concurrency": 2, "rate": 200.0}):
        with scripted_server(*script) as server:
            result = await run_load(server, requests=20, **load)
        assert result.interrupted
        assert result.summary.completed == 4
        assert result.summary.unfinished == result.summary.due - 4 > 0
        assert "interrupted" in result.notes[0]
        assert result.summary.wall_s < 5


async def test_the_body_carries_what_was_asked() -> None:
    with scripted_server(Behaviour()) as server:
        await run_load(
            server,
            requests=2,
            concurrency=1,
            api_key="secret",
            ignore_eos=True,
            attention_profile="sampled",
            extra_body={"min_p": 0.1},
            temperature=0.7,
            seed=5,
            output_tokens=parse_lengths("", "9"),
        )
    body = server.bodies[1]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["min_p"], body["seed"]) == (9, True, 0.1, 6)
    assert (body["temperature"], body["attention_profile"], body["model"]) == (0.7, "sampled", "scripted-model")
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_warm_requests_come_first_and_are_not_measured() -> None:
    with scripted_server(Behaviour()) as server:
        result = await run_load(server, requests=3, cache="warm", shared_prefix_share=0.5, warmup=2)
    assert len(server.bodies) == 6
    assert result.summary.due == 3
    assert server.bodies[3]["prompt"].startswith(server.bodies[0]["prompt"][:60])


async def test_a_connection_is_used_again_after_a_stream_ends() -> None:
    with scripted_server(Behaviour()) as server:
        await run_load(server, requests=10, concurrency=1)
        assert len(server.peers) <= 2
