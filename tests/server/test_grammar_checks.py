"""Grammars are checked in processes that are ended where one takes too long, whoever waits or has gone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
from llguidance import LLMatcher

from scheduler.constraints.grammar import MOST_BYTES, check
from scheduler.constraints.grammar_worker import HEAD
from server.api_error import ApiError
from server.grammar import grammar_checks, structured
from server.grammar.grammar_checks import GrammarChecks
from tests.server.live_server import Running

GOOD = LLMatcher.grammar_from_regex("[ab]{3}")
BAD = LLMatcher.grammar_from_regex("(?=a)b")
SLOW_SCHEMA = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": f"(.*a){{1,{i % 40 + 1}}}"} for i in range(900)},
}
SLOW = LLMatcher.grammar_from_json_schema(json.dumps(SLOW_SCHEMA))  # some tenths of a second
MANY_BYTES = 1 << 30


@contextmanager
def checks(seconds: float = 5.0, memory_bytes: int = MANY_BYTES, num_processes: int = 1) -> Iterator[GrammarChecks]:
    made = GrammarChecks(num_processes, seconds, memory_bytes)
    try:
        yield made
    finally:
        made.shutdown()


def children() -> list[psutil.Process]:
    module = "scheduler.constraints.grammar_worker"
    return [one for one in psutil.Process().children() if module in " ".join(one.cmdline())]


async def test_a_prompt_does_not_wait_for_grammars(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, begun = threading.Event(), threading.Semaphore(0)

    def check_late(*_: object) -> str:
        begun.release()
        return "" if goes_on.wait(20) else "late"

    monkeypatch.setattr(structured, "check_in_process", check_late)
    url, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 3000}], "max_tokens": 1}
    forms = [body | {"structured_outputs": {"regex": f"a{i}"}} for i in range(8)]
    held = [asyncio.create_task(live.http.post(url, json=form)) for form in forms]
    for _ in range(2):
        assert await asyncio.to_thread(begun.acquire, timeout=20)
    answer = await live.http.post(url, json=body)
    assert answer.status_code == 200
    assert not any(one.done() for one in held)
    goes_on.set()
    await asyncio.gather(*held)


def test_what_compiles_and_what_does_not_is_what_a_check_in_the_process_says() -> None:
    with checks() as made:
        assert made.check(GOOD, ()) == check(GOOD) == ""
        assert made.check(BAD, ()) == check(BAD) != ""
        assert made.check("start: \ud800", ()) == check("start: \ud800") != ""


def test_one_that_takes_too_long_is_refused_with_the_bound_and_the_next_one_is_checked() -> None:
    with checks(0.05) as made:
        began = time.monotonic()
        assert made.check(SLOW, ()) == "takes more than 0.05 s to compile, the most that a grammar may; make it simpler"
        assert time.monotonic() - began < 20
        assert made.check(GOOD, ()) == ""
        assert made.check(BAD, ()) == check(BAD)


def test_one_that_takes_too_much_memory_is_refused_with_the_bound() -> None:
    with checks(memory_bytes=8 << 20) as made:
        assert made.check(SLOW, ()).startswith("takes more than 8 MiB to compile")
        assert made.check(GOOD, ()) == ""


def test_a_process_that_says_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped: processor time does not pass, and the time of those who wait does."""
    monkeypatch.setattr(grammar_checks, "_START_SECONDS", 0.0)
    with checks(0.05) as made:
        slow_start = made._start()
        made._slots.get()
        made._slots.put(slow_start)
        os.kill(slow_start.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert "0.05 s" in made.check(GOOD, ())
        assert time.monotonic() - began < 20
        assert slow_start.poll() == -signal.SIGKILL
        monkeypatch.setattr(grammar_checks, "_START_SECONDS", 20.0)
        assert made.check(GOOD, ()) == ""  # a busy machine was no answer


def test_a_process_that_cannot_begin_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with checks() as made, monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        for grammar in (GOOD, GOOD[:-1] + " " * (1 << 20) + GOOD[-1]):  # one that a pipe has room for, and one not
            assert "or cannot be" in made.check(grammar, ())
        patch.undo()
        assert made.check(GOOD, ()) == ""


def test_an_answer_is_kept_and_processes_begin_with_the_first_question() -> None:
    with checks() as made:
        before = len(children())
        assert made.check(GOOD, ()) == ""
        (own,) = [one for one in children() if one.is_running()][before:]
        own.kill()
        own.wait(20)
        assert made.check(GOOD, ()) == ""
        assert made.check(BAD, ()) == check(BAD)  # by another process


def test_a_slow_one_holds_up_no_more_than_its_own_process() -> None:
    with checks(num_processes=2) as made, ThreadPoolExecutor(2) as threads:
        slow = threads.submit(made.check, SLOW, ())
        while made._slots.qsize() == 2:
            time.sleep(0.001)
        assert made.check(GOOD, ()) == ""
        assert slow.result() == check(SLOW)


def test_a_check_outlives_nobody_that_asked_by_more_than_the_bound() -> None:
    """A server that is killed leaves a process that is busy: the kernel ends it."""
    command = [sys.executable, "-m", "scheduler.constraints.grammar_worker", "0.05", str(MANY_BYTES)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    raw = json.dumps([SLOW, []]).encode()
    worker.stdin.write(HEAD.pack(len(raw)) + raw)
    worker.stdin.close()
    assert worker.wait(30) == -signal.SIGPROF


def test_half_a_frame_and_no_more_ends_a_worker() -> None:
    command = [sys.executable, "-m", "scheduler.constraints.grammar_worker", "5", str(MANY_BYTES)]
    for raw in (b"", b"\0\0", HEAD.pack(9) + b"abc"):
        done = subprocess.run(command, input=raw, capture_output=True, timeout=60)
        assert done.returncode == 0
        assert done.stdout == b""


def test_a_request_is_told_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with checks(0.05) as made:
        monkeypatch.setattr(structured, "check_in_process", made.check)
        with pytest.raises(ApiError) as caught:
            structured.schema_grammar("response_format.json_schema.schema", SLOW_SCHEMA)
    assert caught.value.status == 400
    assert "takes more than 0.05 s to compile" in caught.value.message
    assert len(json.dumps(SLOW_SCHEMA)) < MOST_BYTES


def test_grammars_that_take_long_together_are_each_within_the_bound() -> None:
    took = _seconds_of(SLOW)
    with checks(3 * took) as made:
        for number in range(6):
            schema = SLOW_SCHEMA | {"title": f"{number}"}
            assert made.check(LLMatcher.grammar_from_json_schema(json.dumps(schema)), ()) == ""


def _seconds_of(grammar: str) -> float:
    began = time.process_time()
    check(grammar)
    return time.process_time() - began
