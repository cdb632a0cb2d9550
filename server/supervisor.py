"""Keeps an engine process alive and carries requests to it and their output back. Knows no HTTP and no text.

States: loading -> ready -> dead -> loading -> ...; `failed` (the first start did not succeed) ends the program. An
engine that is ready speaks several times a second, also when idle: one that falls silent hangs, and is killed.
Invariant: every open mailbox gets either its requests' last deltas or one EngineLost.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from scheduler.messages import (
    Accepted,
    Cancel,
    EngineRequest,
    Failed,
    Loading,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Submit,
)
from server import logs
from server.api_error import queue_full, too_long, unavailable
from server.config import Deployment
from server.engine import EngineGone, EngineProcess
from server.mailbox import EngineLost, Mailbox
from server.metrics import Metrics

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 30.0
_HEALTHY_AFTER_S = 60.0  # a life this long resets the backoff
_SHUTDOWN_WAIT_S = 5.0
_SILENCE_CHECKS = 4  # in a row; one alone would also fail when it was this process that stood still
_LOST = "the engine process died while it worked on this request; try again"


class Supervisor:
    def __init__(
        self, deployment: Deployment, command: Sequence[str], metrics: Metrics, on_loading: Callable[[Loading], None]
    ) -> None:
        self._command = command
        self._deployment_json = deployment.model_dump_json(exclude={"server": {"api_keys"}}).encode()
        self._settings = deployment.server
        self._metrics = metrics
        self._on_loading = on_loading
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._engine: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._answers: dict[str, asyncio.Future[Refused | None]] = {}
        self._submit_ids = itertools.count()
        self._stopping = False
        self._lives = 0
        self._has_spoken = False
        self.state = "loading"
        self.loading = Loading(stage="starting", fraction=0.0)
        self.limits: Ready | None = None
        self.failure: asyncio.Future[str] | None = None

    # --- life of the engine -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._context = zmq.Context()
        self.failure = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_alive())

    async def stop(self) -> None:
        """Ask the engine to exit, wait a little, and make sure."""
        self._stopping = True
        engine = self._engine
        if engine is not None:
            with suppress(EngineGone):
                engine.send(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.wait(), _SHUTDOWN_WAIT_S if self.state == "ready" else 0.2)
            engine.kill()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._context is not None:
            self._context.destroy(linger=0)

    def kill_engine(self) -> None:
        """For a program that must exit this instant."""
        if self._engine is not None:
            self._engine.kill()
            self._engine.remove_folder()

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid if self._engine is not None else None

    async def _keep_alive(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            began_s = time.monotonic()
            reason = await self._one_life()
            if self._stopping:
                return
            if self.limits is None:
                self.state = "failed"
                assert self.failure is not None
                self.failure.set_result(reason)
                return
            if not self._settings.restart_engine:
                return
            if time.monotonic() - began_s > _HEALTHY_AFTER_S:
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            self._metrics.engine_restarts.inc()

    async def _one_life(self) -> str:
        """Start an engine and serve with it until it ends. Returns why it did, in one line."""
        assert self._context is not None
        self.state = "loading"
        self.loading = Loading(stage="starting", fraction=0.0)
        self._lives += 1
        engine = self._engine = EngineProcess(self._context, self._command, self._deployment_json)
        failed: str | None = None
        watch = asyncio.create_task(self._end_silence(engine))
        try:
            await engine.start()
            logs.info("engine_started", pid=engine.pid, life=self._lives)
            async for message in engine.messages():
                self._has_spoken = True
                match message:
                    case Outputs():
                        self._deliver(message)
                    case Accepted():
                        self._answer(message.submit_id, None)
                    case Refused():
                        self._answer(message.submit_id, message)
                    case Loading():
                        self.loading = message
                        self._on_loading(message)
                        logs.info("engine_loading", stage=message.stage, fraction=message.fraction)
                    case Ready():
                        self._become_ready(message)
                    case Failed():
                        failed = message.message
            ended = await engine.wait()
        except (OSError, msgspec.DecodeError) as error:
            ended = f"could not be run ({' '.join(str(error).split())})"
        finally:
            watch.cancel()
            self._engine = None
            engine.kill()
            engine.close()
            self._lose_everything()
        reason = failed or f"engine: {ended} {'before it was ready' if self.limits is None else ''}".strip()
        if not self._stopping:
            logs.warning("engine_ended", reason=reason, life=self._lives)
        return reason

    async def _end_silence(self, engine: EngineProcess) -> None:
        """Kill an engine that serves and has said nothing in all of `engine_silence_seconds`."""
        num_silent = 0
        while num_silent < _SILENCE_CHECKS:
            self._has_spoken = False
            await asyncio.sleep(self._settings.engine_silence_seconds / _SILENCE_CHECKS)
            num_silent = 0 if self._has_spoken or self.state != "ready" else num_silent + 1
        logs.warning("engine_silent", pid=engine.pid, seconds=self._settings.engine_silence_seconds)
        engine.kill()

    def _become_ready(self, ready: Ready) -> None:
        self.limits = ready
        self.state = "ready"
        self._metrics.engine_up.set(1)
        self._metrics.pages_capacity.set(ready.num_pages)
        logs.info(
            "engine_ready",
            device=ready.device,
            load_seconds=ready.load_seconds,
            pages=ready.num_pages,
            max_context_tokens=ready.max_context_tokens,
            profiles=",".join(ready.profiles),
        )

    def _lose_everything(self) -> None:
        self.state = "dead"
        self._metrics.engine_gone()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineGone(_LOST))
        self.abandon(_LOST, "engine_dead")

    # --- requests -----------------------------------------------------------------------------------------------------

    def ready(self) -> Ready:
        """The engine's limits. Raises ApiError 503 unless it serves."""
        if self.state != "ready" or self.limits is None:
            what = "the model is loading" if self.state == "loading" else "the engine process is dead"
            raise unavailable(f"engine: {what}; try again later", f"engine_{self.state}", self._retry_after())
        return self.limits

    async def submit(self, requests: list[EngineRequest], mailbox: Mailbox, param: str) -> None:
        """All or none. On return the engine has them, and their output goes to the mailbox until `forget`.

        Raises ApiError: 429 (queue full), 400 naming `param` (can never fit), 503 (no engine).
        """
        self.ready()
        assert self._engine is not None
        submit_id = str(next(self._submit_ids))
        answer: asyncio.Future[Refused | None] = asyncio.get_running_loop().create_future()
        self._answers[submit_id] = answer
        for request in requests:
            self._mailboxes[request.request_id] = mailbox
        try:
            self._engine.send(Submit(submit_id=submit_id, requests=requests))
            refused = await answer
        except EngineGone as error:
            raise unavailable(str(error), "engine_dead", self._retry_after()) from None
        finally:
            self._answers.pop(submit_id, None)
        if refused is not None:
            self._metrics.finished.labels("refused").inc(len(requests))
            for request in requests:
                self._mailboxes.pop(request.request_id, None)
            if refused.code == "queue_full":
                raise queue_full(refused.message, self._retry_after())
            raise too_long(param, refused.message)

    def forget(self, request_ids: list[str], cancel: bool) -> None:
        """No more output of these; with `cancel`, the engine drops them as well."""
        for request_id in request_ids:
            self._mailboxes.pop(request_id, None)
        if cancel and self._engine is not None:
            with suppress(EngineGone):
                self._engine.send(Cancel(request_ids=request_ids))

    def abandon(self, message: str, code: str) -> None:
        """Tell everyone who waits that nothing will come."""
        waiting = set(self._mailboxes.values())
        self._mailboxes.clear()
        for mailbox in waiting:
            mailbox.put(EngineLost(message, code))

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
            self._metrics.take(outputs.stats)

    def _answer(self, submit_id: str, refused: Refused | None) -> None:
        answer = self._answers.get(submit_id)
        if answer is not None and not answer.done():
            answer.set_result(refused)

    def _retry_after(self) -> int:
        return self._settings.retry_after_seconds
