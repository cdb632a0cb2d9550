"""Run copies beside the computation: a stream down to the host, one up from it, and the events between them.

Work on a side stream begins after the earlier work of the computing stream. The computing stream waits for a side
stream only if it is told to. On the CPU there are no streams: work is done when the call returns, and no wait blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work: a CUDA event, or `PASSED`."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class _Passed:
    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


PASSED: Event = _Passed()
"""An event with nothing to wait for."""


class Streams:
    """The side streams of one device; `down` and `up` are None on the CPU."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.down = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self.up = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def aside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Put work inside the block on `stream` (None: no streams), after the current stream's work so far."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def record(self) -> Event:
        """Return an event at the end of the current stream's work so far."""
        if self.down is None:
            return PASSED
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.down.device))
        return event

    def wait_for(self, event: Event) -> None:
        """Let the current stream wait for `event`; the host does not wait."""
        if isinstance(event, torch.cuda.Event) and self.down is not None:
            torch.cuda.current_stream(self.down.device).wait_event(event)

    def keep(self, tensors: tuple[Tensor, ...], stream: torch.cuda.Stream | None) -> None:
        """Keep the memory of `tensors` from being reused before `stream` has done its work so far."""
        if stream is not None:
            for tensor in tensors:
                tensor.record_stream(stream)
