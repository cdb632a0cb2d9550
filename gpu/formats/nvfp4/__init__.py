"""NVFP4 of NVIDIA's Model Optimizer: FP4 (e2m1), an FP8 scale for each 16 columns, and one number for a module."""

import re
from typing import Any

from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat

GROUP = 16
NVFP4 = MatrixFormat("fp4", GROUP)
NOTE = "fp4 in groups of 16, whose scales are multiplied by their module's and kept in float16"


def read(keys: QuantisationKeys) -> Quantisation:
    named = keys.get("quant_algo")
    if named not in ("NVFP4", "W4A16_NVFP4"):  # which differ in what tokens are rounded to elsewhere
        raise keys.refused("quant_algo", named, "served: 'NVFP4', 'W4A16_NVFP4'")
    size = keys.get("group_size")
    if size not in (None, GROUP):
        raise keys.refused("group_size", size, f"served: {GROUP}")
    for key in ("producer", "kv_cache_quant_algo", "quant_type"):
        keys.get(key)
    groups = keys.get("config_groups") or {}
    for group in groups.values() if isinstance(groups, dict) else [groups]:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or not _is_nvfp4(weights):
            raise keys.refused(
                "config_groups", groups, f"served: weights of type float, num_bits 4, group_size {GROUP}"
            )
    left = (*keys.names("ignore"), *keys.names("exclude_modules"))
    return Quantisation("modelopt-nvfp4", NVFP4, NVFP4, tuple(_pattern(name) for name in left), note=NOTE)


def _is_nvfp4(weights: dict[str, Any]) -> bool:
    wanted = {"type": "float", "num_bits": 4, "group_size": GROUP}
    return all(weights.get(key) == value for key, value in wanted.items())


def _pattern(name: str) -> str:
    """Return a module's name as `Quantisation.plain` has it, of which `*` is any part."""
    if "*" not in name:
        return name
    return "re:" + re.escape(name).replace(r"\*", ".*") + r"(\.|$)"


FORMAT = WeightFormat(
    {"modelopt": read, "modelopt_fp4": read}, ("modelopt-nvfp4", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    "gpu.formats.nvfp4.tensors", scale_dtype="float16",
)  # fmt: skip
