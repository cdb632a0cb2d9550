"""Beginning and end: of requests, of streams, of the engine process, of the program."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import psutil
import pytest

from server.engine.supervisor import Supervisor
from tests.server.live_server import ROOT, Running, fake_command, make_deployment, plan_of, running_server
from tests.server.program import Program
from tests.tolerances import CANCEL_S, DRAIN_LATE_S, KEEPALIVE_COMMENTS, ORPHAN_S, PROGRESS_REPORTS, QUIET_LATE_S

COMPLETION = "/v1/completions"
SLOW = {"prompt": "one two three", "attention_profile": "slow", "max_tokens": 2000, "ignore_eos": True}
LONG_PREFILL = {"prompt": "one two three", "attention_profile": "long_prefill", "temperature": 0, "stream": True}


@pytest.fixture
def live(own_live: Running) -> Running:
    return own_live


async def is_idle(live) -> bool:
    return await live.metric("tandem_requests_running") == 0


async def is_busy(live) -> bool:
    return await live.metric("tandem_requests_running") > 0


async def test_a_client_that_goes_away_frees_its_request_at_once(live):
    for number, stream in enumerate((True, False), 1):

        async def ask(stream: bool) -> None:
            async with httpx.AsyncClient(base_url=live.url, timeout=30) as http:
                await http.post(COMPLETION, json=SLOW | {"stream": stream, "n": 3})

        client = asyncio.create_task(ask(stream))
        await live.until(lambda: is_busy(live))
        client.cancel()
        await live.until(lambda: is_idle(live), CANCEL_S)
        assert await live.metric("tandem_requests_finished_total") == 3 * number
        assert live.service.num_open == 0
        assert live.service.supervisor._mailboxes == {}


async def test_a_client_that_leaves_during_a_long_prefill_is_noticed():
    """Without that the request runs on."""
    async with running_server(make_deployment(), fake_command(prefill_s=60)) as live:
        async with live.http.stream("POST", COMPLETION, json=LONG_PREFILL) as answer:
            assert answer.status_code == 200
            await live.until(lambda: is_busy(live))
            await asyncio.sleep(1.0)
            assert await is_busy(live)
        await live.until(lambda: is_idle(live), CANCEL_S)


async def test_every_run_of_the_engine_is_told_the_plan_that_was_made(monkeypatch):
    deployment = make_deployment()
    planned = plan_of(deployment).num_pages
    async with running_server(deployment, fake_command(planned=1)) as live:
        monkeypatch.delattr("gpu.memory.plan.plan_memory")
        supervisor = live.service.supervisor
        told = [supervisor.ready().num_pages]
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        await live.until(lambda: has_runs(supervisor, 2))
        told.append(supervisor.ready().num_pages)
    assert told == [planned, planned]


async def has_runs(supervisor: Supervisor, number: int) -> bool:
    return supervisor._num_runs == number and supervisor.state == "ready"


async def test_a_full_queue_is_a_429_with_retry_after_before_any_stream_begins():
    async with running_server(make_deployment(retry_after_seconds=3), fake_command(max_requests=2)) as live:
        running = asyncio.create_task(live.http.post(COMPLETION, json=SLOW | {"n": 2, "max_tokens": 20}))
        await live.until(lambda: is_busy(live))
        for stream in (True, False):
            answer = await live.http.post(COMPLETION, json={"prompt": "a", "stream": stream})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "3"
            assert answer.json()["error"] == {
                "message": "queue: 8 wait, room for 8", "type": "rate_limit_error", "param": None, "code": "queue_full",
            }  # fmt: skip
        assert (await running).status_code == 200
        assert (await live.http.post(COMPLETION, json={"prompt": "a"})).status_code == 200


async def test_comments_keep_a_silent_stream_alive_and_only_a_silent_one():
    async with running_server(make_deployment(keepalive_seconds=0.2), fake_command(prefill_s=1.1)) as live:
        answer = await live.http.post(COMPLETION, json=LONG_PREFILL)
        assert answer.text.count(": keepalive\n\n") in KEEPALIVE_COMMENTS
        assert answer.text.index(": keepalive") < answer.text.index("data: ")
        busy = await live.http.post(COMPLETION, json=SLOW | {"stream": True, "max_tokens": 12})
        assert ": keepalive" not in busy.text


async def test_progress_is_reported_when_asked_for_and_not_too_often():
    async with running_server(make_deployment(progress_seconds=0.2), fake_command(prefill_s=1.0)) as live:
        silent = await live.http.post(COMPLETION, json=LONG_PREFILL)
        assert "prompt_progress" not in silent.text
        settings = {key: value for key, value in LONG_PREFILL.items() if key != "prompt"}
        for path, body in (
            (COMPLETION, {"prompt": "one two three"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two three"}]}),
        ):
            answer = await live.http.post(path, json=body | settings | {"return_progress": True})
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
            assert len(progress) in PROGRESS_REPORTS
            assert all(chunk["choices"] == [] for chunk in chunks[: len(progress)])
            assert [p["processed"] for p in progress] == sorted(p["processed"] for p in progress)
            assert set(progress[0]) == {"index", "total", "cache", "processed", "time_ms"}
            assert all(p["processed"] <= p["total"] for p in progress)


async def test_a_killed_engine_ends_streams_with_an_error_and_a_new_one_serves(live):
    first_pid = live.service.supervisor.engine_pid
    whole = asyncio.create_task(live.http.post(COMPLETION, json=SLOW))
    stream = asyncio.create_task(live.http.post(COMPLETION, json=SLOW | {"stream": True}))
    await live.until(lambda: is_busy(live))
    await asyncio.sleep(0.2)
    os.kill(first_pid, signal.SIGKILL)

    async def is_down() -> bool:
        return (await live.http.get("/health")).status_code == 503

    await live.until(is_down, 2)
    refused = await live.http.post(COMPLETION, json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] in ("engine_dead", "engine_loading")
    answer = await whole
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    events = [line for line in (await stream).text.splitlines() if line]
    assert json.loads(events[-1][6:])["error"]["code"] == "engine_dead"
    assert "data: [DONE]" not in events
    await live.until_ready()
    assert 'tandem_requests_finished_total{reason="lost"} 2.0' in (await live.http.get("/metrics")).text
    assert live.service.supervisor.engine_pid != first_pid
    done = await live.http.post(COMPLETION, json={"prompt": "one two", "temperature": 0})
    assert done.json()["choices"][0]["text"] == "one two"
    assert await live.metric("tandem_engine_restarts_total") == 1


async def test_an_engine_that_hangs_is_replaced_and_one_that_idles_is_not():
    async with running_server(make_deployment(engine_silence_seconds=1.2), fake_command()) as live:
        first_pid = live.service.supervisor.engine_pid
        await asyncio.sleep(1.8)
        assert live.service.supervisor.engine_pid == first_pid
        stream = asyncio.create_task(live.http.post(COMPLETION, json=SLOW | {"stream": True}))
        await live.until(lambda: is_busy(live))
        os.kill(first_pid, signal.SIGSTOP)
        events = [line for line in (await stream).text.splitlines() if line]
        error = json.loads(events[-1][6:])["error"]
        assert error["code"] == "engine_hung"
        assert error["message"].startswith("the engine process hung (no sign of life for ")
        await live.until_ready()
        assert live.service.supervisor.engine_pid != first_pid


async def test_health_tells_a_silent_engine_at_once_and_again_when_it_speaks():
    async with running_server(make_deployment(engine_quiet_seconds=0.8), fake_command()) as live:
        first_pid = live.service.supervisor.engine_pid

        async def says(status: str) -> bool:
            return (await live.http.get("/health")).json() == {"status": status}

        os.kill(first_pid, signal.SIGSTOP)
        await live.until(lambda: says("hung"), QUIET_LATE_S)
        assert (await live.http.get("/health")).status_code == 503
        assert (await live.http.get("/live")).status_code == 200, "it will be replaced if that lasts"
        refused = await live.http.post(COMPLETION, json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_hung")
        assert await live.metric("tandem_engine_up") == 0
        os.kill(first_pid, signal.SIGCONT)
        await live.until(lambda: says("ready"))
        assert await live.metric("tandem_engine_up") == 1
        assert (await live.http.post(COMPLETION, json={"prompt": "a"})).status_code == 200
        assert live.service.supervisor.engine_pid == first_pid


async def test_a_step_that_takes_long_is_not_silence_but_one_that_never_ends_is_a_hung_engine():
    ask = {"prompt": "one two", "attention_profile": "long_step", "temperature": 0}
    deployment = make_deployment(engine_quiet_seconds=0.8, engine_silence_seconds=60)
    async with running_server(deployment, fake_command(step_s=2.0)) as live:
        asked = asyncio.create_task(live.http.post(COMPLETION, json=ask))
        while not asked.done():
            assert (await live.http.get("/health")).json() == {"status": "ready"}
            await asyncio.sleep(0.05)
        assert asked.result().json()["choices"][0]["text"] == "one two"
    async with running_server(make_deployment(engine_silence_seconds=1.2), fake_command(step_s=60.0)) as live:
        first_pid = live.service.supervisor.engine_pid
        answer = await live.http.post(COMPLETION, json=ask)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_hung")
        assert "hung (one step for " in answer.json()["error"]["message"]
        await live.until_ready()
        assert live.service.supervisor.engine_pid != first_pid


async def test_counters_only_grow_when_the_engine_is_replaced(live):
    async def counted(least: float) -> bool:
        return await live.metric("tandem_prefix_cache_query_tokens_total") >= least

    await live.until(lambda: counted(100))
    steps = await live.metric("tandem_engine_steps_total")
    os.kill(live.service.supervisor.engine_pid, signal.SIGKILL)
    await live.until(lambda: counted(200))
    assert await live.metric("tandem_prefix_cache_query_tokens_total") == 200
    assert await live.metric("tandem_prefix_cache_hit_tokens_total") == 80
    assert await live.metric("tandem_preemptions_total") == 2
    assert await live.metric("tandem_preempted_tokens_recomputed_total") == 60
    assert await live.metric("tandem_engine_steps_total") >= steps


async def test_metrics_show_the_host_tier():
    async with running_server(make_deployment(), fake_command(host=1)) as live:

        async def is_told() -> bool:
            return await live.metric("tandem_host_tokens") > 0

        await live.until(is_told)
        asked = ("bytes_used", "bytes_promised", "bytes_capacity", "contexts", "tokens", "segments")
        assert [await live.metric(f"tandem_host_{name}") for name in asked] == [5000, 6000, 9000, 3, 400, 2]
        asked = ("tables_built", "tables_failed", "tokens_covered", "rows_read", "rows_left_out", "tokens_reloaded",
                 "ready_seconds",
                 "wait_seconds", "attend_seconds")  # fmt: skip
        assert [await live.metric(f"tandem_host_{name}_total") for name in asked] == [
            60, 1, 8000, 160, 7, 70, 0.5, 0.25, 1.5
        ]  # fmt: skip


async def test_an_engine_that_dies_of_a_request_takes_only_that_life_with_it(live):
    answer = await live.http.post(COMPLETION, json={"prompt": "one two three", "attention_profile": "dies"})
    assert answer.status_code == 503
    await live.until_ready()
    assert (await live.http.post(COMPLETION, json={"prompt": "a"})).status_code == 200


async def test_without_restarts_a_dead_engine_stays_dead_and_says_so():
    async with running_server(make_deployment(restart_engine=False), fake_command()) as live:
        os.kill(live.service.supervisor.engine_pid, signal.SIGKILL)

        async def is_dead() -> bool:
            return (await live.http.get("/health")).json() == {"status": "dead"}

        assert (await live.http.get("/live")).status_code == 200
        await live.until(is_dead)
        assert (await live.http.get("/live")).status_code == 503, "only a new process helps"
        await asyncio.sleep(0.5)
        assert await is_dead()


async def test_health_tells_loading_from_ready():
    async with running_server(make_deployment(), fake_command(load_s=0.5), wait=False) as live:
        answer = await live.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        assert (await live.http.post(COMPLETION, json={"prompt": "a"})).json()["error"]["code"] == "engine_loading"
        assert (await live.http.get("/version")).json() == {"version": "0.1.0"}
        await live.until_ready()
        assert (await live.http.get("/health")).json() == {"status": "ready"}


async def test_metrics_tell_what_happened(live, tokenizer):
    num = len(tokenizer.encode("one two three", True))
    for _ in range(3):
        await live.http.post(COMPLETION, json={"prompt": "one two three", "temperature": 0})
    await live.http.post(COMPLETION, json={"prompt": "one two three", "temperature": 0, "max_tokens": 2})
    assert await live.metric("tandem_prompt_tokens_total") == 4 * num
    assert await live.metric("tandem_generated_tokens_total") == 3 * (num + 1) + 2
    text = (await live.http.get("/metrics")).text
    assert 'tandem_requests_finished_total{reason="stop"} 3.0' in text
    assert 'tandem_requests_finished_total{reason="length"} 1.0' in text
    for name in ("time_to_first_token", "request", "queue"):
        assert await live.metric(f"tandem_{name}_seconds_count") == 4
    assert await live.metric("tandem_inter_token_seconds_count") == 3 * num + 1
    assert await live.metric("tandem_engine_step_seconds_total") == 7
    assert await live.metric("tandem_pages_capacity") == 1024
    assert await live.metric("tandem_pages_cached") == 2
    assert await live.metric("tandem_engine_up") == 1


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def engine_pids(parent: int) -> list[int]:
    """Return the engines among the server's children, of which others render templates."""
    children = psutil.Process(parent).children()
    return [child.pid for child in children if "fake_engine.py" in " ".join(child.cmdline())]


async def test_sigterm_lets_open_streams_finish_and_refuses_new_ones():
    program = Program({}, drain_seconds=20)
    url = await asyncio.to_thread(program.ready)
    engines = engine_pids(program.process.pid)
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        async with http.stream("POST", COMPLETION, json=SLOW | {"stream": True, "max_tokens": 20}) as stream:
            program.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            refused = await http.post(COMPLETION, json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            health = await http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            text = "".join([part async for part in stream.aiter_text()])
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":"length"') == 1
    code, _ = await asyncio.to_thread(program.end)
    assert code == 0
    assert engines
    assert not any(is_alive(pid) for pid in engines)


async def test_a_drain_that_takes_too_long_ends_streams_with_an_error_object_half_bodies_and_what_nobody_reads():
    """In time and without tracebacks."""
    program = Program({"token_s": 0.002}, drain_seconds=0.3)
    url = await asyncio.to_thread(program.ready)
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    unread = json.dumps({"prompt": "one " * 400, "max_tokens": 12000, "ignore_eos": True, "stream": True, "n": 4})
    half_bodies, unread_ones = [], []
    for kept, sent in ((half_bodies, head % 100 + b'{"prompt":'), (unread_ones, head % len(unread) + unread.encode())):
        for _ in range(5):
            kept.append(await asyncio.open_connection(host, int(port)))
            kept[-1][1].transport.pause_reading()
            kept[-1][1].write(sent)
    half_head = await asyncio.open_connection(host, int(port))
    half_head[1].write(head[:20])
    await asyncio.sleep(0.5)
    async with (
        httpx.AsyncClient(base_url=url, timeout=20) as http,
        http.stream("POST", COMPLETION, json=SLOW | {"stream": True}) as stream,
    ):
        program.process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        text = "".join([part async for part in stream.aiter_text()])
    assert json.loads(text.strip().splitlines()[-1][6:])["error"]["code"] == "draining"
    code, errors = await asyncio.to_thread(program.end)
    assert time.monotonic() - began_s < DRAIN_LATE_S
    assert code == 0
    assert "Traceback" not in errors
    assert "drain_expired" in errors
    for reader, writer in half_bodies:
        writer.transport.resume_reading()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "draining"
    for _, writer in [*half_bodies, *unread_ones, half_head]:
        writer.close()


async def test_a_second_signal_ends_the_program_at_once():
    program = Program({}, drain_seconds=60)
    url = await asyncio.to_thread(program.ready)
    engines = engine_pids(program.process.pid)
    body = SLOW | {"stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=20) as http, http.stream("POST", COMPLETION, json=body):
        program.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.2)
        assert program.process.poll() is None
        program.process.send_signal(signal.SIGTERM)
        code, _ = await asyncio.to_thread(program.end)
    assert code == 128 + signal.SIGTERM
    await asyncio.sleep(0.1)
    assert engines
    assert not any(is_alive(pid) for pid in engines)


def test_an_engine_process_never_outlives_its_parent_even_while_it_loads(tmp_path):
    """`scheduler.engine.engine_loop` itself, stuck before it is ready, under a parent that is killed."""
    started = tmp_path / "started"
    stuck = (
        "import pathlib, sys, time; from scheduler.engine import engine_loop\n"
        f"engine_loop._read_start = lambda text: pathlib.Path({str(started)!r}).touch() or time.sleep(60)\n"
        "engine_loop.run_engine(*sys.argv[1:])"
    )
    starts_it = (
        "import os, subprocess, sys\n"
        "addresses = ['ipc://' + sys.argv[2] + name for name in ('/requests', '/replies')]\n"
        "command = [sys.executable, '-c', sys.argv[1], *addresses, str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE); print(child.pid, flush=True)\n"
        "child.stdin.write(b'{}'); child.stdin.close(); child.wait()"
    )
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "requests").touch()
    (folder / "replies").touch()
    command = [sys.executable, "-c", starts_it, stuck, str(folder)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    wait_until(started.exists, 60)
    assert is_alive(pid)
    parent.kill()
    parent.wait(20)
    wait_until(lambda: not is_alive(pid), ORPHAN_S)
    assert not folder.exists()


def test_an_engine_process_that_is_given_nothing_ends_and_removes_the_folder_of_its_sockets(tmp_path):
    """Whoever started it ahead of a plan has ended, or has none."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    command = [sys.executable, "-m", "scheduler.engine.engine_process", *(f"ipc://{folder}/{end}" for end in "ab")]
    ended = subprocess.run(
        [*command, str(os.getpid())], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
    assert not folder.exists()


def test_an_engine_that_cannot_start_ends_the_program_with_one_line():
    program = Program({"fails": 1})
    code, errors = program.end()
    assert code == 1
    assert errors.strip().splitlines()[-1].startswith("checkpoint: model.safetensors is cut short")
    assert "Traceback" not in errors


def test_engines_that_fail_one_after_the_other_end_the_program(tmp_path):
    broken = tmp_path / "broken"
    program = Program({"exits_if": str(broken)}, max_engine_failures=2)
    program.ready()
    broken.touch()
    os.kill(engine_pids(program.process.pid)[0], signal.SIGKILL)
    code, errors = program.end()
    assert code == 1
    last = errors.strip().splitlines()[-1]
    assert last == (
        "engine: 2 engine processes failed in a row (server.max_engine_failures); last error: "
        "engine: exited with code 3"
    )


async def test_a_keeper_that_fails_itself_ends_the_program(live, monkeypatch):
    supervisor = live.service.supervisor
    monkeypatch.setattr(supervisor, "_deliver", lambda _: {}["no such key"])
    reason = await asyncio.wait_for(asyncio.shield(supervisor.failure), 10)
    assert reason == "supervisor: KeyError: 'no such key'"
    assert (await live.http.get("/health")).json() == {"status": "failed"}
    assert (await live.http.get("/live")).status_code == 503
