"""Threads that read: what somebody waits for first, in order, and what nobody has asked for behind all of that.

It refuses to know what is read, and where to. Invariant: nothing that nobody waits for begins while there is something
wanted that has not begun. Methods may be called from any thread.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from transfer.host_pages import Pages

Waiting = dict["Future[Pages]", Callable[[], Pages]]


class Readers:
    """As an executor, whose futures may be cancelled until they begin."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "chunk-reads")
        self._lock = Lock()
        self._wanted: Waiting = {}
        self._unasked: Waiting = {}

    def submit(self, read: Callable[[], Pages], is_wanted: bool) -> "Future[Pages]":
        future: Future[Pages] = Future()
        with self._lock:
            (self._wanted if is_wanted else self._unasked)[future] = read
        self._threads.submit(self._read_next)
        return future

    def set_wanted(self, future: "Future[Pages]", is_wanted: bool) -> None:
        """One that has not begun goes to the end of the other ones."""
        begin, end = (self._unasked, self._wanted) if is_wanted else (self._wanted, self._unasked)
        with self._lock:
            if future in begin:
                end[future] = begin.pop(future)

    def shutdown(self) -> None:
        """All are read."""
        self._threads.shutdown()

    def _read_next(self) -> None:
        """The first of those that wait by now; as often as there was one submitted."""
        with self._lock:
            waiting = self._wanted or self._unasked
            future = next(iter(waiting))
            read = waiting.pop(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(read())
        except BaseException as error:  # the outermost handler of this thread: whoever waits has the error
            future.set_exception(error)
