"""Split a model over the devices of one host: each has some heads of every layer and a part of every MLP.

QKV, gate and up are split by rows, and the two matrices behind them by columns, so a layer has two sums over devices
(Megatron-LM, arXiv 1909.08053, section 3). Each device has all norms and the whole input embedding.
"""

from dataclasses import replace

from gpu.model.matrix_formats import layer_tensors
from gpu.model.spec import Architecture, KvHeads, LayerSpec, ModelError, Share

KEY = "gpu.devices"


def split_over(architecture: Architecture, devices: int, rank: int = 0) -> Architecture:
    """Return the share of device `rank` of `devices`. Raises ModelError if the model cannot be split, with the
    reason.
    """
    if architecture.devices == devices:
        return architecture
    assert architecture.share is None, "a share is not split again"
    why = why_not_split(architecture, devices)
    if why is not None:
        raise ModelError(f"{KEY}: asked {devices}, and {why}; use 1")
    a = architecture
    return replace(
        a,
        num_heads=a.num_heads // devices,
        num_kv_heads=a.num_kv_heads // devices,
        intermediate=a.intermediate // devices,
        layer_pattern=tuple(_split_layer(spec, devices) for spec in a.layer_pattern),
        share=Share(a, rank, devices),
    )


def _split_layer(spec: LayerSpec, devices: int) -> LayerSpec:
    return replace(
        spec,
        heads=spec.heads and KvHeads(spec.heads.count // devices, spec.heads.dim),
        intermediate=spec.intermediate and spec.intermediate // devices,
        experts=spec.experts and replace(spec.experts, intermediate=spec.experts.intermediate // devices),
    )


def why_not_split(a: Architecture, devices: int) -> str | None:
    """Return the reason why a model cannot be split over `devices` devices; None if it can."""
    specs = a.layer_pattern
    if a.latent is not None:
        return f"{a.name} has latent attention, whose one row a token belongs to all heads"
    if a.recurrent is not None:
        return f"{a.name} has recurrent layers, whose states are not split"
    experts = [spec.experts for spec in specs if spec.experts is not None]
    if any("experts_gate_up" in layer_tensors(a, spec).values() for spec in specs if spec.experts is not None):
        return f"{a.name} has the experts of a layer in one tensor, of which no parts are read"
    if any(one.has_biases or one.beside_mlp for one in experts):
        return f"{a.name} has experts with biases, or beside an MLP with norms of its own, which are not split"
    if any(spec.wide_qk_norm for spec in specs):
        return f"{a.name} norms all heads of a token together, which lie on several devices"
    if a.quantisation is not None and a.quantisation.scheme != "rounded":
        return f"{a.name} is quantised ({a.quantisation.scheme}), and of plain checkpoints alone parts are read"
    if a.quantisation is not None and a.quantisation.humming:
        return "model.products is humming, which is not split"
    sizes = {
        "heads": [a.num_heads],
        "KV heads": [a.heads_of(spec).count for spec in specs],
        "columns of an MLP": [*map(a.intermediate_of, specs), *(one.intermediate for one in experts)],
    }
    for what, counts in sizes.items():
        odd = [count for count in counts if count % devices]
        if odd:
            return f"{a.name} has {odd[0]:,} {what}, no multiple of it"
    return None
