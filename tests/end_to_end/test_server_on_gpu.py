"""`tandem serve` on a CUDA device with host memory: every profile answers, leavers and dead engines leave nothing.

The reference model in float32, so that what is read whole from host memory says what the device says.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.real_server import REPOSITORY, START_SECONDS, ServerProcess, running_server

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

CHANGES = {
    "gpu": {"device": "cuda", "kv_cache_gib": 0.5},
    "host": {
        "residency": "fixed",
        "memory_limit_gib": 1.0,
        "threads": 2,
        "resident_tokens": 256,
        "sampled": {"bits_per_table": 8, "num_tables": 75},
    },
    "scheduler": {"prefill": {"chunk_tokens": 64}},  # many units: a prompt of LONG_TOKENS takes seconds on any card
    "server": {"progress_seconds": 0.05},
}
PROFILES = ("exact", "sampled", "offloaded")
FILLER = "The old house stood on a hill above the town, and nobody had lived in it for years. "
LONG_TOKENS = 15_000
ASK_SECONDS = 120
RELEASE_SECONDS = 20
STATS_SECONDS = 1.0  # the engine reports its gauges four times a second
REQUESTS = ("tandem_requests_running", "tandem_requests_prefilling", "tandem_requests_waiting")
HELD = ("tandem_pages_used", "tandem_host_bytes_promised", "tandem_host_bytes_used", "tandem_host_contexts")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server"), CHANGES) as started:
        yield started


def question(number: int, num_fillers: int) -> list[dict[str, str]]:
    """A needle in the middle of a document of 40 tokens a filler: what is asked for is `number`."""
    needle = f"The special magic number for amber-falcon is {number}."
    document = f"{FILLER * num_fillers}{needle} {FILLER * num_fillers}"
    return [{"role": "user", "content": f"{document}\n\nWhat is the special magic number for amber-falcon?"}]


def ask(server: ServerProcess, messages: list[dict[str, str]], profile: str) -> dict:
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "attention_profile": profile}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=ASK_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, f"still not so after {seconds} s"
        time.sleep(0.05)


def settled(server: ServerProcess, name: str) -> float:
    """A metric, after the engine has reported what it did so far."""
    time.sleep(STATS_SECONDS)
    return server.metric(name)


def test_a_prefill_that_is_cancelled_leaves_nothing_on_the_device_or_the_host(server: ServerProcess) -> None:
    """What is held before it are idle contexts of other tests."""
    before = {name: settled(server, name) for name in HELD}
    body = {"prompt": [7 + i % 5000 for i in range(LONG_TOKENS)], "stream": True, "max_tokens": 4,
            "return_progress": True, "attention_profile": "offloaded"}  # fmt: skip
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=ASK_SECONDS) as answer:
        for line in answer.iter_lines():  # leaving it closes the stream, and so cancels
            promised = server.metric("tandem_host_bytes_promised") if "prompt_progress" in line else 0.0
            if promised > before["tandem_host_bytes_promised"]:
                break
        else:
            pytest.fail("the prefill ended before anything was promised host memory; raise LONG_TOKENS")
    wait_until(lambda: all(server.metric(name) <= before[name] for name in HELD), RELEASE_SECONDS)
    wait_until(lambda: not any(server.metric(name) for name in REQUESTS), RELEASE_SECONDS)


def test_what_is_read_whole_from_host_memory_is_what_the_device_says(server: ServerProcess) -> None:
    messages = question(4815162, 64)
    exact = said(ask(server, messages, "exact"))
    before = settled(server, "tandem_host_rows_read_total")
    assert "4815162" in exact
    assert said(ask(server, messages, "offloaded")) == exact
    assert settled(server, "tandem_host_rows_read_total") > before


def test_a_sampled_context_finds_its_needle_in_few_rows_and_the_next_turn_its_prefix(server: ServerProcess) -> None:
    covered = settled(server, "tandem_host_tokens_covered_total")
    read = server.metric("tandem_host_rows_read_total")
    messages = question(2718281, 64)
    first = ask(server, messages, "sampled")
    assert "2718281" in said(first)
    turn = [*messages, {"role": "assistant", "content": said(first)}, {"role": "user", "content": "And again?"}]
    usage = ask(server, turn, "sampled")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * first["usage"]["prompt_tokens"]
    covered = settled(server, "tandem_host_tokens_covered_total") - covered
    read = server.metric("tandem_host_rows_read_total") - read
    assert 0 < read < covered / 4, "all of it would be a row for each group of four heads"
    assert server.metric("tandem_host_tables_built_total") > 0
    assert server.metric("tandem_host_tables_failed_total") == 0


def test_requests_of_every_profile_at_once_say_what_each_was_asked(server: ServerProcess) -> None:
    """Nine of three profiles, of different lengths, in shared steps."""
    asked = [(1_234_567 + 777_777 * index, 20 + 6 * index, PROFILES[index % 3]) for index in range(9)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda it: said(ask(server, question(it[0], it[1]), it[2])), asked))
    assert [(item, text) for item, text in zip(asked, answers, strict=True) if str(item[0]) not in text] == []
    wait_until(lambda: not any(server.metric(name) for name in REQUESTS), RELEASE_SECONDS)


def test_a_killed_engine_is_replaced_and_its_device_memory_with_it(server: ServerProcess) -> None:
    first = server.engine
    body = {"prompt": "Once", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=ASK_SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(first.pid, signal.SIGKILL)
        last = [line for line in lines if line][-1]
    assert json.loads(last[6:])["error"]["code"] == "engine_dead"
    assert httpx.get(f"{server.url}/health").status_code == 503
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, START_SECONDS)
    assert server.engine.pid != first.pid
    for profile in PROFILES:
        assert "1618033" in said(ask(server, question(1618033, 64), profile)), profile


def test_a_server_ends_on_sigterm_and_its_engine_with_it(tmp_path: Path) -> None:
    with running_server(tmp_path, CHANGES) as server:
        engine = server.engine
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0
        wait_until(lambda: not psutil.pid_exists(engine.pid), RELEASE_SECONDS)


SHAPE = "llama-3.1-8b"
PROMPT_LENGTHS = (512, 16_384, 98_304)
NEAR = 0.03  # of what is compared: an 8B's prefill differs by 1 % between two runs of one server
LAUNCHED_BELOW = (
    4096  # tokens: a shorter prompt takes as long as its launches, 30 to 60 ms from one to the next; printed
)


@pytest.mark.long
@pytest.mark.timeout(560)
def test_the_benchmark_times_prompts_as_the_server_answers_them(tmp_path: Path) -> None:
    """`tandem bench engine --prompts` of an 8B, what the server's engine says of its prefills, and first tokens."""
    folder = REPOSITORY / "deploy" / "models" / "reference"
    changes = {
        "model": {"path": None, "random_weights": SHAPE, "tokenizer": str(folder), "name": "timed"},
        "gpu": {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 16.0, "graph_batch_sizes": [1]},
        "scheduler": {"max_context_tokens": max(PROMPT_LENGTHS) + 16, "prefix_cache": False},
    }
    with running_server(tmp_path, changes) as server:
        served = {length: time_prompts(server, length) for length in PROMPT_LENGTHS}
    told = tmp_path / "rows.json"
    lengths = ",".join(map(str, PROMPT_LENGTHS))
    start = "import sys; from bench.cli import app; app(sys.argv[1:])"  # also where the project is not installed
    command = [sys.executable, "-c", start, "engine", "--random-weights", SHAPE, "--batch", "1", "--steps", "16",
               "--rounds", "3", "--prompts", lengths, "--json", str(told)]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    benched = [row["ms"] / 1e3 for row in json.loads(told.read_text()) if row["name"] == "prefill"]
    lines = [
        f"{length:>7,} tokens: bench {bench_s:.4f} s, engine {engine_s:.4f} ({bench_s / engine_s:.3f}), first token "
        f"over HTTP {http_s:.4f} ({bench_s / http_s:.3f})"
        for (length, (engine_s, http_s)), bench_s in zip(served.items(), benched, strict=True)
    ]
    print("\n" + "\n".join(lines))
    for (length, (engine_s, http_s)), bench_s in zip(served.items(), benched, strict=True):
        if length >= LAUNCHED_BELOW:
            assert abs(bench_s / engine_s - 1) <= NEAR, lines
            assert abs(bench_s / http_s - 1) <= NEAR, lines


def time_prompts(server: ServerProcess, length: int) -> tuple[float, float]:
    """Return the medians of five prompts of random tokens, or of 25 short ones: what the engine says of the prefill,
    and the first token over HTTP, in seconds.
    """
    draw, engine, first_token = random.Random(length), [], []
    for _ in range(26 if length < LAUNCHED_BELOW else 6):
        before = server.metric("tandem_prefill_seconds_sum")
        body = {"prompt": [draw.randrange(3, 8000) for _ in range(length)], "max_tokens": 2, "temperature": 0,
                "ignore_eos": True, "stream": True}  # fmt: skip
        began = time.perf_counter()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=ASK_SECONDS) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line.startswith("data: {"))
            first_token.append(time.perf_counter() - began)
            assert list(lines)[-2] == "data: [DONE]"
        engine.append(server.metric("tandem_prefill_seconds_sum") - before)
    return statistics.median(engine[1:]), statistics.median(first_token[1:])
