"""Send the load. Closed loop: workers, each with one request open. Open loop: arrivals are drawn beforehand, and
requests are sent at their times whatever the server does.

Invariant: each request that was due gets one record. An open loop's latencies start at the drawn time, not at the time
at which the client sent the request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.load.arrivals import draw_arrivals
from bench.load.client import Client
from bench.load.load_plan import LoadPlan
from bench.load.prompts import Job
from bench.load.records import RequestRecord

FAILURE_PAUSE_S = 0.1
"""Pause of a closed-loop worker after a failure, so that a dead server is not flooded with requests."""
_JOBS_AHEAD = 256


@dataclass
class LoadRun:
    """A run under way. Its fields may be read while it runs; `records` is complete when `run` returns."""

    plan: LoadPlan
    client: Client
    model: str
    make_job: Callable[[int], Job]
    records: list[RequestRecord] = field(default_factory=list)
    num_open: int = 0
    num_expected: int | None = None
    interrupted: bool = False
    wall_s: float = 0.0
    _jobs: asyncio.Queue[Job | None] = field(default_factory=lambda: asyncio.Queue(_JOBS_AHEAD))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Send everything, and wait for every answer or for `interrupt`."""
        arrivals = None
        if self.plan.rate is not None:
            plan = self.plan
            arrivals = draw_arrivals(plan.rate or 0, plan.burstiness, plan.seed, plan.requests, plan.duration_s)
        self.num_expected = self.plan.requests if arrivals is None else len(arrivals)
        producer = asyncio.create_task(self._produce(self.num_expected))
        first_jobs = min(_JOBS_AHEAD, self.num_expected or self.plan.concurrency or 1)
        while self._jobs.qsize() < first_jobs and not producer.done():
            await asyncio.sleep(0.005)
        try:
            if producer.done():
                producer.result()
            self.client.start += self.client.now()
            loop = self._run_closed() if arrivals is None else self._run_open([float(time) for time in arrivals])
            await self._guard(loop, producer)
        finally:
            self.wall_s = self.client.now()
            producer.cancel()

    def interrupt(self) -> None:
        """Stop now. Open requests end as unfinished; measured ones are kept."""
        self.interrupted = True
        for task in list(self._tasks):
            task.cancel()

    async def send_alone(self, job: Job) -> RequestRecord:
        """Send the first turn of a job outside the measurement, to warm a cache or the server."""
        record = RequestRecord(job.index, 0, self.client.now(), job.asked_tokens)
        await self.client.send(self._path, self._build_body(list(job.turns[0]), job), record)
        return record

    async def _guard(self, loop: Any, producer: asyncio.Task[None]) -> None:
        main = asyncio.create_task(loop)
        self._tasks.add(main)
        try:
            await main
        except asyncio.CancelledError:
            if not self.interrupted:
                raise
        await asyncio.gather(*(task for task in self._tasks if task is not main), return_exceptions=True)
        if producer.done() and not producer.cancelled():
            producer.result()

    async def _produce(self, num_jobs: int | None) -> None:
        """Make prompts ahead of time in another thread, so that making them delays no request."""
        index = 0
        try:
            while num_jobs is None or index < num_jobs:
                await self._jobs.put(await asyncio.to_thread(self.make_job, index))
                index += 1
        finally:
            await self._jobs.put(None)

    async def _run_closed(self) -> None:
        assert self.plan.concurrency is not None
        workers = [asyncio.create_task(self._work()) for _ in range(self.plan.concurrency)]
        self._tasks.update(workers)
        await asyncio.gather(*workers)

    async def _work(self) -> None:
        while self.plan.duration_s is None or self.client.now() < self.plan.duration_s:
            job = await self._jobs.get()
            if job is None:
                self._jobs.put_nowait(None)
                return
            if not await self._run_job(job, self.client.now()):
                await asyncio.sleep(FAILURE_PAUSE_S)

    async def _run_open(self, arrivals: list[float]) -> None:
        room = asyncio.Semaphore(self.plan.concurrency) if self.plan.concurrency else None
        for due_s in arrivals:
            job = await self._jobs.get()
            if job is None:
                return
            while (left_s := due_s - self.client.now()) > 0:
                await asyncio.sleep(left_s)
            task = asyncio.create_task(self._run_in_room(job, due_s, room))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*(task for task in self._tasks if task is not asyncio.current_task()))

    async def _run_in_room(self, job: Job, due_s: float, room: asyncio.Semaphore | None) -> None:
        if room is None:
            await self._run_job(job, due_s)
            return
        try:
            await room.acquire()
        except asyncio.CancelledError:
            now_s = self.client.now()
            waiting = RequestRecord(job.index, 0, due_s, job.asked_tokens, sent_s=now_s, end_s=now_s)
            waiting.reason = "interrupted before it was sent"
            self.records.append(waiting)
            raise
        try:
            await self._run_job(job, due_s)
        finally:
            room.release()

    async def _run_job(self, job: Job, due_s: float) -> bool:
        """Send a job's turns in order, each after the previous answer. Return whether all completed."""
        messages: list[dict[str, Any]] = []
        for turn, new_messages in enumerate(job.turns):
            messages.extend(new_messages)
            record = RequestRecord(job.index, turn, due_s, job.asked_tokens)
            self.records.append(record)
            self.num_open += 1
            try:
                await self.client.send(self._path, self._build_body(messages, job), record)
            finally:
                self.num_open -= 1
            if record.outcome != "completed":
                self._skip_turns(job, turn + 1, record.end_s)
                return False
            messages.append({"role": "assistant", "content": "".join(record.text)})
            due_s = record.end_s
        return True

    def _skip_turns(self, job: Job, begin: int, now_s: float) -> None:
        for turn in range(begin, len(job.turns)):
            record = RequestRecord(job.index, turn, now_s, job.asked_tokens, sent_s=now_s, end_s=now_s)
            record.outcome, record.reason = "skipped", "an earlier turn of its conversation failed"
            self.records.append(record)

    @property
    def _path(self) -> str:
        return "/v1/completions" if self.plan.endpoint == "completions" else "/v1/chat/completions"

    def _build_body(self, messages: list[dict[str, Any]], job: Job) -> dict[str, Any]:
        plan = self.plan
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": job.output_tokens}
        body["temperature"] = plan.temperature
        if plan.endpoint == "completions":
            body["prompt"] = messages[0]["content"]
        else:
            body["messages"] = messages
        if job.documents:
            body["documents"] = list(job.documents)
        if plan.temperature > 0:
            body["seed"] = plan.seed + max(job.index, 0)
        if plan.include_usage:
            body["stream_options"] = {"include_usage": True}
        if plan.ignore_eos:
            body["ignore_eos"] = True
        if plan.attention_profile is not None:
            body["attention_profile"] = plan.attention_profile
        return {**body, **plan.extra_body}
