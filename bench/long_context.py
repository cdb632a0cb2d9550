"""`tandem bench long`: contexts that outgrow the card, through the engine: prefill, decode by batch, the next turn.

Drives the engine of a deployment in this process with prompts of random tokens, one profile after the other; the first
profile is ours, the others are its peers at the same batch. Floor of a step: the weights over the device's measured
rate, and the bytes that the CPU reads over the host's measured streaming rate, one after the other; what overlaps can
beat it from a batch of two on. Random weights spread keys evenly: the fraction read is printed beside every time.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console

from bench.rates import device_name, measure_device_rates
from bench.rows import Row, announce, require, summarise
from cpu.rates import measure_host_rates
from gpu.load import load_architecture
from gpu.sampling_params import SamplingParams
from scheduler.config import EngineConfig
from scheduler.engine import Engine, load_engine
from scheduler.messages import EngineRequest, HostStats
from server.config import Deployment
from transfer.machine import GIB, count_physical_cores

_WARMUP_STEPS = 4
_ANSWER_TOKENS = 16  # of the first turn
_QUESTION_TOKENS = 256  # of the second turn


@dataclass(frozen=True, slots=True)
class LongContextBenchmark:
    """`context` tokens a prompt; `batches` ascending; `steps` measured at each; `turn` tokens of a first turn, or 0."""

    context: int
    batches: tuple[int, ...]
    steps: int
    profiles: tuple[str, ...]
    turn: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Decode at one batch: milliseconds a step, and by counters per step where they went and what the CPU read."""

    step_ms: list[float]
    rows_read: float
    rows_down: float  # of all heads and layers
    wait_ms: float  # for queries, on the host
    attend_ms: float


@dataclass(frozen=True, slots=True)
class Served:
    """One profile's numbers."""

    first_token_s: list[float]
    batches: dict[int, Batch]
    device_gib: float
    host_gib: float
    process_gib: float
    turns_s: tuple[float, float] | None  # first token of a second turn: with its prefix down, and computed whole


class Client:
    """Requests to one engine, stepped by hand."""

    def __init__(self, engine: Engine, vocab_size: int, max_context_tokens: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self._number = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens, other ones at each call."""
        self._number += 1
        tokens: list[int] = np.random.default_rng(self._number).integers(0, self.vocab_size, num_tokens).tolist()
        return tokens

    def submit(self, prompt: list[int], max_tokens: int, profile: str) -> str:
        request_id = f"long-{time.monotonic_ns()}"
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            stop_token_ids=[],
            attention_profile=profile,
            arrival_s=time.monotonic(),
        )
        self.engine.submit([request])
        return request_id

    def until_first_token(self, request_id: str) -> float:
        """Seconds until a request's first token; others go on."""
        began = time.perf_counter()
        while True:
            for delta in self.engine.step():
                require(delta.error is None, f"request failed: {delta.error}")
                if delta.request_id == request_id and delta.token_ids:
                    return time.perf_counter() - began

    def finish(self, request_id: str) -> list[int]:
        """All tokens of a request that has not begun."""
        tokens: list[int] = []
        while True:
            for delta in self.engine.step():
                if delta.request_id == request_id:
                    tokens += delta.token_ids
                    if delta.finish_reason is not None:
                        require(delta.error is None, f"request failed: {delta.error}")
                        return tokens

    def steps(self, batch: int, count: int) -> Batch:
        """Steps in which every one of `batch` requests draws a token."""
        for _ in range(_WARMUP_STEPS):
            self.engine.step()
        before, times = self.host_stats(), []
        began = time.perf_counter()
        while len(times) < count:
            num_tokens = sum(len(delta.token_ids) for delta in self.engine.step())
            now = time.perf_counter()
            require(num_tokens == batch, f"a step drew {num_tokens} tokens; wanted {batch}")
            times.append(1e3 * (now - began))
            began = now
        return _difference(before, self.host_stats(), times)

    def host_stats(self) -> HostStats:
        stats = self.engine.stats().host
        assert stats is not None, "the deployment has a host section"
        return stats

    def drain(self, request_ids: Sequence[str]) -> None:
        self.engine.cancel(list(request_ids))
        while self.engine.has_work:
            self.engine.step()
        self.engine.step()


def _difference(before: HostStats, after: HostStats, times: list[float]) -> Batch:
    count = len(times)
    return Batch(
        times,
        (after.rows_read - before.rows_read) / count,
        (after.tokens_covered - before.tokens_covered) / count,
        1e3 * (after.wait_seconds - before.wait_seconds) / count,
        1e3 * (after.attend_seconds - before.attend_seconds) / count,
    )


def run_long_context_benchmark(benchmark: LongContextBenchmark, deployment: Deployment, console: Console) -> list[Row]:
    """Rows for prefill, each batch and the second turn of the first profile, the others as peers. Raises GateError."""
    config = EngineConfig(
        model=deployment.model, gpu=deployment.gpu, host=deployment.host, scheduler=deployment.scheduler
    )
    rates = measure_host_rates(count_physical_cores())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates |= measure_device_rates(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine, ready = load_engine(config, lambda *_: None)
    client = Client(engine, ready.vocab_size, ready.max_context_tokens)
    served = {}
    for profile in benchmark.profiles:
        console.print(f"profile {profile}", highlight=False)
        served[profile] = _serve(client, benchmark, profile, console)
    engine.shutdown()
    return _rows(benchmark, deployment, served, rates, device, console)


def _serve(client: Client, benchmark: LongContextBenchmark, profile: str, console: Console) -> Served:
    first_token_s, batches, running = [], {}, []
    peak_host = 0.0
    for batch in benchmark.batches:
        while len(running) < batch:
            max_tokens = min(4096, client.max_context_tokens - benchmark.context)
            running.append(client.submit(client.prompt(benchmark.context), max_tokens, profile))
            first_token_s.append(client.until_first_token(running[-1]))
            console.print(f"  prefill {len(running)}: {first_token_s[-1]:.2f} s", highlight=False)
        batches[batch] = client.steps(batch, benchmark.steps)
        median = float(np.median(batches[batch].step_ms))
        peak_host = max(peak_host, client.host_stats().bytes_used / GIB)
        console.print(f"  batch {batch}: {median:.2f} ms a step", highlight=False)
    client.drain(running)
    turns = _take_turns(client, benchmark, profile) if benchmark.turn else None
    device_gib = torch.cuda.max_memory_reserved() / GIB if torch.cuda.is_available() else 0.0
    process_gib = psutil.Process().memory_info().rss / GIB
    return Served(first_token_s, batches, device_gib, peak_host, process_gib, turns)


def _take_turns(client: Client, benchmark: LongContextBenchmark, profile: str) -> tuple[float, float]:
    """First token of a second turn: over the first one's deposited prefix, and of as long a prompt never seen."""
    prompt = client.prompt(benchmark.turn)
    answer = client.finish(client.submit(prompt, _ANSWER_TOKENS, profile))
    times = []
    for begun in (prompt + answer, client.prompt(len(prompt) + len(answer))):
        request_id = client.submit(begun + client.prompt(_QUESTION_TOKENS), _ANSWER_TOKENS, profile)
        times.append(client.until_first_token(request_id))
        client.drain([request_id])
    return times[0], times[1]


def _rows(
    benchmark: LongContextBenchmark, deployment: Deployment, served: dict[str, Served], rates: dict[str, float],
    device: torch.device, console: Console,
) -> list[Row]:  # fmt: skip
    profile, *others = benchmark.profiles
    ours, peer = served[profile], others[0] if others else None
    shape = deployment.model.random_weights or (deployment.model.path.name if deployment.model.path else "")
    architecture = load_architecture(deployment.model)
    assert deployment.host is not None
    row_bytes = 2 * architecture.dim * (1 if deployment.host.rows == "int8" else 2)  # a key and a value
    weight_bytes = architecture.num_weights_read_per_token * (2 if device.type == "cuda" else 4)
    stream = rates["device_stream_gb_s"] if device.type == "cuda" else rates["host_stream_gb_s"]
    common: dict[str, Any] = {
        "device": device_name(device),
        "rates": rates,
        "config": {"benchmark": asdict(benchmark),
                   "engine": deployment.model_dump(mode="json", exclude={"server"})},
        "peer": peer,
    }  # fmt: skip
    theirs = served[peer] if peer else None
    rows = []
    for batch, measured in ours.batches.items():
        host_ms = measured.rows_read * row_bytes / rates["host_stream_gb_s"] / 1e6
        floor_ms = weight_bytes / stream / 1e6 + host_ms
        floor = (
            f"weights over {stream:.0f} GB/s, {measured.rows_read:,.0f} rows over {rates['host_stream_gb_s']:.0f} GB/s"
        )
        announce(console, f"{profile}, batch {batch}", floor, floor_ms)
        timing = summarise(measured.step_ms)
        rows.append(
            Row(
                name=f"decode step, {profile}",
                shape=f"{shape}, batch {batch}, context {benchmark.context:,}",
                **asdict(timing),
                floor=floor,
                floor_ms=floor_ms,
                peer_ms=None if theirs is None else summarise(theirs.batches[batch].step_ms).ms,
                extras=_extras(ours, measured, batch, timing.ms),
                **common,
            )
        )
    rows.append(_first_token_row("prefill", shape, benchmark.context, ours.first_token_s[0], None, common))
    if ours.turns_s is not None:
        name = "second turn, first token (peer: the whole prompt computed)"
        row = _first_token_row(name, shape, benchmark.turn, ours.turns_s[0], ours.turns_s[1], common)
        rows.append(row)
    return rows


def _extras(ours: Served, measured: Batch, batch: int, step_ms: float) -> dict[str, Any]:
    return {
        "tokens_per_s": 1e3 * batch / step_ms,
        "fraction_read": measured.rows_read / max(measured.rows_down, 1.0),
        "host_wait_ms": measured.wait_ms,
        "host_attend_ms": measured.attend_ms,
        "device_gib": ours.device_gib,
        "host_gib": ours.host_gib,
        "process_gib": ours.process_gib,
    }


def _first_token_row(
    name: str, shape: str, context: int, seconds: float, peer_s: float | None, common: dict[str, Any]
) -> Row:
    ms = 1e3 * seconds
    return Row(
        name=name, shape=f"{shape}, {context:,} tokens", ms=ms, p10=ms, p90=ms, floor="none given", floor_ms=None,
        peer_ms=None if peer_s is None else 1e3 * peer_s, extras={}, **common,
    )  # fmt: skip
