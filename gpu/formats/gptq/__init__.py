"""GPTQ: 4 or 8 bits with zero points, words along the columns; groups of any columns (act-order)."""

from gpu.model.matrix_format import Kind, MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat


def read(keys: QuantisationKeys) -> Quantisation:
    bits = keys.only("bits", 4, 8)
    scheme = keys.only("checkpoint_format", "gptq", "gptq_v2")
    keys.only("pack_dtype", "int32")
    keys.only("sym", True, False)
    keys.empty("dynamic")
    keys.empty("is_marlin_format")
    has_order = keys.only("desc_act", False, True)
    kind: Kind = "int4" if bits == 4 else "int8"
    stored = MatrixFormat(kind, keys.group("group_size"), has_zeros=True, has_order=has_order)
    output = stored if keys.only("lm_head", False, True) else None
    return Quantisation(scheme, stored, output, keys.names("modules_to_not_convert"))


FORMAT = WeightFormat({"gptq": read}, ("gptq", "gptq_v2"), "gpu.formats.gptq.tensors", scale_suffixes=(".scales",))
