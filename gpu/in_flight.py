"""Hold a launched step: its results, the time it took, and the rows that failed.

If the host's answers of a step fail, its rows are void, and so are rows of the same sequences in all later steps. If
another sequence has taken the slot meanwhile, that sequence does not fail.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from gpu.decode.answering import Answers
from gpu.prefill.outputs import FinishedJob
from gpu.sampling.sampler import Drawing
from gpu.step import NOT_FINITE, Lane, SampledToken, StepResult


class Timer:
    """Seconds between two points of the device's stream: CUDA events, or the wall clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._times = [0.0, 0.0]

    def mark(self, point: int) -> None:
        """Record the begin (point 0) or the end (point 1)."""
        if self._events:
            self._events[point].record()
        else:
            self._times[point] = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has passed the end."""
        if self._events:
            self._events[1].synchronize()

    @property
    def is_over(self) -> bool:
        """Return whether the device has passed the end."""
        return not self._events or self._events[1].query()

    @property
    def seconds(self) -> float:
        """Return the seconds between begin and end, after `wait`."""
        if self._events:
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._times[1] - self._times[0]


@dataclass(frozen=True, slots=True)
class Awaited:
    """Answers of the host that a step waits for, and the slots of the rows that need them."""

    answers: Answers
    slots: Sequence[int]


def is_decoded(awaited: Sequence[Awaited], decode: Timer | None) -> bool:
    """Return whether a step's rows are computed, drawn or not. decode: the timer of the rows; None: there are none."""
    return all(one.answers.is_over for one in awaited) and (decode is None or decode.is_over)


@dataclass(eq=False, slots=True)
class InFlight:
    """A step that was launched and not collected yet.

    finished_jobs, decoded: results; their tokens may be drawn later.
    released: slots whose sequences had ended before the step.
    stepped: slots that decode in it.
    failures: by slot, why its decode or offload in this step failed.
    all_failures: the runner's failures by slot; such a slot cannot continue until it is released.
    on_collected: called with the result.
    behind: the step that was launched next.
    """

    lane: Lane
    finished_jobs: list[FinishedJob]
    decoded: list[Drawing]
    awaited: list[Awaited]
    units: Timer | None
    decode: Timer | None
    whole: Timer
    released: Collection[int]
    stepped: Collection[int]
    failures: dict[int, str]
    all_failures: dict[int, str]
    on_collected: Callable[[StepResult], None] | None = None
    behind: "InFlight | None" = field(default=None, init=False)

    @property
    def drawings(self) -> list[Drawing]:
        return [*(job.drawing for job in self.finished_jobs), *self.decoded]

    def drafted(self) -> dict[int, list[int]]:
        """Return the tokens that the device drafted, by slot. It waits for the current stream."""
        drafts: dict[int, list[int]] = {}
        for one in self.decoded:
            if one.drafted is not None:
                known = iter(one.drafted.tolist())
                drafts |= {slot: [*islice(known, len(draft))]
                           for slot, draft in zip(one.slots, one.drafts or (), strict=True)}  # fmt: skip
        return drafts

    def end(self) -> None:
        """Start the copies to the host on the current stream and mark the end of the step. All draws are launched."""
        for job in self.finished_jobs:
            job.copy_to_host()
        for drawing in self.decoded:
            drawing.copy_to_host()
        self.whole.mark(1)

    @property
    def is_over(self) -> bool:
        """Return whether `collect` would not wait. Call it after `end`."""
        return all(awaited.answers.is_over for awaited in self.awaited) and self.whole.is_over

    def collect(self) -> StepResult:
        """Wait for this step alone, and return its tokens: of finished prompts, of decode groups, of failed slots.

        It waits for the host's answers first: a thread that waits for the device spins on a core that they may need.
        """
        for awaited in self.awaited:
            reason = awaited.answers.wait()
            if reason is not None:
                self._fail(dict.fromkeys(awaited.slots, reason))
        self.whole.wait()
        tokens = [token for job in self.finished_jobs for token in job.drawing.to_host()]
        drawn = [token for drawing in self.decoded for token in drawing.to_host()]
        tokens += [token for token in drawn if token.slot not in self.failures]
        tokens += [SampledToken(slot, NOT_FINITE, None) for slot in self.failures]
        logprobs = [entry for job in self.finished_jobs for entry in job.prompt_logprobs.items()]
        result = StepResult(
            tokens=tuple(tokens),
            prompt_logprobs={slot: tuple(own.to_list()) for slot, own in logprobs},
            unit_seconds=self.units.seconds if self.units else 0.0,
            decode_seconds=self.decode.seconds if self.decode else 0.0,
            host_seconds=sum(awaited.answers.attended_s for awaited in self.awaited),
            num_parts=max((len(awaited.answers.parts) for awaited in self.awaited), default=0),
            failures=self.failures,
            pooled={slot: vector.numpy() for job in self.finished_jobs for slot, vector in job.pooled.items()},
        )
        if self.on_collected is not None:
            self.on_collected(result)
        return result

    def _fail(self, reasons: dict[int, str]) -> None:
        """Mark slots as failed in this step, in those launched after it, and in all to come."""
        step: InFlight | None = self
        while step is not None:
            if step is not self:
                reasons = {slot: reason for slot, reason in reasons.items() if slot not in step.released}
            for slot in step.stepped:
                if slot in reasons:
                    step.failures.setdefault(slot, reasons[slot])
            step = step.behind
        self.all_failures |= reasons
