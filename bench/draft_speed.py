"""Run `tandem bench drafts`: steps of 1, 2, 4 and 8 rows a stream, and streams with and without drafts.

Weights are random, so acceptance is replayed (`bench.replay`). Each stream's text is recorded without drafts. Then the
n-grams, or the head that comes with a checkpoint (mtp), run at their full cost, and their tokens are replaced by the
record's, made wrong at a real model's rate or a stated one. Streams of free text use what the source itself drafts.
Streams with and without drafts take turns. Each draw of both is compared with the record.

Floor of a step: the weights that its rows read, over the measured rate of reading them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.as_served import interpreter_as_served
from bench.benchmark_rows import Row, Stages, announce, require, summarise
from bench.engine_patches import note_results, switch_drafts
from bench.engine_steps import measure_floor_rates
from bench.long_client import GREEDY, Client
from bench.rates import device_name
from bench.replay import RIGHT, Acceptance, Partings, Recorded, Replayed
from gpu.config import Composition, DraftConfig, GpuConfig, ModelConfig
from gpu.load import DTYPES
from gpu.model.architecture import load_architecture
from gpu.model.matrix_formats import step_weight_bytes
from gpu.operations.recurrent.state_arrays import MOST_STEP_ROWS
from gpu.step import StepResult
from scheduler.drafts.drafter import make_source
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.planning.engine_memory import plan_engine
from transfer.machine import GIB, probe_machine

WIDTHS = (1, 2, 4, 8)
PROFILE = "drafting"
_WARM_UP = 8  # first tokens of each stream, which are not timed
_SPARE = 64  # tokens that a stream may be ahead of the slowest one
_KV_ROOM = 1.25  # rows of the pool, as a multiple of all streams'


@dataclass(frozen=True, slots=True)
class DraftsBenchmark:
    """What to measure. tokens: of each stream's answer, after `prompt_tokens`. accepted: how often a proposed token is
    right. mtp: the model's own head drafts.
    """

    random_weights: str
    weights: str | None
    device: str
    dtype: str
    batches: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    rounds: int
    accepted: tuple[Acceptance, ...]
    threads: int
    mtp: bool = False


@dataclass(slots=True)
class _Streams:
    """The times of streams of one length. seconds: of all their tokens but the first ones. device_ms: of steps.
    partings: how their draws differed from the record.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    device_ms: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    partings: Partings = field(default_factory=Partings)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_drafts_benchmark(benchmark: DraftsBenchmark, console: Console) -> list[Row]:
    """Return a row for each batch and width, and for each batch and acceptance. Each is printed as it is measured.

    Raises GateError.
    """
    torch.set_num_threads(benchmark.threads)
    stages = Stages(console)
    config = _config_of(benchmark)
    architecture = load_architecture(config.model)
    plan = plan_engine(config, architecture, probe_machine())
    device, dtype = torch.device(plan.device), DTYPES[plan.dtype]
    engine, ready = load_engine(config, plan, lambda stage, fraction: stages.begin(f"loading: {stage}"))
    is_packed, rows = engine._runner.weights.is_packed, list[Row]()
    stages.begin("rates of the machine")
    rates, rate = measure_floor_rates(
        step_weight_bytes(architecture, dtype.itemsize, is_packed, 1), benchmark.threads, device
    )
    common: dict[str, Any] = {"device": device_name(device), "rates": rates,
                              "config": asdict(benchmark) | {"torch": torch.__version__}}  # fmt: skip
    try:
        with interpreter_as_served():
            bench = _Bench(benchmark, Client(engine, ready.vocab_size, ready.profiles), plan.kv == "float32")
            for batch in benchmark.batches:
                what = f"{architecture.name} {benchmark.weights or plan.dtype}, batch {batch}, " \
                       f"{benchmark.prompt_tokens:,} tokens"  # fmt: skip
                stages.begin(f"recording texts of batch {batch}")
                bench.record(batch)
                most = MOST_STEP_ROWS if architecture.recurrent is not None else max(WIDTHS)
                widths = [one for one in WIDTHS if one <= most and batch * one <= engine.scheduler.drafts.most_rows]
                for width in widths:
                    num_bytes = step_weight_bytes(architecture, dtype.itemsize, is_packed, batch * width)
                    floor, floor_ms = f"{num_bytes / 1e9:.3f} GB over {rate:.0f} GB/s", num_bytes / rate / 1e6
                    announce(console, f"step, {what}, {width} rows a stream", floor, floor_ms)
                    streams = bench.of_width(batch, width)
                    extras = {"tokens_per_s": streams.tokens_per_s, "rows": batch * width,
                              "wall_ms": 1e3 * batch * width / streams.tokens_per_s,
                              "partings": asdict(streams.partings)}  # fmt: skip
                    rows.append(Row(name="verify step", shape=f"{what}, {width} rows each", floor=floor,
                                    floor_ms=floor_ms, peer=None, peer_ms=None, extras=extras,
                                    **asdict(summarise(streams.device_ms)), **common))  # fmt: skip
                    stages.tell(rows[-1], str(streams.partings))
                for accepted in (*benchmark.accepted, None):
                    source = "the head" if benchmark.mtp else "n-grams"
                    name = f"free text, {source}" if accepted is None else f"drafts right: {accepted.name}"
                    row, partings = _compare(bench, batch, accepted, f"{what}, {name}", common)
                    rows.append(row)
                    stages.tell(row, str(partings))
    finally:
        engine.shutdown()
    return rows


def _compare(
    bench: "_Bench", batch: int, accepted: Acceptance | None, what: str, common: dict[str, Any]
) -> tuple[Row, Partings]:
    """Return a row with the milliseconds a token with and without drafts, and where draws with drafts differed from the
    record. accepted: None: free text.
    """
    bench.stream(batch, accepted, is_on=True)  # the scheduler learns the times of widths
    took: dict[bool, list[_Streams]] = {False: [], True: []}
    before = bench.client.engine.stats().drafts
    for _ in range(bench.benchmark.rounds):
        for is_on in (False, True):
            took[is_on].append(bench.stream(batch, accepted, is_on))
    after = bench.client.engine.stats().drafts
    partings = {is_on: add_partings([one.partings for one in took[is_on]]) for is_on in (False, True)}
    proposed, drawn = after.proposed - before.proposed, after.accepted - before.accepted
    steps = after.steps - before.steps
    with_ms, without_ms = ([1e3 / one.tokens_per_s for one in took[is_on]] for is_on in (True, False))
    extras = {
        "proposed": proposed, "accepted": drawn, "steps": steps, "saved_s": after.saved_seconds - before.saved_seconds,
        "partings": asdict(partings[True]), "partings_without": asdict(partings[False]),
    }  # fmt: skip
    row = Row(name="token with drafts", shape=what, floor="none: a share of what the batch takes without",
              floor_ms=None, peer="without drafts", peer_ms=summarise(without_ms).ms, extras=extras,
              **asdict(summarise(with_ms)), **common)  # fmt: skip
    return row, partings[True]


def add_partings(partings: Sequence[Partings]) -> Partings:
    """Sum up the differences of several sets of draws."""
    draws, level, beyond = (sum(getattr(one, name) for one in partings) for name in ("draws", "level", "beyond"))
    return Partings(draws, level, beyond, max((one.most_steps for one in partings), default=0.0))


class _Bench:
    """Runs streams of one engine, and notes the device's time in their steps. is_exact: it computes in float32."""

    def __init__(self, benchmark: DraftsBenchmark, client: Client, is_exact: bool) -> None:
        self.benchmark = benchmark
        self.client = client
        self._is_exact = is_exact
        self._recorded = Recorded(client.engine._runner)
        self._device_ms: list[float] = []
        note_results(client.engine.scheduler, self._note)

    def _note(self, result: StepResult) -> None:
        if result.decode_seconds and not result.unit_seconds:
            self._device_ms.append(1e3 * result.decode_seconds)

    def record(self, batch: int) -> None:
        """Record the texts that a batch of streams writes without drafts."""
        self._recorded.records.clear()
        prompts = self._prompts(batch)
        switch_drafts(self.client.engine.scheduler.drafts, False)
        most = self.benchmark.tokens + _SPARE
        ids = [self.client.submit(prompt.tolist(), most, PROFILE, GREEDY) for prompt in prompts]
        streams = _Streams(texts=[[] for _ in prompts])
        while min(map(len, streams.texts)) < most:
            self._advance(ids, streams)
        self.client.drain(ids)
        self._recorded.records = {
            prompt.tobytes(): text for prompt, text in zip(prompts, streams.texts, strict=True)
        }  # fmt: skip

    def of_width(self, batch: int, width: int) -> _Streams:
        """Run streams whose drafts are always right, and always `width` rows long."""
        with self._chosen(lambda looks, num_fed, times: [width - 1] * len(looks)):
            return self.stream(batch, RIGHT, is_on=width > 1)

    def stream(self, batch: int, accepted: Acceptance | None, is_on: bool) -> _Streams:
        """Run `batch` streams. Raises GateError if a text differs from its record.

        accepted None: free text with the source's own drafts.
        """
        drafts, draw, vocab_size = self.client.engine.scheduler.drafts, Random(batch), self.client.vocab_size
        switch_drafts(drafts, is_on)
        drafts.make_source = make_source if accepted is None else lambda config, sequence: Replayed(
            make_source(config, sequence), sequence.num_prompt_tokens,
            self._recorded.records[sequence.prompt.astype(np.int32).tobytes()], accepted, vocab_size, draw,
        )  # fmt: skip
        if self.benchmark.mtp:
            self._recorded.replace_guesses(accepted, draw)
        self._recorded.take_partings()
        prompts = self._prompts(batch)
        streams = _Streams(texts=[[] for _ in prompts])
        most = self.benchmark.tokens + _SPARE
        ids = [self.client.submit(prompt.tolist(), most, PROFILE, GREEDY) for prompt in prompts]
        while min(map(len, streams.texts)) < _WARM_UP:
            self._advance(ids, streams)
        began, first = time.perf_counter(), sum(map(len, streams.texts))
        self._device_ms.clear()
        while min(map(len, streams.texts)) < self.benchmark.tokens:
            self._advance(ids, streams)
        streams.seconds = time.perf_counter() - began
        streams.num_tokens = sum(map(len, streams.texts)) - first
        streams.device_ms = list(self._device_ms)
        self.client.drain(ids)
        streams.texts = [text[: self.benchmark.tokens] for text in streams.texts]
        streams.partings = self._recorded.take_partings()
        streams.partings.check(self._is_exact, f"batch {batch}")
        written = [self._recorded.records[prompt.tobytes()][: self.benchmark.tokens] for prompt in prompts]
        require(streams.texts == written, f"batch {batch}: the text is the record's")
        return streams

    def _prompts(self, batch: int) -> list[np.ndarray]:
        return [
            np.random.default_rng(place).integers(
                0, self.client.vocab_size, self.benchmark.prompt_tokens, dtype=np.int32
            )
            for place in range(batch)
        ]

    def _advance(self, ids: list[str], streams: _Streams) -> None:
        for delta in self.client.advance():
            streams.texts[ids.index(delta.request_id)] += delta.token_ids

    @contextmanager
    def _chosen(self, choose: Callable[[Any, int, Any], list[int]]) -> Iterator[None]:
        """Choose the lengths of drafts by `choose` while the context lasts."""
        drafts = self.client.engine.scheduler.drafts
        kept, drafts.choose_lengths = drafts.choose_lengths, choose
        try:
            yield
        finally:
            drafts.choose_lengths = kept


def _config_of(benchmark: DraftsBenchmark) -> EngineConfig:
    """Return the settings of an engine with enough pages for all streams."""
    model = ModelConfig(random_weights=benchmark.random_weights, weights=benchmark.weights)  # type: ignore[arg-type]
    shape = load_architecture(model)
    context = benchmark.prompt_tokens + benchmark.tokens + 2 * _SPARE
    row_bytes = shape.rows_of_head * (shape.num_layers + benchmark.mtp) * shape.num_kv_heads * shape.dim * 4
    most, widest = max(benchmark.batches), max(WIDTHS)
    sizes = sorted({batch * width for batch in benchmark.batches for width in WIDTHS})  # graphs that are replayed
    return EngineConfig(
        model=model,
        gpu=GpuConfig(
            device=benchmark.device, dtype=benchmark.dtype, threads=benchmark.threads,  # type: ignore[arg-type]
            kv_cache_gib=_KV_ROOM * most * context * row_bytes / GIB,
            graph_batch_sizes=tuple(sizes), prefill_graph_sizes=(),
        ),
        profiles={PROFILE: Composition(draft=DraftConfig(source="mtp") if benchmark.mtp else DraftConfig())},
        scheduler=SchedulerConfig(max_running=most * widest, max_context_tokens=context, prefix_cache=False),
    )  # fmt: skip
