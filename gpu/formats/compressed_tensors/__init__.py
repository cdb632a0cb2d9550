"""compressed-tensors: integers in words or bytes, FP8 and FP4, of all linear modules alike."""

from gpu.formats.nvfp4 import NOTE, NVFP4
from gpu.model.matrix_format import Kind, MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat

MXFP4 = MatrixFormat("fp4", 32, scale_bytes=1)


def read(keys: QuantisationKeys) -> Quantisation:
    groups = keys.part("config_groups")
    if len(groups.config) != 1:
        raise keys.refused("config_groups", sorted(groups.config), "served: one, of all linear modules")
    group = groups.part(next(iter(groups.config)))
    if group.get("targets") != ["Linear"]:
        raise group.refused("targets", group.get("targets"), "served: ['Linear']")
    for key in ("input_activations", "output_activations"):
        group.get(key)  # of tokens, which stay bf16 here
    keys.empty("transform_config")
    sparsity = keys.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise keys.refused("sparsity_config", sparsity, "served: none")
    packing = keys.get("format") or group.get("format")
    group.get("format")
    weights = group.part("weights")
    stored = _read_weights(weights)
    for part in (weights, group):
        part.refuse_unread()
    served = {"int4": ("pack-quantized",), "int8": ("pack-quantized", "int-quantized", "naive-quantized"),
              "fp8": ("float-quantized", "naive-quantized"),
              "fp4": ("nvfp4-pack-quantized",) if stored.group == NVFP4.group else ("mxfp4-pack-quantized",),
              }[stored.kind]  # fmt: skip
    if packing not in served:
        raise keys.refused("format", packing, f"served of these weights: {', '.join(map(repr, served))}")
    scheme = packing if packing.endswith("pack-quantized") else "compressed"
    note = NOTE if stored == NVFP4 else None
    return Quantisation(scheme, stored, stored, keys.names("ignore"), note=note)


def _read_weights(keys: QuantisationKeys) -> MatrixFormat:
    kind = keys.only("type", "int", "float")
    bits = keys.only("num_bits", 8, 4)
    strategy = keys.only("strategy", "tensor", "channel", "group", "block", "tensor_group")
    is_symmetric = keys.only("symmetric", True, False)
    keys.only("dynamic", False)
    has_order = keys.only("actorder", False, "weight", "static", "group", True) in ("group", True)
    for key in ("observer", "observer_kwargs", "zp_dtype"):
        keys.get(key)
    group, block = keys.group("group_size"), keys.get("block_structure")
    if kind == "float" and bits == 4:
        for served in (NVFP4, MXFP4):
            if (strategy == "tensor_group") == (served is NVFP4) and group == served.group and is_symmetric:
                return served
        wanted = f"served of FP4: tensor_group of {NVFP4.group}, group of {MXFP4.group}, symmetric"
        raise keys.refused("strategy", strategy, f"{wanted}; group_size is {group}")
    if strategy == "tensor_group":
        raise keys.refused("strategy", strategy, "served of it: FP4")
    if kind == "float":
        if strategy == "block":
            rows, columns = keys.block("block_structure", block)
            return MatrixFormat("fp8", columns, scale_bytes=4, row_block=rows)
        if strategy == "group":
            raise keys.refused("strategy", strategy, "served of FP8: tensor, channel, block")
        return MatrixFormat("fp8", None, scale_bytes=4)
    if strategy == "block" or (strategy == "group") != (group is not None):
        raise keys.refused("strategy", strategy, f"served of integers: tensor, channel, group; group_size is {group}")
    named: Kind = "int4" if bits == 4 else "int8"
    return MatrixFormat(named, group, has_zeros=not is_symmetric, has_order=has_order)


FORMAT = WeightFormat(
    {"compressed-tensors": read}, ("pack-quantized", "compressed"), "gpu.formats.compressed_tensors.tensors",
    scale_suffixes=(".weight_scale",),
)  # fmt: skip
