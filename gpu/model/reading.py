"""Bytes of files, read ahead by several threads: straight into host memory that is their place, else by way of staging.

It refuses to know tensors and formats: a piece is a range of a file and what becomes of it. On a GPU staging is pinned
and copied from asynchronously, on the stream of who asks. Invariants: of what has no place in host memory that holds
the staging buffers and no more; who asks places what was staged, piece after piece in their order; a buffer is written
to again only once the copy from it is over. Bytes: each is read out of the page cache once and written once, to its
place or to a buffer that the host's last cache mostly holds.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE_BYTES = 4 * 2**20  # at most, but for a row that is longer: what is in flight stays in the host's last cache
NUM_THREADS = 4
NUM_BUFFERS = 2 * NUM_THREADS


class ReadError(Exception):
    """A file that ends early or cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_bytes` of the open file `file` (`name` in errors) from `offset` on. target: host memory, writable and as
    many bytes, or None: they are staged; done: called by who asked once they are there, with the staged bytes, uint8
    `[num_bytes]`, or the target.
    """

    file: int
    name: str
    offset: int
    num_bytes: int
    target: Tensor | None
    done: Callable[[Tensor], None]


class _Buffer:
    """Staging, as long as the longest piece that it had."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if is_pinned else None

    def view(self, num_bytes: int) -> Tensor:
        """Once the last copy from it is over."""
        if self._copied is not None:
            self._copied.synchronize()
        if num_bytes > len(self._bytes):
            self._bytes = torch.empty(max(num_bytes, PIECE_BYTES), dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._bytes[:num_bytes]

    def leave(self) -> None:
        """Copies from it have been launched."""
        if self._copied is not None:
            self._copied.record()


def read_pieces(pieces: Iterable[Piece], device: torch.device) -> Iterator[int]:
    """Bytes of each piece, once it is done; on a GPU, once its copies are launched. Raises ReadError."""
    buffers = [_Buffer(device.type == "cuda") for _ in range(NUM_BUFFERS)]
    pending: deque[tuple[Piece, _Buffer, Future[Tensor]]] = deque()

    def finish() -> int:
        piece, buffer, future = pending.popleft()
        piece.done(future.result())
        buffer.leave()
        return piece.num_bytes

    with ThreadPoolExecutor(NUM_THREADS, "weights") as threads:
        try:
            for number, piece in enumerate(pieces):
                if len(pending) == NUM_BUFFERS:
                    yield finish()
                buffer = buffers[number % NUM_BUFFERS]
                pending.append((piece, buffer, threads.submit(_read, piece, buffer)))
            while pending:
                yield finish()
        finally:
            for _, _, future in pending:
                future.cancel()


def _read(piece: Piece, buffer: _Buffer) -> Tensor:
    target = buffer.view(piece.num_bytes) if piece.target is None else piece.target
    room, begin = memoryview(target.numpy()), 0
    while begin < piece.num_bytes:
        try:
            count = os.preadv(piece.file, [room[begin:]], piece.offset + begin)
        except OSError as error:
            raise ReadError(f"{piece.name} cannot be read ({error.strerror})") from None
        if count == 0:
            raise ReadError(f"{piece.name} ends {piece.num_bytes - begin:,} bytes early; fetch it again")
        begin += count
    return target
