"""Run background jobs that yield to decode, in pieces of about a millisecond, the most urgent first.

Threads with cores of their own run longer pieces, because a thread waits half a millisecond for the interpreter after
each piece. While the gate is shut, no piece begins except on those threads. A job that raises is logged and its `fail`
is called; the other jobs go on. The gate is a number in memory, so that compiled code can shut it without the
interpreter.
"""

import heapq
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Thread

import numpy as np

log = logging.getLogger(__name__)

PIECE_TOKENS = 2**18  # table entries built, or rows' elements copied in 16 bits, between two looks at the gate
LONG_PIECE_TOKENS = 2**22  # table entries built by a thread with a core of its own: some 8 ms


@dataclass(slots=True)
class Pace:
    """The largest size of the next piece of a table build, set by the thread that runs it. Copies do not use it."""

    piece_tokens: int


@dataclass(eq=False, slots=True)
class BuildJob:
    """A background job. urgency: lower runs earlier; ties run in the order of submission. pieces: each `next` runs one
    piece, of a size by `pace`. A job that is no longer wanted ends early. Either `finish` or `fail` is called, once.
    """

    urgency: tuple[int, ...]
    name: str
    pieces: Iterator[None]
    pace: Pace
    is_wanted: Callable[[], bool]
    finish: Callable[[], None]
    fail: Callable[[Exception], None]
    order: int = field(init=False, default_factory=count().__next__)

    def __lt__(self, other: "BuildJob") -> bool:
        return (self.urgency, self.order) < (other.urgency, other.order)


class Builder:
    """Threads that run jobs until `shutdown`. gate: int64 `[1]`, the number of pauses; the gate is shut above 0.
    num_cores: threads that may pass a shut gate, because decode leaves them cores (`num_busy_cores`).
    """

    def __init__(self, num_threads: int, num_cores: int) -> None:
        self._jobs: list[BuildJob] = []
        self._num_under_way = 0
        self._num_cores = num_cores
        self._changed = Condition()
        self._is_over = False
        self.gate = np.zeros(1, np.int64)
        self._threads = [
            Thread(target=self._run, args=(number < num_cores,), name=f"builder-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_busy_cores(self) -> int:
        """Return how many threads with cores of their own have work."""
        return min(self._num_cores, len(self._jobs) + self._num_under_way)

    def submit(self, job: BuildJob) -> None:
        with self._changed:
            self._push(job)

    def _push(self, job: BuildJob) -> None:
        heapq.heappush(self._jobs, job)
        self._changed.notify_all()  # not one thread, which might be waiting for the gate

    def drop_unwanted(self) -> None:
        """End waiting jobs that are no longer wanted, before their turn."""
        with self._changed:
            dropped = [job for job in self._jobs if not job.is_wanted()]
            self._jobs = [job for job in self._jobs if job not in dropped]
            heapq.heapify(self._jobs)
        for job in dropped:
            job.finish()

    def pause(self) -> None:
        """Let no piece begin until `go_on`, except on threads with cores of their own. A running piece may finish its
        millisecond. Pauses add up. One thread at a time begins or ends them.
        """
        self.gate[0] += 1

    def go_on(self) -> None:
        """End one pause, from any thread."""
        with self._changed:
            self.gate[0] -= 1
            self._changed.notify_all()

    def shutdown(self) -> None:
        """Stop after the pieces that are running; jobs that are not done stay undone."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, passes_gate: bool) -> None:
        while (job := self._take(passes_gate)) is not None:
            job.pace.piece_tokens = LONG_PIECE_TOKENS if passes_gate else PIECE_TOKENS
            goes_on = False
            try:
                goes_on = self._do_piece(job)
            finally:
                with self._changed:  # at once, or the job would count twice
                    self._num_under_way -= 1
                    if goes_on:
                        self._push(job)

    def _do_piece(self, job: BuildJob) -> bool:
        """Run one piece, and return whether more of the job remains."""
        if not job.is_wanted():
            job.finish()
            return False
        try:
            next(job.pieces)
        except StopIteration:
            job.finish()
        except Exception as error:  # the outermost handler of this thread: one job's failure must not end it
            log.exception("background_job_failed job=%s", job.name)
            job.fail(error)
        else:
            return True
        return False

    def _take(self, passes_gate: bool) -> BuildJob | None:
        """Return the next job, once there is one and the gate is open; None after shutdown."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or (self._jobs and (passes_gate or self.gate[0] <= 0)))
            if self._is_over:
                return None
            self._num_under_way += 1
            return heapq.heappop(self._jobs)
