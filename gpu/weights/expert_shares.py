"""Share a model's experts between the card and host memory, and tell what it takes to bring some up. No torch.

The first experts stay on the card, equally many in each layer, so that each layer of a step waits equally long for the
link. Which experts a text takes is not known beforehand. Invariant: the parts add up to all experts, and these
bytes are what `gpu.weights.host_experts` allocates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from gpu.model.matrix_format import Kind
from gpu.model.matrix_formats import OF_EXPERTS, layer_formats, matrix_shapes
from gpu.model.spec import Architecture, Experts
from transfer.arrays import sum_bytes
from transfer.slot_shape import ANSWERED, expert_row_arrays, expert_work_arrays

STAGED_STACKS = 2  # of a layer's experts in host memory, whole, for prefill: those it reads, and the next layer's
KV_SHARE = 1 / 4  # of what is left without experts, kept for contexts where experts take what they can get
MOST_COMPUTED_ROWS = 32  # of a step whose experts in host memory the CPU computes: of more they are fetched
COMPUTED_COLUMNS = 32  # rows of experts that the CPU computes are whole lines of bfloat16, or runs of few bits
COMPUTED_GROUP = 16  # columns, of those that share a scale there: a vector's
PINNED_SHARE = 0.8  # of the host's memory, at most, with all that is planned there: the system's own is beside it


def experts_layer_bytes(shape: Architecture, layer: int, dtype_bytes: int) -> int:
    """All experts of a layer, as a GPU has them."""
    formats, shapes = layer_formats(shape, layer), matrix_shapes(shape, shape.layers[layer])
    found = 0
    for name in OF_EXPERTS:
        (rows, inner), stored = shapes[name], formats[name]
        found += rows * inner * dtype_bytes if stored is None else stored.num_bytes(rows, inner)
    return found


def most_experts(shape: Architecture) -> int:
    """Of a layer; 0: the model has none."""
    return max((spec.experts.num_experts for spec in shape.layer_pattern if spec.experts is not None), default=0)


def why_not_computed(shape: Architecture) -> str | None:
    """What the CPU's kernels have no code for; None: they have."""
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
    if {spec.activation for _, spec in layers} != {"silu"}:
        return f"the CPU computes experts with SiLU, and {shape.name} has another activation"
    if len({spec.experts for _, spec in layers}) > 1:
        return f"the CPU computes experts that are alike in all layers, and those of {shape.name} are not"
    experts = experts_of(shape)
    if shape.hidden % COMPUTED_COLUMNS or experts.intermediate % COMPUTED_COLUMNS:
        widths = f"{shape.hidden} and {experts.intermediate}"
        return f"the CPU computes rows of multiples of {COMPUTED_COLUMNS} columns, and these have {widths}"
    return None


def experts_of(shape: Architecture) -> Experts:
    """Of the first layer that has some, and of all that are alike."""
    return next(spec.experts for spec in shape.layers if spec.experts is not None)


@dataclass(frozen=True, slots=True)
class ExpertShares:
    """on_card: of each layer's experts, the first so many, or all if it has no more."""

    shape: Architecture
    dtype_bytes: int
    on_card: int

    @property
    def on_host(self) -> int:
        """Of the layer that has most."""
        return max((count for count, _, _ in self._layers()), default=0)

    @property
    def num_host_layers(self) -> int:
        """With experts in host memory."""
        return sum(count > 0 for count, _, _ in self._layers())

    @property
    def host_bytes(self) -> int:
        """Of all layers, pinned."""
        return sum(count * each for count, each, _ in self._layers())

    @property
    def card_bytes(self) -> int:
        """Of all layers, without what is fetched."""
        return sum((experts.num_experts - count) * each for count, each, experts in self._layers())

    @property
    def card_gib(self) -> float:
        return self.card_bytes / 2**30

    @property
    def staged_bytes(self) -> int:
        """What prefill reads them from, and decode steps that are not captured."""
        return STAGED_STACKS * max((count * each for count, each, _ in self._layers()), default=0)

    def slot_bytes(self, num_tokens: int) -> int:
        """What a captured step of so many tokens reads them from: a slot for each that it may take."""
        return max((min(count, num_tokens * experts.per_token) * each for count, each, experts in self._layers()),
                   default=0)  # fmt: skip

    def fetched_bytes(self, num_tokens: int) -> float:
        """Over the link, of a decode step of so many tokens that take their experts at random, in expectation."""
        return sum(
            experts.taken(num_tokens) / experts.num_experts * count * each for count, each, experts in self._layers()
        )

    def computed_numbers(self, num_tokens: int) -> dict[Kind | None, tuple[float, float]]:
        """Of such a step's experts in host memory, in expectation: by what their numbers are stored as, None: plain,
        how many there are, and how many products with a row's.
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
        """Of those on the card, likewise: what such a step reads of them there."""
        return sum(
            experts.taken(num_tokens) / experts.num_experts * (experts.num_experts - count) * each
            for count, each, experts in self._layers()
        )

    def expert_slot_bytes(self, num_rows: int) -> int:
        """Of one lane, where the CPU computes experts for steps of so many rows: the slot in which it is asked
        (`transfer.expert_exchange`), and what it computes in (`cpu.experts`), all float32 or int32.
        """
        experts, hidden = experts_of(self.shape), self.shape.hidden
        row = expert_row_arrays(hidden, experts.per_token)
        work = expert_work_arrays(num_rows, experts.per_token, experts.intermediate, hidden)
        return num_rows * sum_bytes(row.values()) + ANSWERED.num_bytes + sum_bytes(work.values())

    def _numbers_of_layers(self) -> Iterator[int]:
        """Of those with experts."""
        return (layer for layer, spec in enumerate(self.shape.layers) if spec.experts is not None)

    def _layers(self) -> Iterator[tuple[int, int, Experts]]:
        """Of each layer with experts: how many lie in host memory, bytes of one, and what they are."""
        for experts, each in _layers_with_experts(self.shape, self.dtype_bytes):
            yield max(0, experts.num_experts - self.on_card), each, experts


@lru_cache(maxsize=512)
def _layers_with_experts(shape: Architecture, dtype_bytes: int) -> tuple[tuple[Experts, int], ...]:
    """Of each layer that has some: what they are, and bytes of one."""
    return tuple(
        (spec.experts, experts_layer_bytes(shape, layer, dtype_bytes) // spec.experts.num_experts)
        for layer, spec in enumerate(shape.layers)
        if spec.experts is not None
    )
