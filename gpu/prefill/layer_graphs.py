"""Run layers of prefill units as CUDA graphs: one graph for what comes before attention, one for what comes after it.

For a few hundred tokens, and some thousand in layers of many launches, the host takes longer to launch a layer's
kernels than the device takes to run them. Attention depends on each prompt's past, so it is launched between the two
graphs, and so is the update of a recurrent layer's state. A unit takes the graph of the smallest size that holds its
tokens. Rows beyond them are in no slot: they write no keys, and their outputs are not read.

Invariant: graphs read and write only the buffers here, weights, KV pages and the windows' buffer, and run on one
stream, one after another.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpu.batching.capture import record
from gpu.layers.decoder import Attend, Carried, Decoder, Pages
from gpu.layers.delta_layers import StatePart
from gpu.operations.linear.packed_matrix import Packed
from gpu.prefill.graph_arrays import between_widths, graph_arrays, layers_in_graphs
from transfer.allocation import allocate

log = logging.getLogger(__name__)

_Work = Callable[[], None]


class Replayed(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph, and the matrices that it reads in widened form."""

    graph: Replayed
    widened: list[Packed]


@dataclass(frozen=True, slots=True)
class _LayerGraphs:
    """The two graphs of one layer for one size.

    pages: where the first one writes keys and values; None: to the pool.
    """

    before: _Graph
    behind: _Graph
    pages: Pages | None


class LayerGraphs:
    """Captured layers for units of up to `most_tokens` tokens. All of them pass data in the same buffers.

    There are none on the CPU, and none if no size was captured.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._least_tokens: dict[int, int] = {}  # by size, ascending: the fewest tokens of a unit that takes it
        self._layers: dict[tuple[int, int], _LayerGraphs] = {}  # by layer and size
        self._num_filled = 0  # rows of the buffers that belong to a slot

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the longest unit that has graphs; 0: no unit has."""
        return max(self._least_tokens, default=0)

    def drop(self) -> None:
        """Free all captured layers."""
        self._least_tokens.clear()
        self._layers.clear()

    def capture(
        self, sizes: Sequence[int], pages_of: Callable[[int], Pages | None], seconds: Callable[[int], float]
    ) -> None:
        """Capture layers for these numbers of tokens, and keep those graphs that are faster here than separate
        launches.

        A size is timed with the shortest unit that would use it, which wastes the most rows. If the graphs are faster,
        they serve all those units. Otherwise they may still serve units of exactly that size, as all units of a long
        prompt but its last have.

        pages_of: where a layer's keys and values go; None: to the pool's pages.
        seconds: times a prompt of so many tokens with the graphs captured so far.
        """
        layers = [layer for layer in layers_in_graphs(self._decoder.architecture) if not self._has_far_experts(layer)]
        if not layers or not sizes:
            return
        self._allocate(max(sizes))
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        taken = {}
        for size in sorted(set(sizes), reverse=True):  # largest first: small blocks would leave no room for large ones
            before = self._memory_bytes()
            for layer in layers:
                self._capture_layer(layer, size, pages_of(layer), pool)
            taken[size] = (self._memory_bytes() - before) / 2**20
        reports = []
        for size in sorted(taken):
            lengths = sorted({self.most_tokens + 1, size})
            launched = [seconds(length) for length in lengths]
            self._least_tokens[size] = lengths[0]
            replayed = [seconds(length) for length in lengths]
            faster = [length for length, *both in zip(lengths, replayed, launched, strict=True) if both[0] < both[1]]
            times = ", ".join(
                f"{length}: {1e3 * one:.1f} for {1e3 * other:.1f} ms"
                for length, one, other in zip(lengths, replayed, launched, strict=True)
            )
            if faster:
                self._least_tokens[size] = faster[0]
                reports.append(f"{size} for units from {faster[0]} tokens on ({times}; {taken[size]:.0f} MiB)")
            else:
                del self._least_tokens[size]
                for layer in layers:
                    del self._layers[layer, size]
                reports.append(f"{size} dropped, no faster than launching ({times})")
        log.info("prefill graphs of %d layers, replayed for launched: %s", len(layers), "; ".join(reports))

    def covers(self, layer: int, num_tokens: int, pages: Pages | None) -> bool:
        """Return whether a layer has a graph for so many tokens that writes its keys and values to these pages."""
        if not 0 < num_tokens <= self.most_tokens or num_tokens < self._least_tokens[self._size_of(num_tokens)]:
            return False
        graphs = self._layers.get((layer, self._size_of(num_tokens)))
        if graphs is None or (graphs.pages is None) != (pages is None):
            return False
        return pages is None or graphs.pages is None or pages[0] is graphs.pages[0]

    def run(self, layer: int, hidden: Tensor, positions: Tensor, slots: Tensor, attend: Attend,
            cells: Tensor | None = None) -> Tensor:  # fmt: skip
        """Compute one layer as `Decoder.layer` does, in place; return `hidden`.

        `covers` must hold for its number of tokens.
        """
        num, graphs = len(hidden), self._layers[layer, self._size_of(len(hidden))]
        self._positions[:num].copy_(positions)
        self._cells[:num].copy_(positions if cells is None else cells)
        self._fill_slots(slots)
        self._hidden[:num].copy_(hidden)
        self._replay(graphs.before)
        query, pre_rope_query = (self._rows(buffer, layer, num) for buffer in (self._query, self._pre_rope_query))
        attended = attend(query, pre_rope_query)
        self._rows(self._attended_of(layer), layer, num).copy_(attended.out)
        if self._has_sinks(layer):
            self._lse[:num].copy_(attended.partial_lse)
        self._replay(graphs.behind)
        return hidden.copy_(self._hidden[:num])

    def run_recurrent(self, layer: int, hidden: Tensor, slots: Tensor, parts: Sequence[StatePart]) -> Tensor:
        """Compute a recurrent layer in the same way. hidden: `[tokens, hidden]`, the tokens of `parts` in order."""
        delta, num, graphs = self._decoder.delta, len(hidden), self._layers[layer, self._size_of(len(hidden))]
        assert delta is not None, "a recurrent layer has states"
        if self._decoder.adapters is not None:
            self._fill_slots(slots)  # nothing else of the layer reads them
        self._hidden[:num].copy_(hidden)
        self._replay(graphs.before)
        delta.take_in(layer, self._mixed[:num], self._gates[:num], parts, self._made[:num])
        self._replay(graphs.behind)
        return hidden.copy_(self._hidden[:num])

    def _replay(self, captured: _Graph) -> None:
        for packed in captured.widened:
            self._decoder.projections.widened.make_ready(packed)
        captured.graph.replay()

    def _memory_bytes(self) -> int:
        """Return the bytes of the device's memory in use, graphs included."""
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    @property
    def _device(self) -> torch.device:
        return self._decoder.pool.device

    def _allocate(self, most_tokens: int) -> None:
        architecture = self._decoder.architecture
        arrays = graph_arrays(architecture, most_tokens, self._decoder.weights.embedding.dtype.itemsize)
        buffers = {name: allocate(spec, self._device) for name, spec in arrays.items()}
        self._hidden, self._wide, self._lse = buffers["hidden"], buffers["wide"], buffers["lse"]
        attention, recurrent = between_widths(architecture)
        self._query, self._pre_rope_query, self._attended = _cut_buffer(buffers["between"], attention)
        self._mixed, self._gates, self._made = _cut_buffer(buffers["between"], recurrent)
        self._positions, self._cells = buffers["positions"], buffers["cells"]
        self._slots = buffers["slots"].fill_(-1)

    def _has_far_experts(self, layer: int) -> bool:
        experts = self._decoder.weights.layers[layer].experts
        return experts is not None and experts.host is not None

    def _has_sinks(self, layer: int) -> bool:
        return self._decoder.weights.layers[layer].sinks is not None

    def _attended_of(self, layer: int) -> Tensor:
        """Return the buffer for attention's output: float32 where sinks are merged, as without a graph."""
        return self._wide if self._has_sinks(layer) else self._attended

    def _rows(self, buffer: Tensor, layer: int, num_tokens: int) -> Tensor:
        """Return the first rows of a buffer `[most_tokens, columns]` as `[num_tokens, heads, dim]` of the layer."""
        architecture = self._decoder.architecture
        heads, dim = architecture.num_heads, architecture.heads_of(self._decoder.specs[layer]).dim
        return buffer.flatten()[: num_tokens * heads * dim].view(num_tokens, heads, dim)

    def _size_of(self, num_tokens: int) -> int:
        sizes = list(self._least_tokens)
        return sizes[bisect_left(sizes, num_tokens)]

    def _fill_slots(self, slots: Tensor) -> None:
        num = len(slots)
        self._slots[:num].copy_(slots)
        if num < self._num_filled:
            self._slots[num : self._num_filled].fill_(-1)
        self._num_filled = num

    def _capture_layer(self, layer: int, size: int, pages: Pages | None, pool: tuple[int, int] | None) -> None:
        is_recurrent = self._decoder.specs[layer].recurrent is not None
        before, behind = self._state_work(layer, size) if is_recurrent else self._attention_work(layer, size, pages)
        self._fill_slots(self._slots[:0])
        for work in (before, behind):
            work()  # its kernels are compiled now: no module may be loaded in a capture
        graphs = [self._record(work, pool) for work in (before, behind)]
        self._layers[layer, size] = _LayerGraphs(graphs[0], graphs[1], pages)

    def _record(self, work: _Work, pool: tuple[int, int] | None) -> _Graph:
        noted: list[Packed] = []

        def noting() -> None:
            with self._decoder.projections.widened.noted(noted):
                work()

        return _Graph(record(noting, pool)[0], noted)

    def _attention_work(self, layer: int, size: int, pages: Pages | None) -> tuple[_Work, _Work]:
        """Return the work before attention and the work after it.

        Gates of the output pass from one to the other in the graphs' own memory; no other graph of that memory runs in
        between.
        """
        decoder, hidden, slots = self._decoder, self._hidden[:size], self._slots[:size]
        positions, cells = self._positions[:size], self._cells[:size]
        query, pre_rope_query = (self._rows(buffer, layer, size) for buffer in (self._query, self._pre_rope_query))
        attended = self._rows(self._attended_of(layer), layer, size)
        lse = self._lse[:size] if self._has_sinks(layer) else None
        carried: list[Carried] = []

        def before() -> None:
            carried[:] = [Carried(None, layer, {}, decoder.query_scale(positions))]
            made = decoder.enter(layer, hidden, positions, cells, slots, pages, None, carried[0])
            query.copy_(made[0])
            pre_rope_query.copy_(made[1])

        def behind() -> None:
            hidden.copy_(decoder.leave(layer, hidden, attended, lse, slots, None, carried[0]))

        return before, behind

    def _state_work(self, layer: int, size: int) -> tuple[_Work, _Work]:
        """Return the work before a recurrent layer's state is updated and the work after that."""
        decoder, hidden, slots, made = self._decoder, self._hidden[:size], self._slots[:size], self._made[:size]

        def before() -> None:
            mixed, gates = decoder.projections.mixed(layer, hidden)
            self._mixed[:size].copy_(mixed)
            self._gates[:size].copy_(gates)

        def behind() -> None:
            hidden.copy_(decoder.leave(layer, hidden, made, None, slots))

        return before, behind


def _cut_buffer(buffer: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Cut a buffer's memory into arrays of `[rows, width]`, one behind another."""
    rows = len(buffer)
    parts = buffer.flatten()[: rows * sum(widths)].split([rows * width for width in widths])
    return [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]
