"""Bring experts from host memory to the card, into slots and buffers that the products read.

A decode step fetches the experts that its tokens choose, each once, into slots that live until the layer's products are
done; the device decides which, inside the captured step. A prompt chooses nearly all experts of a layer, so they are
copied whole, the next layer's beside the products of this one, and kept from prefill chunk to prefill chunk. A buffer
is filled after everything launched on the stream that reads it, and read after it is filled. Other streams, and
captured steps, have memory of their own. Bytes over the link: in a decode step each chosen expert once; for a prompt
each layer's experts once, as long as no more than STAGED_STACKS layers are needed in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.operations.experts.far_experts import FarExperts
from gpu.operations.experts.fetch_experts import Listed
from gpu.weights.expert_shares import STAGED_STACKS
from gpu.weights.host_experts import HostExperts
from transfer.copies import PASSED, Event, Streams


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer for one layer's experts.

    memory: uint8. layer: whose experts it holds, or None. filled: event after which they are there.
    """

    memory: Tensor
    layer: int | None
    filled: Event


class StagedExperts:
    """The experts in host memory of all layers, and their slots on the card.

    It belongs to the stream that creates it.

    layers: by the layer's number; None: the layer has no experts in host memory. nums_on_card: of each layer's experts.
    """

    def __init__(self, layers: Sequence[HostExperts | None], nums_on_card: Sequence[int], device: torch.device) -> None:
        self._layers = layers
        self._places = [
            torch.cat([torch.arange(near), ~torch.arange(one.count if one else 0)]).to(device, torch.int32)
            for near, one in zip(nums_on_card, layers, strict=True)
        ]
        self._numbers = [number for number, one in enumerate(layers) if one is not None]
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._streams = Streams(device)
        size = max((one.num_bytes(one.count) for one in layers if one is not None), default=0)
        self._buffers = [  # the least recently used first
            _Buffer(torch.empty(size, dtype=torch.uint8, device=device), None, PASSED) for _ in range(STAGED_STACKS)
        ]
        self._last: int | None = None
        self.num_listed = torch.zeros(1, dtype=torch.int64, device=device)
        """Experts fetched one by one since the start, also by replayed steps; counted on the device."""
        self._host_count = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._num_fetched = 0
        self.num_copied = 0
        """Experts that were copied with their whole layer."""

    @property
    def num_fetched(self) -> int:
        """Return `num_listed` as of the last finished step, without waiting."""
        # The copies of two lanes may land in either order, so a later one can be smaller.
        self._num_fetched = max(self._num_fetched, int(self._host_count))
        return self._num_fetched

    def end_step(self) -> None:
        """Start to copy the count to the host, after what the last launched step fetches."""
        self._host_count.copy_(self.num_listed, non_blocking=True)

    @property
    def is_kept(self) -> bool:
        """Return whether experts may stay in a buffer for the next use: on this stream, and not in a graph."""
        if self._stream is None:
            return True
        return torch.cuda.current_stream(self._device) == self._stream and not torch.cuda.is_current_stream_capturing()

    def fetch_listed(self, layer: int, listed: Listed) -> FarExperts:
        """Fetch the listed experts into slots. The caller launches what reads them before the next call."""
        own, num_slots = self._host_experts(layer), len(listed.wanted)
        if self.is_kept:
            buffer = self._take_buffer(None)
            self._streams.wait_for(buffer.filled)
            memory = buffer.memory
        else:
            memory = torch.empty(own.num_bytes(num_slots), dtype=torch.uint8, device=self._device)
        slots = own.slots_in(memory, num_slots)
        own.fetch(slots, listed)
        return FarExperts(slots.gate_up, slots.down, listed.places)

    def without_experts(self, layer: int) -> FarExperts:
        """Return a layer without experts on the card, because the CPU computes them."""
        return FarExperts(None, None, self._places[layer])

    def is_copied_next(self, layer: int) -> bool:
        """Return whether the layer's copy was started with that of the layer in front, and no other has been used
        since.
        """
        place = self._numbers.index(layer)
        in_front = self._numbers[place - 1] if place else layer
        return self._last in (in_front, layer) and self._find_buffer(layer) is not None

    def copy_layer(self, layer: int, starts_next: bool = True) -> FarExperts:
        """Return all experts of a layer, in order. The caller launches what reads them before the next call.

        starts_next: if layers come in order, start the next layer's copy as well.
        """
        assert self.is_kept, "staged experts: whole layers are copied only on their own stream, outside of graphs"
        place = self._numbers.index(layer)
        buffer = self._find_buffer(layer) or self._load_buffer(layer)
        self._buffers.append(self._buffers.pop(self._buffers.index(buffer)))
        if starts_next and place + 1 < len(self._numbers) and (place == 0 or self._last == self._numbers[place - 1]):
            following = self._numbers[place + 1]
            if self._find_buffer(following) is None:
                self._load_buffer(following)
        self._last = layer
        self._streams.wait_for(buffer.filled)
        own = self._host_experts(layer)
        slots = own.slots_in(buffer.memory, own.count)
        return FarExperts(slots.gate_up, slots.down, self._places[layer])

    def _load_buffer(self, layer: int) -> _Buffer:
        buffer, own = self._take_buffer(layer), self._host_experts(layer)
        self.num_copied += own.count
        with self._streams.aside(self._streams.up):
            own.copy(own.slots_in(buffer.memory, own.count))
            buffer.filled = self._streams.record()
        return buffer

    def _take_buffer(self, layer: int | None) -> _Buffer:
        buffer = self._buffers[0]
        buffer.layer = layer
        return buffer

    def _find_buffer(self, layer: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer == layer), None)

    def _host_experts(self, layer: int) -> HostExperts:
        own = self._layers[layer]
        assert own is not None, f"staged experts: layer {layer} has none in host memory"
        return own
