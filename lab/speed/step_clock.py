"""Clock every turn and step of a serving engine's loop: when the host does what, and what the device runs meanwhile.

The clock is attached to the loop of an engine process (`watched_engine`), so an unwatched engine has no cost. Times are
seconds of `time.perf_counter`. Those of a GPU come from the events that every step records; one event at the beginning
puts them on that clock, to some microseconds. A span's seconds leave out those of the spans inside it.
"""

import gc
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu import in_flight
from gpu.in_flight import InFlight, Timer
from gpu.step import Lane, PrefillUnit, StepPlan, StepResult
from lab.speed.kernel_trace import KernelTrace
from scheduler.engine.engine_loop import Loop
from scheduler.messages import EngineRequest, Outputs
from scheduler.sequences.sequence import Sequence as Request

COMPILED, EAGER = -1, 0
"""Values in place of a captured graph's rows: the CPU's compiled step, and a step launched layer by layer."""
_LOOK_S = 0.05
Call = Callable[..., Any]


class Spans:
    """Seconds by name of calls on one thread, each without the calls inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []  # for each open span, the seconds of the spans inside it
        self._thread = threading.get_ident()

    def timed(self, name: str, call: Call) -> Call:
        def timed(*given: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*given, **named)
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return call(*given, **named)
            finally:
                self.note(name, time.perf_counter() - began, self._inner.pop())

        return timed

    def note(self, name: str, taken: float, inner: float = 0.0) -> None:
        """Add a span of `taken` seconds, `inner` of which belong to spans inside it."""
        self.seconds[name] += taken - inner
        if self._inner:
            self._inner[-1] += taken

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, and begin anew."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class StepClock:
    """The clock of one engine. turns, steps, requests: its records, as they are written to a file."""

    def __init__(self, loop: Loop, trace: KernelTrace | None) -> None:
        engine, connection = loop._engine, loop._connection
        self._engine, self._runner, self._scheduler = engine, engine._runner, engine.scheduler
        self._trace = trace
        self._next_look_s = 0.0
        self._spans = Spans()
        self._graph: int | None = None
        self._of_lanes: dict[Lane, deque[tuple[dict[str, Any], InFlight]]] = {lane: deque() for lane in Lane}
        self._turn_began_s = 0.0
        self._num_tokens = 0
        self._collecting_s = 0.0
        self.turns: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.requests: dict[str, dict[str, float]] = defaultdict(dict)
        self._anchor: torch.cuda.Event | None = None
        self._anchor_s = 0.0
        if self._runner.device.type == "cuda":
            self._anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            self._anchor.record()
            torch.cuda.synchronize()
            self._anchor_s = time.perf_counter()
        timed = self._spans.timed
        steps: Any = self._runner.decode_steps
        steps._find_captured = self._found(steps._find_captured)
        for thing, name, instead in (
            (loop._pulse, "begin_turn", self._begin_turn),
            (loop, "_handle", timed("queue a request", self._handle(loop._handle))),
            (connection, "receive", self._receive(connection.receive)),
            (connection, "send", timed("send", self._send(connection.send))),
            (self._scheduler, "progress", timed("tell progress", self._scheduler.progress)),
            (engine, "stats", timed("tell stats", engine.stats)),
            (engine, "step", timed("loop", engine.step)),
            (engine, "_collect", timed("collect", engine._collect)),
            (self._scheduler, "schedule", timed("schedule", self._scheduler.schedule)),
            (self._scheduler, "masks", timed("grammar masks", self._scheduler.masks)),
            (self._scheduler, "postprocess", timed("read result", self._postprocess(self._scheduler.postprocess))),
            (self._runner, "launch", timed("launch", self._launch(self._runner.launch))),
            (self._runner, "_launch_units", timed("launch units", self._runner._launch_units)),
            (self._runner, "_launch_decode", timed("launch decode", self._runner._launch_decode)),
            (self._runner, "_draw", timed("launch draws", self._runner._draw)),
        ):
            setattr(thing, name, instead)
        in_flight.Timer.wait = timed("wait for the device", Timer.wait)  # type: ignore[method-assign]
        if connection._reader is not None:
            connection._reader._prepare = self._prepare(connection._reader._prepare)
        gc.callbacks.append(self._collect_garbage)

    def end_turn(self) -> None:
        """End the current turn, if there is one."""
        now, seconds = time.perf_counter(), self._spans.take()
        if self._turn_began_s and seconds:
            told = {"begin": self._turn_began_s, "end": now, "tokens": self._num_tokens, "seconds": seconds}
            self.turns.append(told)
        self._num_tokens = 0

    def told(self) -> dict[str, Any]:
        """Return all records, the sizes of captured graphs, and the kernels of a traced window, if there was one."""
        sizes = sorted({size for _, size in self._runner.decode_steps._captured})
        kernels = None if self._trace is None else self._trace.told
        return {
            "device": self._runner.device.type,
            "graphs": sizes,
            "layers": self._runner.architecture.num_layers,
            "turns": self.turns,
            "steps": self.steps,
            "requests": list(self.requests.values()),
            "kernels": kernels,
        }

    # --- what the loop calls ------------------------------------------------------------------------------------------

    def _begin_turn(self) -> None:
        self.end_turn()
        self._turn_began_s = time.perf_counter()
        if self._trace is not None and self._turn_began_s >= self._next_look_s:
            self._next_look_s = self._turn_began_s + _LOOK_S
            self._trace.look()
            self._turn_began_s = time.perf_counter()

    def _receive(self, call: Call) -> Call:
        looks, waits = self._spans.timed("look for requests", call), self._spans.timed("idle", call)

        def receive(wait_seconds: float) -> Any:
            if not wait_seconds:
                return looks(wait_seconds)
            arrivals = waits(wait_seconds)
            self.end_turn()  # the wait is a turn of its own, which may begin before the load does
            self._turn_began_s = time.perf_counter()
            return arrivals

        return receive

    def _handle(self, call: Call) -> Call:
        def handle(message: Any) -> None:
            call(message)
            for sequence in getattr(message, "sequences", ()):
                self.requests[sequence.request_id]["queued"] = time.perf_counter()

        return handle

    def _prepare(self, call: Call) -> Call:
        """Wrap the call so that its times are recorded. The thread that reads requests makes it."""

        def prepare(requests: list[EngineRequest], rest: Callable[[], None]) -> list[Request]:
            began = time.perf_counter()
            prepared: list[Request] = call(requests, rest)
            for request in requests:
                told = {"arrived": request.arrival_s, "read": began, "prepared": time.perf_counter()}
                self.requests[request.request_id] |= told
            return prepared

        return prepare

    def _send(self, call: Call) -> Call:
        def send(message: Any) -> None:
            call(message)
            if isinstance(message, Outputs):
                now = time.perf_counter()
                for delta in message.deltas:
                    self._num_tokens += len(delta.token_ids)
                    if delta.queue_seconds is not None:
                        self.requests[delta.request_id]["first_sent"] = now

        return send

    def _found(self, call: Call) -> Call:
        def find(kind: Any, num_rows: int) -> Any:
            captured = call(kind, num_rows)
            self._graph = EAGER if captured is None else sum(rows.num_rows for rows in captured.rows)
            return captured

        return find

    def _launch(self, call: Call) -> Call:
        def launch(plan: StepPlan) -> InFlight:
            self._graph, before = COMPILED, dict(self._spans.seconds)
            began = time.perf_counter()
            step: InFlight = call(plan)
            spans = {name: self._spans.seconds[f"launch {name}"] - before.get(f"launch {name}", 0.0)
                     for name in ("units", "decode", "draws")}  # fmt: skip
            record = _describe(plan) | {
                "graph": self._graph if plan.decode else None,
                "launch": began,
                "launched": time.perf_counter(),
                "host": spans,
                "prompts": self._scheduler._num_prompts,
                "running": len(self._scheduler.roster.running),
            }
            self._of_lanes[plan.lane].append((record, step))
            if plan.new_jobs:
                slots = {prompt.slot for job in plan.new_jobs for prompt in job.prompts}
                for sequence in self._scheduler.roster.holding():
                    if sequence.slot in slots:
                        self.requests[sequence.request_id].setdefault("begun", began)
            return step

        return launch

    def _postprocess(self, call: Call) -> Call:
        def postprocess(result: StepResult, lane: Lane = Lane.DEVICE) -> Any:
            record, step = self._of_lanes[lane].popleft()
            record["collected"] = time.perf_counter()
            for name, timer in (("whole", step.whole), ("units", step.units), ("decode", step.decode)):
                record[f"{name}_at"] = None if timer is None else [self._point(timer, 0), self._point(timer, 1)]
            self.steps.append(record)
            return call(result, lane)

        return postprocess

    def _point(self, timer: Timer, point: int) -> float:
        """Return when the device passed a point of a timer."""
        if self._anchor is None:
            return timer._times[point]
        milliseconds: float = self._anchor.elapsed_time(timer._events[point])
        return self._anchor_s + milliseconds / 1e3

    def _collect_garbage(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() != self._spans._thread:
            return
        if phase == "start":
            self._collecting_s = time.perf_counter()
        else:
            self._spans.note("garbage", time.perf_counter() - self._collecting_s)


def _describe(plan: StepPlan) -> dict[str, Any]:
    """Return what a plan has: units with their layers, jobs and tokens, and rows that draw."""
    layers: Sequence[PrefillUnit] = [unit for unit in plan.units if isinstance(unit, PrefillUnit)]
    return {
        "lane": plan.lane.value,
        "units": len(plan.units),
        "jobs": len({unit.job_id for unit in plan.units}),
        "layers": len({unit.layer for unit in layers}),
        "token_layers": sum(unit.end - unit.begin for unit in layers),
        "most_tokens": max((unit.end - unit.begin for unit in plan.units), default=0),
        "rows": sum(sum(group.lengths) for group in plan.decode),
        "fenced": plan.is_fenced,
    }
