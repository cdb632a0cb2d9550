"""Whole decode steps over predicted blocks, at turnovers that are stated, beside other ways to bring the same blocks.

Weights are random, so how far one step's blocks differ from the next one's says nothing of a model: a share of them is
exchanged for others, drawn anew, or what the reference model chose comes again (`predicted_ways`). The predictor
runs all the same. Ways: `read`, the blocks stay as they are, which is what a step costs without prediction and link;
`predict`, blocks are predicted and chosen, and none is fetched; `across`, what serves: fetched across tokens, beside
the layers that follow; `demand`: likewise chosen, but fetched where a layer needs them; `layer`: the next layer's
blocks are chosen by this layer's query and the mean keys of blocks, and fetched beside the rest of this layer, without
histories and looks, which that needs none of; `refetch`: likewise, and all of the budget comes anew, as published
systems do. Contexts share their rows in host memory, which a link does not notice. Nothing else in a step differs from
what serves, but that forcing or replaying a choice takes two small kernels a layer, in `predict` as well. On the CPU
device steps run eagerly, which tells that a command works and no times.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.decode_loop import served_graph_sizes
from cpu.cpu_tier import CpuTier, open_tier
from gpu.batching.captured_steps import StepKind
from gpu.config import Composition
from gpu.decode.capture import capture
from gpu.decode.steps import Batch
from gpu.methods.method import ProfilePart
from gpu.methods.predicted.device import Predicted
from gpu.model.architecture import Architecture
from gpu.page_layout import PageLayout
from gpu.profiles import resolve_profiles
from gpu.runner import Runner
from gpu.runner_settings import RunnerSettings
from gpu.step import HostRead, PageWrite, RingWrite, StepPlan
from gpu.weights.weights import Weights
from lab.kernels.predicted_ways import NO_FETCH, WAYS, Forced, Replayed, Wanted, Way, Ways, fetch
from lab.speed.step_trace import trace_steps
from lab.speed.trace_lanes import HostSpan
from transfer.copies import PASSED
from transfer.host_config import HostConfig
from transfer.host_tier import Answered
from transfer.machine import count_physical_cores
from transfer.reading import Reading
from transfer.tier_shape import BLOCK_TOKENS, TierShape

PAGE_TOKENS, DENSE_LAYERS = 16, (0, 1)
SINK, WINDOW, ROOM = 64, 192, 2_048
PATTERN_TOKENS = 4_096
WARM_UP_STEPS = 6


REPLAYED = "replayed"
ALONE_REPEATS = 8


class Cell(NamedTuple):
    """What steps are measured over: tokens of each context, that a KV head reads of its middle, and contexts."""

    context: int
    budget: int
    batch: int

    def __str__(self) -> str:
        return f"{self.context}:{self.budget}x{self.batch}"


def parse_cells(text: str) -> list[Cell]:
    """Return `context:budget x batch`, with commas, as `32768:4096x4,98304:2048x1`. Raises ValueError."""
    cells = []
    for one in text.split(","):
        try:
            context, _, rest = one.partition(":")
            budget, _, batch = rest.partition("x")
            cells.append(Cell(int(context), int(budget), int(batch)))
        except ValueError:
            raise ValueError(f"cells: {one!r}; wanted tokens:budget x contexts, as 32768:4096x4") from None
        if cells[-1].context < 2 * (SINK + WINDOW) + cells[-1].budget or cells[-1].batch < 1:
            raise ValueError(f"cells: {one!r}; wanted a context beyond its budget, and contexts")
    return cells


@dataclass(frozen=True, slots=True)
class Measured:
    """A step's median milliseconds on the device, and bytes that it brought over the link, of blocks and of keys that
    were looked at. turnover: what was asked for, or REPLAYED; changed: share of slots that were filled anew; alone_ms:
    as many blocks brought one layer after the other with nothing beside; hidden: the share of that time by which the
    step is not longer than where as many are chosen and none is fetched; plain_bytes: of the whole budget.
    """

    way: Way
    turnover: float | str
    median_ms: float
    link_bytes: int
    plain_bytes: int
    changed: float
    alone_ms: float | None
    hidden: float | None


class Contexts:
    """A tier with one run of `context` tokens that `batch` contexts share, and a model's weights."""

    def __init__(self, shape: Architecture, context: int, batch: int, weights: Weights) -> None:
        self.shape, self.weights = shape, weights
        self.device = weights.embedding.device
        self.context, self.batch = context // PAGE_TOKENS * PAGE_TOKENS, batch
        self.run_tokens = self.context - SINK - WINDOW
        layers = tuple(layer for layer in range(shape.num_layers) if layer not in DENSE_LAYERS)
        self.tier_shape = TierShape(layers, shape.num_heads, shape.num_kv_heads, shape.dim, "bfloat16", 10, 0)
        row_bytes = 2 * 2 * shape.dim * shape.num_kv_heads * len(layers)
        self.tier: CpuTier = open_tier(
            self.tier_shape, weights.embedding.dtype, int(1.3 * row_bytes * self.context) + 2**30,
            min(4, count_physical_cores()), is_pinned=self.device.type == "cuda",
        )  # fmt: skip
        self._fill()

    def _fill(self) -> None:
        pattern = torch.randn(self.shape.num_kv_heads, PATTERN_TOKENS, self.shape.dim, dtype=torch.bfloat16)
        self.tier.open(0, Reading.WHOLE)
        for reservation in self.tier.reserve(0, self.run_tokens):
            for layer in range(len(self.tier_shape.layers)):
                rows = reservation.layer(layer)
                rows.centre.zero_()
                for begin in range(0, rows.keys.shape[1], PATTERN_TOKENS):
                    into = slice(begin, min(begin + PATTERN_TOKENS, rows.keys.shape[1]))
                    rows.keys[:, into].copy_(pattern[:, : into.stop - begin])
                    rows.values[:, into].copy_(pattern[:, : into.stop - begin])
            self.tier.fill(reservation, range(len(self.tier_shape.layers)), PASSED)
        for context_id in range(1, self.batch):
            self.tier.fork(0, context_id, self.run_tokens, Reading.WHOLE)

    def shutdown(self) -> None:
        self.tier.shutdown()


class Steps:
    """Decode steps of `batch` contexts with a budget, one cell further each."""

    def __init__(self, contexts: Contexts, weights_file: Path, budget: int, batch: int) -> None:
        shape, self.batch, self.contexts = contexts.shape, batch, contexts
        part = _part({"weights": weights_file, "budget_tokens": budget})
        longest = contexts.context + ROOM
        resident, dense = -(-(SINK + WINDOW + ROOM) // PAGE_TOKENS), contexts.run_tokens // PAGE_TOKENS
        blocks = PageLayout(shape.num_layers, len(DENSE_LAYERS), 0).blocks_for(dense)
        each = resident + blocks
        self.runner = Runner(
            shape,
            contexts.weights,
            RunnerSettings(
                num_pages=batch * each,
                page_tokens=PAGE_TOKENS,
                max_running=max((batch, *served_graph_sizes([batch]))),
                max_context_tokens=longest,
                max_hidden_tokens=4096,
                tier=contexts.tier,
                parts=(part,),
                num_rings={part.id: batch},
                sink_tokens=SINK,
                dtype=contexts.weights.embedding.dtype,
                device=contexts.device,
            ),
        )
        for arena in self.runner.pool.arenas:
            arena.normal_()
        writes = []
        for slot in range(batch):
            first = slot * each
            own = list(range(first, first + resident))
            down = self.runner.pool.layout.dense_pages(range(first + resident, first + each), 0, dense)
            sink = SINK // PAGE_TOKENS
            writes.append(PageWrite(slot, 0, own[:sink] + down + own[sink:]))
        held = [RingWrite(slot, part.id, slot, Reading.BLOCKS) for slot in range(batch)]
        self.runner.launch(StepPlan(page_writes=writes, ring_writes=held)).collect()
        side = self.runner._reusing[part.id]
        assert isinstance(side, Predicted)
        self.side, self.cell = side, contexts.context
        assert self.runner.decode_steps.host_reader is not None
        self.runner.decode_steps.host_reader.halving.always = 1

    def capture(self) -> None:
        """The one kind of step that is timed."""
        if self.contexts.device.type == "cpu":
            return
        steps, kind = self.runner.decode_steps, StepKind(1, True)
        steps._captured.clear()
        with torch.inference_mode():
            for size in served_graph_sizes([self.batch]):
                steps._captured[kind, size] = steps._capture(kind, size, torch.cuda.graph_pool_handle())

    @torch.inference_mode()
    def step(self) -> None:
        begin, end = SINK, SINK + self.contexts.run_tokens
        asks = [HostRead(slot, begin, end) for slot in range(self.batch)]
        cells = [self.cell] * self.batch
        self.runner.decode_steps.run(Batch(list(range(self.batch)), cells, cells, asks, True))
        self.cell += 1

    def time(self, steps: int) -> float:
        for _ in range(WARM_UP_STEPS):
            self.step()
        self.runner.decode_steps.drain()
        if self.contexts.device.type == "cpu":
            return float(np.median([_seconds(self.step) for _ in range(steps)])) * 1e3
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        for event in events[:-1]:
            event.record()
            self.step()
        events[-1].record()
        torch.cuda.synchronize()
        self.runner.decode_steps.drain()
        return float(np.median([first.elapsed_time(last) for first, last in pairwise(events)]))

    def shutdown(self) -> None:
        self.runner.shutdown()


def measure(
    contexts: Contexts, weights_file: Path, cell: Cell, turnovers: Sequence[float], steps: int,
    selections: np.ndarray | None, trace: Path | None,
) -> Generator[Measured, None, None]:  # fmt: skip
    """Yield each way at each turnover, and at what is replayed; `read` once, `predict` at the first turnover, for it
    fetches nothing, and at what is replayed. trace: of `across`, at the last of these; whoever stops earlier gets none.
    """
    bench = Steps(contexts, weights_file, cell.budget, cell.batch)
    side, device = bench.side, contexts.device
    run_blocks = contexts.run_tokens // BLOCK_TOKENS
    ways, block_bytes = Ways(side, run_blocks), 2 * 2 * BLOCK_TOKENS * contexts.shape.dim
    forced = Forced(len(side._layers), device)
    sources: list[tuple[Wanted, Sequence[float | str]]] = [(forced, turnovers)]
    if selections is not None:
        layers, slots = len(side._layers), side.blocks.ids.shape[2]
        sources.append((Replayed(selections, layers, side._kv_heads, slots, run_blocks, device), [REPLAYED]))
    once: dict[str, list[tuple[Wanted, Sequence[float | str]]]] = {
        "read": [(forced, turnovers[:1])], "predict": [(wanted, shares[:1]) for wanted, shares in sources],
    }  # fmt: skip
    predict_ms: dict[Wanted, float] = {}
    places = cell.batch * side._kv_heads * len(side._layers)
    plain = places * cell.budget // BLOCK_TOKENS * block_bytes
    try:
        for way in WAYS:
            for wanted, shares in once.get(way, sources):
                ways.set(way, wanted)
                bench.capture()
                for turnover in shares:
                    if not isinstance(turnover, str):
                        forced.share.fill_(1 - (1 - turnover) ** ways.steps_between(way))
                    bench.time(2)
                    before = side.counts()
                    median = bench.time(steps)
                    after, num_steps = side.counts(), steps + WARM_UP_STEPS
                    chosen = after["fetch_fetched_blocks"][0] - before["fetch_fetched_blocks"][0]
                    blocks_a_step = 0.0 if way in NO_FETCH else chosen / num_steps
                    changed = blocks_a_step * block_bytes / plain
                    if way == "refetch":
                        blocks_a_step = places * cell.budget / BLOCK_TOKENS * (1 - 1 / len(side._layers))
                    seen = after["fetch_looked_blocks"][0] - before["fetch_looked_blocks"][0]
                    looked = seen / num_steps * block_bytes / 2
                    if way == "predict":
                        predict_ms[wanted] = median
                    alone = hidden = None
                    if way not in NO_FETCH:
                        alone = _time_alone(side, blocks_a_step * block_bytes / plain)
                    if way == "across" and alone:
                        hidden = min(1.0, max(0.0, 1 - (median - predict_ms[wanted]) / alone))
                    link = int(blocks_a_step * block_bytes + looked)
                    yield Measured(way, turnover, median, link, plain, changed, alone, hidden)
        if trace is not None:
            ways.set("across", sources[-1][0])
            bench.capture()
            _trace(bench, trace)
    finally:
        bench.shutdown()


def _time_alone(side: Predicted, share: float) -> float:
    """Return milliseconds in which a share of all slots is filled, layer by layer, by the kernel that serves, captured:
    thirty launches one by one take a millisecond, whatever they bring.
    """
    shape, device = side.blocks.ids.shape, side.blocks.ids.device
    fresh = ((torch.rand(shape, device=device) < share) & (side.blocks.ids >= 0)).to(torch.uint8)

    def bring() -> None:
        for layer, own in zip(side._layers, fresh, strict=True):
            fetch(side, layer, own)

    if device.type == "cpu":
        return 1e3 * _seconds(bring)
    graph, _ = capture(bring, None)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(ALONE_REPEATS + 1):
        if repeat == 1:
            begin.record()
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / ALONE_REPEATS


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _trace(bench: Steps, path: Path) -> None:
    spans: list[HostSpan] = []
    answering = bench.runner.decode_steps._answering
    assert answering is not None
    observe = answering._on_answered

    def note(rows: int, num_parts: int, answered: Answered, seconds: float) -> None:
        """Behind an answered step: the thread has waited for its asks and attended for so long."""
        now = time.time_ns()
        name = f"{len(spans)}: waited {1e3 * answered.waited_s:.2f} ms, attended {1e3 * answered.attended_s:.2f}"
        spans.append(HostSpan(name, now - int(1e9 * seconds), now))
        observe(rows, num_parts, answered, seconds)

    answering._on_answered = note

    device = bench.contexts.device

    def step() -> None:
        bench.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    trace_steps(step, dict, device, path, lambda: spans)


def measure_link(device: torch.device) -> float:
    """Return bytes a second of one copy from pinned memory, which no gather beats; on the CPU device, of one
    in memory.
    """
    if device.type == "cpu":
        host = torch.ones(2**26, dtype=torch.uint8)
        return host.nbytes / min(_seconds(host.clone) for _ in range(4))
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    on_card = torch.empty_like(host, device="cuda")
    best = 0.0
    for _ in range(4):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        on_card.copy_(host, non_blocking=True)
        events[1].record()
        torch.cuda.synchronize()
        best = max(best, host.nbytes / events[0].elapsed_time(events[1]) * 1e3)
    return best


def _part(settings: dict[str, Any]) -> ProfilePart:
    given = {"method": "predicted", "min_context_tokens": 0, **settings}
    part = resolve_profiles({"blocks": Composition.model_validate({"host": given})}, HostConfig())["blocks"].ring_part
    assert part is not None
    return part
