"""Run `tandem bench drafts`: steps of 1, 2, 4 and 8 rows a stream, and streams with and without drafts.

Weights are random, so a text says nothing of acceptance. Streams that draft are biased to one token, which their text
then is; a source proposes it, each token wrong at a stated rate, and all else runs at its full cost. Streams of free
text have no bias and the n-grams that serve. With and without take turns, and the text without drafts must be the text
with them. Of a head that comes with a checkpoint (mtp), its steps run, and such tokens take the place of its guesses.

Floor of a step: the weights that so many rows read, over the measured rate of reading them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.as_served import interpreter_as_served
from bench.benchmark_rows import Row, announce, require, summarise
from bench.engine import measure_floor_rates
from bench.engine_patches import note_results, replace_guesses, switch_drafts
from bench.long_client import GREEDY, Client
from bench.rates import device_name
from gpu.config import Composition, DraftConfig, GpuConfig, ModelConfig
from gpu.load import DTYPES
from gpu.model.architecture import load_architecture
from gpu.model.matrix_formats import step_weight_bytes
from gpu.operations.recurrent.state_arrays import MOST_STEP_ROWS
from gpu.sampling_params import SamplingParams
from gpu.step import StepResult
from scheduler.drafts.draft_source import Proposal
from scheduler.drafts.drafter import make_source
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.planning.engine_memory import plan_engine
from transfer.machine import GIB, probe_machine

WIDTHS = (1, 2, 4, 8)
PROFILE = "drafting"
TOKEN = 7  # that biased streams write
BIASED = SamplingParams(temperature=0.0, logit_bias={TOKEN: 100.0})
_WARM_UP = 8  # tokens of each stream
_KV_ROOM = 1.25  # times the rows of all streams


@dataclass(frozen=True, slots=True)
class DraftsBenchmark:
    """What to measure: `tokens` of each stream, behind `prompt_tokens`; accepted: rates at which a proposed token is
    right. mtp: the model's head drafts.
    """

    random_weights: str
    weights: str | None
    device: str
    dtype: str
    batches: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    rounds: int
    accepted: tuple[float, ...]
    threads: int
    mtp: bool = False


class Constant:
    """Propose one token, wrong at the rate `1 - accepted`."""

    def __init__(self, accepted: float, draw: Random) -> None:
        self.num_observed = 0
        self._accepted = accepted
        self._draw = draw

    def observe(self, token_ids: np.ndarray) -> None:
        """Count further tokens."""
        self.num_observed += len(token_ids)

    def propose(self, most_tokens: int) -> Proposal:
        """Return `most_tokens` tokens; how much speaks for them is always alike."""
        right = [self._draw.random() < self._accepted for _ in range(most_tokens)]
        return Proposal([TOKEN if one else TOKEN + 1 for one in right], 1)

    def forget(self) -> None:
        """Keep nothing."""


@dataclass(slots=True)
class _Streams:
    """Hold what streams of one length took. seconds: of all their tokens but the first ones; device_ms: of steps."""

    seconds: float = 0.0
    num_tokens: int = 0
    device_ms: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_drafts_benchmark(benchmark: DraftsBenchmark, console: Console) -> list[Row]:
    """Return a row for each batch and width, and for each batch and rate of acceptance. Raises GateError."""
    torch.set_num_threads(benchmark.threads)
    config = _config_of(benchmark)
    architecture = load_architecture(config.model)
    plan = plan_engine(config, architecture, probe_machine())
    device, dtype = torch.device(plan.device), DTYPES[plan.dtype]
    engine, ready = load_engine(config, plan, lambda stage, fraction: None)
    is_packed, rows = engine._runner.weights.is_packed, list[Row]()
    rates, rate = measure_floor_rates(
        step_weight_bytes(architecture, dtype.itemsize, is_packed, 1), benchmark.threads, device
    )
    common: dict[str, Any] = {"device": device_name(device), "rates": rates,
                              "config": asdict(benchmark) | {"torch": torch.__version__}}  # fmt: skip
    try:
        with interpreter_as_served():
            bench = _Bench(benchmark, Client(engine, ready.vocab_size, ready.profiles))
            for batch in benchmark.batches:
                what = f"{architecture.name} {benchmark.weights or plan.dtype}, batch {batch}, " \
                       f"{benchmark.prompt_tokens:,} tokens"  # fmt: skip
                most = MOST_STEP_ROWS if architecture.recurrent is not None else max(WIDTHS)
                widths = [one for one in WIDTHS if one <= most and batch * one <= engine.scheduler.drafts.most_rows]
                for width in widths:
                    num_bytes = step_weight_bytes(architecture, dtype.itemsize, is_packed, batch * width)
                    floor, floor_ms = f"{num_bytes / 1e9:.3f} GB over {rate:.0f} GB/s", num_bytes / rate / 1e6
                    announce(console, f"step, {what}, {width} rows a stream", floor, floor_ms)
                    streams = bench.of_width(batch, width)
                    extras = {"tokens_per_s": streams.tokens_per_s, "rows": batch * width,
                              "wall_ms": 1e3 * batch * width / streams.tokens_per_s}  # fmt: skip
                    rows.append(Row(name="verify step", shape=f"{what}, {width} rows each", floor=floor,
                                    floor_ms=floor_ms, peer=None, peer_ms=None, extras=extras,
                                    **asdict(summarise(streams.device_ms)), **common))  # fmt: skip
                for accepted in (*benchmark.accepted, None):
                    source = "the head" if benchmark.mtp else "n-grams"
                    name = f"free text, {source}" if accepted is None else f"drafts right at {accepted:g} a token"
                    rows.append(_compare(bench, batch, accepted, f"{what}, {name}", common))
    finally:
        engine.shutdown()
    return rows


def _compare(bench: "_Bench", batch: int, accepted: float | None, what: str, common: dict[str, Any]) -> Row:
    """Return a row of milliseconds a token with drafts, beside those without. accepted: None: of free text."""
    bench.stream(batch, accepted, is_on=True)  # times of widths are learnt
    took: dict[bool, list[_Streams]] = {False: [], True: []}
    before = bench.client.engine.stats().drafts
    for _ in range(bench.benchmark.rounds):
        for is_on in (False, True):
            took[is_on].append(bench.stream(batch, accepted, is_on))
    after = bench.client.engine.stats().drafts
    if accepted is not None:
        wrong = [text for one in took[True] for text in one.texts if set(text) != {TOKEN}]
        require(not wrong, "a text with drafts is the text without")
    proposed, drawn = after.proposed - before.proposed, after.accepted - before.accepted
    steps = after.steps - before.steps
    with_ms, without_ms = ([1e3 / one.tokens_per_s for one in took[is_on]] for is_on in (True, False))
    extras = {
        "proposed": proposed, "accepted": drawn, "steps": steps, "saved_s": after.saved_seconds - before.saved_seconds,
        "equal_texts": [a.texts == b.texts for a, b in zip(took[True], took[False], strict=True)],
    }  # fmt: skip
    return Row(name="token with drafts", shape=what, floor="none: a share of what the batch takes without",
               floor_ms=None, peer="without drafts", peer_ms=summarise(without_ms).ms, extras=extras,
               **asdict(summarise(with_ms)), **common)  # fmt: skip


class _Bench:
    """Run streams of one engine, and note what their steps take on the device."""

    def __init__(self, benchmark: DraftsBenchmark, client: Client) -> None:
        self.benchmark = benchmark
        self.client = client
        self._device_ms: list[float] = []
        note_results(client.engine.scheduler, self._note)

    def _note(self, result: StepResult) -> None:
        if result.decode_seconds and not result.unit_seconds:
            self._device_ms.append(1e3 * result.decode_seconds)

    def of_width(self, batch: int, width: int) -> _Streams:
        """Run streams whose drafts are always right, and always of so many rows."""
        with self._chosen(lambda looks, num_fed, times: [width - 1] * len(looks)):
            return self.stream(batch, 1.0, is_on=width > 1)

    def stream(self, batch: int, accepted: float | None, is_on: bool) -> _Streams:
        """Run `batch` streams. accepted: None: of free text, drafted by n-grams."""
        drafts, draw = self.client.engine.scheduler.drafts, Random(batch)
        switch_drafts(drafts, is_on)
        drafts.make_source = make_source if accepted is None else lambda config, sequence: Constant(accepted, draw)
        if self.benchmark.mtp:
            change = None if accepted is None else partial(_spoil, accepted, draw)
            replace_guesses(self.client.engine._runner, change)
        sampling = GREEDY if accepted is None else BIASED
        prompts = [np.random.default_rng(place).integers(0, self.client.vocab_size, self.benchmark.prompt_tokens)
                   for place in range(batch)]  # fmt: skip
        most = self.benchmark.prompt_tokens + self.benchmark.tokens + 64
        streams = _Streams(texts=[[] for _ in prompts])
        ids = [self.client.submit(prompt.tolist(), most - len(prompt), PROFILE, sampling) for prompt in prompts]
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
        return streams

    def _advance(self, ids: list[str], streams: _Streams) -> None:
        for delta in self.client.advance():
            streams.texts[ids.index(delta.request_id)] += delta.token_ids

    @contextmanager
    def _chosen(self, choose: Callable[[Any, int, Any], list[int]]) -> Iterator[None]:
        """Set the lengths of drafts by `choose`, until the block ends."""
        drafts = self.client.engine.scheduler.drafts
        kept, drafts.choose_lengths = drafts.choose_lengths, choose
        try:
            yield
        finally:
            drafts.choose_lengths = kept


def _spoil(accepted: float, draw: Random, tokens: torch.Tensor) -> torch.Tensor:
    """Return other guesses in place of these: TOKEN, wrong at the rate `1 - accepted`."""
    guesses = [TOKEN if draw.random() < accepted else TOKEN + 1 for _ in range(len(tokens))]
    return torch.tensor(guesses, dtype=tokens.dtype, device=tokens.device)


def _config_of(benchmark: DraftsBenchmark) -> EngineConfig:
    """Return the settings of an engine with pages for all streams."""
    model = ModelConfig(random_weights=benchmark.random_weights, weights=benchmark.weights)  # type: ignore[arg-type]
    shape = load_architecture(model)
    context = benchmark.prompt_tokens + benchmark.tokens + 128
    row_bytes = shape.rows_of_head * (shape.num_layers + benchmark.mtp) * shape.num_kv_heads * shape.dim * 4
    most = max(benchmark.batches)
    return EngineConfig(
        model=model,
        gpu=GpuConfig(
            device=benchmark.device, dtype=benchmark.dtype, threads=benchmark.threads,  # type: ignore[arg-type]
            kv_cache_gib=_KV_ROOM * most * context * row_bytes / GIB,
        ),
        profiles={PROFILE: Composition(draft=DraftConfig(source="mtp") if benchmark.mtp else DraftConfig())},
        scheduler=SchedulerConfig(max_running=max(64, most), max_context_tokens=context, prefix_cache=False),
    )  # fmt: skip
