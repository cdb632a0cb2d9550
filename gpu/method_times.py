"""Time whole decode steps with and without a method at the start, for methods that decide by such times.

No sequence owns pages yet. They are filled with random rows for it, or with zeros where they hold codes.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from gpu.methods.device_side import RingSide
from gpu.methods.method import ProfilePart, Where
from gpu.profiles import FULL_ATTENTION
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

_REPEATS = 5
_PROMPT_TOKENS = 16  # in front of a context that is timed


@torch.inference_mode()
def learn_times(runner: Runner, parts: Mapping[PartId, ProfilePart], graph_batch_sizes: Sequence[int], kv: str) -> None:
    """Let each method that decides by times measure its steps. kv: the format of rows in pages."""
    limits = runner.limits
    longest = min(limits.max_context_tokens, limits.num_pages * limits.page_tokens)
    gpu = torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "none"
    for part_id, side in runner.ring_sides.items():
        if side.goes_by_times:
            fill_pages(runner)
            most = min(limits.max_running, side.num_rings)
            sizes = sorted({1, *(size for size in graph_batch_sizes if size <= most)})
            time = partial(time_steps, runner, parts[part_id], side)
            side.learn_times(time, sizes, longest, Where(gpu, kv, side.num_layers, runner.architecture))
            side.forget_counts()


def fill_pages(runner: Runner) -> None:
    """Fill all pages with rows that can be attended to."""
    for pages in (*runner.pool.key_pages, *runner.pool.value_pages):
        if pages.is_floating_point():
            pages.normal_()
        else:
            pages.zero_()


def time_steps(runner: Runner, part: ProfilePart, side: RingSide, rows: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of a step of `rows` rows with contexts of `tokens` tokens, without the method and with it.

    Contexts lie in pages that no sequence owns yet; where these are too few, contexts share them.
    """
    limits, slots = runner.limits, list(range(rows))
    page_tokens = part.method.ring_page_tokens(part.settings)
    writes, rings, prompts = [], [], []
    for slot in slots:
        greedy = SamplingParams(temperature=0.0)
        prompts.append(
            PrefillPrompt(slot, np.zeros(_PROMPT_TOKENS, np.int32), 0, _PROMPT_TOKENS, greedy, FULL_ATTENTION)
        )
        writes.append(PageWrite(slot, 0, _pages_of(slot, -(-tokens // limits.page_tokens), limits.num_pages)))
        pages = tuple(_pages_of(slot, -(-tokens // page_tokens), side.num_pages)) if page_tokens else None
        rings.append(RingWrite(slot, part.id, slot, part.method.reading, None, pages))
    units = [PrefillUnit(0, layer, 0, rows * _PROMPT_TOKENS, DENSE) for layer in range(runner.architecture.main_layers)]
    job = PrefillJob(0, prompts)
    runner.launch(StepPlan(page_writes=writes, ring_writes=rings, new_jobs=[job], units=units)).collect()
    group = DecodeGroup(slots, [tokens - 1] * rows, [1] * rows)
    seconds = []
    for side.forced in (False, True):
        times = [runner.launch(StepPlan(decode=[group])).collect().decode_seconds for _ in range(1 + _REPEATS)]
        seconds.append(min(times[1:]))
    side.forced = None
    runner.launch(StepPlan(released_slots=slots)).collect()
    return seconds[0], seconds[1]


def _pages_of(slot: int, count: int, num_pages: int) -> list[int]:
    return [(slot * count + page) % num_pages for page in range(count)]
