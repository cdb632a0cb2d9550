"""NVIDIA's Model Optimizer: NVFP4, which is FP4 (e2m1), an FP8 scale for each 16 columns, and one number for a module,
and FP8 (e4m3), which has one scale for a module.
"""

import re

from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat

GROUP = 16
NVFP4 = MatrixFormat("fp4", GROUP)
FP8 = MatrixFormat("fp8", None, scale_bytes=4)
NOTE = "fp4 in groups of 16, whose scales are multiplied by their module's and kept in float16"


def read(keys: QuantisationKeys) -> Quantisation:
    named = keys.get("quant_algo")
    if named not in ("NVFP4", "W4A16_NVFP4", "FP8"):  # the first two differ in what tokens are rounded to elsewhere
        raise keys.refused("quant_algo", named, "served: 'NVFP4', 'W4A16_NVFP4', 'FP8'")
    bits, group = (8, None) if named == "FP8" else (4, GROUP)
    size = keys.get("group_size")
    if size not in (None, group):
        raise keys.refused("group_size", size, f"served: {group}")
    for key in ("producer", "kv_cache_quant_algo", "quant_type"):
        keys.get(key)
    wanted, groups = {"type": "float", "num_bits": bits, "group_size": group}, keys.get("config_groups") or {}
    for one in groups.values() if isinstance(groups, dict) else [groups]:
        weights = one.get("weights") if isinstance(one, dict) else None
        if not isinstance(weights, dict) or any(weights.get(key) != value for key, value in wanted.items()):
            words = f"served: weights of type float, num_bits {bits}, group_size {group}"
            raise keys.refused("config_groups", groups, words)
    plain = tuple(_pattern(name) for name in (*keys.names("ignore"), *keys.names("exclude_modules")))
    if named == "FP8":
        return Quantisation("fp8", FP8, None, plain)
    return Quantisation("modelopt-nvfp4", NVFP4, NVFP4, plain, note=NOTE)


def _pattern(name: str) -> str:
    """Return a module's name as `Quantisation.plain` has it, of which `*` is any part."""
    if "*" not in name:
        return name
    return "re:" + re.escape(name).replace(r"\*", ".*") + r"(\.|$)"


FORMAT = WeightFormat(
    {"modelopt": read, "modelopt_fp4": read}, ("modelopt-nvfp4", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    "gpu.formats.nvfp4.tensors", scale_dtype="float16",
)  # fmt: skip
