"""Patch an engine from outside for measurements, so that production code needs no switches for benchmarks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

import scheduler.engine.engine
from gpu.runner import Runner
from gpu.step import StepResult
from scheduler.residence.evictions import Evictor
from scheduler.steps.drafts import Drafts
from scheduler.steps.scheduler import Scheduler
from transfer.chunks.chunk_store import ChunkStore


def note_results(steps: Scheduler, note: Callable[[StepResult], None]) -> None:
    """Call `note` with each step's result, from now on, before the scheduler reads it."""
    postprocess = steps.postprocess

    def noting(result: StepResult, *lane: Any) -> Any:
        note(result)
        return postprocess(result, *lane)

    steps.postprocess = noting


def switch_drafts(drafts: Drafts, is_on: bool) -> None:
    """Turn drafts on or off. No request may be running."""
    vars(drafts).pop("take", None)
    if not is_on:
        drafts.take = lambda *_: (None, [])


def has_drafts(drafts: Drafts) -> bool:
    """Return whether sequences draft, as `switch_drafts` set it."""
    return "take" not in vars(drafts)


def replace_guesses(runner: Runner, change: Callable[[Tensor], Tensor] | None) -> None:
    """Replace the tokens that the device drafts, int64 `[rows]`, by those of `change`; drafting runs at its full cost.

    None: replace them no longer.
    """
    sampler = runner._sampler
    vars(sampler).pop("guess", None)
    if change is not None:
        guess = sampler.guess
        sampler.guess = lambda *given: change(guess(*given))


def set_adaptive(evictor: Evictor, is_adaptive: bool) -> None:
    """Let offloaded blocks stay resident until their pages are needed, or evict them at once, so that the host is asked
    for all of them. No request may be running.
    """
    evictor._host = replace(evictor._host, is_adaptive=is_adaptive)


@contextmanager
def one_in_flight() -> Iterator[None]:
    """Collect each step before the next of its lane is launched, so that the device waits for Python in between."""
    module: Any = scheduler.engine.engine
    before, module.MOST_IN_FLIGHT = module.MOST_IN_FLIGHT, 1
    try:
        yield
    finally:
        module.MOST_IN_FLIGHT = before


def forget_chunks(store: ChunkStore) -> None:
    """Evict from memory all chunks that no request reads; the files stay, so the next reads come from disk."""
    store.finish_reads()
    with store._lock:
        for entry in [one for one in store._entries.values() if one.is_idle]:
            store._forget(entry)
            store._end(entry)
