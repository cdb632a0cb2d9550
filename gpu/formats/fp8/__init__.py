"""FP8 (e4m3) with a scale a tensor, a row or a block, as `fp8` and `fbgemm_fp8` state it."""

from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat


def read(keys: QuantisationKeys) -> Quantisation:
    keys.only("fmt", "e4m3", "float8_e4m3fn")
    keys.only("scale_fmt", None, "float", "float32", "ue8m0")
    left = (*keys.names("modules_to_not_convert"), *keys.names("ignored_layers"))
    block = keys.get("weight_block_size")
    if block is None:
        return Quantisation("fp8", MatrixFormat("fp8", None, scale_bytes=4), None, left)
    rows, columns = keys.block("weight_block_size", block)
    return Quantisation("fp8 blocks", MatrixFormat("fp8", columns, scale_bytes=4, row_block=rows), None, left)


def read_rows(keys: QuantisationKeys) -> Quantisation:
    left = keys.names("modules_to_not_convert")
    return Quantisation("fp8 rows", MatrixFormat("fp8", None, scale_bytes=4), None, left)


FORMAT = WeightFormat(
    {"fp8": read, "fbgemm_fp8": read_rows}, ("fp8", "fp8 rows", "fp8 blocks"), "gpu.formats.fp8.tensors",
    scale_suffixes=(".weight_scale",),
)  # fmt: skip
