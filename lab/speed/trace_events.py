"""Define the kernels and copies of a device's trace, and the time that they cover."""

from collections.abc import Iterable
from typing import NamedTuple

WAITS = ("await_answer",)  # parts of kernels' names
COPIES = ("Memcpy", "_offload_kernel", "_restore_kernel", "_scatter_kernel")


class DeviceEvent(NamedTuple):
    """A kernel or copy, on the device's clock."""

    name: str
    start_us: float
    duration_us: float


def covered_us(events: Iterable[DeviceEvent]) -> float:
    """Return the length of the union of the events' intervals, in microseconds."""
    covered, end = 0.0, float("-inf")
    for _, start, duration in sorted(events, key=lambda event: event.start_us):
        covered += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return covered
