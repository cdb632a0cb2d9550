"""Time the cost of HTTP: concurrent greedy streams through the server, beside the same requests to the engine alone.

It starts `tandem serve` for a deployment as a subprocess, streams from it and ends it. Then it drives the engine's own
loop in this process, so the two never share the machine. Every round has prompts of its own, so that no cached prefix
is used.
"""

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.benchmark_rows import Row, announce, require, summarise
from bench.load.client import Client
from bench.load.records import RequestRecord
from bench.rates import device_name
from bench.server_process import serving
from gpu.sampling_params import SamplingParams
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.messages import EngineRequest, Ready, pack_tokens
from server.planning.resolved_plan import ResolvedPlan


@dataclass(frozen=True, slots=True)
class HttpBenchmark:
    config: Path
    streams: int
    prompt_tokens: int
    tokens: int  # of each stream
    rounds: int
    vocab_size: int
    load_timeout_s: float


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of one step of the engine, for all streams together."""

    text: str
    ms: float
    rates: dict[str, float]


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of a round: until the last token, and until every stream had its first."""

    seconds: float
    all_started_s: float


def run_http_benchmark(benchmark: HttpBenchmark, plan: ResolvedPlan, floor: Floor, console: Console) -> list[Row]:
    """Measure the milliseconds of a step (a token of every stream) over HTTP, with the engine alone as the peer.

    Returns one row. Raises GateError if the server does not start or a stream has too few tokens.
    """
    announce(console, f"{benchmark.streams} streams over HTTP, per token of each", floor.text, floor.ms)
    program = [sys.executable, "-m", "server.commands", "serve", str(benchmark.config)]
    with serving(lambda port: [*program, "--host", "127.0.0.1", "--port", str(port)], benchmark.load_timeout_s) as url:
        over_http = [asyncio.run(_stream_all(url, benchmark, number)) for number in range(benchmark.rounds + 1)][1:]
    engine, ready = load_engine(plan.deployment, plan.memory, lambda *_: None)
    alone = [_run_engine(engine, ready, benchmark, number) for number in range(benchmark.rounds + 1)][1:]
    ours, theirs = ([1e3 * took.seconds / benchmark.tokens for took in runs] for runs in (over_http, alone))
    timing, peer = summarise(ours), summarise(theirs)
    row = Row(
        name="step over HTTP",
        shape=f"{benchmark.streams} streams of {benchmark.prompt_tokens} + {benchmark.tokens} tokens, first to last",
        device=device_name(torch.device(ready.device)),
        ms=timing.ms,
        p10=timing.p10,
        p90=timing.p90,
        floor=floor.text,
        floor_ms=floor.ms,
        peer="the engine alone",
        peer_ms=peer.ms,
        rates=floor.rates,
        extras={
            "tokens_per_s": 1e3 * benchmark.streams / timing.ms,
            "peer_tokens_per_s": 1e3 * benchmark.streams / peer.ms,
            "share_of_engine": peer.ms / timing.ms,
            "all_started_ms": summarise([1e3 * took.all_started_s for took in over_http]).ms,
            "peer_all_started_ms": summarise([1e3 * took.all_started_s for took in alone]).ms,
        },
        config={"benchmark": {"config": str(benchmark.config), "streams": benchmark.streams},
                "engine": plan.deployment.model_dump(mode="json", exclude={"server"})},
    )  # fmt: skip
    console.print(f"over HTTP: {100 * peer.ms / timing.ms:.1f} % of the engine alone", highlight=False)
    return [row]


def draw_round(benchmark: HttpBenchmark, number: int) -> list[list[int]]:
    """Return prompts of one round, different from every other round's."""
    shape = (benchmark.streams, benchmark.prompt_tokens)
    prompts: list[list[int]] = np.random.default_rng(number).integers(0, benchmark.vocab_size, shape).tolist()
    return prompts


def _run_engine(engine: Engine, ready: Ready, benchmark: HttpBenchmark, number: int) -> Took:
    """Return the seconds from submission of the streams to the last token."""
    requests = [
        EngineRequest(
            request_id=f"{number}-{index}",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=benchmark.tokens,
            stop_token_ids=(),
            attention_profile=ready.default_profile,
            arrival_s=time.monotonic(),
        )
        for index, prompt in enumerate(draw_round(benchmark, number))
    ]
    began, received, started_s = time.perf_counter(), Counter[str](), 0.0
    engine.submit(requests)
    while engine.has_work:
        for delta in engine.step():
            received[delta.request_id] += len(delta.token_ids)
        if not started_s and len(received) == benchmark.streams:
            started_s = time.perf_counter() - began
    seconds = time.perf_counter() - began
    require(received.total() == benchmark.streams * benchmark.tokens, f"the engine made {received.total()} tokens")
    return Took(seconds, started_s)


async def _stream_all(url: str, benchmark: HttpBenchmark, number: int) -> Took:
    """Return the seconds from sending the requests to the last token."""
    client = Client(url, None, timeout_s=benchmark.load_timeout_s, retries=0)
    try:
        model = await client.find_model()
        records = [RequestRecord(0, 0, 0.0, benchmark.prompt_tokens) for _ in range(benchmark.streams)]
        bodies = [_body(model, prompt, benchmark.tokens) for prompt in draw_round(benchmark, number)]
        began = client.now()
        await asyncio.gather(
            *(client.send("/v1/completions", body, record) for body, record in zip(bodies, records, strict=True))
        )
        seconds = client.now() - began
    finally:
        await client.session.close()
    for record in records:
        require(record.outcome == "completed", f"a stream {record.outcome}: {record.reason}")
        require(record.output_tokens == benchmark.tokens, f"a stream of {record.output_tokens} tokens")
    return Took(seconds, max(record.ttft_s for record in records))


def _body(model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
