"""Run a load against a server whose engine is clocked, and gather what its processes did meanwhile.

The server and its engine are two other processes, as in serving; this process is the load's client. The load runs once
to warm up, once to be measured, and once more if kernels are traced. CPU seconds of processes are the system kernel's
own counts.
"""

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.server_process import serving
from lab.speed.timeline import Timeline, Window
from lab.speed.token_load import run_load
from lab.speed.token_turns import TokenLoad, Turn
from lab.speed.watched_engine import TRACE_SUFFIX

_WARM_TOKENS_OUT = 16
_SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class TimelineRun:
    """The plan of a timeline. config: the deployment's file. trace_s: seconds of kernels to trace, from `trace_after_s`
    after the load's begin; 0: none.
    """

    config: Path
    load: TokenLoad
    trace_s: float
    trace_after_s: float
    load_timeout_s: float


def run_timeline(run: TimelineRun) -> Timeline:
    """Return the timeline of a load. Raises GateError if the server does not start, LoadError for a partial answer."""
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder:
        file = Path(folder) / "engine.json"

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "lab.speed.watched_server", str(run.config), str(port), str(file)]

        with serving(command, run.load_timeout_s) as url:
            server = _processes_of(os.getpid(), "lab.speed.watched_server")
            engine = [one for pid in server for one in _processes_of(pid, "lab.speed.watched_engine")]
            pids = {"server": server[0], "engine": engine[0], "client": os.getpid()}
            warm = replace(run.load, seed=run.load.seed + 1, tokens_out=min(_WARM_TOKENS_OUT, run.load.tokens_out))
            asyncio.run(run_load(url, replace(warm, rate=None)))
            turns, window = asyncio.run(_measure(url, run.load, pids))
            if run.trace_s:
                asyncio.run(_trace(url, run, file.with_name(file.name + TRACE_SUFFIX)))
        engine_told: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    return Timeline(engine_told, window, turns)


async def _measure(url: str, load: TokenLoad, pids: dict[str, int]) -> tuple[list[Turn], Window]:
    samples: list[tuple[float, dict[str, float]]] = []

    async def sample() -> None:
        while True:
            samples.append((time.perf_counter(), {name: cpu_seconds(pid) for name, pid in pids.items()}))
            await asyncio.sleep(_SAMPLE_S)

    sampling = asyncio.create_task(sample())
    await asyncio.sleep(0)
    turns = await run_load(url, load)
    sampling.cancel()
    samples.append((time.perf_counter(), {name: cpu_seconds(pid) for name, pid in pids.items()}))
    begin = min(turn.due_s for turn in turns)
    return turns, Window(begin, max(turn.times_s[-1] for turn in turns), samples)


async def _trace(url: str, run: TimelineRun, switch: Path) -> None:
    """Run the load with other prompts while kernels are traced for a time."""

    async def turn_on_and_off() -> None:
        await asyncio.sleep(run.trace_after_s)
        switch.touch()
        await asyncio.sleep(run.trace_s)
        switch.unlink()

    tracing = asyncio.create_task(turn_on_and_off())
    await run_load(url, replace(run.load, seed=run.load.seed + 2))
    await tracing
    await asyncio.sleep(2 * _SAMPLE_S)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _processes_of(parent: int, word: str) -> list[int]:
    """Return the children of a process whose command line has this word."""
    children = [
        int(pid)
        for task in Path(f"/proc/{parent}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]  # fmt: skip
    return [pid for pid in children if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
