"""Read `quantization_config` of a `config.json`: which matrices have few bits, and how files store them.

Only weights are read. Roundings of activations are left out, since products here are in bf16. What a configuration says
is understood or refused by name.
"""

from collections.abc import Mapping
from typing import Any

from gpu.model.matrix_format import Quantisation
from gpu.model.spec import ModelError
from gpu.model.weight_format import QuantisationKeys, weight_formats

_KEYS = ("quantization_config", "compression_config")
_MLX_KEY = "quantization"  # beside which MLX writes its quantization_config, which names no method
_INSTEAD = "fetch the plain checkpoint and set model.weights to int4, int8 or fp8, or take an AWQ, GPTQ or GGUF file"


def parse_quantisation(config: Mapping[str, Any], source: str) -> Quantisation | None:
    """Return which matrices of a `config.json` have few bits, or None; `source` names it. Raises ModelError."""
    if isinstance(config.get(_MLX_KEY), dict):
        raise ModelError(f"model: {source}: {_MLX_KEY}: an MLX checkpoint, which is not served; {_INSTEAD}")
    found = [(key, config[key]) for key in _KEYS if config.get(key) is not None]
    if not found:
        text = config.get("text_config")
        return parse_quantisation(text, source) if isinstance(text, dict) else None
    key, value = found[0]
    if not isinstance(value, dict):
        raise ModelError(f"model: {source}: {key} is {value!r}; wanted a mapping")
    methods = {name: read for one in weight_formats().values() for name, read in one.methods.items()}
    keys = QuantisationKeys(value, f"{source}: {key}")
    method = value.get("quant_method") or ("compressed-tensors" if "config_groups" in value else None)
    if method == "bitsandbytes" or (method is None and ("load_in_4bit" in value or "load_in_8bit" in value)):
        raise ModelError(f"model: {source}: {key}: a bitsandbytes checkpoint, which is not served; {_INSTEAD}")
    if not isinstance(method, str) or method not in methods:
        raise keys.refused("quant_method", method, f"served: {', '.join(map(repr, methods))}")
    keys.get("quant_method")
    quantisation = methods[method](keys)
    keys.refuse_unread()
    return quantisation


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the part that is read here."""
    return {key: value for key, value in config.items() if key not in _KEYS}
