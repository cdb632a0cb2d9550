"""Layers of short prefill units as CUDA graphs: what comes before attention is one graph, what comes behind another.

For a few hundred tokens the host takes longer to launch a layer's kernels than the device takes to run them. Attention
follows each prompt's past, so it is launched between the two, and so is what takes tokens into a recurrent layer's
state. A unit takes the graph of the smallest size that holds
its tokens. Rows beyond them are in no slot: they write no keys, and their outputs are not read.

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
from gpu.prefill.graph_arrays import graph_arrays, layers_in_graphs
from transfer.allocation import allocate

log = logging.getLogger(__name__)

_Work = Callable[[], None]


class Replayed(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _LayerGraphs:
    """The two graphs of one layer for one size. pages: where the first one writes keys and values, None: the pool's."""

    before: Replayed
    behind: Replayed
    pages: Pages | None


class LayerGraphs:
    """Captured layers of units of up to `most_tokens` tokens; none on the CPU, and none where no size is asked for."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._sizes: list[int] = []
        self._layers: dict[tuple[int, int], _LayerGraphs] = {}  # by layer and size
        self._num_filled = 0  # rows of the buffers that are in slots

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the longest unit that has graphs; 0: none has."""
        return max(self._sizes, default=0)

    def drop(self) -> None:
        """Let go of all captured layers."""
        self._sizes.clear()
        self._layers.clear()

    def capture(
        self, sizes: Sequence[int], pages_of: Callable[[int], Pages | None], seconds: Callable[[int], float]
    ) -> None:
        """Capture layers for these numbers of tokens, and keep a number's graphs only where replaying is faster here
        than launching kernels one by one. Both are timed with the shortest prompt that would use the graphs, which
        wastes most rows.

        pages_of: where a layer's keys and values go; None: to the pool's pages.
        seconds: times a prompt of so many tokens with the graphs that there are by then.
        """
        layers = [layer for layer in layers_in_graphs(self._decoder.architecture) if not self._has_far_experts(layer)]
        if not layers or not sizes:
            return
        self._allocate(max(sizes))
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for size in sorted(set(sizes)):
            shortest = self.most_tokens + 1
            launched = seconds(shortest)
            for layer in layers:
                self._capture_layer(layer, size, pages_of(layer), pool)
            self._sizes.append(size)
            replayed = seconds(shortest)
            log.debug(
                "prefill graphs of %d tokens: %.2f ms replayed, %.2f ms launched", size, 1e3 * replayed, 1e3 * launched
            )
            if replayed >= launched:
                self._sizes.pop()
                for layer in layers:
                    del self._layers[layer, size]
        log.info("prefill graphs: %d layers, sizes %s", len(layers), ",".join(map(str, self._sizes)) or "none")

    def covers(self, layer: int, num_tokens: int, pages: Pages | None) -> bool:
        """Return whether a layer has a graph for so many tokens whose keys and values go to these pages."""
        if not 0 < num_tokens <= self.most_tokens:
            return False
        graphs = self._layers.get((layer, self._size_of(num_tokens)))
        if graphs is None or (graphs.pages is None) != (pages is None):
            return False
        return pages is None or graphs.pages is None or pages[0] is graphs.pages[0]

    def run(self, layer: int, hidden: Tensor, positions: Tensor, slots: Tensor, attend: Attend,
            cells: Tensor | None = None) -> Tensor:  # fmt: skip
        """Compute one layer as `Decoder.layer` does, of a number of tokens that `covers` names."""
        num, graphs = len(hidden), self._layers[layer, self._size_of(len(hidden))]
        self._positions[:num].copy_(positions)
        self._cells[:num].copy_(positions if cells is None else cells)
        self._begin(graphs, hidden, slots)
        query, pre_rope_query = (self._rows(buffer, layer, num) for buffer in (self._query, self._pre_rope_query))
        attended = attend(query, pre_rope_query)
        self._rows(self._attended_of(layer), layer, num).copy_(attended.out)
        if self._has_sinks(layer):
            self._lse[:num].copy_(attended.partial_lse)
        graphs.behind.replay()
        return self._out[:num].clone()

    def run_recurrent(self, layer: int, hidden: Tensor, slots: Tensor, parts: Sequence[StatePart]) -> Tensor:
        """Compute a recurrent layer likewise, of tokens `[tokens, hidden]` that are those of `parts`, in order."""
        delta, num, graphs = self._decoder.delta, len(hidden), self._layers[layer, self._size_of(len(hidden))]
        assert delta is not None, "a recurrent layer has states"
        self._begin(graphs, hidden, slots)
        self._made[:num].copy_(delta.take_in(layer, self._mixed[:num], self._gates[:num], parts))
        graphs.behind.replay()
        return self._out[:num].clone()

    def _begin(self, graphs: _LayerGraphs, hidden: Tensor, slots: Tensor) -> None:
        """Compute what comes before attention, or the state."""
        self._hidden[: len(hidden)].copy_(hidden)
        self._fill_slots(slots)
        self._decoder.projections.widened.forget()  # graphs widen in its memory
        graphs.before.replay()

    @property
    def _device(self) -> torch.device:
        return self._decoder.pool.device

    def _allocate(self, most_tokens: int) -> None:
        architecture = self._decoder.architecture
        arrays = graph_arrays(architecture, most_tokens, self._decoder.weights.embedding.dtype.itemsize)
        buffers = {name: allocate(spec, self._device) for name, spec in arrays.items()}
        self._hidden, self._out = buffers["hidden"], buffers["out"]
        self._query, self._pre_rope_query = buffers["query"], buffers["pre_rope_query"]
        self._attended, self._wide, self._lse = buffers["attended"], buffers["wide"], buffers["lse"]
        self._mixed, self._gates, self._made = buffers["mixed"], buffers["gates"], buffers["made"]
        self._positions, self._cells = buffers["positions"], buffers["cells"]
        self._slots = buffers["slots"].fill_(-1)

    def _has_far_experts(self, layer: int) -> bool:
        experts = self._decoder.weights.layers[layer].experts
        return experts is not None and experts.host is not None

    def _has_sinks(self, layer: int) -> bool:
        return self._decoder.weights.layers[layer].sinks is not None

    def _attended_of(self, layer: int) -> Tensor:
        """Return attention's output; sinks are merged in float32, as they are without a graph."""
        return self._wide if self._has_sinks(layer) else self._attended

    def _rows(self, buffer: Tensor, layer: int, num_tokens: int) -> Tensor:
        """Return the first rows of a buffer `[most_tokens, columns]` as `[num_tokens, heads, dim]` of the layer."""
        architecture = self._decoder.architecture
        heads, dim = architecture.num_heads, architecture.heads_of(self._decoder.specs[layer]).dim
        return buffer.flatten()[: num_tokens * heads * dim].view(num_tokens, heads, dim)

    def _size_of(self, num_tokens: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_tokens)]

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
        with self._decoder.projections.widened.in_place():
            for work in (before, behind):
                work()  # its kernels are compiled now: no module may be loaded in a capture
            self._layers[layer, size] = _LayerGraphs(record(before, pool)[0], record(behind, pool)[0], pages)

    def _attention_work(self, layer: int, size: int, pages: Pages | None) -> tuple[_Work, _Work]:
        """Return what comes before attention and behind it. What is carried from one to the other, gates of the output,
        lies in memory of the graphs: between the two no other graph of that memory is replayed.
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
            self._out[:size].copy_(decoder.leave(layer, hidden, attended, lse, slots, None, carried[0]))

        return before, behind

    def _state_work(self, layer: int, size: int) -> tuple[_Work, _Work]:
        """Return what comes before a recurrent layer's state and behind it."""
        decoder, hidden, slots, made = self._decoder, self._hidden[:size], self._slots[:size], self._made[:size]

        def before() -> None:
            mixed, gates = decoder.projections.mixed(layer, hidden)
            self._mixed[:size].copy_(mixed)
            self._gates[:size].copy_(gates)

        def behind() -> None:
            self._out[:size].copy_(decoder.leave(layer, hidden, made, None, slots))

        return before, behind
