"""Hold the CUDA streams of a device's two lanes, and decide which lane owns the buffers of decode steps.

Work of one lane runs in order, beside the work of the other lane. A fenced step begins after everything launched before
it. The lane of rows that wait for the host has priority, because its kernels are short and the host waits for them.
Freed memory is not reused while either lane may still read it (`keep`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.step import Lane, StepPlan

_FIRST = -1  # a stream's priority


class LaneStreams:
    """The CUDA streams of one device's lanes. On the CPU there are none, and work is done when it is launched."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        self._ends: dict[Lane, torch.cuda.Event] = {}
        if device.type == "cuda":
            self._streams[Lane.DEVICE] = torch.cuda.current_stream(device)
            self._streams[Lane.HOST] = torch.cuda.Stream(device, _FIRST)  # type: ignore[no-untyped-call]

    @contextmanager
    def enter(self, lane: Lane, is_fenced: bool) -> Iterator[None]:
        """Run the work inside on the lane's stream, as a step."""
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

    def is_busy(self, lane: Lane) -> bool:
        """Return whether the device still has work of the lane to do."""
        end = self._ends.get(lane)
        return end is not None and not end.query()

    def stream(self, lane: Lane) -> torch.cuda.Stream | None:
        return self._streams.get(lane)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors, which the caller may drop, until all lanes have done their work so far."""
        for tensor in tensors:
            for stream in self._streams.values():
                tensor.record_stream(stream)


@dataclass(slots=True)
class _Use:
    """The last use of the decode steps' buffers. lanes: lanes whose next step is already ordered after it."""

    is_over: Callable[[], bool]
    lanes: set[Lane]


class StepBuffers:
    """Tracks which lane uses the buffers of decode steps. Steps with a host read in some row have one set of buffers
    and one exchange; all other steps have another set.

    A step writes its rows there first, so two steps of one kind must not run in two lanes. Ended steps are forgotten;
    otherwise the last step of a kind that no longer occurs would be kept, and with it all steps behind it.
    """

    def __init__(self) -> None:
        self._uses: dict[bool, _Use] = {}  # the last use, by whether rows read host memory

    def check(self, plan: StepPlan) -> None:
        """Raise AssertionError if a plan would overwrite what the other lane's step reads."""
        for reads_host in _kinds(plan):
            use = self._uses.get(reads_host)
            is_free = use is None or plan.is_fenced or plan.lane in use.lanes or use.is_over()
            kind = "read the host" if reads_host else "read the device alone"
            assert is_free, f"lanes: rows that {kind} in lane {plan.lane.value}, beside such rows in the other lane"

    def note(self, plan: StepPlan, is_over: Callable[[], bool]) -> None:
        """Note a launched plan. is_over: whether its rows are computed."""
        self._uses = {reads_host: use for reads_host, use in self._uses.items() if not use.is_over()}
        for use in self._uses.values() if plan.is_fenced else ():
            use.lanes.add(plan.lane)
        self._uses |= {reads_host: _Use(is_over, {plan.lane}) for reads_host in _kinds(plan)}


def _kinds(plan: StepPlan) -> set[bool]:
    return {any(read is not None for read in group.host_reads or ()) for group in plan.decode}
