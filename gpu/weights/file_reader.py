"""Read bytes of files ahead with several threads: directly into host memory that is their place, or else through
staging.

On a GPU, staging is pinned and copied from asynchronously, on the caller's stream. The caller places staged ranges in
their order. A buffer is overwritten only after the copy from it has ended; no other memory is used. Bytes moved: each
byte is read from the page cache once and written once, to its place or to a buffer that the host's last cache mostly
holds.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

RANGE_BYTES = 4 * 2**20  # most bytes of a range, unless a row is longer, so that ranges fit into the host's last cache
NUM_THREADS = 4
NUM_BUFFERS = 2 * NUM_THREADS


class ReadError(Exception):
    """A file that ends early or cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file to read: `num_bytes` of the open file `file` (`name` in errors) from `offset` on.

    target: writable host memory of as many bytes; None: the bytes are staged.
    done: called in the caller's thread once the bytes are there, with the target or the staged bytes, uint8.
    """

    file: int
    name: str
    offset: int
    num_bytes: int
    target: Tensor | None
    done: Callable[[Tensor], None]


class _Buffer:
    """A staging buffer, which grows to the longest range."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if is_pinned else None

    def view(self, num_bytes: int) -> Tensor:
        """Return the buffer's first `num_bytes` bytes, once the last copy from it has ended."""
        if self._copied is not None:
            self._copied.synchronize()
        if num_bytes > len(self._bytes):
            self._bytes = torch.empty(max(num_bytes, RANGE_BYTES), dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._bytes[:num_bytes]

    def leave(self) -> None:
        """Note that copies from the buffer have been launched."""
        if self._copied is not None:
            self._copied.record()


def read_ranges(ranges: Iterable[FileRange], device: torch.device) -> Iterator[int]:
    """Yield the bytes of each range, once it is done; on a GPU, once its copies are launched. Raises ReadError."""
    buffers = [_Buffer(device.type == "cuda") for _ in range(NUM_BUFFERS)]
    pending: deque[tuple[FileRange, _Buffer, Future[Tensor]]] = deque()

    def finish() -> int:
        file_range, buffer, future = pending.popleft()
        file_range.done(future.result())
        buffer.leave()
        return file_range.num_bytes

    with ThreadPoolExecutor(NUM_THREADS, "weights") as threads:
        try:
            for number, file_range in enumerate(ranges):
                if len(pending) == NUM_BUFFERS:
                    yield finish()
                buffer = buffers[number % NUM_BUFFERS]
                pending.append((file_range, buffer, threads.submit(_read, file_range, buffer)))
            while pending:
                yield finish()
        finally:
            for _, _, future in pending:
                future.cancel()


def _read(file_range: FileRange, buffer: _Buffer) -> Tensor:
    target = buffer.view(file_range.num_bytes) if file_range.target is None else file_range.target
    room, begin = memoryview(target.numpy()), 0
    while begin < file_range.num_bytes:
        try:
            count = os.preadv(file_range.file, [room[begin:]], file_range.offset + begin)
        except OSError as error:
            raise ReadError(f"{file_range.name} cannot be read ({error.strerror})") from None
        if count == 0:
            raise ReadError(f"{file_range.name} ends {file_range.num_bytes - begin:,} bytes early; fetch it again")
        begin += count
    return target
