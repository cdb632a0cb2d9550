"""Apply LoRA adapters beside a model's matrices, for a batch whose rows have different adapters.

The adapters of a matrix are stacked, so a batch takes two more products, whatever its rows ask for: with all of them,
`x @ down.T`, in which each row keeps only the columns of its own adapter, and back, `@ up.T`. Steps of few rows have
kernels for both. Rows without an adapter keep no column. Captured steps read the adapter of each slot on the device.
Steps in which no row has an adapter are captured separately.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from safetensors import safe_open
from torch import Tensor

from gpu.model.adapter_file import TENSORS, AdapterFile, AdapterPart
from gpu.model.matrix_formats import matrix_shapes
from gpu.model.spec import Architecture
from gpu.operations.linear.adapter_product import AdapterRange, AdapterRows, StackedAdapters
from gpu.weights.tensor_places import row_order


class Adapters:
    """Adapters on the device, numbered from 1 in their order, and the number that each slot has; 0: none."""

    def __init__(
        self, files: Sequence[AdapterFile], architecture: Architecture, max_running: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Load the adapters' tensors, rounded to `dtype`. The up matrices are multiplied by their gains first."""
        self.count = len(files)
        self.products = _load(files, architecture, dtype, device)
        self._ids = torch.zeros(1 + max_running, dtype=torch.int64, device=device)  # entry 0 is for rows of no slot
        self._number_of_slot = [0] * max_running

    def assign(self, slot: int, number: int) -> None:
        """Give a slot its adapter, in stream order after what is launched."""
        assert 0 <= number <= self.count, f"adapters: number {number}; there are {self.count}"
        self._number_of_slot[slot] = number
        self._ids[slot + 1 : slot + 2].fill_(number)

    def has_any(self, slots: Collection[int]) -> bool:
        """Return whether one of the slots has an adapter."""
        return any(self._number_of_slot[slot] for slot in slots)

    def rows(self, slots: Tensor) -> AdapterRows:
        """Return the adapters of tokens in these slots, int32 `[tokens]`; -1 for rows of no slot."""
        return AdapterRows(self._ids.index_select(0, slots.long() + 1)[:, None])


def _load(
    files: Sequence[AdapterFile], architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> dict[tuple[int, str], StackedAdapters]:
    """Load the stacked adapters of every matrix that some adapter changes, by layer and name."""
    parts: dict[tuple[int, str], list[tuple[int, AdapterPart]]] = {}
    for number, file in enumerate(files, 1):
        for part in file.parts:
            parts.setdefault((part.layer, part.matrix), []).append((number, part))
    opened = [safe_open(file.folder / TENSORS, framework="pt") for file in files]
    shared: dict[tuple[tuple[int, ...], ...], tuple[Tensor, Tensor]] = {}
    products = {}
    for (layer, matrix), listed in parts.items():
        num_rows, inner = matrix_shapes(architecture, architecture.layers[layer])[matrix]
        listed.sort(key=lambda one: (one[1].begin, one[1].rows, one[0]))
        counts: dict[tuple[int, int], list[int]] = {}
        down = torch.empty(sum(part.rank for _, part in listed), inner, dtype=dtype, device=device)
        up = torch.zeros(len(down), max(part.rows for _, part in listed), dtype=dtype, device=device)
        begin = 0
        for number, part in listed:
            columns = slice(begin, begin + part.rank)
            down[columns].copy_(opened[number - 1].get_tensor(part.down))
            rows = opened[number - 1].get_tensor(part.up).float() * part.gain
            order = _row_order_of(architecture, layer, part)
            up[columns, : part.rows].copy_((rows if order is None else rows[order]).T)
            begin += part.rank
            counts.setdefault((part.begin, part.rows), [0] * (1 + len(files)))[number] += part.rank
        ranges = _ranges_of(counts, num_rows)
        key = tuple(tuple(counts.get((one.begin, one.rows), [0] * (1 + len(files)))) for one in ranges)
        if key not in shared:
            shared[key] = _owners_and_spans(key, device)
        products[layer, matrix] = StackedAdapters(down, up, *shared[key], ranges, max(map(max, key)))
    return products


def _ranges_of(counts: Mapping[tuple[int, int], Sequence[int]], num_rows: int) -> tuple[AdapterRange, ...]:
    """Return ranges that cover all rows of a matrix, in order.

    counts: for each range (begin, rows) that adapters change, the number of columns that each adapter has there.
    """
    ranges, end = [], 0
    for (begin, rows), of_range in counts.items():
        assert begin >= end, "adapters: parts of a matrix do not overlap"
        if begin > end:
            ranges.append(AdapterRange(end, begin - end, 0))
        ranges.append(AdapterRange(begin, rows, sum(of_range)))
        end = begin + rows
    if end < num_rows:
        ranges.append(AdapterRange(end, num_rows - end, 0))
    return tuple(ranges)


def _owners_and_spans(counts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the owners and spans of `StackedAdapters`.

    counts: for each range, the number of columns of each adapter; index 0 stands for no adapter.
    """
    of_all = torch.tensor(counts)
    numbers = torch.arange(of_all.shape[1], dtype=torch.int64).expand_as(of_all)
    owners = numbers.flatten().repeat_interleave(of_all.flatten())
    firsts = of_all.flatten().cumsum(0).view_as(of_all) - of_all
    return owners.to(device), torch.stack([firsts.T, of_all.T], 2).to(device, torch.int32)


def _row_order_of(architecture: Architecture, layer: int, part: AdapterPart) -> Tensor | None:
    """Return, for each of our rows, the adapter's row, if the matrix itself was reordered on loading; None: the same
    order.
    """
    order = row_order(architecture, architecture.layers[layer]) if part.matrix == "qkv" else None
    if order is None or part.what == "value":
        return None
    return order[part.begin : part.begin + part.rows] - part.begin
