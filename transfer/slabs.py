"""Allocate host memory in slabs: ahead in the background, pinned if asked, counted against a limit, and reused.

Bytes are counted when a slab is claimed, not when it is allocated, so a claim succeeds or fails at once and as a whole.
All slabs, in use or idle, stay below the limit. Because pinning is slow, a freed slab is kept for the next claim of its
size class; it is returned to the system when its room is needed.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from transfer.host_memory import slab_bytes
from transfer.host_pages import Pages, interleave_thread
from transfer.host_tier import HostMemoryError

MIB, GIB = 2**20, 2**30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageSource:
    """Functions that map and pin pages. map may raise OSError or MemoryError, pin and unpin OSError. pin and unpin are
    None if pages stay unpinned.
    """

    map: Callable[[int], Pages]
    pin: Callable[[Pages], None] | None
    unpin: Callable[[Pages], None] | None


class Slab:
    """Claimed memory, which may still be being allocated."""

    __slots__ = ("_pages", "num_bytes")

    def __init__(self, num_bytes: int, pages: "Future[Pages]") -> None:
        self.num_bytes = num_bytes
        self._pages = pages

    def wait(self) -> Pages:
        """Wait for the memory and return it, uint8 `[num_bytes]`. Raises HostMemoryError if the host has none."""
        return self._pages.result()

    @property
    def is_refused(self) -> bool:
        return self._pages.done() and (self._pages.cancelled() or self._pages.exception() is not None)

    def cancel(self) -> bool:
        """Cancel the allocation if it has not begun; return whether it was cancelled."""
        return self._pages.cancel()


class SlabPool:
    """Slabs below a limit. Methods may be called from any thread."""

    def __init__(self, limit_bytes: int, limit_key: str, source: PageSource, num_threads: int) -> None:
        """limit_key: the setting that sets the limit, for errors. num_threads: how many slabs are mapped, touched and
        pinned at a time.
        """
        self.limit_bytes = limit_bytes
        self._limit_key = limit_key
        self._source = source
        self._lock = Lock()
        self._in_use_bytes = 0
        self._pinned_bytes = 0
        self._idle: list[Slab] = []  # oldest first
        self._evicted: deque[Slab] = deque()  # still pinned, until a thread unpins them
        self._threads = ThreadPoolExecutor(num_threads, "slabs", interleave_thread)

    @property
    def bytes_in_use(self) -> int:
        return self._in_use_bytes

    @property
    def bytes_held(self) -> int:
        """Return the bytes in use or idle, without those that the host refused."""
        with self._lock:
            self._drop_refused()
            return self._in_use_bytes + self._idle_bytes()

    @property
    def bytes_pinned(self) -> int:
        return self._pinned_bytes

    def claim(self, sizes: Sequence[int]) -> list[Slab]:
        """Claim a slab for each size in bytes; they are allocated in this order. Raises HostMemoryError without
        claiming any.
        """
        classes = [slab_bytes(size) for size in sizes]
        with self._lock:
            asked = sum(classes)
            if self._in_use_bytes + asked > self.limit_bytes:
                raise HostMemoryError(
                    f"host memory: asked {_size(asked)}, {self._describe_use()} in use; raise {self._limit_key}, or "
                    "run fewer or shorter contexts"
                )
            self._in_use_bytes += asked
            self._drop_refused()
            found = [self._take_idle(size) for size in classes]
            self._evict()
        return [slab or self._order(size) for slab, size in zip(found, classes, strict=True)]

    def prepare(self, sizes: Sequence[int]) -> None:
        """Allocate idle slabs ahead for a claim of these sizes, as far as there is room. Slabs that the host refused
        are tried again.
        """
        wanted = Counter(slab_bytes(size) for size in sizes)
        with self._lock:
            self._drop_refused()
            wanted.subtract(slab.num_bytes for slab in self._idle)
            for size, missing in wanted.items():
                for _ in range(missing):
                    if self._in_use_bytes + self._idle_bytes() + size <= self.limit_bytes:
                        self._idle.append(self._order(size))

    def release(self, slabs: Sequence[Slab]) -> None:
        """Release slabs, each once. They must no longer be read or written."""
        with self._lock:
            for slab in slabs:
                self._in_use_bytes -= slab.num_bytes
                if not slab.cancel():
                    self._idle.append(slab)

    def shutdown(self) -> None:
        """Stop the threads, cancel allocations that have not begun, and return idle and evicted slabs to the system."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            self._drop_refused()
            self._evicted += self._idle
            self._idle = []
        while self._evicted:
            self._unmake_next()

    def _describe_use(self) -> str:
        return f"{_size(self._in_use_bytes)} of {_size(self.limit_bytes)}"

    def _idle_bytes(self) -> int:
        return sum(slab.num_bytes for slab in self._idle)

    def _drop_refused(self) -> None:
        """Forget idle slabs whose allocation failed."""
        self._idle = [slab for slab in self._idle if not slab.is_refused]

    def _take_idle(self, num_bytes: int) -> Slab | None:
        for index, slab in enumerate(self._idle):
            if slab.num_bytes == num_bytes:
                return self._idle.pop(index)
        return None

    def _evict(self) -> None:
        held = self._in_use_bytes + self._idle_bytes()
        while self._idle and held > self.limit_bytes:
            slab = self._idle.pop(0)
            held -= slab.num_bytes
            if not slab.cancel():
                self._evicted.append(slab)
                self._threads.submit(self._unmake_next)

    def _order(self, num_bytes: int) -> Slab:
        return Slab(num_bytes, self._threads.submit(self._make, num_bytes))

    def _make(self, num_bytes: int) -> Pages:
        try:
            pages = self._source.map(num_bytes)
            if self._source.pin is not None:
                self._source.pin(pages)
        except (OSError, MemoryError) as error:
            log.warning("host_memory_refused bytes=%d in_use=%d error=%s", num_bytes, self._in_use_bytes, error)
            raise HostMemoryError(
                f"host memory: asked the system for {_size(num_bytes)}, it refused: {error}; {self._describe_use()} in "
                f"use; lower {self._limit_key}, or raise `ulimit -l` (memlock) where pinning failed"
            ) from error
        if self._source.pin is not None:
            with self._lock:
                self._pinned_bytes += num_bytes
        return pages

    def _unmake_next(self) -> None:
        """Return an evicted slab's pages to the system, by dropping their last view."""
        slab = self._evicted.popleft()
        if self._source.unpin is None:
            return
        try:
            self._source.unpin(slab.wait())
        except HostMemoryError:
            return  # it was never allocated
        except OSError as error:
            log.error("host_memory_unpin_failed bytes=%d error=%s", slab.num_bytes, error)
        with self._lock:
            self._pinned_bytes -= slab.num_bytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
