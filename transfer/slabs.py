"""Host memory in slabs: allocated ahead in the background, pinned where asked, counted against a limit, used again.

It refuses to know what a slab holds. Invariants: bytes are counted when a slab is claimed, not when it is there, so a
claim succeeds or fails at once and as a whole; slabs that are held, in use or idle, stay below the limit; a freed slab
waits for the next claim of its class, since pinning is slow, and goes back to the system when its room is needed.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from transfer.host_memory import slab_bytes
from transfer.host_pages import Pages, interleave_thread
from transfer.tier import HostMemoryError

GIB = 2**30
LIMIT_KEY = "host.memory_limit_gib"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageSource:
    """How pages come and go. map raises OSError or MemoryError, pin and unpin OSError; None: pages stay unpinned."""

    map: Callable[[int], Pages]
    pin: Callable[[Pages], None] | None
    unpin: Callable[[Pages], None] | None


class Slab:
    """Memory that was claimed: there already, or on its way."""

    __slots__ = ("_pages", "num_bytes")

    def __init__(self, num_bytes: int, pages: "Future[Pages]") -> None:
        self.num_bytes = num_bytes
        self._pages = pages

    def wait(self) -> Pages:
        """uint8 `[num_bytes]`, once it is there. Raises HostMemoryError where the host refused it."""
        return self._pages.result()


class SlabPool:
    """Slabs below a limit. Methods may be called from any thread."""

    def __init__(self, limit_bytes: int, source: PageSource, num_threads: int) -> None:
        """num_threads: how many slabs are mapped, touched and pinned at a time."""
        self.limit_bytes = limit_bytes
        self._source = source
        self._lock = Lock()
        self._in_use_bytes = 0
        self._held_bytes = 0  # in use, idle, or on its way
        self._pinned_bytes = 0
        self._idle: list[Pages] = []  # oldest first
        self._threads = ThreadPoolExecutor(num_threads, "slabs", interleave_thread)

    @property
    def bytes_in_use(self) -> int:
        return self._in_use_bytes

    @property
    def bytes_held(self) -> int:
        """In use, idle, and on their way."""
        return self._held_bytes

    @property
    def bytes_pinned(self) -> int:
        return self._pinned_bytes

    def claim(self, sizes: Sequence[int]) -> list[Slab]:
        """A slab for each size in bytes, allocated in this order. Raises HostMemoryError, and then none is claimed."""
        classes = [slab_bytes(size) for size in sizes]
        with self._lock:
            asked = sum(classes)
            if self._in_use_bytes + asked > self.limit_bytes:
                raise HostMemoryError(
                    f"host memory: asked {_gib(asked)}, {_gib(self._in_use_bytes)} of {_gib(self.limit_bytes)} in use; "
                    f"raise {LIMIT_KEY}, or run fewer or shorter contexts"
                )
            self._in_use_bytes += asked
            found = [self._take_idle(size) for size in classes]
            new_bytes = sum(size for size, pages in zip(classes, found, strict=True) if pages is None)
            evicted = self._evict(new_bytes)
            self._held_bytes += new_bytes
        if evicted:
            self._threads.submit(self._unmake, evicted)
        slabs = []
        for size, pages in zip(classes, found, strict=True):
            if pages is None:
                slabs.append(Slab(size, self._threads.submit(self._make, size)))
            else:
                future: Future[Pages] = Future()
                future.set_result(pages)
                slabs.append(Slab(size, future))
        return slabs

    def release(self, slabs: Sequence[Slab]) -> None:
        """Give slabs back, each once; one on its way arrives idle, one that was refused is forgotten."""
        for slab in slabs:
            cancelled = slab._pages.cancel()
            with self._lock:
                self._in_use_bytes -= slab.num_bytes
                if cancelled:
                    self._held_bytes -= slab.num_bytes
            if not cancelled:
                slab._pages.add_done_callback(self._keep)

    def shutdown(self) -> None:
        """Stop the threads and give idle slabs back to the system."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            idle, self._idle = self._idle, []
            self._held_bytes -= sum(pages.nbytes for pages in idle)
        self._unmake(idle)

    def _take_idle(self, num_bytes: int) -> Pages | None:
        for index, pages in enumerate(self._idle):
            if pages.nbytes == num_bytes:
                return self._idle.pop(index)
        return None

    def _evict(self, new_bytes: int) -> list[Pages]:
        evicted: list[Pages] = []
        while self._idle and self._held_bytes + new_bytes > self.limit_bytes:
            evicted.append(self._idle.pop(0))
            self._held_bytes -= evicted[-1].nbytes
        return evicted

    def _make(self, num_bytes: int) -> Pages:
        try:
            pages = self._source.map(num_bytes)
            if self._source.pin is not None:
                self._source.pin(pages)
        except (OSError, MemoryError) as error:
            with self._lock:
                self._held_bytes -= num_bytes
            log.warning("host_memory_refused bytes=%d in_use=%d error=%s", num_bytes, self._in_use_bytes, error)
            raise HostMemoryError(
                f"host memory: asked the system for {_gib(num_bytes)}, it refused: {error}; {_gib(self._in_use_bytes)} "
                f"of {_gib(self.limit_bytes)} in use; lower {LIMIT_KEY}, or raise `ulimit -l` (memlock) where pinning "
                "failed"
            ) from error
        if self._source.pin is not None:
            with self._lock:
                self._pinned_bytes += num_bytes
        return pages

    def _unmake(self, evicted: list[Pages]) -> None:
        """The system has pages back when their last view is gone, which is here."""
        while evicted:
            pages = evicted.pop()
            if self._source.unpin is None:
                continue
            try:
                self._source.unpin(pages)
            except OSError as error:
                log.error("host_memory_unpin_failed bytes=%d error=%s", pages.nbytes, error)
            with self._lock:
                self._pinned_bytes -= pages.nbytes

    def _keep(self, future: "Future[Pages]") -> None:
        if future.exception() is None:
            with self._lock:
                self._idle.append(future.result())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
