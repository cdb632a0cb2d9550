"""LoRA adapters beside the matrices of a model: small products, of rows with different adapters at once.

All adapters of a matrix stand below each other, so a batch takes two products more, whatever its rows ask for: with
all of them, `x @ down.T`, in which each row keeps the columns of its own adapter, and back, `@ up.T`; steps of few rows
have kernels for them. Rows without one keep none. Captured steps read which adapter a slot has on the device.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from safetensors import safe_open
from torch import Tensor

from gpu.model.adapter_file import TENSORS, AdapterFile, AdapterPart
from gpu.model.matrix_formats import matrix_shapes
from gpu.model.spec import Architecture
from gpu.operations.linear.adapter_product import StackedAdapters
from gpu.weights.tensor_places import row_order


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which adapter each token has: ids int64 `[tokens, 1]`, 0: none."""

    ids: Tensor


class Adapters:
    """Adapters on the device, numbered from 1 in their order, and the one that each slot has; 0: none."""

    def __init__(
        self, files: Sequence[AdapterFile], architecture: Architecture, max_running: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Read the adapters' tensors, rounded to `dtype`; ups are multiplied by their gains before."""
        self.count = len(files)
        self.products = _load(files, architecture, dtype, device)
        self._ids = torch.zeros(1 + max_running, dtype=torch.int64, device=device)  # behind that of no slot
        self._of_slot = [0] * max_running

    def assign(self, slot: int, number: int) -> None:
        """Give a slot its adapter, behind what is launched."""
        assert 0 <= number <= self.count, f"adapters: {number} of {self.count}"
        self._of_slot[slot] = number
        self._ids[slot + 1 : slot + 2].fill_(number)

    def has_any(self, slots: Collection[int]) -> bool:
        """Return whether one of the slots has an adapter."""
        return any(self._of_slot[slot] for slot in slots)

    def rows(self, slots: Tensor) -> AdapterRows:
        """Return what tokens of these slots have. slots: int32 `[tokens]`, -1 in rows of no slot."""
        return AdapterRows(self._ids.index_select(0, slots.long() + 1)[:, None])


def _load(
    files: Sequence[AdapterFile], architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> dict[tuple[int, str], StackedAdapters]:
    """Return the products of every matrix that some adapter changes, by layer and name."""
    parts: dict[tuple[int, str], list[tuple[int, AdapterPart]]] = {}
    for number, file in enumerate(files, 1):
        for part in file.parts:
            parts.setdefault((part.layer, part.matrix), []).append((number, part))
    opened = [safe_open(file.folder / TENSORS, framework="pt") for file in files]
    shared: dict[tuple[int, ...], tuple[Tensor, Tensor, int]] = {}
    products = {}
    for (layer, matrix), listed in parts.items():
        num_rows, inner = matrix_shapes(architecture, architecture.layers[layer])[matrix]
        num_columns = sum(part.rank for _, part in listed)
        down = torch.empty(num_columns, inner, dtype=dtype, device=device)
        up = torch.zeros(num_columns, num_rows, dtype=dtype, device=device)
        begin, counts = 0, [0] * (1 + len(files))
        for number, part in listed:
            columns = slice(begin, begin + part.rank)
            down[columns].copy_(opened[number - 1].get_tensor(part.down))
            rows = opened[number - 1].get_tensor(part.up).float() * part.gain
            order = _order_of(architecture, layer, part)
            up[columns, part.begin : part.begin + part.rows].copy_((rows if order is None else rows[order]).T)
            begin += part.rank
            counts[number] += part.rank
        key = tuple(counts)
        if key not in shared:
            shared[key] = _whose(counts, device)
        products[layer, matrix] = StackedAdapters(down, up, *shared[key])
    return products


def _whose(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return `StackedAdapters`' owners, begins and most, of how many columns each adapter has; the first is none."""
    numbers = torch.arange(len(counts), dtype=torch.int64)
    owners = numbers.repeat_interleave(torch.tensor(counts))
    begins = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return owners.to(device), begins.to(device), max(counts)


def _order_of(architecture: Architecture, layer: int, part: AdapterPart) -> Tensor | None:
    """Return which row of the adapter each of ours is, as of the matrix itself; None: the same one."""
    order = row_order(architecture, architecture.layers[layer]) if part.matrix == "qkv" else None
    if order is None or part.what == "value":
        return None
    return order[part.begin : part.begin + part.rows] - part.begin
