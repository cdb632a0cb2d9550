"""Keep one model of a deployment: its service, whose engine comes and goes, and its running and waiting requests."""

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from server.api_error import ApiError, queue_full, unavailable
from server.bodies.keep_alive import FOREVER
from server.engine.supervisor import Supervisor
from server.service.service import Service

FIRST_RETRY_S, LONGEST_RETRY_S = 10.0, 600.0  # after a load that failed, until a request may have it tried again

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
STATES: tuple[ModelState, ...] = ("unloaded", "loading", "loaded", "unloading", "failed")


@dataclass(slots=True)
class Waiter:
    """A request that waits for its model: since when, and the future with its lease."""

    since_s: float
    admitted: "asyncio.Future[Lease]"


class ServedModel:
    """A model of a deployment.

    is_started: its engine has memory, or soon will. is_closing: it makes room for another, so new requests wait.
    num_open: admitted requests that have not ended. expires_s: when it may be unloaded for being idle. goes_when_idle:
    it is unloaded once its running requests are answered, unless another comes.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.is_started = False
        self.is_closing = False
        self.is_stopping = False
        self.num_open = 0
        self.waiters: deque[Waiter] = deque()
        service.metrics.num_load_waits = self.waiters.__len__
        self.expires_s = FOREVER
        self.goes_when_idle = False
        self.used_s = 0.0  # when it was asked for last
        self.began_s = 0.0
        self.ready_since_s: float | None = None
        self.load_seconds = 0.0  # that its last load took
        self.failure: str | None = None  # why that failed
        self.retry_s = 0.0
        self._num_failures = 0

    @property
    def name(self) -> str:
        return self.service.model_name

    @property
    def supervisor(self) -> Supervisor:
        return self.service.supervisor

    @property
    def is_ready(self) -> bool:
        return self.is_started and not self.is_stopping and self.supervisor.state == "ready"

    @property
    def is_idle(self) -> bool:
        """Return whether the engine could end now without breaking off any work."""
        return not self.num_open and not self.supervisor.has_work

    @property
    def state(self) -> ModelState:
        if self.is_started and self.supervisor.state != "failed":
            if self.is_stopping or (self.is_closing and self.is_ready):
                return "unloading"
            return "loaded" if self.is_ready else "loading"
        return "failed" if self.failure is not None or self.is_started else "unloaded"

    def idle_until(self, keep_alive_s: float | None) -> float:
        """Return when the model may be unloaded if it is idle from now on. keep_alive_s: of the request, or None."""
        seconds = self.service.deployment.idle_seconds if keep_alive_s is None else keep_alive_s
        return math.inf if seconds is None else time.monotonic() + seconds

    def admit(self) -> "Lease":
        self.num_open += 1
        self.used_s, self.goes_when_idle = time.monotonic(), False
        return Lease(self)

    def note_ready(self, now: float) -> None:
        """Note that a load has succeeded."""
        self.ready_since_s, self.load_seconds = now, now - self.began_s
        self.failure, self._num_failures, self.goes_when_idle = None, 0, False
        self.expires_s = self.idle_until(None)

    def note_failure(self, reason: str, now: float) -> None:
        """Note that a load failed, or that the engine failed for good; after each failure in a row, the wait is
        longer.
        """
        self.failure = reason
        self.retry_s = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**self._num_failures)
        self._num_failures += 1

    def failed(self, now: float) -> ApiError:
        """Return the 503 of a request for a model whose load has failed."""
        what = f"model: {self.name!r} could not be loaded: {self.failure}"
        return unavailable(what, "model_failed", max(1, math.ceil(self.retry_s - now)))

    def too_late(self, waited_s: float, for_what: str) -> ApiError:
        """Return the 503 of a request that has waited as long as it may. for_what: what it waited for."""
        retry_s = max(self.service.settings.retry_after_seconds, math.ceil(self.load_seconds))
        what = f"model: {self.name!r} is not loaded after {waited_s:.3g} s: {for_what}; try again later"
        return unavailable(what, "model_loading", retry_s)

    def queue_full(self) -> ApiError:
        limits = "scheduler.max_queue and max_running"
        what = f"model: {len(self.waiters)} requests wait until {self.name!r} is loaded ({limits})"
        return queue_full(what, self.service.settings.retry_after_seconds)

    def describe_wait(self, ending: str) -> str:
        """Describe in a few words what a request is waiting for. ending: what another engine does that is ending."""
        if self.is_stopping:
            return f"it is unloaded, and loaded again then{ending and f'; it {ending}'}"
        if not self.is_started or self.is_closing:
            return f"another model has its place, and {ending or 'answers what it has begun'}"
        loading = self.supervisor.loading
        return f"loading, {loading.stage} {round(100 * loading.fraction)} %"

    def turn_away(self, error: ApiError) -> None:
        """Send the error to every request that waits."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def let_in(self) -> None:
        """Admit every request that waits."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_result(self.admit())


@dataclass(slots=True)
class Lease:
    """A request's use of a model, which stays loaded until `release`."""

    model: ServedModel
    keep_alive_s: float | None = None
    is_over: bool = field(default=False)

    def release(self) -> None:
        """End the use; further calls have no effect."""
        if self.is_over:
            return
        self.is_over = True
        self.model.num_open -= 1
        if not self.model.goes_when_idle:
            self.model.expires_s = self.model.idle_until(self.keep_alive_s)
        self.model.supervisor.on_change()
