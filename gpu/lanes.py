"""The streams that a device's lanes run on: what one is given runs in order, and beside what the other is given.

It refuses to know what is launched. Invariants: a fenced step begins behind all that was launched before it; the lane
of rows that wait for the host goes first where both want the device, for its kernels are short and the host waits for
them; memory that is given back is not handed out while either lane may still read it (`keep`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpu.step import Lane

_FIRST = -1  # a stream's priority


class LaneStreams:
    """Of one device; on the CPU there are none, and work is done when it is launched."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        self._ends: dict[Lane, torch.cuda.Event] = {}
        if device.type == "cuda":
            self._streams[Lane.DEVICE] = torch.cuda.current_stream(device)
            self._streams[Lane.HOST] = torch.cuda.Stream(device, _FIRST)  # type: ignore[no-untyped-call]

    @contextmanager
    def enter(self, lane: Lane, is_fenced: bool) -> Iterator[None]:
        """Inside, work goes to the lane: a step."""
        if not self._streams:
            yield
            return
        stream = self._streams[lane]
        if is_fenced:
            for end in self._ends.values():
                stream.wait_event(end)
        with torch.cuda.stream(stream):
            yield
        self._ends[lane] = stream.record_event()

    def stream(self, lane: Lane) -> torch.cuda.Stream | None:
        return self._streams.get(lane)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """These may be let go of: their memory stays until all lanes have passed what they were given so far."""
        for tensor in tensors:
            for stream in self._streams.values():
                tensor.record_stream(stream)
