"""Divide a model's experts between the card and host memory, and count the bytes to fetch some of them. No torch.

The first experts of each layer stay on the card, equally many in each, so that each layer of a step waits equally long
for the link. Which experts a text will use is not known beforehand. Invariant: both parts together are all experts, and
the bytes are those that `gpu.weights.host_experts` allocates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from gpu.model.matrix_format import Kind
from gpu.model.matrix_formats import OF_EXPERTS, layer_formats, matrix_shapes
from gpu.model.spec import Architecture, Experts
from transfer.arrays import sum_bytes
from transfer.model_constants import ExpertActivation
from transfer.slot_shape import ANSWERED, expert_row_arrays, expert_work_arrays

STAGED_STACKS = 2  # of a layer's experts in host memory, whole, for prefill: those it reads, and the next layer's
KV_SHARE = 1 / 4  # of the memory beside experts, kept for contexts with `gpu.experts_gib: auto`
MOST_COMPUTED_ROWS = 32  # most rows of a step whose experts the CPU computes; larger steps fetch them
COMPUTED_COLUMNS = 32  # rows of experts that the CPU computes are whole lines of bfloat16, or runs of few bits
COMPUTED_ACTIVATIONS: tuple[ExpertActivation, ...] = get_args(ExpertActivation)
COMPUTED_GROUP = 16  # columns, of those that share a scale there: a vector's
PINNED_SHARE = 0.8  # the most of the host's memory that is planned, if some of it is pinned


def experts_layer_bytes(shape: Architecture, layer: int, dtype_bytes: int) -> int:
    """Return the bytes of all experts of a layer on a GPU."""
    formats, shapes = layer_formats(shape, layer), matrix_shapes(shape, shape.layers[layer])
    found = 0
    for name in OF_EXPERTS:
        (rows, inner), stored = shapes[name], formats[name]
        found += rows * inner * dtype_bytes if stored is None else stored.num_bytes(rows, inner)
    return found


def most_experts(shape: Architecture) -> int:
    """Return the largest number of experts of a layer; 0 if the model has none."""
    return max((spec.experts.num_experts for spec in shape.layer_pattern if spec.experts is not None), default=0)


def why_not_computed(shape: Architecture) -> str | None:
    """Return the reason why the CPU's kernels cannot compute the model's experts; None if they can."""
    layers = [(number, spec) for number, spec in enumerate(shape.layers) if spec.experts is not None]
    if not layers:
        return f"{shape.name} has no experts"
    groups = {
        stored.group for number, _ in layers for name, stored in layer_formats(shape, number).items()
        if name in OF_EXPERTS and stored is not None and stored.group is not None
    }  # fmt: skip
    odd = sorted(group for group in groups if group % COMPUTED_GROUP)
    if odd:
        return f"the CPU computes groups of multiples of {COMPUTED_GROUP} columns, and these have {odd[0]}"
    if not {spec.activation for _, spec in layers} <= set(COMPUTED_ACTIVATIONS):
        return f"the CPU computes experts with SiLU or as gpt-oss does, and {shape.name} has another activation"
    if any(spec.experts.beside_mlp for _, spec in layers):
        return f"the CPU computes experts in place of an MLP, and those of {shape.name} stand beside one"
    if len({spec.experts for _, spec in layers}) > 1:
        return f"the CPU computes experts that are alike in all layers, and those of {shape.name} are not"
    experts = experts_of(shape)
    if shape.hidden % COMPUTED_COLUMNS or experts.intermediate % COMPUTED_COLUMNS:
        widths = f"{shape.hidden} and {experts.intermediate}"
        return f"the CPU computes rows of multiples of {COMPUTED_COLUMNS} columns, and these have {widths}"
    return None


def experts_of(shape: Architecture) -> Experts:
    """Return the experts of the first layer that has any; all such layers are alike."""
    return next(spec.experts for spec in shape.layers if spec.experts is not None)


@dataclass(frozen=True, slots=True)
class ExpertShares:
    """The division of experts between card and host. on_card: how many of each layer's experts, the first ones, are on
    the card; a layer with fewer is there as a whole.
    """

    shape: Architecture
    dtype_bytes: int
    on_card: int

    @property
    def on_host(self) -> int:
        """Return the largest number of experts that a layer has in host memory."""
        return max((count for count, _, _ in self._layers()), default=0)

    @property
    def num_host_layers(self) -> int:
        """Return how many layers have experts in host memory."""
        return sum(count > 0 for count, _, _ in self._layers())

    @property
    def host_bytes(self) -> int:
        """Return the bytes of pinned host memory for the experts of all layers."""
        return sum(count * each for count, each, _ in self._layers())

    @property
    def card_bytes(self) -> int:
        """Return the bytes of all layers' experts on the card, without buffers for fetched ones."""
        return sum((experts.num_experts - count) * each for count, each, experts in self._layers())

    @property
    def card_gib(self) -> float:
        return self.card_bytes / 2**30

    @property
    def staged_bytes(self) -> int:
        """Return the bytes of the staging buffers, from which prefill and steps without a graph read host experts."""
        return STAGED_STACKS * max((count * each for count, each, _ in self._layers()), default=0)

    def slot_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a captured step's slots for `num_tokens`: one for each host expert that a layer
        may use.
        """
        return max((min(count, num_tokens * experts.per_token) * each for count, each, experts in self._layers()),
                   default=0)  # fmt: skip

    def fetched_bytes(self, num_tokens: int) -> float:
        """Return the expected bytes that a decode step of `num_tokens` fetches over the link, if tokens choose experts
        at random.
        """
        return sum(
            experts.taken(num_tokens) / experts.num_experts * count * each for count, each, experts in self._layers()
        )

    def computed_numbers(self, num_tokens: int) -> dict[Kind | None, tuple[float, float]]:
        """Return the CPU's expected work in a step of `num_tokens`: by storage format (None: plain), how many numbers
        it reads, and how many products it computes with them.
        """
        found: dict[Kind | None, tuple[float, float]] = {}
        for layer, (count, _, experts) in zip(self._numbers_of_layers(), self._layers(), strict=True):
            share = count / experts.num_experts
            formats, shapes = layer_formats(self.shape, layer), matrix_shapes(self.shape, self.shape.layers[layer])
            for name in OF_EXPERTS:
                each = shapes[name][0] * shapes[name][1] / experts.num_experts
                stored = formats[name]
                read, products = found.get(stored and stored.kind, (0.0, 0.0))
                found[stored and stored.kind] = (
                    read + experts.taken(num_tokens) * share * each,
                    products + num_tokens * experts.per_token * share * each,
                )
        return found

    def near_bytes(self, num_tokens: int) -> float:
        """Return the expected bytes of experts on the card that a step of `num_tokens` reads there."""
        return sum(
            experts.taken(num_tokens) / experts.num_experts * (experts.num_experts - count) * each
            for count, each, experts in self._layers()
        )

    def expert_slot_bytes(self, num_rows: int) -> int:
        """Return the bytes of one lane for experts that the CPU computes in steps of `num_rows`: the exchange slot
        (`transfer.expert_exchange`) and the work arrays (`cpu.experts`), all float32 or int32.
        """
        experts, hidden = experts_of(self.shape), self.shape.hidden
        row = expert_row_arrays(hidden, experts.per_token)
        work = expert_work_arrays(num_rows, experts.per_token, experts.intermediate, hidden)
        return num_rows * sum_bytes(row.values()) + ANSWERED.num_bytes + sum_bytes(work.values())

    @property
    def host_bias_bytes(self) -> int:
        """Return the bytes of the float32 copies that the CPU has of the biases of experts in host memory."""
        hidden = self.shape.hidden
        return sum(4 * count * (2 * experts.intermediate + hidden)
                   for count, _, experts in self._layers() if experts.has_biases)  # fmt: skip

    def _numbers_of_layers(self) -> Iterator[int]:
        """Return the numbers of the layers with experts."""
        return (layer for layer, spec in enumerate(self.shape.layers) if spec.experts is not None)

    def _layers(self) -> Iterator[tuple[int, int, Experts]]:
        """Yield for each layer with experts: how many are in host memory, the bytes of one, and their description."""
        for experts, each in _layers_with_experts(self.shape, self.dtype_bytes):
            yield max(0, experts.num_experts - self.on_card), each, experts


@lru_cache(maxsize=512)
def _layers_with_experts(shape: Architecture, dtype_bytes: int) -> tuple[tuple[Experts, int], ...]:
    """Return for each layer with experts: their description, and the bytes of one."""
    return tuple(
        (spec.experts, experts_layer_bytes(shape, layer, dtype_bytes) // spec.experts.num_experts)
        for layer, spec in enumerate(shape.layers)
        if spec.experts is not None
    )
