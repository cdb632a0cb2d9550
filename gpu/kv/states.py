"""Hold states of recurrent layers: each sequence has one in all of these layers, in place of keys and values.

The scheduler numbers states as it does windows, and decides which slot holds which. A copy is the state after the same
token. A sequence that begins at position 0 never reads its state before it writes it, so none is cleared. Host memory
may have copies (`gpu.kv.host_states`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from gpu.kv.commitment import Commitment, allocate_arena
from gpu.kv.host_states import HostStates
from gpu.model.spec import Recurrent
from gpu.operations.recurrent.delta_net import LayerStates
from gpu.operations.recurrent.state_arrays import draft_array, state_arrays
from gpu.step import StateMove, WindowWrite
from gpu.upload import upload
from transfer.allocation import dtype_of

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class States:
    """The states of all slots.

    of_slot: int32 `[max_slots]`, the number of the state that a slot holds. numbers: the same on the host, up to the
        last launched plan.
    layers: the recurrent layers of the model.
    count: number of states; 0: each slot has its own, and none are assigned or copied.
    num_places: places for copies in host memory.
    """

    def __init__(self, own: Recurrent, layers: Sequence[int], count: int, max_slots: int, dtype: torch.dtype,
                 state_dtype: torch.dtype, device: torch.device, num_places: int = 0) -> None:  # fmt: skip
        self.layers = tuple(layers)
        self.count = count or max_slots
        self.device = device
        arrays = state_arrays(own, self.count, dtype.itemsize, state_dtype.itemsize)
        wide = dtype if dtype == torch.float64 else dtype_of(arrays["states"])
        kinds = {"states": wide, "rings": dtype}
        self.arenas = [
            allocate_arena((len(self.layers), *arrays[name].shape), kind, device) for name, kind in kinds.items()
        ]
        self.commitment = Commitment(self.arenas)
        self.host = HostStates(self.arenas, num_places)
        self.numbers = [slot % self.count for slot in range(max_slots)]
        self.of_slot = torch.tensor(self.numbers, dtype=torch.int32, device=device)
        kept = draft_array(own, max_slots, dtype.itemsize).shape
        self.drafts = torch.zeros(len(self.layers), *kept, dtype=dtype, device=device)
        places = zip(*self.arenas, self.drafts, strict=True)
        self._of_layers = {layer: LayerStates(*own) for layer, own in zip(self.layers, places, strict=True)}

    @property
    def all_layers(self) -> LayerStates:
        """Return the states of all layers, with a layer axis in front."""
        return LayerStates(*self.arenas, self.drafts)

    def of_layer(self, layer: int) -> LayerStates:
        return self._of_layers[layer]

    def write(self, writes: Sequence[WindowWrite | StateMove]) -> None:
        """Copy states and give them to slots, in order; asynchronous. Raises ValueError for one out of range."""
        given = []
        for write in writes:
            if isinstance(write, StateMove):
                self._move(write)
                continue
            self._check([write.window] + ([] if write.source is None else [write.source]))
            self.host.before_write(write.window)
            if write.source is not None:
                self.copy(write.source, write.window)
            if write.slot is not None:
                given.append((write.slot, write.window))
        if given:
            for slot, state in given:
                self.numbers[slot] = state
            slots, states = upload(np.array(given, np.int64).T.copy(), self.device).unbind(0)
            self.of_slot[slots] = states.int()

    def _check(self, named: Sequence[int]) -> None:
        if not all(0 <= state < self.count for state in named):
            raise ValueError(f"states: asked {list(named)}, have {self.count}")

    def _move(self, move: StateMove) -> None:
        self._check([move.state])
        if not 0 <= move.place < self.host.count:
            raise ValueError(f"states in host memory: asked place {move.place}, have {self.host.count}")
        if move.is_up:
            self.host.get(move.place, move.state)
        else:
            self.host.put(move.state, move.place)

    def copy(self, source: int, target: int) -> None:
        """Copy a state in all layers; asynchronous."""
        if source != target:
            for arena in self.arenas:
                arena[:, target].copy_(arena[:, source])
