"""Whole decode steps over predicted blocks, at turnovers that are stated, beside other ways to bring the same blocks.

Weights are random, so how far one step's blocks differ from the next one's says nothing of a model: a share of them is
exchanged for others, drawn anew. The predictor runs all the same. Ways: `read`, the blocks stay as they are, which is
what a step costs without prediction and link; `predict`, as well, with the prediction; `across`, what serves: fetched
across tokens, beside the layers that follow; `demand`: likewise chosen, but fetched where a layer needs them; `layer`:
the next layer's blocks are chosen by this layer's query and the mean keys of blocks, and fetched beside the rest of
this layer; `refetch`: likewise, and all of the budget comes anew, as published systems do. Contexts share their rows in
host memory, which a link does not notice. Nothing else in a step differs from what serves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bench.step_trace import trace_steps
from cpu.tier import CpuTier, open_tier
from gpu.config import Composition
from gpu.decode.ladder import StepKind
from gpu.decode.steps import Batch
from gpu.kv.layout import PageLayout
from gpu.load import RANDOM_SEED
from gpu.methods.device_side import LayerReads
from gpu.methods.predicted.blocks import Blocks
from gpu.methods.predicted.device import Predicted, _Choice
from gpu.methods.predicted.fetching import fetch_blocks
from gpu.methods.predicted.replacing import replace_blocks
from gpu.model.architecture import Architecture
from gpu.model.weights import Weights, random_weights
from gpu.profiles import Part, resolve_profiles
from gpu.runner import Runner
from gpu.step import HostAsk, PageWrite, RingWrite, StepPlan
from transfer.config import HostConfig
from transfer.copies import PASSED
from transfer.tier_shape import BLOCK_TOKENS, TierShape

Way = Literal["read", "predict", "across", "demand", "layer", "refetch"]
WAYS: tuple[Way, ...] = get_args(Way)
PAGE_TOKENS, DENSE_LAYERS = 16, (0, 1)
SINK, WINDOW, ROOM = 64, 192, 2_048
PATTERN_TOKENS = 4_096
WARM_UP_STEPS = 6


@dataclass(frozen=True, slots=True)
class Measured:
    """A step's median milliseconds on the device, and bytes that it brought over the link."""

    way: Way
    turnover: float
    median_ms: float
    link_bytes: int


class Contexts:
    """A tier with one run of `context` tokens that `batch` contexts share, and a model's weights."""

    def __init__(self, shape: Architecture, context: int, batch: int, weights: Weights | None) -> None:
        self.shape, self.context, self.batch = shape, context // PAGE_TOKENS * PAGE_TOKENS, batch
        self.run_tokens = self.context - SINK - WINDOW
        layers = tuple(layer for layer in range(shape.num_layers) if layer not in DENSE_LAYERS)
        self.tier_shape = TierShape(layers, shape.num_heads, shape.num_kv_heads, shape.dim, "bfloat16", 10, 0)
        row_bytes = 2 * 2 * shape.dim * shape.num_kv_heads * len(layers)
        self.tier: CpuTier = open_tier(
            self.tier_shape, torch.bfloat16, int(1.3 * row_bytes * self.context) + 2**30, 4, is_pinned=True
        )  # fmt: skip
        self._fill()
        device = torch.device("cuda")
        self.weights = weights or random_weights(shape, RANDOM_SEED, torch.bfloat16, device, lambda fraction: None)

    def _fill(self) -> None:
        pattern = torch.randn(self.shape.num_kv_heads, PATTERN_TOKENS, self.shape.dim, dtype=torch.bfloat16)
        self.tier.open(0, False)
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
            self.tier.fork(0, context_id, self.run_tokens, False)


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
            shape, contexts.weights, num_pages=batch * each, page_tokens=PAGE_TOKENS, max_running=batch,
            max_context_tokens=longest, max_hidden_tokens=4096, tier=contexts.tier, parts=(part,),
            num_rings={str(part): batch}, sink_tokens=SINK, dtype=torch.bfloat16, device=torch.device("cuda"),
        )  # fmt: skip
        for arena in self.runner.pool.arenas:
            arena.normal_()
        writes = []
        for slot in range(batch):
            first = slot * each
            own = list(range(first, first + resident))
            down = self.runner.pool.layout.dense_pages(range(first + resident, first + each), 0, dense)
            sink = SINK // PAGE_TOKENS
            writes.append(PageWrite(slot, 0, own[:sink] + down + own[sink:]))
        held = [RingWrite(slot, str(part), slot, False) for slot in range(batch)]
        self.runner.launch(StepPlan(page_writes=writes, ring_writes=held)).collect()
        side = self.runner._reusing[str(part)]
        assert isinstance(side, Predicted)
        self.side, self.cell = side, contexts.context
        assert self.runner.decode_steps.asking is not None
        self.runner.decode_steps.asking.halving.always = 1

    def capture(self) -> None:
        """The one kind of step that is timed."""
        steps, kind = self.runner.decode_steps, StepKind(1, True)
        steps._captured.clear()
        with torch.inference_mode():
            steps._captured[kind, self.batch] = steps._capture(kind, self.batch, torch.cuda.graph_pool_handle())

    @torch.inference_mode()
    def step(self) -> None:
        begin, end = SINK, SINK + self.contexts.run_tokens
        asks = [HostAsk(slot, begin, end) for slot in range(self.batch)]
        cells = [self.cell] * self.batch
        self.runner.decode_steps.run(Batch(list(range(self.batch)), cells, cells, asks, True))
        self.cell += 1

    def time(self, steps: int) -> float:
        for _ in range(WARM_UP_STEPS):
            self.step()
        self.runner.decode_steps.drain()
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


class Ways:
    """How one side of a method brings its blocks; `None` gives it back what serves."""

    def __init__(self, side: Predicted) -> None:
        self.side = side
        self._serving: dict[str, Any] = {
            name: getattr(side, name) for name in ("_choose", "_score", "before", "after", "read")
        }
        self._fresh = torch.zeros(side.blocks.ids.shape, dtype=torch.uint8, device=side.blocks.ids.device)
        self._means: Tensor | None = None

    def set(self, way: Way, turnover: float) -> None:
        side = self.side
        for name, serving in self._serving.items():
            setattr(side, name, serving)
        predict = self._serving["_score"]

        def forced(layer: Blocks, choice: _Choice) -> Tensor:
            if way not in ("layer", "refetch"):
                predict(layer, choice)
            return force(layer, turnover)

        side._score = forced  # type: ignore[method-assign]
        change = {"read": self._read, "predict": self._predict, "demand": self._demand}.get(way)
        if way in ("layer", "refetch"):
            self._across_layers(is_whole=way == "refetch")
        elif change is not None:
            change()

    def _read(self) -> None:
        def nothing(reads: LayerReads, *_: Any) -> None:
            return

        self.side.after = nothing  # type: ignore[method-assign]

    def _predict(self) -> None:
        predict = self._serving["_score"]
        self.side._choose = lambda layer, choice, counts: predict(layer, choice)  # type: ignore[method-assign]

    def _demand(self) -> None:
        side, before, fresh_of = self.side, self._serving["before"], self._fresh

        def choose(layer: Blocks, choice: _Choice, counts: Tensor) -> None:
            fresh_of[self._place_of(layer)].copy_(_replace(side, layer, choice, counts))

        def fetch_first(reads: LayerReads) -> None:
            place = side._places.get(reads.layer)
            if place is not None:
                _fetch(side, side._layers[place], fresh_of[place])
            before(reads)

        side._choose = choose  # type: ignore[method-assign]
        side.before = fetch_first  # type: ignore[method-assign]

    def _across_layers(self, is_whole: bool) -> None:
        side, after, read = self.side, self._serving["after"], self._serving["read"]
        size = (len(side._layers), side._kv_heads, side.blocks.history.shape[3], side._dim)
        means = self._means = (
            torch.randn(size, dtype=torch.bfloat16, device="cuda") if self._means is None else self._means
        )

        def choose_next(reads: LayerReads, *rest: Any) -> None:
            serving, side._choose = side._choose, lambda *_: None  # type: ignore[method-assign]
            after(reads, *rest)
            side._choose = serving  # type: ignore[method-assign]
            place, own = side._places.get(reads.layer), side._of_rows.get(reads.rows)
            if place is None or own is None or own.choice is None or place + 1 == len(side._layers):
                return
            layer = side._layers[place + 1]
            with side._streams.aside(side._streams.up):
                query = reads.query.unflatten(1, (side._kv_heads, -1))
                torch.einsum("rkgd,kbd->rkgb", query, means[place + 1]).amax(2)
                fresh = _replace(side, layer, own.choice, side._counts[place + 1])
                _fetch(side, layer, torch.ones_like(fresh) if is_whole else fresh)

        def wait(reads: LayerReads, *rest: Any) -> None:
            own = side._of_rows.get(reads.rows)
            if own is not None and own.used and reads.layer in side._places:
                torch.cuda.current_stream().wait_stream(side._streams.up)  # type: ignore[arg-type]
            read(reads, *rest)

        side.after = choose_next  # type: ignore[method-assign]
        side.read = wait  # type: ignore[method-assign]

    def _place_of(self, layer: Blocks) -> int:
        return next(place for place, one in enumerate(self.side._layers) if one is layer)


def force(layer: Blocks, turnover: float) -> Tensor:
    """Scores `[places, blocks]` by which all but a share of the blocks that are there stay, and others are drawn."""
    places, blocks = layer.interior.shape
    scores = torch.rand(places, blocks, device=layer.ids.device)
    held = (torch.rand(layer.ids.shape, device=layer.ids.device) >= turnover).float() * 4 - 2  # stays: 2, goes: -2
    there = layer.ids.clamp(min=0).long()
    return scores.scatter_add_(1, there, torch.where(layer.ids >= 0, held, 0.0))


def _replace(side: Predicted, layer: Blocks, choice: _Choice, counts: Tensor) -> Tensor:
    scores = side._score(layer, choice).masked_fill_(choice.is_out, -torch.inf)
    wanted = scores.topk(layer.ids.shape[1], 1, sorted=False).indices.int()
    return replace_blocks(layer.ids, layer.bits, wanted, choice.is_in, counts)


def _fetch(side: Predicted, layer: Blocks, fresh: Tensor) -> None:
    fetch_blocks(layer.ids, fresh, layer.lies, layer.keys, layer.values, side._kv_heads, side._is_int8)


def measure(
    contexts: Contexts, weights_file: Path, budget: int, batch: int, turnovers: Sequence[float], steps: int,
    trace: Path | None,
) -> Iterator[Measured]:  # fmt: skip
    """Each way at each turnover; `read` and `predict` once. trace: of `across` at the last turnover."""
    bench = Steps(contexts, weights_file, budget, batch)
    ways, side = Ways(bench.side), bench.side
    block_bytes = 2 * 2 * BLOCK_TOKENS * contexts.shape.dim
    try:
        for way in WAYS:
            for turnover in turnovers if way not in ("read", "predict") else turnovers[:1]:
                ways.set(way, turnover)
                bench.capture()
                bench.time(2)
                before = side.fetch_counts()
                median = bench.time(steps)
                after, num_steps = side.fetch_counts(), steps + WARM_UP_STEPS
                fetched = (after.fetched_blocks - before.fetched_blocks) * block_bytes
                looked = (after.looked_blocks - before.looked_blocks) * block_bytes // 2
                if way == "refetch":
                    fetched = num_steps * batch * side._kv_heads * (len(side._layers) - 1) * budget * block_bytes // 16
                yield Measured(way, turnover, median, (fetched + looked) // num_steps)
        if trace is not None:
            ways.set("across", turnovers[-1])
            bench.capture()
            trace_steps(_traced(bench), dict, torch.device("cuda"), trace)
    finally:
        bench.shutdown()


def _traced(bench: Steps) -> Callable[[], None]:
    def step() -> None:
        bench.step()
        torch.cuda.synchronize()

    return step


def measure_link(contexts: Contexts) -> float:
    """Bytes a second of one copy from pinned memory, which no gather beats."""
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    best = 0.0
    for _ in range(4):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        device.copy_(host, non_blocking=True)
        events[1].record()
        torch.cuda.synchronize()
        best = max(best, host.nbytes / events[0].elapsed_time(events[1]) * 1e3)
    return best


def _part(settings: dict[str, Any]) -> Part:
    given = {"method": "predicted", "min_context_tokens": 0, **settings}
    part = resolve_profiles({"blocks": Composition.model_validate({"host": given})}, HostConfig())["blocks"].ring_part
    assert part is not None
    return part
