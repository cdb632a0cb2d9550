"""AWQ: 4 bits with zero points, eight rows to a word, in the order of its GEMM kernels."""

from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat


def read(keys: QuantisationKeys) -> Quantisation:
    keys.only("version", "gemm", "GEMM")
    keys.only("zero_point", True)
    keys.only("bits", 4)
    group = keys.group("group_size")
    keys.only("backend", "autoawq")
    return Quantisation("awq", MatrixFormat("int4", group, has_zeros=True), None, keys.names("modules_to_not_convert"))


FORMAT = WeightFormat({"awq": read}, ("awq",), "gpu.formats.awq.tensors", scale_suffixes=(".scales",))
