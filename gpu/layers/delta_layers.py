"""Compute the recurrent layers of a decoder, for the rows of a step or for parts of prompts.

Products take all rows at once, as in other layers. Between them, rows of one sequence are processed in order. Padding
rows and packed neighbours change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from gpu.attention.step_rows import StepRows
from gpu.kv.states import States
from gpu.layers.projections import Projections
from gpu.model.spec import Architecture
from gpu.operations.arguments import runs_on_triton
from gpu.operations.recurrent.delta_net import RecurrentWeights
from gpu.operations.recurrent.delta_prefill import Span, delta_prefill, plan_spans, run_spans_reference
from gpu.operations.recurrent.delta_step import delta_commit, delta_commit_reference, delta_step, stack
from gpu.step import WindowBranch

MOST_PLANNED = 1024  # units whose spans are cached on the device, some 2 KiB each: enough for half a million tokens


@dataclass(frozen=True, slots=True)
class StatePart:
    """A prompt's part of a unit: tokens `[begin, end)` of the unit are the sequence's, from position `first` on.

    number: of the sequence's state. branches: copies of the state that the prompt leaves.
    """

    number: int
    begin: int
    end: int
    first: int
    branches: Sequence[WindowBranch]

    def spans(self) -> list[Span]:
        """Return the part as spans, each with the numbers of the states that are copied from the state at its end."""
        left: dict[int, list[int]] = {}
        for branch in self.branches:
            at = self.begin + branch.end - self.first
            if self.begin < at <= self.end:
                left.setdefault(at, []).append(branch.window)
        ends = sorted({*left, self.end})
        return [
            Span(self.number, begin, end, self.first + begin - self.begin, self.begin, tuple(left.get(end, ())))
            for begin, end in zip([self.begin, *ends], ends, strict=False)
        ]


class DeltaLayers:
    """The recurrent layers of one decoder."""

    def __init__(self, architecture: Architecture, projections: Projections, states: States) -> None:
        assert architecture.recurrent is not None, "the model has recurrent layers"
        self.own = architecture.recurrent
        self.states = states
        self._eps = self.own.norm_eps or architecture.rms_norm_eps
        self._projections = projections
        ring_length, device = states.of_layer(states.layers[0]).rings.shape[1], states.device
        self._plan = lru_cache(MOST_PLANNED)(partial(plan_spans, ring_length=ring_length, device=device))
        on_triton = runs_on_triton(states.of_slot)
        has_kernels = on_triton and not self.own.is_short
        self._stacked = stack([self._weights(layer) for layer in states.layers]) if has_kernels else None

    def step(self, layer: int, hidden: Tensor, rows: StepRows) -> Tensor:
        """Return a layer's input to its output projection, `[rows, value_heads * value_dim]`, for one token per row."""
        weights = self._weights(layer)
        mixed, gates = self._projections.mixed(layer, hidden)
        held = self.states.of_layer(layer)
        numbers, own = self.states.of_slot, (rows.slots, rows.positions, rows.drafted)
        return delta_step(mixed, gates, weights, self.own, self._eps, held, numbers, *own)

    def commit(self, slots: Tensor, cells: Tensor, accepted: Tensor) -> None:
        """Update all layers' states with drafted tokens that were accepted; see `delta_commit`."""
        if self.own.is_short:
            return  # the state is the ring of last inputs, which are found by their positions
        if self._stacked is not None:
            delta_commit(self._stacked, self.own, self.states.all_layers, self.states.of_slot, slots, cells, accepted)
            return
        for layer in self.states.layers:
            held = self.states.of_layer(layer)
            delta_commit_reference(self._weights(layer), self.own, held, self.states.of_slot, slots, cells, accepted)

    def prefill(self, layer: int, hidden: Tensor, parts: Sequence[StatePart]) -> Tensor:
        """Return the same as `step` for a unit's tokens `[tokens, hidden]`, which are those of `parts`, in order."""
        return self.take_in(layer, *self._projections.mixed(layer, hidden), parts)

    def take_in(
        self, layer: int, mixed: Tensor, gates: Tensor, parts: Sequence[StatePart], out: Tensor | None = None
    ) -> Tensor:
        """Update the states with projected tokens, and return what `prefill` does.

        mixed, gates: from `Projections.mixed`. out: where the result is written; None: to new memory.
        """
        weights, held = self._weights(layer), self.states.of_layer(layer)
        spans = tuple(span for part in parts for span in part.spans())
        if self._stacked is None or mixed.dtype == torch.float64:
            return run_spans_reference(mixed, gates, weights, self.own, self._eps, held, spans, out)
        return delta_prefill(mixed, gates, weights, self.own, self._eps, held, self._plan(spans), out)

    def _weights(self, layer: int) -> RecurrentWeights:
        weights = self._projections.weights.layers[layer].recurrent
        assert weights is not None, "the layer is recurrent"
        return weights
