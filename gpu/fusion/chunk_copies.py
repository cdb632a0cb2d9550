"""Copy document chunks between a device and the library: computed chunks are stored, chunks that were read are
released.

Invariant: memory that a copy reads or writes is neither released nor stored before the device has done the copy. On a
GPU a thread waits for that, not the launching thread, and reports failures.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from transfer.chunks.chunk_format import ChunkKey, ChunkShape
from transfer.chunks.chunk_library import ChunkLibrary
from transfer.copies import Event, Streams

log = logging.getLogger(__name__)


class Documents:
    """Copies document chunks between device and library. shape: of the library's chunks. device: the one that
    computes.
    """

    def __init__(self, library: ChunkLibrary, device: torch.device) -> None:
        self.library = library
        self.shape: ChunkShape = library.store.folder.shape
        self.device = device
        self.streams = Streams(device)
        self._waiting = ThreadPoolExecutor(1, "chunk-copies") if device.type == "cuda" else None

    def layers_for(self, num_tokens: int) -> Tensor:
        """Allocate host memory for a computed chunk, uint8 `[layers, 2, tokens, kv_heads * row_bytes]`."""
        width = self.shape.num_kv_heads * self.shape.row_bytes
        size = (self.shape.num_layers, 2, num_tokens, width)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def copy_to_host(self, rows: Tensor, host: Tensor) -> None:
        """Copy to host memory, beside what is computed next."""
        with self.streams.aside(self.streams.down):
            host.copy_(rows, non_blocking=True)
        self.streams.keep((rows,), self.streams.down)

    def keep(self, key: ChunkKey, layers: Tensor) -> None:
        """Store a computed chunk once the copies to the host have run. If that fails, prompts that wait for the chunk
        compute its tokens as other text.
        """

        def refuse(error: BaseException) -> None:
            self.library.refuse(key, f"it was computed and could not be kept: {error!r}")

        self._after(self._sent(), lambda: self.library.keep(key, pages_of(layers)), refuse)

    def keep_now(self, key: ChunkKey, layers: Tensor) -> list[np.ndarray]:
        """Store a computed chunk now and return its layers. Waits for the device."""
        self._sent().synchronize()
        pages = pages_of(layers)
        self.library.keep(key, pages)
        return pages

    def release(self, releases: Sequence[Callable[[], None]]) -> None:
        """Call `releases` once the copies to the device have run, which read the memory that is released."""

        def release_all() -> None:
            for release in releases:
                release()

        with self.streams.aside(self.streams.up):
            event = self.streams.record()
        self._after(event, release_all, lambda error: log.error("chunks_not_released error=%r", error))

    def shutdown(self) -> None:
        """Finish what is under way."""
        if self._waiting is not None:
            self._waiting.shutdown()
        self.library.shutdown()

    def _sent(self) -> Event:
        with self.streams.aside(self.streams.down):
            return self.streams.record()

    def _after(self, event: Event, call: Callable[[], object], tell: Callable[[BaseException], None]) -> None:
        """Call `call` after the event. tell: called with the exception if the waiting thread raises one."""
        if self._waiting is None:
            call()
            return

        def wait() -> None:
            event.synchronize()
            call()

        def look(done: "Future[None]") -> None:
            error = done.exception()
            if error is not None:
                tell(error)

        self._waiting.submit(wait).add_done_callback(look)


def pages_of(layers: Tensor) -> list[np.ndarray]:
    """Return a chunk's layers in the form that the store takes: uint8 `[layer_bytes]` each."""
    return list(layers.flatten(1).numpy())
