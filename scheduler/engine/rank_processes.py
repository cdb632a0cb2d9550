"""Run the other ranks of a model that is split over devices: one process for each device except the first.

Rank 0 is the engine's own process. Each other rank has a runner of its own, and carries out the plans that rank 0
launches. A rank that ends while it is needed ends the engine, since no step can be computed without it.
"""

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import itemgetter
from typing import Any

import torch

from gpu.model.spec import ModelError
from gpu.ranks import ProcessRanks, RankError, open_store
from scheduler.engine_config import EngineStart
from transfer.machine import physical_core

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "scheduler.engine.rank_process")
_END_S = 4.0  # for all ranks together to end; the server waits five seconds for the engine
_KILL_S = 10.0  # for the system to free the memory of killed processes
_ROOT_CAUSE_S = 5.0  # for the thread that watches the rank which ended first, to report the cause

OnEnd = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RankStart:
    """The first message to a rank. start_json: an EngineStart. port: of the store where ranks meet. cores: the host's
    logical CPUs that are for this rank.
    """

    start_json: str
    rank: int
    count: int
    port: int
    cores: tuple[int, ...]


def end_engine(reason: str) -> None:
    """Log why the engine cannot go on, and end this process at once, as its device may wait for a rank that is gone."""
    log.error("failed reason=%s", reason)
    os._exit(1)


def await_cause(error: RankError) -> None:
    """Log this rank's error, and give the thread that watches the other ranks time to end this process with the
    cause.
    """
    log.error("ranks event=lost reason='%s'", error)
    time.sleep(_ROOT_CAUSE_S)


class RankProcesses:
    """The other ranks' processes, and rank 0's membership in their group. on_end: called in a thread with the reason if
    one ended before `close`; all others have been killed then.
    """

    def __init__(self, start: EngineStart, on_end: OnEnd = end_engine) -> None:
        """Start the processes, which load their parts while rank 0 loads its own (`join`). Raises ModelError if there
        are too few devices.
        """
        self._count = start.config.gpu.devices
        is_cuda = start.memory.device == "cuda"
        visible = visible_devices(self._count) if is_cuda else [""] * self._count
        self._device = torch.device(start.memory.device)
        self._store = open_store(0, self._count, 0)
        self._is_closing = False
        self._closing = threading.Lock()
        self._on_end = on_end
        self._ranks: ProcessRanks | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[Any, Any]] = []
        self._cores = sorted(os.sched_getaffinity(0))
        shares = share_cores(self._cores, self._count)
        for rank in range(1, self._count):
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": visible[rank]} if is_cuda else {})
            told = RankStart(start.model_dump_json(), rank, self._count, self._store.port, shares[rank])
            self._run(told, environment)
        os.sched_setaffinity(0, shares[0])

    def _run(self, told: RankStart, environment: dict[str, str]) -> None:
        ours, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            process = subprocess.Popen(
                [*_COMMAND, str(descriptor), str(os.getpid())], pass_fds=[descriptor], stdin=subprocess.DEVNULL,
                env=environment,
            )  # fmt: skip
        self._processes.append(process)
        self._connections.append(ours)
        threading.Thread(target=self._watch, args=(told.rank, process, ours), name="rank-end", daemon=True).start()
        with suppress(OSError):  # if it has ended, its watching thread reports that
            ours.send(told)

    def join(self) -> ProcessRanks:
        """Return rank 0's membership in the group, once every rank has joined."""
        self._ranks = ProcessRanks(0, self._count, self._device, self._store)
        return self._ranks

    def tell(self, message: object) -> None:
        """Send a message, such as a plan or masks of draws, to all other ranks. Raises RankError."""
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(packed)
            except OSError as error:
                raise RankError(f"gpu.devices: rank {rank} of {self._count} cannot be reached ({error})") from None

    def kill(self) -> None:
        """Kill the processes, and wait until their memory is free, since a new engine may need it at once."""
        self._is_closing = True
        until = time.monotonic() + _KILL_S
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def close(self, drop_graphs: Callable[[], None] = lambda: None) -> None:
        """End the processes, killing those that do not, and leave the group. drop_graphs: drops rank 0's graphs."""
        self._is_closing = True
        with suppress(RankError):
            self.tell(None)
        until = time.monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()
        if self._ranks is not None:
            self._ranks.close(drop_graphs)
        os.sched_setaffinity(0, self._cores)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]", connection: "Connection[Any, Any]") -> None:
        """Wait for a rank's last message and its end; report an end before `close`."""
        said = None
        with suppress(EOFError, OSError):
            said = connection.recv()
        code = process.wait()
        with self._closing:
            if self._is_closing:
                return
            self._is_closing = True
        self.kill()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        where = f"gpu.devices: rank {rank} of {self._count}"
        reason = (said or f"its process {how}").removeprefix(where).lstrip(": ")
        self._on_end(f"{where}: {reason}")


def share_cores(
    cpus: Sequence[int], count: int, core_of: Callable[[int], tuple[int, int] | None] = physical_core
) -> list[tuple[int, ...]]:
    """Return each rank's logical CPUs: neighbouring physical cores, which ranks do not share if there are enough.

    With fewer CPUs than ranks, each has all of them. core_of: package and core of a CPU; None: unknown.
    """
    places = [(core_of(cpu) or (-1, cpu), cpu) for cpu in cpus]
    cores = [[cpu for _, cpu in own] for _, own in groupby(sorted(places), key=itemgetter(0))]
    if len(cores) < count:
        cores = [[cpu] for core in cores for cpu in core]
    each = len(cores) // count
    if not each:
        return [tuple(cpus)] * count
    return [tuple(sorted(chain(*cores[rank * each : (rank + 1) * each]))) for rank in range(count)]


def visible_devices(count: int) -> list[str]:
    """Return the name of each rank's CUDA device, as in CUDA_VISIBLE_DEVICES. Raises ModelError for too few devices."""
    there = torch.cuda.device_count()
    if there < count:
        raise ModelError(f"gpu.devices: asked {count}, torch finds {there} CUDA devices; lower it")
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(there)] if listed is None else [one.strip() for one in listed.split(",")]
    return names[:count]
