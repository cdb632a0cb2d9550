"""Patch an engine from outside for who measures: production code has no switch for what only a benchmark wants."""

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
    """Have `note` see each step's result before anything is made of it, from now on."""
    postprocess = steps.postprocess

    def noting(result: StepResult, *lane: Any) -> Any:
        note(result)
        return postprocess(result, *lane)

    steps.postprocess = noting


def switch_drafts(drafts: Drafts, is_on: bool) -> None:
    """Have sequences draft, or not, with nothing under way."""
    vars(drafts).pop("take", None)
    if not is_on:
        drafts.take = lambda *_: (None, [])


def has_drafts(drafts: Drafts) -> bool:
    """Return whether sequences draft, as `switch_drafts` has left it."""
    return "take" not in vars(drafts)


def replace_guesses(runner: Runner, change: Callable[[Tensor], Tensor] | None) -> None:
    """Have other tokens, int64 `[rows]`, in place of those that the device drafts, which cost what they cost; None: no
    more.
    """
    sampler = runner._sampler
    vars(sampler).pop("guess", None)
    if change is not None:
        guess = sampler.guess
        sampler.guess = lambda *given: change(guess(*given))


def set_adaptive(evictor: Evictor, is_adaptive: bool) -> None:
    """Have offloaded blocks stay resident while nobody needs their pages, or be evicted at once; nothing is under way.

    The latter has the host asked for all of them.
    """
    evictor._host = replace(evictor._host, is_adaptive=is_adaptive)


@contextmanager
def one_in_flight() -> Iterator[None]:
    """Have each step collected before the next of its lane is launched: the device waits for Python between two."""
    module: Any = scheduler.engine.engine
    before, module.MOST_IN_FLIGHT = module.MOST_IN_FLIGHT, 1
    try:
        yield
    finally:
        module.MOST_IN_FLIGHT = before


def forget_chunks(store: ChunkStore) -> None:
    """Evict from memory all chunks that nobody reads; files stay, and the next reads come from the disk."""
    store.finish_reads()
    with store._lock:
        for entry in [one for one in store._entries.values() if one.is_idle]:
            store._forget(entry)
            store._end(entry)
