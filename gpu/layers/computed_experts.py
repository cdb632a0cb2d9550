"""Open the exchange slots and workers by which the CPU computes experts in host memory.

A model or machine that this does not work for is refused with one line, before any step is captured.
"""

import logging

import torch
from torch import Tensor

from gpu.exchange.device_experts import ExpertExchange
from gpu.model.spec import Activation, Architecture, ModelError
from gpu.operations.linear.numba_matrix_table import rows_of
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights.expert_shares import COMPUTED_ACTIVATIONS, experts_of, why_not_computed
from gpu.weights.host_experts import HostExperts
from gpu.weights.weights import ExpertWeights, Weights
from transfer.expert_exchange import LayerExperts, OpenExperts

log = logging.getLogger(__name__)


def open_exchanges(
    weights: Weights, shape: Architecture, max_rows: int, device: torch.device, open_experts: OpenExperts,
    num_lanes: int,
) -> list[ExpertExchange]:  # fmt: skip
    """Return an exchange of `max_rows` rows for each lane, with its workers; none if no expert is in host memory.

    Raises ModelError if this machine's CPU or the model does not support it.
    """
    hosts = [layer.experts and layer.experts.host for layer in weights.layers]
    if not any(hosts):
        return []
    reason = why_not_computed(shape)
    if reason is not None:
        raise ModelError(f"gpu.host_experts: asked compute, but {reason}; use fetch")
    layers = [
        layer.experts and _layer_of(layer.experts, spec.activation, shape)
        for layer, spec in zip(weights.layers, shape.layers, strict=True)
    ]
    per_token = experts_of(shape).per_token
    by = sorted({"integers" if one.in_integers else "floats" for one in layers if one is not None})
    log.info("products of=experts_in_host_memory by=%s own=%r", " ".join(by), "FP8 and plain rows by floats")
    try:
        workers = [open_experts(layers, max_rows, per_token) for _ in range(num_lanes)]
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"gpu.host_experts: asked compute, but {error}; use fetch") from None
    return [ExpertExchange(max_rows, shape.hidden, per_token, device, worker) for worker in workers]


def _layer_of(experts: ExpertWeights, activation: Activation, shape: Architecture) -> LayerExperts | None:
    """Return a layer's experts in host memory, with float32 copies of their biases, which are on the card.

    They are multiplied in integers unless `model.products` is `own`.
    """
    host = experts.host
    if host is None:
        return None
    assert not any(isinstance(one, Packed) and one.order is not None for one in (host.gate_up, host.down)), "in order"
    biases = (_last(bias, experts, host) for bias in (experts.gate_up_bias, experts.down_bias))
    assert activation in COMPUTED_ACTIVATIONS, "other activations were refused before"
    asked = shape.quantisation
    in_integers = asked is not None and (asked.integers or asked.humming)
    return LayerExperts(host.count, rows_of(host.gate_up), rows_of(host.down), *biases, activation, in_integers)


def _last(bias: Tensor | None, experts: ExpertWeights, host: HostExperts) -> Tensor | None:
    """Return the part of a bias that belongs to the experts in host memory, on the CPU."""
    if bias is None:
        return None
    return bias.view(len(experts.router), -1)[-host.count :].flatten().to("cpu", torch.float32)
