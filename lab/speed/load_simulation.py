"""Simulate a load: the engine's own scheduler runs over a device that takes stated times and computes nothing.

Default times are of an 8B model in bf16 on an H100, each measured alone: 27,000 prompt tokens a second, and decode
steps of 5.4 ms for one row and 7.1 ms for 64. They leave out what attention adds with the context. The host is assumed
never to be late. Requests reach the engine one after another, each after `request_s`.
"""

from bisect import insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from gpu.model.architecture import Architecture
from gpu.profiles import Profile
from gpu.sampling_params import SamplingParams
from gpu.step import HostRead, LogitsUnit, PrefillUnit, SampledToken, StepPlan, StepResult, Unit
from lab.speed.token_turns import TokenLoad, Turn, draw_tokens
from scheduler.engine.engine import Engine
from scheduler.engine_config import SchedulerConfig
from scheduler.messages import EngineRequest, pack_tokens
from scheduler.prefill.prefill_queue import QUIET_STEP_SECONDS
from scheduler.sequences.capacity import Capacity
from scheduler.steps.scheduler import Device, Scheduler

_PAGE = 16


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Seconds of the device's work. unit_s: of a prefill unit in addition to its tokens. most_rows_s: of a decode step
    with 64 rows. weights_s: of a decode step's read of the weights. request_s: of a request's way to the engine.
    """

    prompt_tokens_per_s: float = 27_000
    unit_s: float = 0.15e-3
    one_row_s: float = 5.4e-3
    most_rows_s: float = 7.1e-3
    weights_s: float = 4.8e-3
    request_s: float = 0.5e-3

    def decode_seconds(self, num_rows: int) -> float:
        return self.one_row_s + (self.most_rows_s - self.one_row_s) * (num_rows - 1) / 63 if num_rows else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The seconds of a load, and its turns. few_rows_s: of decode steps while prompts waited; num_few_rows: their
    number.
    """

    seconds: float
    prefill_s: float
    decode_s: float
    few_rows_s: float
    num_few_rows: int
    turns: list[Turn]


@dataclass(slots=True)
class _Launched:
    result: StepResult
    ends_s: float
    runner: "SimulatedRunner"
    is_over: bool = True

    def collect(self) -> StepResult:
        self.runner.collected_s = max(self.runner.collected_s, self.ends_s)
        return self.result


@dataclass(slots=True)
class SimulatedRunner:
    """A runner that only keeps clocks. clock_s: when all launched work ends. collected_s: the host's time, which is at
    least the time of the last collected result.
    """

    times: DeviceTimes
    num_layers: int
    clock_s: float = 0.0
    collected_s: float = 0.0
    prefill_s: float = 0.0
    decodes: list[tuple[float, int, bool]] = field(default_factory=list)  # seconds, rows, whether prompts are under way
    _slots: dict[int, list[int]] = field(default_factory=dict)  # the slots of a job's prompts, by job
    _left: dict[int, int] = field(default_factory=dict)  # tokens times layers that are left, by job

    def is_ready(self, _: HostRead) -> bool:
        return True

    def method_counts(self) -> dict[str, dict[str, list[int]]]:
        return {}

    def request_figures(self, _: Collection[int]) -> dict[int, dict[str, int]]:
        return {}

    def expert_counts(self) -> None:
        """Return no counts: all experts are on the device."""

    def draw(self, step: _Launched, masks: dict[int, object]) -> None:
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
        self.clock_s = max(self.clock_s, self.collected_s) + unit_s + decode_s
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


class Clients:
    """Sends the requests of a load on the simulated clock. Turns of a chat follow one another, and at most
    `load.concurrency` chats are open at once.
    """

    def __init__(self, load: TokenLoad, request_s: float) -> None:
        arrivals = load.arrivals() or [0.0] * load.requests
        concurrency = load.concurrency or load.requests
        self.turns: list[Turn] = []
        self._load = load
        self._request_s = request_s
        self._unopened = deque(enumerate(arrivals))
        self._sent: list[tuple[float, int, int]] = []  # arrival time, chat and turn, in order
        self._open: dict[str, tuple[int, int, Turn]] = {}
        self._prompts: dict[int, list[int]] = {}
        self._free_s = 0.0  # when the next request can start on its way to the engine
        for _ in range(min(concurrency, load.requests)):
            self._open_next(0.0)

    @property
    def next_s(self) -> float | None:
        """Return when the next request arrives; None if none is on its way."""
        return self._sent[0][0] if self._sent else None

    def take(self, now_s: float) -> list[EngineRequest]:
        """Return the requests that have arrived by now."""
        requests = []
        while self._sent and self._sent[0][0] <= now_s:
            _, chat, number = self._sent.pop(0)
            self._prompts.setdefault(chat, []).extend(draw_tokens(self._load, chat, number))
            requests.append(make_request(f"{chat}.{number}", self._prompts[chat], self._load.tokens_out))
        return requests

    def tell(self, request_id: str, token_ids: list[int], is_over: bool, now_s: float) -> None:
        """Give tokens of its answer to a client. At the answer's end its chat continues, or the next chat begins."""
        chat, number, turn = self._open[request_id]
        turn.times_s.append(now_s)
        turn.token_ids += token_ids
        if not is_over:
            return
        del self._open[request_id]
        self._prompts[chat] += turn.token_ids
        if number + 1 < self._load.turns:
            self._send(chat, number + 1, now_s)
        else:
            del self._prompts[chat]
            self._open_next(now_s)

    def _open_next(self, now_s: float) -> None:
        if self._unopened:
            chat, due_s = self._unopened.popleft()
            self._send(chat, 0, due_s if self._load.rate is not None else now_s)

    def _send(self, chat: int, number: int, due_s: float) -> None:
        turn = Turn(due_s, sent_s=due_s)
        self.turns.append(turn)
        self._open[f"{chat}.{number}"] = chat, number, turn
        self._free_s = max(self._free_s, due_s) + self._request_s
        insort(self._sent, (self._free_s, chat, number))


def simulate(config: SchedulerConfig, architecture: Architecture, load: TokenLoad, times: DeviceTimes) -> Outcome:
    """Run a load until the last token. The simulated device has room for all of it, with all prefixes."""
    runner = SimulatedRunner(times, architecture.num_layers)
    most_tokens = load.turns * (load.tokens_in + load.tokens_out)
    hidden_tokens = most_tokens + 4 * config.prefill.chunk_tokens
    num_pages = load.requests * (most_tokens + 2 * _PAGE) // _PAGE
    capacity = Capacity(num_pages, _PAGE, most_tokens, hidden_tokens, None, {}, 0, 0)
    profile = Profile("exact", kv_key="exact", parts=())
    device = Device(quiet_step_seconds=QUIET_STEP_SECONDS)
    scheduler = Scheduler(config, architecture, capacity, b"load", {"exact": profile}, device)
    for num_tokens in (64, config.prefill.chunk_tokens - 1):  # as at an engine's start
        unit = PrefillUnit(0, 0, 0, num_tokens)
        scheduler.learn_units([unit], [num_tokens], runner.unit_seconds(num_tokens))
    engine = Engine(scheduler, runner, None, is_pipelined=True)  # type: ignore[arg-type]
    clients = Clients(load, times.request_s)
    while engine.has_work or clients.next_s is not None:
        if not engine.has_work and clients.next_s is not None:
            runner.collected_s = max(runner.collected_s, clients.next_s)
        for request in clients.take(runner.collected_s):
            engine.submit([request])
        for delta in engine.step():
            clients.tell(delta.request_id, delta.token_ids, delta.finish_reason is not None, runner.collected_s)
    few = [seconds for seconds, _, has_prompts in runner.decodes if has_prompts]
    return Outcome(
        seconds=runner.clock_s,
        prefill_s=runner.prefill_s,
        decode_s=sum(seconds for seconds, _, _ in runner.decodes),
        few_rows_s=sum(few),
        num_few_rows=len(few),
        turns=clients.turns,
    )


def make_request(name: str, prompt: list[int], tokens_out: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=tokens_out,
        stop_token_ids=(),
        attention_profile="exact",
        arrival_s=0.0,
    )
