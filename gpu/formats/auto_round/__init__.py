"""AutoRound: integers that it rounded, packed as GPTQ's or AWQ's; modules of its own settings are plain or refused."""

from gpu.model.matrix_format import Kind, MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_PLAIN_BITS = 16  # from which on a module is not quantised


def read(keys: QuantisationKeys) -> Quantisation:
    packing = keys.only("packing_format", _GPTQ, _AWQ, "auto_round:gptq", "auto_round:awq")
    is_awq = packing.endswith("awq")
    bits = keys.only("bits", *((4,) if is_awq else (4, 8)))
    keys.only("sym", True, False)
    keys.only("data_type", "int")
    keys.only("act_bits", 16, 32)
    keys.only("desc_act", False)
    keys.only("quant_lm_head", False)
    for key in ("block_name_to_quantize", "act_data_type", "act_sym", "super_bits", "super_group_size"):
        keys.get(key)  # which modules lie in layers, and of tokens, which stay bf16 here
    kind: Kind = "int4" if bits == 4 else "int8"
    stored = MatrixFormat(kind, keys.group("group_size"), has_zeros=True)
    return Quantisation("awq" if is_awq else "gptq", stored, None, _left_alone(keys))


def _left_alone(keys: QuantisationKeys) -> tuple[str, ...]:
    """Return the modules that are plain, by names or expressions. Raises ModelError for other settings of a module."""
    found, own = [], keys.get("extra_config") or {}
    if not isinstance(own, dict):
        raise keys.refused("extra_config", own, "wanted a mapping of modules' names")
    for name, settings in own.items():
        bits = settings.get("bits") if isinstance(settings, dict) else None
        if not isinstance(bits, int) or bits < _PLAIN_BITS:
            raise keys.refused(
                "extra_config", {name: settings}, f"served of a module's own: {_PLAIN_BITS} bits or more"
            )
        found.append(f"re:{name}$" if any(sign in name for sign in "*[(\\") else name)
    return tuple(found)


FORMAT = WeightFormat({"auto-round": read, "intel/auto-round": read}, (), "gpu.formats.gptq.tensors")
