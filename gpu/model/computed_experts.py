"""Which of a model's experts the CPU can compute where they lie, and the slots in which it is asked for them.

It refuses to know rates: whether that is faster than fetching them is the plan's to say. Invariant: what is refused
here is fetched, or named in one line, before anything is loaded.
"""

import torch

from gpu.host.expert_exchange import ExpertExchange
from gpu.model.matrix_formats import OF_EXPERTS, layer_formats
from gpu.model.spec import Architecture, Experts, ModelError
from gpu.model.weights import Weights
from transfer.expert_exchange import MOST_ROWS, LayerExperts, OpenExperts

COLUMN_STEP = 32  # of rows: a line of bfloat16


def why_not_computed(shape: Architecture) -> str | None:
    """What the CPU's kernels have no code for; None: they have."""
    layers = [(number, spec) for number, spec in enumerate(shape.layers) if spec.experts is not None]
    if not layers:
        return f"{shape.name} has no experts"
    packed = {
        stored.kind for number, _ in layers for name in OF_EXPERTS
        if (stored := layer_formats(shape, number)[name]) is not None
    }  # fmt: skip
    if packed:
        return f"the CPU computes plain experts, and these are {', '.join(sorted(packed))}"
    if {spec.activation for _, spec in layers} != {"silu"}:
        return f"the CPU computes experts with SiLU, and {shape.name} has another activation"
    if len({spec.experts for _, spec in layers}) > 1:
        return f"the CPU computes experts that are alike in all layers, and those of {shape.name} are not"
    experts = _experts_of(shape)
    if shape.hidden % COLUMN_STEP or experts.intermediate % COLUMN_STEP:
        widths = f"{shape.hidden} and {experts.intermediate}"
        return f"the CPU computes rows of multiples of {COLUMN_STEP} columns, and these have {widths}"
    return None


def open_exchanges(
    weights: Weights, shape: Architecture, max_running: int, device: torch.device, open_experts: OpenExperts,
    num_lanes: int,
) -> list[ExpertExchange]:  # fmt: skip
    """A slot for each lane, and who answers in it; none where no expert lies in host memory. Raises ModelError where
    this machine's CPU, or the model, cannot.
    """
    hosts = [layer.experts and layer.experts.host for layer in weights.layers]
    if not any(hosts):
        return []
    reason = why_not_computed(shape)
    if reason is not None:
        raise ModelError(f"gpu.host_experts: asked compute, but {reason}; have them fetched")
    layers = [None if host is None else _layer_of(host.count, host.gate_up, host.down) for host in hosts]
    per_token, max_rows = _experts_of(shape).per_token, min(max_running, MOST_ROWS)
    try:
        workers = [open_experts(layers, max_rows, per_token) for _ in range(num_lanes)]
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"gpu.host_experts: asked compute, but {error}; have them fetched") from None
    return [ExpertExchange(max_rows, shape.hidden, per_token, device, worker) for worker in workers]


def _layer_of(count: int, gate_up: object, down: object) -> LayerExperts:
    assert isinstance(gate_up, torch.Tensor), "experts that the CPU computes are plain"
    assert isinstance(down, torch.Tensor), "experts that the CPU computes are plain"
    return LayerExperts(count, gate_up, down)


def _experts_of(shape: Architecture) -> Experts:
    return next(spec.experts for spec in shape.layers if spec.experts is not None)
