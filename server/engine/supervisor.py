"""Keep an engine process alive, and carry requests to it and their output back.

States: unloaded -> loading -> ready -> dead -> loading -> ...; `stop` leads back to unloaded. In the state `failed`
nothing is restarted until the next `start`: the first start failed, several engines in a row failed, or this supervisor
itself did. An engine sends a heartbeat twice a second, even while it loads. A silent engine counts as hung; this is
reported at once, and the engine is killed if it lasts, or if a step never ends. Every open mailbox gets the last deltas
of its requests, or one EngineLost.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
from msgspec.structs import replace

from gpu.memory.plan import MemoryPlan
from scheduler.block_changes import CacheChanges
from scheduler.engine_config import EngineStart
from scheduler.messages import (
    Accepted,
    AskSessions,
    Cancel,
    ChunksStored,
    ContextSaved,
    DropChunks,
    EngineRequest,
    Expect,
    Failed,
    Loading,
    NamedChunk,
    Outputs,
    Pulse,
    ReadSaved,
    Ready,
    Refused,
    SaveContext,
    SavedTokens,
    Sessions,
    Shutdown,
    StoreChunks,
    Submit,
    Told,
    Writing,
)
from scheduler.residence.resting_sessions import read_sessions
from server import logs
from server.api_error import UNSUPPORTED_GRAMMAR, ApiError, invalid, queue_full, too_long, unavailable
from server.deployment import Deployment
from server.engine.engine_end import EXIT_SECONDS, EngineEnd, describe_writing
from server.engine.engine_run import EngineGone, EngineProcess, EngineStartError
from server.engine.event_wire import cleared
from server.engine.head_start import HeadStart
from server.engine.mailbox import EngineLost, Mailbox
from server.engine.prometheus import Metrics
from server.engine.start_events import OnStart, Stage

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 30.0
_HEALTHY_AFTER_S = 60.0  # after so much service, an engine run resets the count of failures and the backoff
# Factor of the allowed silence while an engine loads. It reads libraries before its first message, maybe from a slow
# disk, and compiles, which may keep the interpreter from the thread that sends.
_LOADING_PATIENCE = 5
_KILLED_WAIT_S = 10.0  # for the system to free the memory of a killed engine
_UNREADY_WAIT_S = 0.2  # for an engine that has served nothing yet
_TELL_LOADING_S = 5.0
_MOST_UNDROPPED = 65_536  # names of chunks to drop that are kept until there is an engine
_SILENCE_CHECKS = 4  # in a row; a single one would also fail if this process itself had stood still
_DIED = EngineLost("the engine process died while it worked on this request; try again", "engine_dead")

_WHY_NOT = {
    "loading": "the model is loading",
    "unloading": "the model is being unloaded",
    "unloaded": "the model is not loaded, and has not been since the server's start",
}

Question = AskSessions | SaveContext | ReadSaved
Answer = TypeVar("Answer", Sessions, ContextSaved, SavedTokens)


def _tell_nobody() -> None:
    """Do nothing; the default of `Supervisor.on_change`."""


class Supervisor:
    def __init__(
        self,
        deployment: Deployment,
        memory: MemoryPlan,
        command: Sequence[str],
        metrics: Metrics,
        on_start: OnStart | None,
        ahead: HeadStart | None = None,
    ) -> None:
        """Build a supervisor. ahead: may have an engine process that was started in advance."""
        self._command = command
        self._ahead = ahead
        tells = deployment.server.events is not None
        start = EngineStart(config=deployment, memory=memory, log_level=deployment.server.log_level, tells_blocks=tells)
        self._start_json = start.model_dump_json().encode()  # only EngineConfig's fields of the deployment, no server
        self._settings = deployment.server
        self._metrics = metrics
        self._on_start = on_start
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._engine: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._answers: dict[str, asyncio.Future[Refused | None]] = {}
        self._submit_ids = itertools.count()
        self._storing: dict[str, asyncio.Future[ChunksStored | ApiError]] = {}
        self._asked: dict[str, asyncio.Future[Told | ApiError]] = {}
        self._undropped: dict[NamedChunk, None] = {}  # oldest first
        self._disk = deployment.disk
        self._stopping = False
        self._ends_by_s = math.inf
        self._end: EngineEnd | None = None
        self._num_runs = 0
        self._ready_since_s: float | None = None  # in this run
        self._has_spoken = False
        self._turn_seconds = 0.0
        self._lost = _DIED  # sent to open requests when the engine is lost
        self.quiet_seconds = 0.0
        self.on_blocks: Callable[[CacheChanges], None] | None = None  # publishes block changes
        self.on_change: Callable[[], None] = _tell_nobody  # called when the state changes
        self.state = "unloaded"
        self.loading = Loading(stage="starting", fraction=0.0)
        self.limits: Ready | None = None
        self.contexts_folder: Path | None = None  # of the model, known from its first load on
        self.failure: asyncio.Future[str] | None = None

    # --- runs of the engine -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Keep an engine alive until `stop`; after that `start` may be called again."""
        self._stopping = False
        self._ends_by_s = math.inf
        self.state = "loading"
        self.limits = None
        self._context = zmq.Context()
        self.failure = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_alive())
        self._task.add_done_callback(self._end_with_supervisor)

    async def stop(self) -> None:
        """Ask the engine to exit, wait while it writes contexts, and make sure that it and its memory are gone.

        An error of the supervisor's own task was logged when it occurred, and does not matter here.
        """
        self._stopping = True
        try:
            if self._engine is not None:
                await self._end_engine(self._engine)
        finally:
            task, context = self._task, self._context
            self._task = self._context = self._end = None
            try:
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            finally:
                if context is not None:
                    context.destroy(linger=0)
        if self.state != "failed":
            self._change("unloaded")

    def end_by(self, by_s: float) -> None:
        """Set the time by which the engine must have ended, even if it still writes. It gets at least EXIT_SECONDS."""
        self._ends_by_s = max(by_s, time.monotonic() + EXIT_SECONDS)
        if self._end is not None:
            self._end.end_by(self._ends_by_s)

    async def _end_engine(self, engine: EngineProcess) -> None:
        with suppress(EngineGone):
            engine.send(Shutdown())
        most_write_s = 0.0 if self._disk is None else self._disk.end_seconds
        self._end = EngineEnd(EXIT_SECONDS if self.state == "ready" else _UNREADY_WAIT_S, most_write_s)
        self._end.end_by(self._ends_by_s)
        await self._end.wait(engine)
        engine.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.wait(), _KILLED_WAIT_S)

    def kill_engine(self) -> None:
        """Kill the engine for a program that must exit this instant."""
        if self._engine is not None:
            self._engine.kill()
            self._engine.remove_folder()

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid if self._engine is not None else None

    @property
    def has_work(self) -> bool:
        """Return whether a request, or any other caller, waits for the engine."""
        return bool(self._mailboxes or self._answers or self._storing or self._asked)

    @property
    def knows_disk(self) -> bool:
        """Return whether no engine runs, or it is ending, and the place of its contexts on disk is known."""
        is_at_rest = self.state == "unloaded" or (self.state == "ready" and self._stopping)
        return is_at_rest and (self._disk is None or self.contexts_folder is not None)

    @property
    def ending(self) -> str:
        """Describe what an engine that was told to exit still does; "": nothing."""
        return describe_writing(self._end)

    @property
    def is_hung(self) -> bool:
        """Return whether an engine that served gives no sign of life."""
        return self.state == "ready" and self.quiet_seconds >= self._settings.engine_quiet_seconds

    @property
    def _most_silence_s(self) -> float:
        most_s = self._settings.engine_silence_seconds
        return _LOADING_PATIENCE * most_s if self.state == "loading" else most_s

    @property
    def can_recover(self) -> bool:
        """Return whether the engine serves, or will be started again."""
        return self.state != "failed" and (self.state != "dead" or self._settings.restart_engine)

    def _end_with_supervisor(self, keeper: asyncio.Task[None]) -> None:
        """Fail when the supervisor's own task failed, since then nothing would notice the next dead engine."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            logs.failure("keeper_failed", error)
            self._fail(f"supervisor: {type(error).__name__}: {' '.join(str(error).split())}")

    def _change(self, state: str) -> None:
        self.state = state
        self.on_change()

    def _fail(self, reason: str) -> None:
        self.state = "failed"
        assert self.failure is not None
        if not self.failure.done():
            self.failure.set_result(reason)
        self.on_change()

    async def _keep_alive(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        num_failed = 0
        while True:
            reason = await self._one_run()
            if self._stopping:
                return
            if self.limits is None:
                self._fail(reason)
                return
            if not self._settings.restart_engine:
                return
            num_failed += 1
            if self._was_healthy():
                backoff_s = _FIRST_BACKOFF_S
                num_failed = 0
            if num_failed >= self._settings.max_engine_failures:
                what = f"engine: {num_failed} engine processes failed in a row (server.max_engine_failures)"
                self._fail(f"{what}; last error: {reason}")
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            self._metrics.engine_restarts.inc()

    def _was_healthy(self) -> bool:
        """Return whether the engine run that has ended served for long, without the time in which it hung."""
        if self._ready_since_s is None or self._lost is not _DIED:
            return False
        return time.monotonic() - self._ready_since_s > _HEALTHY_AFTER_S

    async def _one_run(self) -> str:
        """Start an engine and serve with it until it ends. Returns the reason in one line."""
        assert self._context is not None
        self.state = "loading"
        self.loading = Loading(stage="starting", fraction=0.0)
        self._lost = _DIED
        self._ready_since_s = None
        self._num_runs += 1
        try:
            engine = self._engine = EngineProcess(self._context, self._command, self._start_json, self._ahead)
        except EngineStartError as error:
            self._lose_everything()
            logs.warning("engine_ended", reason=str(error), run=self._num_runs)
            return str(error)
        failed: str | None = None
        watch = asyncio.create_task(self._end_silence(engine))
        began_s = time.monotonic()
        teller = asyncio.create_task(self._keep_telling(began_s))
        try:
            await engine.start()
            self._tell_loading(began_s, is_new=False)
            logs.debug("engine_started", pid=engine.pid, run=self._num_runs)
            async for message in engine.messages():
                self._has_spoken = True
                match message:
                    case Outputs():
                        self._deliver(message)
                    case CacheChanges():
                        self._publish(message)
                    case Pulse():
                        self._turn_seconds = message.turn_seconds
                    case Accepted():
                        self._answer(message.submit_id, None)
                    case Refused():
                        self._answer(message.submit_id, message)
                    case ChunksStored():
                        self._end_storing(message)
                    case Sessions() | ContextSaved() | SavedTokens():
                        self._end_asking(message)
                    case Loading():
                        is_new = message.stage != self.loading.stage
                        self.loading = message
                        self._tell_loading(began_s, is_new)
                    case Ready():
                        self._become_ready(message)
                    case Writing():
                        if self._end is not None:
                            self._end.note(message)
                    case Failed():
                        failed = message.message
            ended = await engine.wait()
        except (OSError, msgspec.DecodeError) as error:
            ended = f"could not be run ({' '.join(str(error).split())})"
        finally:
            watch.cancel()
            teller.cancel()
            self._engine = None
            engine.kill()
            engine.close()
            self._lose_everything()
        if self._lost is not _DIED:
            ended = f"hung, and was {ended}"
        reason = failed or f"engine: {ended} {'before it was ready' if self.limits is None else ''}".strip()
        if not self._stopping:
            logs.warning("engine_ended", reason=reason, run=self._num_runs)
        return reason

    async def _keep_telling(self, began_s: float) -> None:
        """Report the stage every few seconds until the engine is ready, to distinguish a slow start from a hung one."""
        while self.state == "loading":
            await asyncio.sleep(_TELL_LOADING_S)
            if self.state == "loading":
                self._tell_loading(began_s, is_new=True)

    def _shown_by(self) -> OnStart | None:
        """Return the function that shows this start to a person; None: it is logged, as every start but the first."""
        return self._on_start if self._num_runs == 1 else None

    def _tell_loading(self, began_s: float, is_new: bool) -> None:
        """Show the loading stage, or log it if nothing shows it. is_new: the stage is new, or was not logged lately."""
        if (show := self._shown_by()) is not None:
            show(Stage(self.loading.stage, self.loading.fraction))
            return
        if not is_new:
            return
        percent = round(100 * self.loading.fraction)
        logs.info("loading", stage=self.loading.stage, percent=percent, seconds=round(time.monotonic() - began_s))

    async def _end_silence(self, engine: EngineProcess) -> None:
        """Notice when an engine falls silent, and kill it when the silence or a step lasts too long.

        Silence is counted in checks that found no message since the check before. An engine that loads may be silent
        for longer; its stages have no limit of their own.
        """
        settings = self._settings
        most_s = settings.engine_silence_seconds
        look_s = min(settings.engine_quiet_seconds, most_s) / _SILENCE_CHECKS
        self.quiet_seconds = self._turn_seconds = 0.0
        while self.quiet_seconds < self._most_silence_s and self._turn_seconds < most_s:
            self._has_spoken = False
            await asyncio.sleep(look_s)
            was_hung = self.is_hung
            self.quiet_seconds = 0.0 if self._has_spoken else self.quiet_seconds + look_s
            if self.is_hung != was_hung:
                self._metrics.engine_up.set(was_hung)
                logs.warning("engine_speaks" if was_hung else "engine_silent", pid=engine.pid)
        what = f"no sign of life for {self.quiet_seconds:.3g} s"
        if self._turn_seconds >= most_s:
            what = f"one step for {self._turn_seconds:.3g} s"
        logs.warning("engine_hung", pid=engine.pid, what=what)
        self._lost = EngineLost(f"the engine process hung ({what}) and was replaced; try again", "engine_hung")
        engine.kill()

    def _become_ready(self, ready: Ready) -> None:
        self.limits = ready
        self.contexts_folder = Path(ready.contexts_folder) if ready.contexts_folder else None
        self._ready_since_s = time.monotonic()
        self.quiet_seconds = 0.0
        self._metrics.engine_up.set(1)
        self._metrics.pages_capacity.set(ready.num_pages)
        if (show := self._shown_by()) is not None:
            show(ready)
        logs.event(
            logging.INFO if show is None else logging.DEBUG,
            "ready",
            device=ready.device,
            load_seconds=ready.load_seconds,
            pages=ready.num_pages,
            max_context_tokens=ready.max_context_tokens,
            profiles=",".join(ready.profiles),
        )
        self._change("ready")
        self._drop_undropped()

    def _lose_everything(self) -> None:
        self._change("dead")
        self._metrics.engine_gone()
        self._publish(cleared(time.time()))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineGone(self._lost.message))
        self.abandon(self._lost.message, self._lost.code)

    # --- requests -----------------------------------------------------------------------------------------------------

    def ready(self) -> Ready:
        """Return the engine's limits. Raises ApiError 503 if it does not serve."""
        if self.state != "ready" or self._stopping or self.limits is None:
            state = "unloading" if self.state == "ready" else self.state
            what = _WHY_NOT.get(state, "the engine process is dead")
            raise unavailable(f"engine: {what}; try again later", f"engine_{state}", self._retry_after())
        if self.is_hung:
            what = f"it hangs (no sign of life for {self.quiet_seconds:.3g} s) and will be replaced if that lasts"
            raise unavailable(f"engine: {what}; try again later", "engine_hung", self._retry_after())
        return self.limits

    async def submit(self, requests: list[EngineRequest], mailbox: Mailbox, param: str, grammar_param: str) -> None:
        """Submit all requests or none. After that their output goes to the mailbox until `forget`.

        Raises ApiError: 429 (queue full), 400 naming `param` (can never fit) or `grammar_param` (a grammar's fault),
        503 (no engine).
        """
        self.ready()
        assert self._engine is not None
        submit_id = str(next(self._submit_ids))
        answer: asyncio.Future[Refused | None] = asyncio.get_running_loop().create_future()
        self._answers[submit_id] = answer
        for request in requests:
            self._mailboxes[request.request_id] = mailbox
        try:
            self._engine.send(Submit.of(submit_id, requests))
            refused = await answer
        except EngineGone as error:
            raise unavailable(str(error), self._lost.code, self._retry_after()) from None
        finally:
            self._answers.pop(submit_id, None)
        if refused is not None:
            self._metrics.finished.labels("refused").inc(len(requests))
            for request in requests:
                self._mailboxes.pop(request.request_id, None)
            if refused.code == "queue_full":
                raise queue_full(refused.message, self._retry_after())
            if refused.code == "grammar":
                raise invalid(grammar_param, refused.message.removeprefix("grammar: "), UNSUPPORTED_GRAMMAR)
            raise too_long(param, refused.message)

    def store_chunks(self, chunks: list[bytes], salt: str) -> "asyncio.Future[ChunksStored | ApiError]":
        """Let the engine compute and store chunks while nothing else waits; return a future of its report or an error.

        chunks: packed token ids. Raises ApiError 503 (no engine).
        """
        self.ready()
        assert self._engine is not None
        request_id = f"chunks-{next(self._submit_ids)}"
        try:
            self._engine.send(StoreChunks(request_id, chunks, salt))
        except EngineGone as error:
            raise unavailable(str(error), self._lost.code, self._retry_after()) from None
        answer: asyncio.Future[ChunksStored | ApiError] = asyncio.get_running_loop().create_future()
        self._storing[request_id] = answer
        answer.add_done_callback(lambda _: self._storing.pop(request_id, None))
        return answer

    def expect(self, request_ids: list[str]) -> None:
        """Tell the engine that these answers called tools, so that their conversations will continue."""
        if self._engine is not None:
            with suppress(EngineGone):
                self._engine.send(Expect(request_ids))

    async def ask_sessions(
        self, owner: str, forget: str = "", forget_slot: int = -1, forget_saved: str = "", of_all: bool = False
    ) -> Sessions:
        """Forget what is named, and return what is kept of an owner's conversations; without an engine, only on disk.

        Raises as `ask` does.
        """
        asked = AskSessions("", owner, forget, forget_slot, forget_saved, of_all)
        if self.knows_disk:
            block_tokens = 0 if self._disk is None else self._disk.block_tokens
            return await asyncio.to_thread(read_sessions, self.contexts_folder, block_tokens, asked)
        return await self.ask(lambda request_id: replace(asked, request_id=request_id), Sessions)

    async def ask(self, make: Callable[[str], Question], answer: type[Answer]) -> Answer:
        """Return the engine's answer to a question. make: makes the question with an id. Raises ApiError 503 (no
        engine).
        """
        self.ready()
        assert self._engine is not None
        request_id = f"question-{next(self._submit_ids)}"
        waiting: asyncio.Future[Told | ApiError] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = waiting
        try:
            self._engine.send(make(request_id))
            found = await waiting
        except EngineGone as error:
            raise unavailable(str(error), self._lost.code, self._retry_after()) from None
        finally:
            del self._asked[request_id]
        if isinstance(found, ApiError):
            raise found
        assert isinstance(found, answer)
        return found

    def drop_chunks(self, chunks: list[NamedChunk]) -> None:
        """Drop chunks that no document contains any more.

        Without an engine they are dropped once there is one; of too many, the last ones. If a document is added again
        in between, its chunks are computed again.
        """
        self._undropped |= dict.fromkeys(chunks)
        while len(self._undropped) > _MOST_UNDROPPED:
            del self._undropped[next(iter(self._undropped))]
        if self.state == "ready" and not self._stopping:
            self._drop_undropped()

    def _drop_undropped(self) -> None:
        if self._undropped and self._engine is not None:
            with suppress(EngineGone):
                self._engine.send(DropChunks(list(self._undropped)))
                self._undropped.clear()

    def _end_storing(self, stored: ChunksStored) -> None:
        self._metrics.chunks_stored.inc(stored.num_stored)
        self._metrics.chunks_known.inc(stored.num_known)
        if stored.reason:
            logs.warning("chunks_not_stored", id=stored.request_id, reason=stored.reason)
        answer = self._storing.get(stored.request_id)
        if answer is not None and not answer.done():
            answer.set_result(stored)

    def _end_asking(self, told: Told) -> None:
        answer = self._asked.get(told.request_id)
        if answer is not None and not answer.done():
            answer.set_result(told)

    def forget(self, request_ids: list[str], cancel: bool) -> None:
        """Stop delivering the output of these requests. cancel: the engine drops them as well."""
        for request_id in request_ids:
            self._mailboxes.pop(request_id, None)
        if cancel and self._engine is not None:
            with suppress(EngineGone):
                self._engine.send(Cancel(request_ids=request_ids))

    def abandon(self, message: str, code: str) -> None:
        """Send an error to all callers that wait for the engine."""
        waiting = set(self._mailboxes.values())
        self._mailboxes.clear()
        for mailbox in waiting:
            mailbox.put(EngineLost(message, code))
        for answer in self._storing.values():
            if not answer.done():
                answer.set_result(unavailable(message, code, self._retry_after()))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(unavailable(message, code, self._retry_after()))

    def _deliver(self, outputs: Outputs) -> None:
        mailboxes = self._mailboxes
        for delta in outputs.deltas:
            mailbox = mailboxes.get(delta.request_id)
            if mailbox is not None:
                mailbox.put(delta)
        for progress in outputs.progress:
            mailbox = mailboxes.get(progress.request_id)
            if mailbox is not None:
                mailbox.put(progress)
        if outputs.stats is not None:
            self._metrics.stats.take(outputs.stats)

    def _publish(self, changes: CacheChanges) -> None:
        if self.on_blocks is not None:
            self.on_blocks(changes)
            self._metrics.cache_events.inc(len(changes.changes))

    def _answer(self, submit_id: str, refused: Refused | None) -> None:
        answer = self._answers.get(submit_id)
        if answer is not None and not answer.done():
            answer.set_result(refused)

    def _retry_after(self) -> int:
        return self._settings.retry_after_seconds
