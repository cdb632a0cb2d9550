"""Load an engine and run it behind two sockets. Without work it sleeps until a message comes.

`EngineStart` comes as JSON on standard input. Invariant: the process ends on Shutdown, and never outlives the process
that started it, not even while it loads or if a step hangs.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
import torch
import zmq
from pydantic import ValidationError

from gpu.memory.plan import PlanError
from gpu.model.architecture import ModelError
from gpu.profiles import ProfileError
from gpu.ranks import RankError
from scheduler.block_changes import CacheChanges
from scheduler.cache.block_events import BlockEvents
from scheduler.engine.connection import Connection, Message, Prepared
from scheduler.engine.engine import HANDOVER_SECONDS, Engine
from scheduler.engine.heartbeat import Heartbeat
from scheduler.engine.load_engine import load_engine
from scheduler.engine.parent_watch import end_with_parent
from scheduler.engine.rank_processes import await_cause
from scheduler.engine_config import EngineStart
from scheduler.messages import (
    Accepted,
    AskSessions,
    Cancel,
    Delta,
    DropChunks,
    Expect,
    Failed,
    Loading,
    Outputs,
    Progress,
    ReadSaved,
    Refused,
    SaveContext,
    Shutdown,
    Stats,
    StoreChunks,
)
from scheduler.residence.kept_sessions import SessionDesk
from scheduler.sequences.capacity import QueueFullError
from transfer.host_pages import give_back_heap, give_back_programs
from transfer.host_tier import HostMemoryError

log = logging.getLogger("engine")

_OUR_LOGGERS = ("engine", "scheduler", "gpu", "cpu", "transfer")
_STATS_SECONDS = 0.25
_PROGRESS_SECONDS = 0.1
_LOADING_STEP = 0.1
_LAST_WORDS_MS = 1000


class Loop:
    """Handles messages, steps the engine and sends its reports; progress and statistics at fixed intervals."""

    def __init__(self, engine: Engine, connection: Connection, pulse: Heartbeat, events: BlockEvents | None) -> None:
        self._events = events
        self._engine = engine
        self._connection = connection
        self._pulse = pulse
        self._sessions = SessionDesk(engine.scheduler.residence)
        self._stats_due = 0.0
        self._progress_due = 0.0
        self._has_rested = False  # freed heap memory since there was work last

    def run(self) -> None:
        """Run until Shutdown comes."""
        while True:
            self._pulse.begin_turn()
            has_work = self._engine.has_work
            messages = self._connection.receive(0.0 if has_work else _STATS_SECONDS)
            if has_work:
                self._has_rested = False
            elif not messages and not self._has_rested:
                give_back_heap()
                self._has_rested = True
            for message in messages:
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            self._report(self._engine.step() if self._engine.has_work else [])
            for stored in self._engine.take_stored():
                self._connection.send(stored)
            for told in self._sessions.take_answers():
                self._connection.send(told)
            if self._events is not None and (changes := self._events.take()):
                self._connection.send(CacheChanges(time.time(), changes))

    def _handle(self, message: Prepared | Refused | Message) -> None:
        match message:
            case Prepared():
                try:
                    self._engine.scheduler.roster.queue(message.sequences)
                except QueueFullError as error:
                    self._connection.send(Refused(message.submit_id, "queue_full", str(error)))
                else:
                    self._connection.send(Accepted(message.submit_id))
            case Refused():
                self._connection.send(message)
            case Cancel():
                self._engine.cancel(message.request_ids)
            case StoreChunks():
                self._engine.store_chunks(message)
            case DropChunks():
                self._engine.drop_chunks(message)
            case Expect():
                self._engine.scheduler.residence.conversations.expect(message.request_ids)
            case AskSessions() | SaveContext() | ReadSaved():
                self._sessions.ask(message)

    def _report(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        progress: list[Progress] = []
        stats: Stats | None = None
        if now >= self._progress_due:
            self._progress_due = now + _PROGRESS_SECONDS
            progress = self._engine.scheduler.progress()
        if now >= self._stats_due:
            self._stats_due = now + _STATS_SECONDS
            stats = self._engine.stats()
        if deltas or progress or stats:
            self._connection.send(Outputs(deltas, progress, stats))


def run_engine(requests: str, replies: str, parent_id: str) -> int:
    """Load the engine and run it until Shutdown; return the exit status. requests, replies: addresses of sockets."""
    end_with_parent(int(parent_id), lambda: _remove_sockets([requests, replies]))
    sys.setswitchinterval(HANDOVER_SECONDS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process decides when to end, also on Ctrl-C
    imports_seconds = time.time() - psutil.Process().create_time()
    text = sys.stdin.read()  # it comes once the sockets are open
    if not text:  # the starting process has nothing to serve after all, or has ended
        _remove_sockets([requests, replies])
        return 1
    connection = Connection(requests, replies)
    pulse = Heartbeat(replies)
    pulse.start()
    stages = Stages(connection.send)
    try:
        start = _read_start(text)
        on_rank_end = partial(_end_without_rank, replies)
        engine, ready = load_engine(
            start.config, start.memory, stages.report, compiles_ahead=True, on_rank_end=on_rank_end
        )
    except RankError as error:
        _end_without_rank(replies, str(error))
    except (HostMemoryError, ModelError, PlanError, ProfileError, ValidationError) as error:
        log.error("failed reason=%s", error)
        connection.send(Failed(" ".join(str(error).split())))
        connection.close()
        return 1
    connection.listen(engine.scheduler.intake.prepare)
    gc.collect()
    gc.freeze()  # nothing that exists now becomes garbage, and a full collection takes longer than a decode step
    if not torch.cuda.is_available():
        give_back_programs()
    connection.send(ready)
    log.info("started imports_s=%.2f %s", imports_seconds, stages.describe())
    events = engine.scheduler.residence.tell_blocks() if start.tells_blocks else None
    try:
        Loop(engine, connection, pulse, events).run()
    except RankError as error:
        await_cause(error)
        engine.kill_ranks()
        _end_without_rank(replies, str(error))
    except HostMemoryError as error:  # of one rank among several: the others would wait for it
        engine.kill_ranks()
        _end_without_rank(replies, str(error))
    pulse.stop()
    engine.shutdown(connection.send)
    connection.close()
    return 0


def _end_without_rank(replies: str, reason: str) -> NoReturn:
    """Report why no step can be computed any more, and end this process at once, even if its device hangs."""
    log.error("failed reason=%s", reason)
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(replies)
    socket.send(msgspec.msgpack.encode(Failed(reason)))
    context.destroy(linger=_LAST_WORDS_MS)
    os._exit(1)


def _remove_sockets(addresses: list[str]) -> None:
    """Remove sockets, and their folder if it is then empty, because the process that made them may have ended."""
    with suppress(OSError):
        for address in addresses:
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        Path(addresses[0].removeprefix("ipc://")).parent.rmdir()


def _read_start(text: str) -> EngineStart:
    start = EngineStart.model_validate_json(text)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in _OUR_LOGGERS:  # numba's debug log is thousands of lines a function
        logging.getLogger(name).setLevel(start.log_level.upper())
    return start


class Stages:
    """Reports the progress of each loading stage, in steps of a tenth, and measures how long each took."""

    def __init__(self, send: Callable[[Loading], None]) -> None:
        self._send = send
        self._reported: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def report(self, stage: str, fraction: float) -> None:
        """Report the progress of a stage. The time since the last call counts for this stage."""
        now = time.monotonic()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last_s
        self._last_s = now
        if stage not in self._reported or fraction >= 1.0 or fraction - self._reported[stage] >= _LOADING_STEP:
            self._reported[stage] = fraction
            self._send(Loading(stage, fraction))

    def describe(self) -> str:
        """Return the seconds of each stage, for the log."""
        return " ".join(f"{stage}_s={seconds:.2f}" for stage, seconds in self._seconds.items())
