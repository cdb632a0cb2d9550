"""Measure from which context on steps are faster that read contexts on the device by an index: whole steps, as served.

Pages, which nobody owns yet, have random rows for it, or zeros where they are codes. Those are all alike, so that a
threshold chooses next to no rows, some percent of a layer's time: an index has to gain about as much.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from gpu.methods.indexed import SPLIT_TOKENS
from gpu.methods.indexed.crossovers import WHAT, Crossovers, find_crossover, identify
from gpu.methods.indexed.device import Indexed
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import (
    DENSE,
    DecodeGroup,
    PageWrite,
    PartId,
    PrefillJob,
    PrefillPrompt,
    PrefillUnit,
    RingWrite,
    StepPlan,
)
from transfer.measured import keep_measured, measured_path
from transfer.reading import Reading

log = logging.getLogger(__name__)

_REPEATS = 5
_PROMPT_TOKENS = 16  # in front of a context that is measured


@torch.inference_mode()
def choose_resident(runner: Runner, graph_batch_sizes: Sequence[int], kv: str) -> None:
    """Measure what `resident: auto` goes by, let the methods know, and keep it for `tandem plan`. kv: how rows are
    stored on the device.
    """
    gpu = torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "none"
    for part, side in runner.ring_sides.items():
        if isinstance(side, Indexed) and side.settings.resident == "auto":
            crossovers = measure_crossovers(runner, part, side, graph_batch_sizes)
            side.set_crossovers(crossovers)
            of = identify(gpu, kv, side.num_layers, runner.architecture, side.settings)
            log.info("resident_index from=%s of=%s", crossovers, of)
            keep_measured(measured_path(), WHAT, of, {str(rows): least for rows, least in crossovers.items()})


def fill_pages(runner: Runner) -> None:
    """Give all pages rows that can be attended to."""
    for pages in (*runner.pool.key_pages, *runner.pool.value_pages):
        if pages.is_floating_point():
            pages.normal_()
        else:
            pages.zero_()


def measure_crossovers(runner: Runner, part: PartId, side: Indexed, graph_batch_sizes: Sequence[int]) -> Crossovers:
    """Return the least tokens of a context, by rows of a step, from which an index pays; None: up to the longest it
    does not. Empty where contexts are too short for any.
    """
    limits = runner.limits
    longest = min(limits.max_context_tokens, limits.num_pages * limits.page_tokens)
    shortest = max(longest // 4, side.settings.min_context_tokens, 2 * SPLIT_TOKENS)
    most = min(limits.max_running, len(side.upkeep.known))
    if shortest >= longest:
        return {}
    fill_pages(runner)
    found: dict[int, int | None] = {}
    for rows in sorted({1, *(size for size in graph_batch_sizes if size <= most)}):
        times = [time_steps(runner, part, side, rows, tokens) for tokens in (shortest, longest)]
        found[rows] = find_crossover((shortest, longest), times)
    return found


def time_steps(runner: Runner, part: PartId, side: Indexed, rows: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of a step of so many rows with contexts of so many tokens, read in full and by an index.

    Contexts lie in pages that nobody owns yet, and in the same ones where there are not enough.
    """
    limits, slots = runner.limits, list(range(rows))
    writes, rings, prompts = [], [], []
    for slot in slots:
        greedy = SamplingParams(temperature=0.0)
        prompts.append(PrefillPrompt(slot, np.zeros(_PROMPT_TOKENS, np.int32), 0, _PROMPT_TOKENS, greedy, "exact"))
        writes.append(PageWrite(slot, 0, _pages_of(slot, -(-tokens // limits.page_tokens), limits.num_pages)))
        pages = _pages_of(slot, -(-tokens // SPLIT_TOKENS), side.upkeep.num_pages)
        rings.append(RingWrite(slot, part, slot, Reading.INDEXED, None, tuple(pages)))
    layers = range(runner.architecture.num_layers)
    units = [PrefillUnit(0, layer, 0, rows * _PROMPT_TOKENS, DENSE) for layer in layers]
    job = PrefillJob(0, prompts)
    runner.launch(StepPlan(page_writes=writes, ring_writes=rings, new_jobs=[job], units=units)).collect()
    group = DecodeGroup(slots, [tokens - 1] * rows, [1] * rows)
    seconds = []
    for crossovers in ({1: None}, {1: 0}):
        side.set_crossovers(crossovers)
        times = [runner.launch(StepPlan(decode=[group])).collect().decode_seconds for _ in range(1 + _REPEATS)]
        seconds.append(min(times[1:]))
    runner.launch(StepPlan(released_slots=slots)).collect()
    side.forget_counts()
    return seconds[0], seconds[1]


def _pages_of(slot: int, count: int, num_pages: int) -> list[int]:
    return [(slot * count + page) % num_pages for page in range(count)]
