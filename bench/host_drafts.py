"""Run `tandem bench drafts --over-host`: contexts in host memory, `verified` against `offloaded`.

V(n) is the time that the CPU attends in a step with n rows of one context, in all offloaded layers. It is measured
first for the kernel alone, with one layer's rows again and again, and then in steps of the engine, whose drafts are
always right. Floors are the bytes over the host's rate of reading in order, and the arithmetic over the rate of float32
products of square matrices.

Then come steps that draft by `indexed` and verify; the extra time is the drafting. Then come streams. Weights are
random, so the text of `offloaded` is recorded, and every stream draws it (`bench.replay`). `verified` drafts at its
full cost, and its drafted tokens are replaced by the record's, made wrong at a real model's rate or a stated one.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.as_served import interpreter_as_served
from bench.benchmark_rows import Row, Stages, announce, require, summarise
from bench.draft_speed import add_partings
from bench.engine_patches import note_results
from bench.host_rate import attend_alike_rows
from bench.long_client import GREEDY, Client
from bench.rates import device_name, measure_device_rates, measure_host_matmul
from bench.replay import RIGHT as ALL_RIGHT
from bench.replay import Acceptance, Partings, Recorded, Replayed
from cpu.memory_rates import measure_host_rates
from gpu.config import Composition, DraftConfig, GpuConfig, MethodChoice, ModelConfig
from gpu.load import DTYPES
from gpu.model.architecture import load_architecture
from gpu.profiles import declared_profiles
from gpu.step import StepResult
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.planning.engine_memory import find_tier_shape, plan_engine
from transfer.host_config import HostConfig
from transfer.machine import probe_machine
from transfer.tier_shape import TierShape

WIDTHS = (1, 2, 4, 8, 16)
DRAFTED = (2, 4, 8)  # rows of steps with drafts by the device, whether they pay off or not
VERIFIED = "verified"
RIGHT = "right"  # a profile whose drafts are always right and cost nothing
_KERNEL_REPEATS = 5
_WARM_UP = 3  # first tokens of a stream, which are not timed
_MOST_RUNNING = 16
_GRAPHS = (1, 4, 8, 16)  # rows of captured steps and of prefill units: small, since the weights leave little memory
_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class HostDraftsBenchmark:
    """What to measure. tokens: of each stream's answer, after `prompt_tokens`. memory_limit_gib: of the card; None: all
    of it. resident_tokens: longer contexts are offloaded and evicted. accepted: how often a drafted token is right.
    """

    random_weights: str
    weights: str | None
    device: str
    dtype: str
    host_rows: str
    memory_limit_gib: float | None
    resident_tokens: int
    prompt_tokens: int
    tokens: int
    rounds: int
    accepted: tuple[Acceptance, ...]
    threads: int


@dataclass(slots=True)
class _Stream:
    """One stream. seconds: of its tokens after the first. host_ms, step_ms: of each step, attention on the host and in
    all. partings: how its draws differed from the record.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    text: list[int] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    partings: Partings = field(default_factory=Partings)

    @property
    def token_ms(self) -> float:
        return 1e3 * self.seconds / self.num_tokens


def run_host_drafts_benchmark(benchmark: HostDraftsBenchmark, console: Console) -> list[Row]:
    """Return rows of V(n) by the kernel, then in steps, then of streams. Raises GateError."""
    torch.set_num_threads(benchmark.threads)
    stages = Stages(console)
    stages.begin("rates of the machine")
    config = _config_of(benchmark)
    architecture = load_architecture(config.model)
    plan = plan_engine(config, architecture, probe_machine())
    device, shape = torch.device(plan.device), find_tier_shape(config, architecture, plan)
    rates = measure_host_rates(benchmark.threads) | {"host_matmul_tflop_s": measure_host_matmul([torch.float32])}
    if device.type == "cuda":
        rates |= measure_device_rates(device)
    common: dict[str, Any] = {"device": device_name(device), "rates": rates,
                              "config": asdict(benchmark) | {"torch": torch.__version__}}  # fmt: skip
    what = f"{architecture.name} {benchmark.weights or plan.dtype}, {benchmark.host_rows} rows, " \
           f"{benchmark.prompt_tokens:,} tokens"  # fmt: skip
    floors = _Floors(shape, benchmark.prompt_tokens, rates)
    rows = _time_kernel(benchmark, shape, DTYPES[plan.dtype], floors, what, common, console)
    engine, ready = load_engine(config, plan, lambda stage, fraction: stages.begin(f"loading: {stage}"))
    try:
        with interpreter_as_served():
            bench = _Bench(benchmark, Client(engine, ready.vocab_size, ready.profiles), plan.kv == "float32")
            stages.begin("recording the text of `offloaded`")  # the first stream: the others find its context
            bench.record()
            verify_ms: dict[int, float] = {}
            for width in (one for one in WIDTHS if one <= engine.scheduler.drafts.most_rows):
                floor, floor_ms = floors.of(width)
                announce(console, f"host attention in a step of {width} rows, {what}", floor, floor_ms)
                with bench.of_width(width):
                    stream = bench.stream(RIGHT)
                verify_ms[width] = summarise(stream.step_ms).ms
                extras = {"rows": width, "step_ms": verify_ms[width], "token_ms": stream.token_ms,
                          "partings": asdict(stream.partings)}  # fmt: skip
                rows.append(Row(name="host attention, step", shape=f"{what}, {width} rows", floor=floor,
                                floor_ms=floor_ms, peer=None, peer_ms=None, extras=extras,
                                **asdict(summarise(stream.host_ms)), **common))  # fmt: skip
                stages.tell(rows[-1], str(stream.partings))
            for width in (one for one in DRAFTED if one in verify_ms):
                rows.append(bench.of_draft(width, verify_ms[width], what, common))
                stages.tell(rows[-1])
            for accepted in benchmark.accepted:
                row, partings = bench.compare(accepted, what, common, console)
                rows.append(row)
                stages.tell(row, str(partings))
    finally:
        engine.shutdown()
    return rows


class _Floors:
    """Floors of attention to a context in all offloaded layers, by the rows of a step."""

    def __init__(self, shape: TierShape, num_tokens: int, rates: dict[str, float]) -> None:
        self._rates = rates
        rows = len(shape.layers) * num_tokens
        self._num_bytes = 2 * rows * shape.num_kv_heads * shape.dim * (1 if shape.rows == "int8" else 2)
        self._flops = 4 * rows * shape.num_heads * shape.dim

    def of(self, num_queries: int) -> tuple[str, float]:
        """Return the floor in words and in milliseconds: the larger of both times."""
        gb_s, tflop_s = self._rates["host_stream_gb_s"], self._rates["host_matmul_tflop_s"]
        bytes_ms, flops_ms = self._num_bytes / gb_s / 1e6, num_queries * self._flops / tflop_s / 1e9
        text = (
            f"{self._num_bytes / 1e9:.3f} GB over {gb_s:.0f} GB/s: {bytes_ms:.1f} ms; "
            f"{num_queries * self._flops / 1e9:.0f} GFLOP over {1e3 * tflop_s:.0f} GFLOP/s: {flops_ms:.1f} ms"
        )
        return text, max(bytes_ms, flops_ms)


def _time_kernel(
    benchmark: HostDraftsBenchmark, shape: TierShape, dtype: torch.dtype, floors: _Floors, what: str,
    common: dict[str, Any], console: Console,
) -> list[Row]:  # fmt: skip
    """Return a row for each width: the time of the kernel for one layer, times the number of layers."""
    rows: list[Row] = []
    for width in WIDTHS:
        floor, floor_ms = floors.of(width)
        announce(console, f"host attention, {width} queries, {what}", floor, floor_ms)
        attend, _ = attend_alike_rows(shape, dtype, benchmark.threads, benchmark.prompt_tokens, width)
        attend()
        took = []
        for _ in range(_KERNEL_REPEATS):
            began = time.perf_counter()
            attend()
            took.append(1e3 * len(shape.layers) * (time.perf_counter() - began))
        alone = rows[0].ms if rows else summarise(took).ms
        rows.append(Row(name="host attention, kernel", shape=f"{what}, {width} queries", floor=floor, floor_ms=floor_ms,
                        peer="one query at a time", peer_ms=width * alone,
                        extras={"queries": width, "times_one": summarise(took).ms / alone},
                        **asdict(summarise(took)), **common))  # fmt: skip
    return rows


class _Bench:
    """Runs streams of one engine, all with the same prompt, and notes the host's time in their steps. is_exact: the
    engine computes in float32.
    """

    def __init__(self, benchmark: HostDraftsBenchmark, client: Client, is_exact: bool) -> None:
        self.benchmark = benchmark
        self.client = client
        self._is_exact = is_exact
        self._draw = Random(0)
        rng = np.random.default_rng(1)
        self._prompt = rng.integers(0, client.vocab_size, benchmark.prompt_tokens, dtype=np.int32)
        self._recorded = Recorded(client.engine._runner)
        self._stream = _Stream()
        self._attended_s = 0.0
        scheduler = client.engine.scheduler
        scheduler.drafts.make_source = lambda config, sequence: Replayed(
            None, sequence.num_prompt_tokens, self._record, ALL_RIGHT, client.vocab_size, self._draw
        )
        note_results(scheduler, self._note)

    def _note(self, result: StepResult) -> None:
        if result.decode_seconds and not result.unit_seconds:
            self._stream.host_ms.append(1e3 * (result.host_seconds or self._attended_since()))
            self._stream.step_ms.append(1e3 * result.decode_seconds)

    def _attended_since(self) -> float:
        """Return the seconds of attention since the last call, for steps that are computed before they return."""
        before, self._attended_s = self._attended_s, self.client.host_stats().attend_seconds
        return self._attended_s - before

    @contextmanager
    def of_width(self, width: int) -> Iterator[None]:
        """Make all drafts `width` rows long, whether that pays or not, until the block ends."""
        drafts = self.client.engine.scheduler.drafts
        kept, drafts.choose_lengths = (
            drafts.choose_lengths,
            lambda looks, num_fed, times: [min(width - 1, len(token_ids)) for token_ids, _ in looks],
        )
        try:
            yield
        finally:
            drafts.choose_lengths = kept

    @contextmanager
    def _right_at(self, accepted: Acceptance) -> Iterator[None]:
        """Make the device's drafted tokens right at this rate, until the block ends."""
        self._recorded.replace_guesses(accepted, self._draw)
        try:
            yield
        finally:
            self._recorded.replace_guesses(None, self._draw)

    @property
    def _record(self) -> list[int]:
        return self._recorded.records[self._prompt.tobytes()]

    def record(self) -> None:
        """Record the whole text that `offloaded` writes."""
        most = self.benchmark.tokens + 2 * _MOST_RUNNING
        request_id = self.client.submit(self._prompt.tolist(), most, "offloaded", GREEDY)
        self._recorded.records[self._prompt.tobytes()] = self.client.finish(request_id)

    def stream(self, profile: str) -> _Stream:
        """Run one stream of `tokens` tokens after the common prompt. Raises GateError if its text is not the record."""
        benchmark = self.benchmark
        self._recorded.take_partings()
        request_id = self.client.submit(self._prompt.tolist(), len(self._record), profile, GREEDY)
        self._stream = stream = _Stream()
        while len(stream.text) < _WARM_UP:
            self._advance(stream)
        stream.host_ms.clear()
        stream.step_ms.clear()
        began, first = time.perf_counter(), len(stream.text)
        while len(stream.text) < benchmark.tokens:
            self._advance(stream)
        stream.seconds, stream.num_tokens = time.perf_counter() - began, len(stream.text) - first
        kept = replace_lists(stream)
        self.client.drain([request_id])
        kept.partings = self._recorded.take_partings()
        kept.partings.check(self._is_exact, profile)
        require(kept.text == self._record[: len(kept.text)], f"{profile}: the text is the record's")
        return kept

    def _advance(self, stream: _Stream) -> None:
        for delta in self.client.advance():
            stream.text += delta.token_ids

    def of_draft(self, width: int, verify_ms: float, what: str, common: dict[str, Any]) -> Row:
        """Return a row of steps that draft `width - 1` tokens and verify them, beside steps that only verify."""
        with self.of_width(width), self._right_at(ALL_RIGHT):
            stream = self.stream(VERIFIED)
        timing = summarise(stream.step_ms)
        extras = {
            "rows": width, "draft_ms": (timing.ms - verify_ms) / (width - 1), "token_ms": stream.token_ms,
            "host_ms": summarise(stream.host_ms).ms,
        }  # fmt: skip
        return Row(name="drafting and verifying", shape=f"{what}, {width} rows", floor="none: a share of verifying",
                   floor_ms=None, peer="verifying alone", peer_ms=verify_ms, extras=extras, **asdict(timing),
                   **common)  # fmt: skip

    def compare(
        self, accepted: Acceptance, what: str, common: dict[str, Any], console: Console
    ) -> tuple[Row, Partings]:
        """Return a row of milliseconds a token of `verified`, beside those of `offloaded`, and the differences between
        its draws and the record.
        """
        floor = "none: a share of what `offloaded` takes"
        console.print(f"verified, drafts right: {accepted.name}, {what} ({floor})", highlight=False)
        took: dict[str, list[_Stream]] = {"offloaded": [], VERIFIED: []}
        stats = self.client.engine.stats
        with self._right_at(accepted):
            self.stream(VERIFIED)  # the scheduler learns times and chances
            before = stats().drafts
            for _ in range(self.benchmark.rounds):
                for profile, streams in took.items():
                    streams.append(self.stream(profile))
            after = stats().drafts
        mine, theirs = ([one.token_ms for one in took[name]] for name in (VERIFIED, "offloaded"))
        steps, proposed = after.steps - before.steps, after.proposed - before.proposed
        drawn = after.accepted - before.accepted
        host_ms, step_ms = (
            summarise([ms for one in took[VERIFIED] for ms in getattr(one, name)]).ms for name in ("host_ms", "step_ms")
        )
        extras = {
            "steps": steps, "proposed": proposed, "accepted": drawn, "tokens_a_step": 1 + drawn / max(steps, 1),
            "drafted_a_step": proposed / max(steps, 1), "host_ms": host_ms, "step_ms": step_ms,
            "offloaded_host_ms": summarise([ms for one in took["offloaded"] for ms in one.host_ms]).ms,
            "saved_s": after.saved_seconds - before.saved_seconds,
            "partings": asdict(partings := add_partings([one.partings for one in took[VERIFIED]])),
        }  # fmt: skip
        row = Row(name="token, verified", shape=f"{what}, drafts right: {accepted.name}", floor=floor, floor_ms=None,
                  peer="offloaded", peer_ms=summarise(theirs).ms, extras=extras, **asdict(summarise(mine)),
                  **common)  # fmt: skip
        return row, partings


def replace_lists(stream: _Stream) -> _Stream:
    """Return a copy of a stream, with lists of its own."""
    return _Stream(stream.seconds, stream.num_tokens, [*stream.text], [*stream.host_ms], [*stream.step_ms])


def _config_of(benchmark: HostDraftsBenchmark) -> EngineConfig:
    """Return the settings of an engine that has the compared profiles."""
    model = ModelConfig(random_weights=benchmark.random_weights, weights=benchmark.weights)  # type: ignore[arg-type]
    host = HostConfig(
        threads=benchmark.threads, rows=benchmark.host_rows,  # type: ignore[arg-type]
        resident_tokens=benchmark.resident_tokens, residency="fixed",
    )  # fmt: skip
    return EngineConfig(
        model=model,
        gpu=GpuConfig(
            device=benchmark.device, dtype=benchmark.dtype, threads=benchmark.threads,  # type: ignore[arg-type]
            memory_limit_gib=benchmark.memory_limit_gib, graph_batch_sizes=_GRAPHS,
        ),
        host=host,
        profiles={
            VERIFIED: declared_profiles()[VERIFIED],
            RIGHT: Composition(host=MethodChoice(method="offloaded"), draft=DraftConfig(most_tokens=WIDTHS[-1] - 1)),
        },
        scheduler=SchedulerConfig(
            max_running=_MOST_RUNNING,
            max_context_tokens=benchmark.prompt_tokens + benchmark.tokens + 2 * _MOST_RUNNING,
            prefill=PrefillConfig(chunk_tokens=_CHUNK_TOKENS),
        ),
    )  # fmt: skip
