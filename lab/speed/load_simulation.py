"""Simulate a load: the engine's own scheduler over a device that takes stated times and computes nothing.

Times are of an 8B in bf16 on a H100 unless told otherwise, each measured alone: 27,000 prompt tokens a second, and
decode steps of 5.4 ms for one row and 7.1 ms for 64. The host is taken to be never late.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from gpu.model.architecture import Architecture
from gpu.profiles import Profile
from gpu.sampling_params import SamplingParams
from gpu.step import HostRead, LogitsUnit, SampledToken, StepPlan, StepResult, Unit
from scheduler.engine.engine import Engine
from scheduler.engine_config import SchedulerConfig
from scheduler.messages import EngineRequest, pack_tokens
from scheduler.sequences.capacity import Capacity
from scheduler.steps.scheduler import Scheduler

_PAGE = 16


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Seconds of the device's work. `unit_s`: of a prefill unit beside its tokens; `most_rows_s`: of 64 rows."""

    prompt_tokens_per_s: float = 27_000
    unit_s: float = 0.15e-3
    one_row_s: float = 5.4e-3
    most_rows_s: float = 7.1e-3

    def decode_seconds(self, num_rows: int) -> float:
        return self.one_row_s + (self.most_rows_s - self.one_row_s) * (num_rows - 1) / 63 if num_rows else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at once, of so many tokens in and out."""

    requests: int
    tokens_in: int
    tokens_out: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a load. `few_rows_s`: of decode steps while prompts waited, which `num_few_rows` counts."""

    seconds: float
    prefill_s: float
    decode_s: float
    few_rows_s: float
    num_few_rows: int
    gaps_s: list[float]
    firsts_s: list[float]


@dataclass(slots=True)
class _Launched:
    result: StepResult
    ends_s: float
    runner: "SimulatedRunner"
    is_over: bool = True

    def collect(self) -> StepResult:
        self.runner.collected_s = self.ends_s
        return self.result


@dataclass(slots=True)
class SimulatedRunner:
    """A device's clock. `clock_s`: when all that was launched is over; `collected_s`: when the last result was."""

    times: DeviceTimes
    num_layers: int
    clock_s: float = 0.0
    collected_s: float = 0.0
    prefill_s: float = 0.0
    decodes: list[tuple[float, int, bool]] = field(default_factory=list)  # seconds, rows, whether prompts are under way
    _slots: dict[int, list[int]] = field(default_factory=dict)  # by job, of its prompts
    _left: dict[int, int] = field(default_factory=dict)  # by job, token-layers

    def is_ready(self, _: HostRead) -> bool:
        return True

    def method_counts(self) -> dict[str, dict[str, list[int]]]:
        return {}

    def request_figures(self, _: Collection[int]) -> dict[int, dict[str, int]]:
        return {}

    def expert_counts(self) -> None:
        """Return no counts: all experts lie on the device."""

    def draw(self, step: _Launched, masks: dict[int, np.ndarray]) -> None:
        raise AssertionError("load simulation: no request has a grammar")

    def launch(self, plan: StepPlan) -> _Launched:
        for job in plan.new_jobs:
            self._slots[job.job_id] = [prompt.slot for prompt in job.prompts]
            self._left[job.job_id] = self.num_layers * job.num_tokens
        slots = [slot for group in plan.decode for slot in group.slots]
        has_prompts = bool(self._left)
        slots_begun = [slot for unit in plan.units for slot in self._advance(unit)]
        unit_s = sum(self.unit_seconds(unit.end - unit.begin) for unit in plan.units)
        decode_s = self.times.decode_seconds(len(slots))
        self.prefill_s += unit_s
        if slots:
            self.decodes.append((decode_s, len(slots), has_prompts))
        self.clock_s += unit_s + decode_s
        tokens = [SampledToken(slot, 1, None) for slot in (*slots_begun, *slots)]
        return _Launched(StepResult(tuple(tokens), {}, unit_s, decode_s), self.clock_s, self)

    def unit_seconds(self, num_tokens: int) -> float:
        return self.times.unit_s + num_tokens / (self.times.prompt_tokens_per_s * self.num_layers)

    def _advance(self, unit: Unit) -> list[int]:
        """Return the slots that draw their first token."""
        assert not isinstance(unit, LogitsUnit), "load simulation: no prompt is scored"
        self._left[unit.job_id] -= unit.end - unit.begin
        if self._left[unit.job_id]:
            return []
        del self._left[unit.job_id]
        return self._slots.pop(unit.job_id)


def simulate(
    config: SchedulerConfig, architecture: Architecture, load: Load, times: DeviceTimes, concurrency: int
) -> Outcome:
    """Run a load, of which `concurrency` requests are open at once, until the last token."""
    runner = SimulatedRunner(times, architecture.num_layers)
    chunk_tokens = config.prefill.chunk_tokens
    hidden_tokens = max(4 * chunk_tokens, load.tokens_in)
    num_pages = load.requests * (load.tokens_in + load.tokens_out + 2 * _PAGE) // _PAGE
    capacity = Capacity(num_pages, _PAGE, load.tokens_in + load.tokens_out, hidden_tokens, None, {}, 0, 0)
    profile = Profile("exact", kv_key="exact", parts=())
    scheduler = Scheduler(config, architecture, capacity, b"load", {"exact": profile})
    engine = Engine(scheduler, runner, None, is_pipelined=True)  # type: ignore[arg-type]
    waiting = deque(_requests(load))
    told_s: dict[str, list[float]] = {}
    begun_s: dict[str, float] = {}

    def submit(count: int) -> None:
        for _ in range(min(count, len(waiting))):
            request = waiting.popleft()
            begun_s[request.request_id] = runner.collected_s
            engine.submit([request])

    submit(concurrency)
    while engine.has_work:
        deltas = engine.step()
        for delta in deltas:
            told_s.setdefault(delta.request_id, []).append(runner.collected_s)
        submit(sum(delta.finish_reason is not None for delta in deltas))
    few = [seconds for seconds, _, has_prompts in runner.decodes if has_prompts]
    return Outcome(
        seconds=runner.clock_s,
        prefill_s=runner.prefill_s,
        decode_s=sum(seconds for seconds, _, _ in runner.decodes),
        few_rows_s=sum(few),
        num_few_rows=len(few),
        gaps_s=[after - before for own in told_s.values() for before, after in pairwise(own)],
        firsts_s=[own[0] - begun_s[name] for name, own in told_s.items()],
    )


def _requests(load: Load) -> list[EngineRequest]:
    random = np.random.default_rng(0)
    prompts = random.integers(3, 500, (load.requests, load.tokens_in)).tolist()
    return [
        EngineRequest(
            request_id=str(number),
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=load.tokens_out,
            stop_token_ids=[],
            attention_profile="exact",
            arrival_s=0.0,
        )
        for number, prompt in enumerate(prompts)
    ]
