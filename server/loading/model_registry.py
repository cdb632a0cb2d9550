"""Hold all models of a deployment, and decide which of them are loaded.

A single model is loaded at the start and stays loaded. With several models, or with `idle_seconds`, an engine is
started when a request needs it. If there is no room, other models are drained first: they accept no new request, finish
the running ones, and are unloaded. A model is not drained before it has served for as long as its load took, so that
loading takes at most half of the time; an idle model may be unloaded at once. While one of several models has no
engine, a process that has already imported an engine's libraries waits to become its engine.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress

from server import logs
from server.api_error import unavailable, unknown_model
from server.bodies.keep_alive import FOREVER
from server.engine.head_start import HeadStart
from server.loading.model_metrics import ModelMetrics
from server.loading.served_model import Lease, ServedModel, Waiter
from server.planning.side_by_side import ONE_AT_A_TIME, Room
from server.service.service import Service

_LONGEST_LEAST_S = 60.0  # a model serves at most so long before it makes room for one that is waited for
_LOOK_AGAIN_S = 0.1  # until an engine is checked again that still works on something without a request
_MOST_NAME = 200  # most characters of a model's name that a message repeats


class ModelRegistry:
    def __init__(self, services: Sequence[Service], room: Room = ONE_AT_A_TIME, ahead: HeadStart | None = None) -> None:
        """Make a registry of one service for each model. ahead: keeps an engine process started in advance, as long as
        some model has no engine.
        """
        self.models = tuple(ServedModel(service) for service in services)
        self.first = self.models[0]
        self.is_managed = len(self.models) > 1 or self.first.service.deployment.idle_seconds is not None
        self.metrics = ModelMetrics(self.models, self.is_managed)
        self.has_served = False  # whether any model was ready since the start
        self.failure: asyncio.Future[str] | None = None
        self._room = room
        self._ahead = ahead
        self._renewing: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._ends_by_s = math.inf
        self._unloading: dict[ServedModel, asyncio.Task[None]] = {}

    # --- for requests -------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[str]:
        return [one for model in self.models for one in model.service.model_ids]

    def find(self, name: str | None) -> ServedModel:
        """Return the model with this name or alias, also with an adapter or `:latest` added; None: the first model.

        Raises ApiError 404.
        """
        if name is None:
            return self.first
        for model in self.models:
            if model.service.knows_model(name):
                return model
        raise unknown_model(name[:_MOST_NAME], self.ids)

    def sharing_chunks(self, service: Service) -> list[ServedModel]:
        """Return the models that keep document chunks in the same folder as this one, itself included."""
        return [model for model in self.models if model.service.chunk_folder == service.chunk_folder]

    def try_admit(self, model: ServedModel) -> Lease | None:
        """Return a lease if the request need not wait: the model is loaded, or the registry does not manage it.

        Raises ApiError 503 if its load failed recently, and 429 if too many requests wait.
        """
        now = time.monotonic()
        if not self.is_managed or (model.is_ready and not model.is_closing):
            return model.admit()
        if not model.is_started and model.failure is not None and now < model.retry_s:
            raise model.failed(now)
        if len(model.waiters) >= model.service.max_sequences:
            raise model.queue_full()
        return None

    async def admit(self, model: ServedModel, most_s: float) -> Lease:
        """Wait at most `most_s` seconds until the model is loaded. Raises ApiError 503 after that, or if its load
        fails.
        """
        waiter = Waiter(time.monotonic(), asyncio.get_running_loop().create_future())
        model.waiters.append(waiter)
        model.used_s = waiter.since_s
        self._changed.set()
        try:
            await asyncio.wait([waiter.admitted], timeout=most_s)
        except BaseException:
            self._leave(model, waiter)
            raise
        if not waiter.admitted.done():
            self._leave(model, waiter)
            raise model.too_late(time.monotonic() - waiter.since_s, self.describe_wait(model))
        return waiter.admitted.result()

    def describe_wait(self, model: ServedModel) -> str:
        """Describe in a few words what a request for this model is waiting for."""
        return model.describe_wait(next(filter(None, (other.supervisor.ending for other in self.models)), ""))

    def _leave(self, model: ServedModel, waiter: Waiter) -> None:
        """Remove a request that no longer waits, and release its lease if it got one in between."""
        if waiter in model.waiters:
            model.waiters.remove(waiter)
        if waiter.admitted.done() and waiter.admitted.exception() is None:
            waiter.admitted.result().release()
        self._changed.set()

    def unload_when_idle(self, model: ServedModel) -> None:
        model.goes_when_idle, model.expires_s = True, 0.0
        self._changed.set()

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first model's engine, and the task that manages the others."""
        self.failure = asyncio.get_running_loop().create_future()
        if self.is_managed:
            for model in self.models:
                model.supervisor.on_change = self._changed.set
            self._load(self.first)
            self._keeper = asyncio.create_task(self._keep())
            self._keeper.add_done_callback(self._end_with_keeper)
            return
        self.first.is_started = True
        self.first.supervisor.start()
        assert self.first.supervisor.failure is not None
        self.first.supervisor.failure.add_done_callback(lambda told: self._fail(told.result()))

    async def stop(self) -> None:
        """End all engines once they have written their contexts, also those that are already being unloaded."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)  # its errors were logged when they occurred
        for model in self._started():
            self._unload(model)
        await asyncio.gather(*self._unloading.values())

    def end_by(self, by_s: float) -> None:
        """Set the time by which all engines must have ended, also those that are ending or start later."""
        self._ends_by_s = by_s
        for model in self.models:
            model.supervisor.end_by(by_s)

    def kill_engines(self) -> None:
        """Kill every engine for a program that must exit this instant."""
        for model in self.models:
            model.supervisor.kill_engine()

    def abandon(self, message: str, code: str) -> None:
        """Send an error to every request that waits."""
        for model in self.models:
            model.turn_away(unavailable(message, code, model.service.settings.retry_after_seconds))
            model.supervisor.abandon(message, code)

    @property
    def can_recover(self) -> bool:
        """Return whether some model serves, or can be loaded."""
        return self.is_managed or self.first.supervisor.can_recover

    def _fail(self, reason: str) -> None:
        if self.failure is not None and not self.failure.done():
            self.failure.set_result(reason)

    def _end_with_keeper(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            logs.failure("keeper_failed", error)
            self._fail(f"models: {type(error).__name__}: {' '.join(str(error).split())}")

    # --- policy -------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Load, admit and unload whenever something has changed or is due."""
        while True:
            self._changed.clear()
            due_s = self._act(time.monotonic())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if math.isinf(due_s) else max(0.0, due_s))

    def _act(self, now: float) -> float:
        """Load, admit and unload. Returns the seconds until the next call is due if nothing changes."""
        for model in self._started():
            if not model.is_stopping:
                self._take_news(model, now)
        wanted = self._most_wanted()
        in_the_way = [] if wanted is None else self._in_the_way(wanted)
        for model in self._started():
            model.is_closing = model.is_closing and model in in_the_way
            if model.is_ready and not model.is_closing:
                model.let_in()
        due_s = math.inf if wanted is None else self._make_room(wanted, in_the_way, now)
        for model in self._started():
            if model.is_ready and not model.is_closing:
                due_s = min(due_s, self._unload_expired(model, now))
        self._keep_one_ahead()
        return due_s

    def _keep_one_ahead(self) -> None:
        """Start a process in advance for the next engine, but not while another engine starts, which it would slow."""
        started = self._started()
        is_served = any(model.is_ready for model in started)
        starts = any(not model.is_ready and not model.is_stopping for model in started)
        if self._ahead is None or len(started) == len(self.models) or not is_served or starts:
            return
        if not self._ahead.is_waiting and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.ensure_future(asyncio.to_thread(self._ahead.renew))

    def _take_news(self, model: ServedModel, now: float) -> None:
        """Note whether an engine has become ready or has failed."""
        if model.is_ready and model.ready_since_s is None:
            model.note_ready(now)
            self.has_served = True
            self.metrics.count_load(model)
            logs.info("model_loaded", model=model.name, seconds=model.load_seconds)
        elif not model.supervisor.can_recover:
            failure = model.supervisor.failure
            told = failure.result() if failure is not None and failure.done() else "its engine ended"
            model.note_failure(told, now)
            self.metrics.count_failure(model)
            logs.warning("model_failed", model=model.name, reason=told)
            self._unload(model)

    def _started(self) -> list[ServedModel]:
        return [model for model in self.models if model.is_started]

    def _most_wanted(self) -> ServedModel | None:
        """Return the model without an engine whose request has waited the longest."""
        wanted = [model for model in self.models if model.waiters and not model.is_started]
        return min(wanted, key=lambda model: model.waiters[0].since_s, default=None)

    def _make_room(self, wanted: ServedModel, in_the_way: list[ServedModel], now: float) -> float:
        """Load the model if there is room, else let others make room. Returns the seconds until the next check."""
        due_s = math.inf
        for model in in_the_way:
            if model.is_stopping:
                continue
            least_s = min(model.load_seconds, _LONGEST_LEAST_S)
            young_s = 0.0 if model.ready_since_s is None else model.ready_since_s + least_s - now
            if model.supervisor.state == "loading" or (model.is_ready and not model.is_idle and young_s > 0):
                if young_s > 0:
                    due_s = min(due_s, young_s)
                continue
            model.is_closing = True
            if model.is_idle:
                self._unload(model)
            elif not model.num_open:
                due_s = min(due_s, _LOOK_AGAIN_S)
        if not any(model.is_started for model in in_the_way):
            self._load(wanted)
        return due_s

    def _in_the_way(self, wanted: ServedModel) -> list[ServedModel]:
        """Return the models that must be unloaded before this one has room, in that order.

        Models that are already making room come first; otherwise each request for this model would drain another one.
        """
        by_expiry = sorted(
            self._started(),
            key=lambda one: (not one.is_stopping, not one.is_closing, one.expires_s, one.used_s),
        )
        for num_gone in range(len(by_expiry)):
            if self._room.holds([one.service.memory for one in (*by_expiry[num_gone:], wanted)]):
                return by_expiry[:num_gone]
        return by_expiry

    def _unload_expired(self, model: ServedModel, now: float) -> float:
        """Unload a model that has been idle for long enough. Returns the seconds until the next check."""
        if model.num_open or model.expires_s == FOREVER:
            return math.inf
        if now < model.expires_s:
            return model.expires_s - now
        if not model.is_idle:
            return _LOOK_AGAIN_S
        self._unload(model)
        return math.inf

    def _load(self, model: ServedModel) -> None:
        logs.info("model_loading", model=model.name)
        model.is_started, model.is_closing = True, False
        model.began_s, model.ready_since_s = time.monotonic(), None
        model.supervisor.start()
        model.supervisor.end_by(self._ends_by_s)

    def _unload(self, model: ServedModel) -> None:
        """Begin to end the engine, unless that has begun. It first writes its contexts to disk, if they are
        kept there.
        """
        if not model.is_stopping:
            model.is_stopping = True
            self._unloading[model] = asyncio.create_task(self._end_engine(model))

    async def _end_engine(self, model: ServedModel) -> None:
        """Wait for the engine's end. An error is logged, and the model may be loaded again in any case."""
        began_s = time.monotonic()
        [fault] = await asyncio.gather(model.supervisor.stop(), return_exceptions=True)
        if isinstance(fault, Exception):
            logs.failure("unload_failed", fault)
        model.is_started = model.is_closing = model.is_stopping = False
        if model.ready_since_s is not None:
            self.metrics.count_unload(model)
            logs.info("model_unloaded", model=model.name, seconds=time.monotonic() - began_s)
        model.ready_since_s = None
        now = time.monotonic()
        if model.failure is not None and now < model.retry_s:
            model.turn_away(model.failed(now))
        del self._unloading[model]
        self._changed.set()
