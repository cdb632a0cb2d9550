"""A thread that answers the host reads of decode steps, so that the launching thread goes on to the next step.

A step that awaits answers on the device is handed over once it is launched; its host reads were frozen before. Steps
are answered in the order of their launches. This thread counts a slot's stamps when it comes to a step, so a launch
disturbs no step before it. A step that fails releases its slots, and so does each step behind it until `recover`. So
the device never waits for ever, and no answer follows from a failed step. The thread waits for the device alone.
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

# Told of a step that is answered: its rows, its parts, what the host says of it, and the seconds that this took.
OnAnswered = Callable[[int, int, Answered, float], None]


class Exchange(Protocol):
    """The device's side of a slot: `gpu.exchange.device_slots`, `gpu.exchange.device_experts`."""

    @property
    def slot(self) -> Handshake: ...

    def forget_requests(self) -> None: ...


class PendingRequests(Protocol):
    """A step's requests in one slot, frozen.

    See `transfer.host_tier.Attention` and `transfer.expert_exchange.ExpertRequests`.
    """

    def give_up(self) -> None: ...


class Answerer(Protocol):
    """The host's side: `transfer.host_tier.HostTier`, `transfer.expert_exchange.ExpertWorker`."""

    def answer(self, parts: Sequence[tuple[Any, Any]]) -> Answered: ...


@dataclass(frozen=True, slots=True)
class SlotRequests:
    """The rows of a step with requests in one slot: their requests, and how many rows the first of them has."""

    exchange: Exchange
    requests: PendingRequests
    num_rows: int


class Answers:
    """The answers of one step, under way."""

    def __init__(self, host: Answerer, parts: Sequence[SlotRequests]) -> None:
        self.host = host
        self.parts = parts
        self.attended_s = 0.0  # once it is over: in which the host attended
        self._is_over = Event()
        self._error: BaseException | None = None

    def wait(self) -> str | None:
        """Wait until the last answer is given; return None, or why the step failed. The device, which awaits the
        answers, may still compute what follows the last. Raises errors that are our own mistakes.
        """
        self._is_over.wait()
        if self._error is None or isinstance(self._error, ExchangeError):
            return None if self._error is None else str(self._error)
        raise self._error

    @property
    def is_over(self) -> bool:
        """Return whether the last answer is given, or none will be."""
        return self._is_over.is_set()

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self._is_over.set()

    def give_up(self, error: BaseException) -> None:
        """Release the slots without an answer, and whatever is read for them."""
        for part in self.parts:
            part.exchange.slot.release()
        for part in self.parts:
            try:
                part.requests.give_up()
            except BaseException as fault:  # our own: `wait` raises it; the other parts and the thread go on
                error = fault
        self.end(error)


class Answering:
    """The thread that answers one device's host requests. Its methods are called from the thread that launches; the
    other begins with the first step.
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
        """Queue a launched step, with the parts whose host reads are answered in turns."""
        answers = self._last = Answers(host, parts)
        if self._is_stopped:
            answers.give_up(_stopped())
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
        """Recover before a step with host reads is launched: if one before it failed, wait for those behind it and for
        the device, and count its requests anew. The caller must not trust what steps in flight read and wrote.
        """
        if self._failure is None and not any(exchange.slot.is_released for exchange in self._exchanges):
            return
        self.drain()
        for exchange in self._exchanges:
            if exchange.slot.is_released:
                exchange.forget_requests()
        self._failure = None

    def stop(self) -> None:
        """End the thread behind the step that it is at. Steps handed over and not begun fail, as do those to come."""
        self._is_stopped = True
        self._steps.put(None)
        if self._thread is not None:
            self._thread.join()

    def answer(self, answers: Answers) -> None:
        """Answer queued steps, in the thread of its own."""
        try:
            if self._is_stopped:
                raise _stopped()
            if self._failure is not None:
                raise ExchangeError(f"exchange: an earlier step failed: {self._failure}")
            for part in answers.parts:
                part.exchange.slot.advance(part.num_rows)
            began_s = perf_counter()
            answered = answers.host.answer([(part.requests, part.exchange.slot) for part in answers.parts])
            rows = sum(part.num_rows for part in answers.parts)
            self._on_answered(rows, len(answers.parts), answered, perf_counter() - began_s)
            answers.attended_s = answered.attended_s
        except BaseException as error:  # the outermost handler of this thread: `Answers.wait` says or raises it
            self._failure = self._failure or ExchangeError(str(error))
            answers.give_up(error)
            return
        answers.end(None)


@torch.inference_mode()
def _serve(steps: "SimpleQueue[tuple[Answering, Answers] | None]") -> None:
    while (step := steps.get()) is not None:
        answering, answers = step
        answering.answer(answers)
        del step, answering, answers  # so that whoever has let go of them does so


def _stopped() -> ExchangeError:
    return ExchangeError("exchange: the thread that answers the device was stopped; start the engine again")
