"""Run a soak: clients that ask and compare answers, clients that leave, kills of the engine, and samples of memory."""

import asyncio
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import psutil

from bench.soak import gauges
from bench.soak.gauges import read_drafted, read_gauges, read_served, wait_for_rest
from bench.soak.processes import ServerProcesses, find_server
from bench.soak.requests import LEFT_SESSIONS, Mix, Served, SoakRequest, make_requests, make_short_lived
from bench.soak.soak_answers import Answer, RefusedError, compare, read_answer

_RETRY_S = 0.5
_SAMPLE_S = 1.0
_KILLED_CODES = ("engine_dead", "engine_hung", "engine_loading")


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The plan of a soak. kill_every_s: between two kills of the engine; 0: none. The last third of the run has no
    kills, so that one engine's memory is watched for long. level_gap: see `compare`. patience_s: timeout of an answer,
    whatever was killed meanwhile.
    """

    url: str
    api_key: str | None
    seconds: float
    kill_every_s: float
    clients: int
    mix: Mix
    level_gap: float
    seed: int
    patience_s: float = 300.0


@dataclass(slots=True)
class Kill:
    """A kill of the engine: its time, and the time at which the next engine served."""

    at: float
    healthy_at: float = float("inf")


@dataclass(slots=True)
class SoakResult:
    """The results of a soak. counts: by kind of request. memory: (seconds, bytes) by role and number of the engine,
    without the bytes that gauges account for. at_rest: gauges after the end, which should be 0. faults: broken
    promises, with how often each was. drafted: tokens that drafts proposed, and those accepted, in the last engine.
    """

    seconds: float = 0.0
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    kills: list[Kill] = field(default_factory=list)
    memory: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    at_rest: dict[str, float] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    drafted: tuple[int, int] = (0, 0)

    def blame(self, what: str) -> None:
        self.faults[what] += 1


async def run_soak(plan: SoakPlan, transport: httpx.AsyncBaseTransport | None = None) -> SoakResult:
    """Ask each prompt once alone, then all concurrently until the time is up, then wait for rest.

    transport: replaces the connection. Raises ValueError if the server is not reachable or refuses a first request.
    """
    headers = {"authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    every = httpx.AsyncClient(
        base_url=plan.url, timeout=plan.patience_s, limits=httpx.Limits(), headers=headers, transport=transport
    )
    async with every as client:
        served = await read_served(client)
        requests = make_requests(served, plan.mix)
        first = [await _ask_first(client, request) for request in requests]
        soak = _Soak(plan, client, served, requests, first)
        await soak.run()
        result = soak.result
        try:
            result.drafted = await read_drafted(client)
            sessions = [*LEFT_SESSIONS, *(str(request.body["session_id"]) for request in requests)]
            result.at_rest = await wait_for_rest(client, sessions)
        except httpx.TransportError as error:
            result.blame(f"the server does not answer at the end: {error or type(error).__name__}")
        for name, value in result.at_rest.items():
            if value:
                result.blame(f"{name} is {value:,.0f} after {gauges.REST_S:.0f} s of rest, wanted 0")
    return result


async def _ask_first(client: httpx.AsyncClient, request: SoakRequest) -> Answer:
    try:
        return await read_answer(client, request)
    except RefusedError as error:
        raise ValueError(f"{request.kind}: the server refuses the first request of this kind: {error}") from None
    except httpx.HTTPError as error:
        raise ValueError(f"{request.kind}: the first request: {error or type(error).__name__}") from None


class _Soak:
    def __init__(
        self,
        plan: SoakPlan,
        client: httpx.AsyncClient,
        served: Served,
        requests: list[SoakRequest],
        first: list[Answer],
    ) -> None:
        self._plan, self._client, self._served, self._requests, self._first = plan, client, served, requests, first
        self._random = Random(plan.seed)
        self._processes = find_server(plan.url)
        self.result = SoakResult()

    async def run(self) -> None:
        plan, began = self._plan, time.monotonic()
        self._began, self._ends = began, began + plan.seconds
        tasks = [self._ask_again_and_again() for _ in range(plan.clients)]
        tasks += [self._leave_again_and_again() for _ in range(max(1, plan.clients // 4))]
        if self._processes is None:
            self.result.notes.append("the server's processes are not this user's on this machine: no kills, no memory")
        else:
            tasks.append(self._watch(self._processes))
            if plan.kill_every_s:
                tasks.append(self._kill_engines(self._processes))
        await asyncio.gather(*tasks)
        self.result.seconds = time.monotonic() - began

    # --- clients ------------------------------------------------------------------------------------------------------

    async def _ask_again_and_again(self) -> None:
        while time.monotonic() < self._ends:
            index = self._random.randrange(len(self._requests))
            request, counts = self._requests[index], self.result.counts[self._requests[index].kind]
            counts["asked"] += 1
            answer = await self._ask_until_answered(request, counts)
            if answer is None:
                self.result.blame(f"{request.kind}: not answered within {self._plan.patience_s:.0f} s")
                continue
            counts["answered"] += 1
            verdict = compare(answer, self._first[index], self._plan.level_gap)
            counts[verdict if request.is_compared or verdict == "same" else "parted"] += 1
            if verdict == "other" and request.is_compared:
                wanted = self._first[index].text
                self.result.blame(f"{request.kind}: said {answer.text[:120]!r}, at first {wanted[:120]!r}")

    async def _ask_until_answered(self, request: SoakRequest, counts: Counter[str]) -> Answer | None:
        began = time.monotonic()
        while (sent := time.monotonic()) - began < self._plan.patience_s:
            try:
                return await read_answer(self._client, request)
            except RefusedError as error:
                self._judge(request, sent, error, counts, time.monotonic())
            except httpx.HTTPError as error:
                self.result.blame(f"{request.kind}: the connection broke: {type(error).__name__} {error}")
            await asyncio.sleep(_RETRY_S)
        return None

    def _judge(self, request: SoakRequest, sent: float, error: RefusedError, counts: Counter[str], now: float) -> None:
        """Count an error that is allowed: of a request in flight at a kill, of one that came before the next engine
        served, or of a full queue. Any other error is a broken promise.
        """
        is_clear = error.code in _KILLED_CODES
        if is_clear and any(sent <= kill.at <= now for kill in self.result.kills):
            counts["lost at a kill"] += 1
        elif is_clear and any(kill.at <= now and sent <= kill.healthy_at for kill in self.result.kills):
            counts["refused meanwhile"] += 1
        elif error.code == "queue_full":
            counts["queue full"] += 1
        else:
            self.result.blame(f"{request.kind}: {error}")

    async def _leave_again_and_again(self) -> None:
        """Disconnect again and again: at once, after some tokens, or without reading any."""
        ways = (("leaves at once", 0.2, 0), ("leaves a stream", 30.0, 20), ("never reads", 5.0, None))
        while time.monotonic() < self._ends:
            kind, most_s, num_lines = self._random.choice(ways)
            self.result.counts[kind]["asked"] += 1
            body = make_short_lived(self._served, self._plan.mix, self._random)
            seconds = most_s if num_lines else self._random.uniform(0, most_s)
            with suppress(TimeoutError, httpx.HTTPError):  # it leaves, or its engine was killed
                async with asyncio.timeout(seconds):
                    await self._read_some(body, num_lines)
            self.result.counts[kind]["cancelled"] += 1
            await asyncio.sleep(self._random.uniform(0.1, 0.5))

    async def _read_some(self, body: dict[str, Any], num_lines: int | None) -> None:
        """Read num_lines lines of a stream; 0: all lines; None: none, while the caller waits."""
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if num_lines is None:
                await asyncio.Event().wait()
            num_read = 0
            async for _ in answer.aiter_lines():
                num_read += 1
                if num_read == num_lines:
                    return

    # --- the server ---------------------------------------------------------------------------------------------------

    async def _kill_engines(self, processes: ServerProcesses) -> None:
        every_s = min(self._plan.kill_every_s, self._plan.seconds / 3)
        for number in range(1, int(2 * self._plan.seconds / 3 / every_s) + 1):
            wait_s = self._began + number * every_s - time.monotonic()
            if wait_s < 0:
                continue  # the engine took longer than the interval to load
            await asyncio.sleep(wait_s)
            engine = processes.find_engine()
            if engine is None:
                self.result.blame(f"no engine runs at the time of kill {number}")
                continue
            kill = Kill(time.monotonic())
            self.result.kills.append(kill)
            with suppress(psutil.NoSuchProcess):
                engine.kill()
                await asyncio.to_thread(engine.wait)
            while not (processes.find_engine() and await self._is_healthy()):  # the server notices a kill a bit later
                if time.monotonic() - kill.at > self._plan.patience_s:
                    self.result.blame(f"no engine serves {self._plan.patience_s:.0f} s after a kill")
                    return
                await asyncio.sleep(0.05)
            kill.healthy_at = time.monotonic()

    async def _is_healthy(self) -> bool:
        try:
            return (await self._client.get("/health")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def _watch(self, processes: ServerProcesses) -> None:
        """Sample memory, but not while an engine loads."""
        while time.monotonic() < self._ends:
            number = len(self.result.kills)
            try:
                if await self._is_healthy():
                    counted = await read_gauges(self._client)
                    sizes = await asyncio.to_thread(processes.resident_bytes)
                    if number == len(self.result.kills) and "engine" in sizes:
                        sizes["engine"] -= counted.engine_bytes
                        for role, size in sizes.items():
                            key = role, number if role == "engine" else 0
                            self.result.memory[key].append((time.monotonic() - self._began, size))
            except httpx.TransportError:
                continue  # clients that ask notice it themselves
            except psutil.NoSuchProcess:
                self.result.blame("the server's process has ended")
                return
            await asyncio.sleep(_SAMPLE_S)
