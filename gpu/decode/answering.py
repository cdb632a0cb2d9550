"""Answer the host reads of decode steps in a thread, so that the launching thread goes on to the next step.

A step that awaits answers on the device is handed over once it is launched. Its host reads were frozen before. Steps
are answered in the order of their launches. This thread advances a slot's stamps when it comes to a step, so a launch
disturbs no earlier step. A step that fails releases its slots, and so does each later step until `recover`. So the
device never waits for ever, and no answer follows from a failed step. The thread waits only for the device.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter
from typing import Any, Protocol

import torch

from transfer.exchange import ExchangeError, Handshake
from transfer.host_tier import Answered

# Called after a step is answered, with the numbers of its rows and parts, the host's report, and the seconds it took.
OnAnswered = Callable[[int, int, Answered, float], None]


class Exchange(Protocol):
    """The device's side of a slot: `gpu.exchange.device_slots`, `gpu.exchange.device_experts`."""

    @property
    def slot(self) -> Handshake: ...

    def forget_requests(self) -> None: ...


class PendingRequests(Protocol):
    """A step's frozen requests in one slot.

    See `transfer.host_tier.Attention` and `transfer.expert_exchange.ExpertRequests`.
    """

    def give_up(self) -> None: ...


class Answerer(Protocol):
    """The host's side: `transfer.host_tier.HostTier`, `transfer.expert_exchange.ExpertWorker`."""

    def answer(self, parts: Sequence[tuple[Any, Any]]) -> Answered: ...


@dataclass(frozen=True, slots=True)
class SlotRequests:
    """A step's requests in one slot. num_rows: the rows of the first request."""

    exchange: Exchange
    requests: PendingRequests
    num_rows: int


class Answers:
    """The answers of one step, given or to come."""

    def __init__(self, host: Answerer, parts: Sequence[SlotRequests]) -> None:
        self.host = host
        self.parts = parts
        self.attended_s = 0.0  # seconds in which the host attended; set once the step is over
        self._is_over = Event()
        self._error: BaseException | None = None

    def wait(self) -> str | None:
        """Wait until the last answer is given. Return None, or the reason why the step failed.

        The device may still compute what follows the last answer. Raises errors that are our own mistakes.
        """
        self._is_over.wait()
        if self._error is None or isinstance(self._error, ExchangeError):
            return None if self._error is None else str(self._error)
        raise self._error

    @property
    def is_over(self) -> bool:
        """Return whether the last answer was given, or the step has failed."""
        return self._is_over.is_set()

    def end(self, error: BaseException | None) -> None:
        """Mark the step as over, with the error that it failed with, if any."""
        self._error = error
        self._is_over.set()

    def give_up(self, error: BaseException) -> None:
        """Release the slots without an answer, and the host memory that is read for them."""
        for part in self.parts:
            part.exchange.slot.release()
        for part in self.parts:
            try:
                part.requests.give_up()
            except BaseException as fault:  # our own: `wait` raises it; the other parts and the thread go on
                error = fault
        self.end(error)


class Answering:
    """The thread that answers one device's host requests; it starts with the first step.

    All methods but `answer` are called from the thread that launches steps.
    """

    def __init__(self, exchanges: Sequence[Exchange], on_answered: OnAnswered) -> None:
        self._exchanges = exchanges
        self._on_answered = on_answered
        self._steps: SimpleQueue[tuple[Answering, Answers] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._last: Answers | None = None
        self._failure: ExchangeError | None = None  # of a step handed over, until `recover`
        self._is_stopped = False
        weakref.finalize(self, self._steps.put, None)

    def hand_over(self, host: Answerer, parts: Sequence[SlotRequests]) -> Answers:
        """Queue a launched step. The host reads of its parts are answered in turns."""
        answers = self._last = Answers(host, parts)
        if self._is_stopped:
            answers.give_up(_stopped_error())
            return answers
        if self._thread is None:
            self._thread = Thread(target=_serve, args=(self._steps,), name="answers", daemon=True)
            self._thread.start()
        self._steps.put((self, answers))
        return answers

    def drain(self) -> None:
        """Wait until every queued step is answered, or has failed."""
        if self._last is not None:
            self._last._is_over.wait()

    def recover(self) -> None:
        """Make the slots usable again if an earlier step failed. Called before a step with host reads is launched.

        Waits for the steps behind the failed one and for the device, and restarts the count of requests. The caller
        must not trust what steps in flight read and wrote.
        """
        if self._failure is None and not any(exchange.slot.is_released for exchange in self._exchanges):
            return
        self.drain()
        for exchange in self._exchanges:
            if exchange.slot.is_released:
                exchange.forget_requests()
        self._failure = None

    def stop(self) -> None:
        """Stop the thread after its current step.

        Steps that were handed over but not begun fail, and so do later ones.
        """
        self._is_stopped = True
        self._steps.put(None)
        if self._thread is not None:
            self._thread.join()

    def answer(self, answers: Answers) -> None:
        """Answer a queued step; runs in the answering thread."""
        try:
            if self._is_stopped:
                raise _stopped_error()
            if self._failure is not None:
                raise ExchangeError(f"exchange: an earlier step failed: {self._failure}")
            for part in answers.parts:
                part.exchange.slot.advance(part.num_rows)
            began_s = perf_counter()
            answered = answers.host.answer([(part.requests, part.exchange.slot) for part in answers.parts])
            rows = sum(part.num_rows for part in answers.parts)
            self._on_answered(rows, len(answers.parts), answered, perf_counter() - began_s)
            answers.attended_s = answered.attended_s
        except BaseException as error:  # the outermost handler of this thread: `Answers.wait` returns or raises it
            self._failure = self._failure or ExchangeError(str(error))
            answers.give_up(error)
            return
        answers.end(None)


@torch.inference_mode()
def _serve(steps: "SimpleQueue[tuple[Answering, Answers] | None]") -> None:
    """Answer the queued steps one by one, until a None."""
    while (step := steps.get()) is not None:
        answering, answers = step
        answering.answer(answers)
        del step, answering, answers  # or this thread would keep them alive while it waits


def _stopped_error() -> ExchangeError:
    return ExchangeError("exchange: the thread that answers the device was stopped; start the engine again")
