"""Hold experts of a layer in host memory, and copy any of them to the card, byte by byte."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gpu.model.spec import ModelError
from gpu.operations.experts.fetch_experts import Listed, fetch_experts, words_of
from gpu.operations.linear.packed_matrix import Stored
from transfer.host_pages import interleave_thread, pinned_tensor

ALIGN_BYTES = 256  # of each tensor of a stack on the card
NUM_THREADS = 8  # that map and pin


def tensors_of(stored: Stored) -> list[Tensor]:
    """Return the tensors of a matrix, its rows first."""
    if isinstance(stored, Tensor):
        return [stored]
    held = (getattr(stored, part.name) for part in fields(stored))
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


def with_tensors(stored: Stored, made: Iterator[Tensor]) -> Stored:
    """Return the matrix with its tensors replaced by those of `made`, in the order of `tensors_of`."""
    if isinstance(stored, Tensor):
        return next(made)
    parts = {part.name: getattr(stored, part.name) for part in fields(stored)}
    return replace(stored, **{name: next(made) for name, own in parts.items() if isinstance(own, Tensor)})


def joined(stacks: Sequence[Stored], device: torch.device) -> Stored:
    """Return matrices stacked by rows, as one matrix on the device."""
    tensors = zip(*(tensors_of(stack) for stack in stacks), strict=True)
    return with_tensors(stacks[0], (torch.cat([part.to(device) for part in parts]) for parts in tensors))


def in_host_memory(layers: Sequence["HostExperts | None"], device: torch.device) -> list["HostExperts | None"]:
    """Allocate experts of the meta device, by layer, in host memory that `device` can read: pinned for CUDA. They are
    not filled. Raises ModelError if the host has no memory for them.
    """
    if device.type == "meta":
        return list(layers)
    matrices = [matrix for one in layers if one is not None for matrix in (one.gate_up, one.down)]
    made = iter(pinned_like(matrices) if device.type == "cuda" else [_unpinned(matrix) for matrix in matrices])
    return [one and HostExperts(one.count, next(made), next(made)) for one in layers]


def _unpinned(matrix: Stored) -> Stored:
    return with_tensors(matrix, (torch.empty_like(tensor, device="cpu") for tensor in tensors_of(matrix)))


def pinned_like(matrices: Sequence[Stored]) -> list[Stored]:
    """Allocate matrices of the meta device in pinned host memory, spread over its NUMA nodes. They are not filled.

    Raises ModelError if the host has no memory for them.
    """
    wanted = [tensor for matrix in matrices for tensor in tensors_of(matrix)]
    try:
        with ThreadPoolExecutor(NUM_THREADS, "pinned experts", interleave_thread) as threads:
            made = list(threads.map(pinned_tensor, wanted))
    except (OSError, MemoryError) as error:
        total = sum(tensor.nbytes for tensor in wanted) / 2**30
        raise ModelError(
            f"gpu.experts_gib: {total:.2f} GiB of experts go to pinned host memory, which the system refused: {error}; "
            "raise it, end what else holds memory, or raise `ulimit -l` (memlock)"
        ) from None
    found = iter(made)
    return [with_tensors(matrix, found) for matrix in matrices]


@dataclass(frozen=True, slots=True)
class HostExperts:
    """The last `count` experts of a layer, `[count * rows, inner]` each, in host memory that the device reads."""

    count: int
    gate_up: Stored
    down: Stored

    def num_bytes(self, num_slots: int) -> int:
        """Return the bytes that `num_slots` experts take on the card."""
        return sum(_aligned(num_slots * words.shape[1] * 4) for words in self._words())

    def slots_in(self, memory: Tensor, num_slots: int) -> "Slots":
        """Return slots for `num_slots` experts in `memory`, uint8 `[num_bytes]` on the card."""
        begin, words, views = 0, [], []
        for tensor, own in zip(self._tensors(), self._words(), strict=True):
            size = num_slots * own.shape[1] * 4
            part = memory[begin : begin + size]
            begin += _aligned(size)
            words.append(part.view(torch.int32).view(num_slots, -1))
            views.append(part.view(tensor.dtype).view(len(tensor) // self.count * num_slots, *tensor.shape[1:]))
        found = iter(views)
        return Slots(tuple(words), with_tensors(self.gate_up, found), with_tensors(self.down, found))

    def fetch(self, slots: "Slots", listed: Listed) -> None:
        """Copy the listed experts to their slots, on the current stream."""
        for source, into in zip(self._words(), slots.words, strict=True):
            fetch_experts(source, into, listed)

    def copy(self, slots: "Slots") -> None:
        """Copy all experts to as many slots, on the current stream."""
        for source, into in zip(self._words(), slots.words, strict=True):
            into.copy_(source, non_blocking=True)

    def _tensors(self) -> list[Tensor]:
        return [*tensors_of(self.gate_up), *tensors_of(self.down)]

    def _words(self) -> list[Tensor]:
        return [words_of(tensor, self.count) for tensor in self._tensors()]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots for experts on the card: as words, int32 `[slots, words]` each, and as the matrices that products read."""

    words: tuple[Tensor, ...]
    gate_up: Stored
    down: Stored


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
