"""Run threads that read: wanted reads in order, and unrequested reads after all of them.

No unrequested read begins while a wanted read has not begun. Methods may be called from any thread.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from transfer.host_pages import Pages

Waiting = dict["Future[Pages]", Callable[[], Pages]]


class Readers:
    """An executor whose futures may be cancelled until they begin."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "chunk-reads")
        self._lock = Lock()
        self._wanted: Waiting = {}
        self._unrequested: Waiting = {}

    def submit(self, read: Callable[[], Pages], is_wanted: bool) -> "Future[Pages]":
        future: Future[Pages] = Future()
        with self._lock:
            (self._wanted if is_wanted else self._unrequested)[future] = read
        self._threads.submit(self._read_next)
        return future

    def set_wanted(self, future: "Future[Pages]", is_wanted: bool) -> None:
        """Move a read that has not begun to the end of the wanted, or of the unrequested, reads."""
        begin, end = (self._unrequested, self._wanted) if is_wanted else (self._wanted, self._unrequested)
        with self._lock:
            if future in begin:
                end[future] = begin.pop(future)

    def shutdown(self) -> None:
        """Finish all reads."""
        self._threads.shutdown()

    def _read_next(self) -> None:
        """Run the first waiting read. Called once for each read that was submitted."""
        with self._lock:
            waiting = self._wanted or self._unrequested
            future = next(iter(waiting))
            read = waiting.pop(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(read())
        except BaseException as error:  # the outermost handler of this thread: the future carries the error
            future.set_exception(error)
