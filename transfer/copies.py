"""Copies beside the computation: a stream down to the host, one up from it, and the events between them.

It refuses to know what is copied. Invariant: work on a side stream begins after what the computing stream was given
before it, and the computing stream waits for a side stream only where it is told to. On the CPU there are no streams:
work is done when the call returns, and every wait is over.
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
"""Nothing to wait for."""


class Streams:
    """The side streams of one device; `down` and `up` are None on the CPU."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.down = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self.up = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def aside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Inside, work goes to `stream` (None: no streams), after all that the current stream was given so far."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def record(self) -> Event:
        """The current stream's work so far."""
        if self.down is None:
            return PASSED
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.down.device))
        return event

    def wait_for(self, event: Event) -> None:
        """The current stream goes on after `event`; the host does not wait."""
        if isinstance(event, torch.cuda.Event) and self.down is not None:
            torch.cuda.current_stream(self.down.device).wait_event(event)

    def keep(self, tensors: tuple[Tensor, ...], stream: torch.cuda.Stream | None) -> None:
        """Memory of `tensors` is not given to others before `stream` has passed what it holds now."""
        if stream is not None:
            for tensor in tensors:
                tensor.record_stream(stream)
