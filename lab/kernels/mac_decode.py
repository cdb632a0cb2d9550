"""Whole decode steps of contexts on the card with MAC-Attention off and on, at rates of hits that are stated.

Weights are random, so how often queries repeat says nothing of a model: the rate is chosen. Rings are filled by as many
decode steps as they hold, of tokens that are drawn evenly; a layer's threshold is then the quantile of the distances
that some further steps had. Nothing in a step differs from what serves. What hits is independent from head to head, as
far as such queries are, and what was counted is told beside the time. Keys and values are random, too: no prompt is
computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import torch

import gpu.methods.mac.device as mac_device
from bench.decode_loop import served_graph_sizes
from gpu.config import Composition
from gpu.decode.steps import Batch
from gpu.load import RANDOM_SEED
from gpu.methods.mac.device import Mac
from gpu.methods.mac.match import Matched
from gpu.methods.method import ProfilePart
from gpu.model.architecture import Architecture
from gpu.profiles import resolve_profiles
from gpu.runner import Runner
from gpu.runner_settings import RunnerSettings
from gpu.step import PageWrite, RingWrite, StepPlan
from gpu.weights.drawing import random_weights
from transfer.reading import Reading

PAGE_TOKENS = 16
CALIBRATION_STEPS = 8


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of steps of one batch, milliseconds on the device: asked and counted shares of heads that hit, of
    groups of which all did, and of KV rows that were read. asked None: a step without MAC. layer_tau: the thresholds,
    as a profile of these weights takes them (`layer_tau`; 0 where one would have to be below), empty where nothing or
    all was to hit.
    """

    asked: float | None
    median_ms: float
    hits: float
    whole_groups: float
    read: float
    layer_tau: dict[int, float]


def time_steps(
    shape: Architecture, context: int, batch: int, rates: Sequence[float], settings: dict[str, object], steps: int
) -> list[StepTimes]:
    """Time steps of `batch` contexts, without MAC and then at each of these rates of hits. On CUDA, in bf16."""
    part = _part(settings)
    num_rings, room = batch, 2 * steps + CALIBRATION_STEPS + 16
    device, name = torch.device("cuda"), part.id
    capacity = int(part.settings.model_dump()["capacity"])
    longest = context + capacity + (room * (len(rates) + 1))
    pages, sizes = -(-longest // PAGE_TOKENS), served_graph_sizes([batch])
    runner = Runner(
        shape,
        random_weights(shape, RANDOM_SEED, torch.bfloat16, device, lambda fraction: None),
        RunnerSettings(
            num_pages=batch * pages,
            page_tokens=PAGE_TOKENS,
            max_running=max((batch, *sizes)),
            max_context_tokens=longest,
            max_hidden_tokens=4096,
            tier=None,
            parts=(part,),
            num_rings={name: num_rings},
            dtype=torch.bfloat16,
            device=device,
        ),
    )
    for arena in runner.pool.arenas:
        arena.normal_()
    writes = [PageWrite(slot, 0, list(range(slot * pages, (slot + 1) * pages))) for slot in range(batch)]
    runner.launch(StepPlan(page_writes=writes)).collect()
    runner.capture(sizes, lambda fraction: None)
    bench = _Steps(runner, batch, context)
    times = [StepTimes(None, bench.time(steps), 0.0, 0.0, 1.0, {})]
    side = runner._reusing[name]
    assert isinstance(side, Mac)
    held = [RingWrite(slot, name, slot, Reading.NONE) for slot in range(batch)]
    runner.launch(StepPlan(ring_writes=held)).collect()
    bench.run(capacity)
    for rate in rates:
        _calibrate(side, bench, rate)
        runner.decode_steps._captured.clear()
        runner.capture(sizes, lambda fraction: None)
        before = torch.tensor(_sums(side))
        median = bench.time(steps)
        tries, hits, cells, kv_cells, whole = (torch.tensor(_sums(side)) - before).tolist()
        groups = tries / shape.group
        taus = _taus(side, shape.dim) if 0 < rate < 1 else {}
        read = kv_cells / (cells / shape.group)
        times.append(StepTimes(rate, median, hits / tries, whole / groups, read, taus))
    return times


class _Steps:
    """Decode steps of all slots, one cell further each; tokens are drawn evenly."""

    def __init__(self, runner: Runner, batch: int, context: int) -> None:
        self.runner, self.batch, self.cell = runner, batch, context
        self._tokens = torch.Generator(device="cuda").manual_seed(7)

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        runner, slots = self.runner, list(range(self.batch))
        reuses = any(side.has_ring(0) for side in runner._reusing.values())
        for _ in range(steps):
            runner._last_tokens.random_(0, runner.limits.vocab_size, generator=self._tokens)
            places = [self.cell] * self.batch
            runner.decode_steps.run(Batch(slots, places, places, [None] * self.batch, reuses))
            self.cell += 1
        torch.cuda.synchronize()

    def time(self, steps: int) -> float:
        """Return the median of a step, milliseconds, launched one behind the other."""
        self.run(8)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        for event in events[:-1]:
            event.record()
            self._one()
        events[-1].record()
        torch.cuda.synchronize()
        return float(np.median([first.elapsed_time(last) for first, last in pairwise(events)]))

    @torch.inference_mode()
    def _one(self) -> None:
        runner, slots, places = self.runner, list(range(self.batch)), [self.cell] * self.batch
        reuses = any(side.has_ring(0) for side in runner._reusing.values())
        runner._last_tokens.random_(0, runner.limits.vocab_size, generator=self._tokens)
        runner.decode_steps.run(Batch(slots, places, places, [None] * self.batch, reuses))
        self.cell += 1


def _calibrate(side: Mac, bench: _Steps, rate: float) -> None:
    """Each layer's threshold becomes the quantile of what some steps, launched one by one, found."""
    layers: dict[int, list[torch.Tensor]] = {layer: [] for layer in side.layers}
    order = iter(list(side.layers) * CALIBRATION_STEPS)
    real = mac_device.match

    def recording(*arguments: object) -> Matched:
        matched: Matched = real(*arguments)  # type: ignore[arg-type]
        layers[next(order)].append(matched.distances2.flatten())
        return matched

    captured = dict(bench.runner.decode_steps._captured)
    bench.runner.decode_steps._captured.clear()
    with patch.object(mac_device, "match", recording):
        bench.run(CALIBRATION_STEPS)
    bench.runner.decode_steps._captured.update(captured)
    for layer, distances in layers.items():
        every = torch.cat(distances)
        limit = float(every.quantile(rate)) if rate < 1 else float(every.max()) * 1e3
        side._limits[layer] = replace(side._limits[layer], max_distance2=limit if rate > 0 else 0.0)


def _taus(side: Mac, dim: int) -> dict[int, float]:
    """Eq. (3) of the paper, the other way round."""
    limits = {layer: side._limits[layer].max_distance2 for layer in side.layers}
    return {layer: round(max(0.0, 1 - (limit / (2 * dim)) ** 0.5), 4) for layer, limit in limits.items()}


def _sums(side: Mac) -> list[int]:
    torch.cuda.synchronize()
    counts = side.counts()
    return [sum(counts[f"reuse_{name}"]) for name in ("tries", "hits", "context_cells", "kv_cells", "whole_groups")]


def _part(settings: dict[str, object]) -> ProfilePart:
    given = {
        "method": "mac", "max_prefix_share": 1.0, "min_context_tokens": 0, "stops_matching": False, **settings
    }  # fmt: skip
    part = resolve_profiles({"mac": Composition.model_validate({"reuse": given})}, None)["mac"].ring_part
    assert part is not None
    return part
