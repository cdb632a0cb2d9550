"""Run steps that no request asked for, on free pages, to compile kernels and to time prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gpu.in_flight import InFlight
from gpu.kv.pool import KvPool
from gpu.methods.prefill_side import PrefillSide, warm_up_sides
from gpu.model.architecture import Architecture
from gpu.prefill.dense import Dense
from gpu.prefill.jobs import Prefill
from gpu.profiles import FULL_ATTENTION
from gpu.ranks import Ranks
from gpu.sampling_params import SamplingParams
from gpu.step import (
    DENSE,
    DecodeGroup,
    HostRead,
    Offload,
    PageEviction,
    PageWrite,
    PartId,
    PrefillJob,
    PrefillPrompt,
    PrefillUnit,
    RingWrite,
    StepPlan,
    TablePlace,
)
from gpu.weights.weights import Progress
from transfer.host_tier import HostMemoryError, HostTier
from transfer.reading import Reading

TIMED_PROMPTS = 3  # the fastest of these counts
CPU_WARM_UP_TOKENS = 8  # few are enough: code on the CPU is not compiled for a number of tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that a scheduler's plans must respect."""

    num_pages: int
    page_tokens: int
    max_context_tokens: int
    max_running: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Rehearses on a runner's own parts, before it serves and while it is idle.

    launch: carries out a plan.
    sides: how prefill methods attend, by part.
    rings: the parts whose methods keep rings.
    tier: host memory, or None without.
    is_on_gpu: whether kernels are chosen and graphs captured.
    ranks: which capture the same graphs, or None.
    """

    launch: Callable[[StepPlan], InFlight]
    limits: Limits
    architecture: Architecture
    pool: KvPool
    prefill: Prefill
    dense: Dense
    sides: Mapping[PartId, PrefillSide]
    rings: Sequence[PartId]
    tier: HostTier | None
    is_on_gpu: bool
    ranks: Ranks | None = None

    @torch.inference_mode()
    def capture_prefill(self, sizes: Sequence[int]) -> None:
        """Capture layers of prefill units of up to these numbers of tokens, where that is faster. Does nothing on the
        CPU. Call it after `warm_up`, whose longest unit sets the size of the windows' buffer.
        """
        limits = self.limits
        most = min(limits.max_context_tokens, limits.num_pages * limits.page_tokens) - 1

        def seconds(num_tokens: int) -> float:
            took = min(self.time_prefill([min(num_tokens, most)], DENSE)[1] for _ in range(TIMED_PROMPTS))
            return took if self.ranks is None else self.ranks.most(took)

        if self.is_on_gpu:
            self.prefill.capture([size for size in sizes if size <= most], seconds)

    @torch.inference_mode()
    def warm_up(self, chunk_tokens: int, on_progress: Progress) -> None:
        """Compile kernels now instead of in a request. It chooses prefill's kernel, runs prefill methods on arbitrary
        numbers, and runs one prefill chunk and one decode step on free pages.

        With a tier, a small context of each kind is offloaded, decoded and closed. With rings, each method fills and
        matches one. On a GPU, `on_progress(fraction)` is called after each of these. On the CPU nearly all time goes to
        functions that numba compiles, which `transfer.simd.compilation` reports.
        """
        steps = self._warm_up_steps(chunk_tokens)
        for num_done, step in enumerate(steps, 1):
            step()
            if self.is_on_gpu:
                on_progress(num_done / (len(steps) + 1))

    def _warm_up_steps(self, chunk_tokens: int) -> list[Callable[[], object]]:
        limits = self.limits
        longest = chunk_tokens if self.is_on_gpu else CPU_WARM_UP_TOKENS
        tokens = min(longest, limits.max_context_tokens, limits.num_pages * limits.page_tokens)
        gathered, heads = self.prefill.gathered, self.architecture.num_heads
        last_layer = self.architecture.main_layers - 1
        keys, values = gathered.keys.flatten(1, 2), gathered.values.flatten(1, 2)
        steps: list[Callable[[], object]] = [partial(self.dense.choose, keys, values, heads, chunk_tokens)]
        if self.is_on_gpu:
            steps += [
                partial(warm_up_sides, self.sides.values(), keys, values, heads, chunk_tokens, last_layer),
                partial(self.prefill.decoder.projections.warm_up, chunk_tokens),
            ]
        steps.append(self.prefill.warm_up_chunks)
        rehearse = partial(self._rehearse, [tokens - 1], DENSE, [], [], [DecodeGroup([0], [tokens - 1], [1])])
        steps += [rehearse, *(partial(rehearse, [RingWrite(0, part, 0, Reading.BLOCKS)]) for part in self.rings)]
        if self.tier is not None:
            readings = dict.fromkeys(reading.on_cpu(self.tier.shape.num_tables) for reading in Reading)
            steps += [partial(self._warm_up_host, reading) for reading in readings]
        return steps

    @torch.inference_mode()
    def time_prefill(self, lengths: Sequence[int], method: PartId) -> tuple[list[PrefillUnit], float]:
        """Prefill a job of prompts of these lengths on free pages. Return its units, and their total seconds.

        The second of two runs counts, because the first may compile and choose kernels for the shape.
        """
        for _ in range(2):
            units, seconds = self._rehearse(lengths, method, [], [], [])
        return units, seconds

    def _rehearse(
        self,
        lengths: Sequence[int],
        method: PartId,
        offloads: list[Offload],
        releases: list[PageEviction],
        decode: list[DecodeGroup],
        ring_writes: Sequence[RingWrite] = (),
    ) -> tuple[list[PrefillUnit], float]:
        """Prefill one job in slots from 0 on, layer by layer in one step; then offload, evict, decode, drop it."""
        greedy = SamplingParams(temperature=0.0)
        prompts, writes, num_pages = [], [], 0
        for slot, length in enumerate(lengths):
            prompts.append(PrefillPrompt(slot, np.zeros(length, np.int32), 0, length, greedy, FULL_ATTENTION))
            pages = range(num_pages, num_pages + length // self.limits.page_tokens + 1)
            writes.append(PageWrite(slot, 0, list(pages)))
            num_pages = pages.stop
        units = [PrefillUnit(0, layer, 0, sum(lengths), method) for layer in range(self.architecture.main_layers)]
        contexts = [offload.context_id for offload in offloads]
        job = PrefillJob(0, prompts)
        prefill = StepPlan(page_writes=writes, ring_writes=list(ring_writes), new_jobs=[job], units=units)
        after = StepPlan(released_slots=list(range(len(lengths))), closed_contexts=contexts)
        seconds = 0.0
        for plan in (prefill, StepPlan(offloads=offloads, evictions=releases, decode=decode), after):
            result = self.launch(plan).collect()
            for reason in result.failures.values():
                raise HostMemoryError(reason)
            seconds = max(seconds, result.unit_seconds)
        return units, seconds

    def _warm_up_host(self, reading: Reading) -> None:
        """Run a context of three pages of tokens, of which the middle one is offloaded."""
        page = self.limits.page_tokens
        offload = Offload(0, 0, page, 2 * page, [1], is_new_context=True, reading=reading)
        release = PageEviction([1], self.pool.layout.dense_pages([1], 0, 1), [TablePlace(0, 1)])
        decode = [DecodeGroup([0], [3 * page - 1], [1], [HostRead(0, page, 2 * page)])]
        self._rehearse([3 * page - 1], DENSE, [offload], [release], decode)
