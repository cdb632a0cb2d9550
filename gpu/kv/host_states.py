"""Keep copies of recurrent layers' states in host memory.

Copies to the host run beside all other work, copies back run before the step that needs them.

A copy to the host reads a state that no step writes; a later write waits for it on the device
(`HostStates.before_write`). On the CPU a copy is done when the call returns.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gpu.model.spec import ModelError
from transfer.copies import Event, Streams
from transfer.host_pages import interleave_thread, pinned_tensor

NUM_THREADS = 8  # threads that map and pin


class HostStates:
    """Places for states in host memory, pinned for CUDA. arenas: the device's states, `[layers, states, ..]`. count:
    number of places. Raises ModelError if the host has no memory for them.
    """

    def __init__(self, arenas: Sequence[Tensor], count: int) -> None:
        self.count = count
        self._arenas = list(arenas)
        self._streams = Streams(arenas[0].device)
        self._leaving: dict[int, Event] = {}  # by state, until it is written
        self._arriving: dict[int, Event] = {}  # by place, until it is read
        wanted = [torch.empty_like(arena[:, 0], device="meta") for arena in arenas] * count
        if arenas[0].device.type == "cuda":
            made = self._pin(wanted)
        else:
            made = [torch.zeros_like(one, device="cpu") for one in wanted]
        self.places = [made[place : place + len(arenas)] for place in range(0, len(made), len(arenas))]

    def put(self, state: int, place: int) -> None:
        """Copy a state of the device to a place; asynchronous, without making the current stream wait."""
        self._arriving.pop(place, None)
        with self._streams.aside(self._streams.down):
            for arena, own in zip(self._arenas, self.places[place], strict=True):
                for layer, into in zip(arena, own, strict=True):  # each of these is one run of bytes
                    into.copy_(layer[state], non_blocking=True)
            self._leaving[state] = self._arriving[place] = self._streams.record()

    def get(self, place: int, state: int) -> None:
        """Copy the content of a place to a state of the device, on the current stream; asynchronous."""
        self.before_write(state)
        if place in self._arriving:
            self._streams.wait_for(self._arriving.pop(place))
        for arena, own in zip(self._arenas, self.places[place], strict=True):
            for layer, source in zip(arena, own, strict=True):
                layer[state].copy_(source, non_blocking=True)

    def before_write(self, state: int) -> None:
        """Let the current stream wait until a state has been copied that it is about to write."""
        if state in self._leaving:
            self._streams.wait_for(self._leaving.pop(state))

    def _pin(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        try:
            with ThreadPoolExecutor(NUM_THREADS, "pinned states", interleave_thread) as threads:
                return list(threads.map(pinned_tensor, wanted))
        except (OSError, MemoryError) as error:
            total = sum(one.nbytes for one in wanted) / 2**30
            raise ModelError(
                f"gpu.host_states_gib: {total:.2f} GiB of snapshots go to pinned host memory, which the system refused"
                f": {error}; lower it, end what else holds memory, or raise `ulimit -l` (memlock)"
            ) from None
