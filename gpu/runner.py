"""The runner: carries out step plans on one device, in order, without waiting for it.

It refuses to know requests, queues and who owns a page: a plan says all. Invariants: everything a plan asks for is
launched on one stream, so a later plan may release a slot, reuse its pages or decode its next token while an earlier
step is still in flight; a sequence whose logits are not finite gets token -1 and disturbs no other.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu.architecture import Architecture
from gpu.decode_graphs import DecodeSteps
from gpu.decoder import Decoder
from gpu.kernels.paged_decode_attention import workspace_for
from gpu.kv_pool import KvPool
from gpu.prefill import FinishedJob, Prefill
from gpu.profiles import PROFILES, get_profile
from gpu.sampler import Sampled, Sampler
from gpu.sampling_params import SamplingParams
from gpu.step import (
    DecodeGroup,
    PageWrite,
    PrefillJob,
    PrefillPrompt,
    PrefillUnit,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from gpu.upload import upload
from gpu.weights import Progress, Weights

CPU_WARM_UP_TOKENS = 8  # nothing on the CPU is compiled for a number of tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler must keep to."""

    num_pages: int
    page_tokens: int
    max_context_tokens: int
    max_running: int
    vocab_size: int


class Timer:
    """Seconds between two points of the device's stream: CUDA events, or the wall clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._times = [0.0, 0.0]

    def mark(self, point: int) -> None:
        """Set the begin (0) or the end (1)."""
        if self._events:
            self._events[point].record()
        else:
            self._times[point] = time.perf_counter()

    def wait(self) -> None:
        """Until the device has passed the end."""
        if self._events:
            self._events[1].synchronize()

    @property
    def seconds(self) -> float:
        """After `wait`."""
        if self._events:
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._times[1] - self._times[0]


@dataclass(slots=True)
class InFlight:
    """A step that was launched."""

    finished_jobs: list[FinishedJob]
    decoded: list[Sampled]
    units: Timer | None
    decode: Timer | None
    whole: Timer

    def collect(self) -> StepResult:
        """Wait for the step, and only for it, and read its tokens: finished prompts first, then decode groups."""
        self.whole.wait()
        tokens = [token for job in self.finished_jobs for token in job.sampled.to_host()]
        tokens += [token for sampled in self.decoded for token in sampled.to_host()]
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        for job in self.finished_jobs:
            prompt_logprobs.update(job.prompt_logprobs_to_host())
        return StepResult(
            tokens=tokens,
            prompt_logprobs=prompt_logprobs,
            unit_seconds=self.units.seconds if self.units else 0.0,
            decode_seconds=self.decode.seconds if self.decode else 0.0,
        )


class Runner:
    """One model on one device. Not thread-safe: one thread launches, and it may collect later."""

    def __init__(self, architecture: Architecture, weights: Weights, *, num_pages: int, page_tokens: int,
                 max_running: int, max_context_tokens: int, max_hidden_tokens: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        self.architecture = architecture
        self.weights = weights
        self.device = device
        self.limits = Limits(num_pages, page_tokens, max_context_tokens, max_running, architecture.vocab_size)
        self.pool = KvPool(architecture, num_pages, 0, (), page_tokens, max_running, max_context_tokens, dtype, device)
        decoder = Decoder(architecture, weights, self.pool, max_context_tokens)
        self._sampler = Sampler(max_running, architecture.vocab_size, device)
        self._prefill = Prefill(decoder, self._sampler, max_hidden_tokens)
        self._last_tokens = torch.zeros(max_running + 1, dtype=torch.int64, device=device)
        workspace = workspace_for(
            max_running, architecture.num_heads, architecture.num_kv_heads, architecture.dim, max_context_tokens, device
        )
        self._decode_steps = {
            name: DecodeSteps(decoder, profile.load_decode_attention(), self._last_tokens, workspace)
            for name, profile in PROFILES.items()
        }

    @property
    def num_prefill_jobs(self) -> int:
        return self._prefill.num_jobs

    def decode_steps(self, profile: str) -> DecodeSteps:
        """The decode steps of an attention profile. Raises ProfileError for an unknown one."""
        return self._decode_steps[get_profile(profile, None).name]

    @torch.inference_mode()
    def capture(self, batch_sizes: Sequence[int], on_progress: Progress) -> None:
        """Capture the decode steps of all profiles as CUDA graphs; does nothing on the CPU."""
        sizes = sorted({min(size, self.limits.max_running) for size in batch_sizes})
        if self.device.type != "cuda" or not sizes:
            return
        for done, steps in enumerate(self._decode_steps.values()):
            begin = done / len(self._decode_steps)
            steps.capture(sizes, lambda part, begin=begin: on_progress(begin + part / len(self._decode_steps)))

    @torch.inference_mode()
    def warm_up(self, chunk_tokens: int) -> None:
        """Run one prefill chunk and one decode step on pages nobody owns yet: kernels compile now, not in a request."""
        limits = self.limits
        longest = chunk_tokens if self.device.type == "cuda" else CPU_WARM_UP_TOKENS
        tokens = min(longest, limits.max_context_tokens, limits.num_pages * limits.page_tokens)
        greedy = SamplingParams(temperature=0.0)
        prompt = PrefillPrompt(0, np.zeros(tokens - 1, np.int32), 0, tokens - 1, greedy, next(iter(PROFILES)))
        layers = range(self.architecture.num_layers)
        pages = list(range(-(-tokens // limits.page_tokens)))
        self.launch(
            StepPlan(
                page_writes=[PageWrite(0, 0, pages)],
                new_jobs=[PrefillJob(0, [prompt])],
                units=[PrefillUnit(0, layer, 0, tokens - 1) for layer in layers],
                decode=[DecodeGroup(name, [0], [tokens - 1], [1]) for name in PROFILES],
            )
        ).collect()
        self.launch(StepPlan(released_slots=[0])).collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Start a step, in the plan's field order; on the CPU it has run when this returns."""
        whole = Timer(self.device)
        whole.mark(0)
        for slot in plan.released_slots:
            self._sampler.release(slot)
        for job_id in plan.dropped_jobs:
            self._prefill.drop(job_id)
        self.pool.write_pages(plan.page_writes)
        for job in plan.new_jobs:
            self._prefill.add(job)
        finished, units = self._launch_units(plan.units)
        decoded, decode = self._launch_decode(plan.decode)
        for job in finished:
            job.copy_to_host()
        for sampled in decoded:
            sampled.copy_to_host()
        whole.mark(1)
        return InFlight(finished, decoded, units, decode, whole)

    def _launch_units(self, units: Sequence[PrefillUnit]) -> tuple[list[FinishedJob], Timer | None]:
        if not units:
            return [], None
        timer = Timer(self.device)
        timer.mark(0)
        finished = []
        for unit in units:
            job = self._prefill.run(unit)
            if job is not None:
                self._feed_back(job.sampled)
                finished.append(job)
        timer.mark(1)
        return finished, timer

    def _launch_decode(self, groups: Sequence[DecodeGroup]) -> tuple[list[Sampled], Timer | None]:
        if not groups:
            return [], None
        timer = Timer(self.device)
        timer.mark(0)
        decoded = []
        for group in groups:
            logits = self.decode_steps(group.profile).run(group.slots, group.positions)
            sampled = self._sampler.sample(logits, group.slots, group.samples)
            self._feed_back(sampled)
            decoded.append(sampled)
        timer.mark(1)
        return decoded, timer

    def _feed_back(self, sampled: Sampled) -> None:
        """What was drawn is the next step's input."""
        slots = upload(np.array(sampled.slots, dtype=np.int64), self.device)
        self._last_tokens.index_copy_(0, slots, sampled.tokens)
