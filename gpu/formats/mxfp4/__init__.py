"""MXFP4 as gpt-oss has it: experts in FP4 (e2m1), with a power of two for each 32 columns; all else is plain."""

import re

from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat

GROUP = 32
_NEVER = ("self_attn", "lm_head")  # whatever a configuration says


def read(keys: QuantisationKeys) -> Quantisation:
    left = (_pattern(name) for name in keys.names("modules_to_not_convert"))
    return Quantisation("mxfp4", MatrixFormat("fp4", GROUP, scale_bytes=1), None, (*_NEVER, *left))


def _pattern(name: str) -> str:
    """Return a module's name as `Quantisation.plain` has it, of which `*` is any part between dots."""
    if "*" not in name:
        return name
    return "re:" + re.escape(name).replace(r"\*", "[^.]*") + r"(\.|$)"


FORMAT = WeightFormat({"mxfp4": read}, ("mxfp4",), "gpu.formats.mxfp4.tensors")
