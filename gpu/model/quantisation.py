"""`quantization_config` of a `config.json`: which matrices have few bits, and how files have them. No torch.

Only weights are read: that a file's makers meant tokens to be rounded,
too, changes nothing here, where products are of bf16. Invariant: what a configuration says is understood or refused by
name, since a number that is unpacked in another order is a number still.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gpu.model.matrix_format import Kind, MatrixFormat, Quantisation
from gpu.model.spec import ModelError

_KEYS = ("quantization_config", "compression_config")
_MLX_KEY = "quantization"  # beside which MLX writes its quantization_config, which names no method
_INSTEAD = "fetch the plain checkpoint and set model.weights to int4, int8 or fp8, or take an AWQ, GPTQ or GGUF file"
# How others run a checkpoint, and how it was made.
_HARMLESS = frozenset(
    (
        "_pre_quantization_dtype", "act_dynamic", "act_group_size", "activation_scale_ub", "activation_scheme", "amp",
        "autoround_version", "backend", "batch_size", "damp_auto_increment", "damp_percent", "data_type", "dataset",
        "dequantize","disable_exllama", "do_fuse", "enable_minmax_tuning", "enable_quanted_input", "exllama_config",
        "fuse_max_seq_len", "global_compression_ratio", "gradient_accumulate_steps","iters",
        "kv_cache_scheme", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr", "model_file_base_name",
        "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
        "modules_to_fuse", "nsamples", "offload", "quantization_status", "quantizer", "rotation_config", "scale_dtype",
        "seqlen", "static_groups", "to_quant_block_names", "tokenizer",
        "true_sequential", "use_cuda_fp16", "use_exllama", "use_ipex", "version",
    )
)  # fmt: skip


class _Keys:
    """Of one configuration; every one is read, harmless, empty, or refused."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        self.read.add(key)
        return self.config.get(key)

    def only(self, key: str, *served: Any) -> Any:
        """Its value, one of these; absent and null are the first."""
        value = self.get(key)
        value = served[0] if value is None else value
        if value not in served or isinstance(value, bool) != isinstance(served[served.index(value)], bool):
            raise self.refused(key, value, f"served: {', '.join(map(repr, served))}")
        return value

    def group(self, key: str) -> int | None:
        """Columns to a scale; -1, and null where there is none: a row's all."""
        value = self.get(key)
        if value in (None, -1):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 8 or value % 8:
            raise self.refused(key, value, "served: -1 and multiples of 8")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key) or []
        if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
            raise self.refused(key, value, "wanted a list of modules' names")
        return tuple(value)

    def empty(self, key: str) -> None:
        value = self.get(key)
        if value not in (None, {}, [], False):
            raise self.refused(key, value, "served: none")

    def part(self, key: str) -> "_Keys":
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.refused(key, value, "wanted a mapping")
        return _Keys(value, f"{self.where}.{key}")

    def refused(self, key: str, value: Any, words: str) -> ModelError:
        return ModelError(f"model: {self.where}.{key} is {value!r}; {words}")

    def refuse_unread(self) -> None:
        for key, value in self.config.items():
            if key not in self.read and key not in _HARMLESS and value is not None:
                raise ModelError(f"model: {self.where}.{key} is {value!r}, and nothing here knows what that means")


def parse_quantisation(config: Mapping[str, Any], source: str) -> Quantisation | None:
    """Of a whole `config.json`, which `source` names in errors; None where it has no such part. Raises ModelError."""
    if isinstance(config.get(_MLX_KEY), dict):
        raise ModelError(f"model: {source}: {_MLX_KEY}: an MLX checkpoint, which is not served; {_INSTEAD}")
    found = [(key, config[key]) for key in _KEYS if config.get(key) is not None]
    if not found:
        text = config.get("text_config")
        return parse_quantisation(text, source) if isinstance(text, dict) else None
    key, value = found[0]
    if not isinstance(value, dict):
        raise ModelError(f"model: {source}: {key} is {value!r}; wanted a mapping")
    keys = _Keys(value, f"{source}: {key}")
    method = value.get("quant_method") or ("compressed-tensors" if "config_groups" in value else None)
    if method == "bitsandbytes" or (method is None and ("load_in_4bit" in value or "load_in_8bit" in value)):
        raise ModelError(f"model: {source}: {key}: a bitsandbytes checkpoint, which is not served; {_INSTEAD}")
    if not isinstance(method, str) or method not in _METHODS:
        raise keys.refused("quant_method", method, f"served: {', '.join(map(repr, _METHODS))}")
    keys.get("quant_method")
    quantisation = _METHODS[method](keys)
    keys.refuse_unread()
    return quantisation


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the part that is read here."""
    return {key: value for key, value in config.items() if key not in _KEYS}


def _awq(keys: _Keys) -> Quantisation:
    keys.only("version", "gemm", "GEMM")
    keys.only("zero_point", True)
    keys.only("bits", 4)
    group = keys.group("group_size")
    keys.only("backend", "autoawq")
    return Quantisation("awq", MatrixFormat("int4", group, has_zeros=True), None, keys.names("modules_to_not_convert"))


def _gptq(keys: _Keys) -> Quantisation:
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


def _fp8(keys: _Keys) -> Quantisation:
    keys.only("fmt", "e4m3", "float8_e4m3fn")
    keys.only("scale_fmt", None, "float", "float32", "ue8m0")
    left = (*keys.names("modules_to_not_convert"), *keys.names("ignored_layers"))
    block = keys.get("weight_block_size")
    if block is None:
        return Quantisation("fp8", MatrixFormat("fp8", None, scale_bytes=4), None, left)
    rows, columns = _block(keys, "weight_block_size", block)
    return Quantisation("fp8 blocks", MatrixFormat("fp8", columns, scale_bytes=4, row_block=rows), None, left)


def _fbgemm_fp8(keys: _Keys) -> Quantisation:
    left = keys.names("modules_to_not_convert")
    return Quantisation("fp8 rows", MatrixFormat("fp8", None, scale_bytes=4), None, left)


def _block(keys: _Keys, key: str, block: Any) -> tuple[int, int]:
    is_pair = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if not is_pair or any(n & (n - 1) for n in block) or block[1] < 8:
        raise keys.refused(key, block, "wanted two powers of two, as [128, 128]")
    return block[0], block[1]


def _compressed_tensors(keys: _Keys) -> Quantisation:
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
    stored = _weights(weights)
    for part in (weights, group):
        part.refuse_unread()
    served = {"int4": ("pack-quantized",), "int8": ("pack-quantized", "int-quantized", "naive-quantized"),
              "fp8": ("float-quantized", "naive-quantized")}[stored.kind]  # fmt: skip
    if packing not in served:
        raise keys.refused("format", packing, f"served of these weights: {', '.join(map(repr, served))}")
    scheme = "pack-quantized" if packing == "pack-quantized" else "compressed"
    return Quantisation(scheme, stored, stored, keys.names("ignore"))


def _weights(keys: _Keys) -> MatrixFormat:
    kind = keys.only("type", "int", "float")
    bits = keys.only("num_bits", *((8, 4) if kind == "int" else (8,)))
    strategy = keys.only("strategy", "tensor", "channel", "group", "block")
    is_symmetric = keys.only("symmetric", True, False)
    keys.only("dynamic", False)
    has_order = keys.only("actorder", False, "weight", "static", "group", True) in ("group", True)
    for key in ("observer", "observer_kwargs", "zp_dtype"):
        keys.get(key)
    group, block = keys.group("group_size"), keys.get("block_structure")
    if kind == "float":
        if strategy == "block":
            rows, columns = _block(keys, "block_structure", block)
            return MatrixFormat("fp8", columns, scale_bytes=4, row_block=rows)
        if strategy == "group":
            raise keys.refused("strategy", strategy, "served of FP8: tensor, channel, block")
        return MatrixFormat("fp8", None, scale_bytes=4)
    if strategy == "block" or (strategy == "group") != (group is not None):
        raise keys.refused("strategy", strategy, f"served of integers: tensor, channel, group; group_size is {group}")
    named: Kind = "int4" if bits == 4 else "int8"
    return MatrixFormat(named, group, has_zeros=not is_symmetric, has_order=has_order)


_METHODS: dict[str, Callable[[_Keys], Quantisation]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
}
