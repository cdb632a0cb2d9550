"""Translate a GGUF file's metadata into the `config.json` of the same model, for its family to read. No torch.

A key of the architecture is translated here, or says what is so anyway, or is passed on by its own name, which the
family refuses as one that it does not know. A value of the wrong type, and a count that the file's tensors contradict,
is refused here by its key.
"""

import re
from typing import Any

import numpy as np

from gpu.model.gguf.file import GgufFile
from gpu.model.gguf.header import shown
from gpu.model.spec import ModelError

# `general.architecture`, and the model type whose layers it has. llama.cpp calls Mistral a Llama.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma3": "gemma3_text",
    "glm4": "glm4",
}
# With experts; of the former, what would have the same name without.
_MIXTURES = {"llama": "mixtral", "qwen3moe": "qwen3_moe"}
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
# Tensors that say how tokens are rotated, read here and by no layer.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_OF_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_OF_EXPERT = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)\.(\d{1,6})\.weight")  # of one, as files had them first
_OF_ALL_EXPERTS = "_exps.weight"
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
# What may be said and is so anyway.
_SO_ANYWAY = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.sliding_window": (0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth",),
    "pooling_type": (0, 1, 2, 3, 4),  # `server.service.vector_settings` reads it
}
_WINDOWED = ("llama", "phi3", "gemma3_text")
_GEMMA3_27B_LAYERS = 62  # by which llama.cpp tells the one whose queries are scaled by hidden / heads


class _Keys:
    """Of one architecture; each is taken once."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.path, self.prefix = file.path, architecture + "."
        self.num_layers = _count_layers(file, self.prefix + "block_count")
        self._left = {
            key.removeprefix(self.prefix): value for key, value in file.metadata.items() if key.startswith(self.prefix)
        }

    def take(self, key: str, absent: Any = None) -> Any:
        value = self._left.pop(key, absent)
        if isinstance(value, float) and abs(value) > float(np.finfo(np.float32).max):
            raise self.refused(key, value, "a number that float32 holds")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-5 as it was meant

    def word(self, key: str, absent: str) -> str:
        """Return a text. Raises ModelError for anything else."""
        value = self.take(key, absent)
        if not isinstance(value, str):
            raise self.refused(key, value, "a text")
        return value

    def size(self, key: str, least: int) -> int | None:
        """Return a count of `least` or more; None: the file does not say. Raises ModelError for anything else."""
        value = self.number(key)
        if value is not None and (not isinstance(value, int) or value < least):
            raise self.refused(key, value, f"a whole number of {least} or more")
        return value

    def number(self, key: str, absent: Any = None) -> Any:
        """Return a number of 0 or more, or `absent`. A list that has the same number for every layer is that number.
        Raises ModelError for anything else.
        """
        value = self.take(key, absent)
        if isinstance(value, list):
            if len(value) != self.num_layers or len(set(value)) != 1:
                raise self.refused(key, value, "a number, or the same one for each layer")
            value = value[0]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise self.refused(key, value, "a number")
        return value

    def left(self) -> dict[str, Any]:
        """By their whole names, but for what is so anyway."""
        return {
            self.prefix + key: value
            for key, value in self._left.items()
            if key not in _SO_ANYWAY or value not in _SO_ANYWAY[key]
        }

    def refused(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"model: {self.path}: {self.prefix}{key} is {shown(value)}; wanted {wanted}")


def _count_layers(file: GgufFile, key: str) -> int:
    """Return the layers that the file has tensors of, which must be as many as its metadata says. Raises ModelError.

    It comes first: a file that claims a billion layers is refused before anything is made for each.
    """
    numbers = {int(found[1]) for name in file.tensors if (found := _OF_LAYER.match(name))}
    stated, num_layers = file.metadata.get(key), max(numbers, default=-1) + 1
    if stated is not None and (isinstance(stated, bool) or stated != num_layers):
        raise ModelError(f"model: {file.path}: {key} is {shown(stated)}; the file has tensors of {num_layers} layers")
    return num_layers


def as_config(file: GgufFile) -> dict[str, Any]:
    """As `gpu.model.family.parse_config` takes it. Raises ModelError for what no served model has."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        served = ", ".join(map(repr, MODEL_TYPES))
        raise ModelError(f"model: {file.path}: general.architecture is {shown(name)}; served: {served}")
    if EMBEDDING not in file.tensors:
        raise ModelError(f"model: {file.path}: tensor {EMBEDDING} is missing; wanted a whole language model")
    if len(file.tensors[EMBEDDING].shape) != 2:
        raise ModelError(
            f"model: {file.path}: tensor {EMBEDDING} is {list(file.tensors[EMBEDDING].shape)}; wanted rows and columns"
        )
    keys = _Keys(file, name)
    config: dict[str, Any] = {ours: keys.size(theirs, 1) for theirs, ours in _SIZES.items()}
    config |= {"model_type": MODEL_TYPES[name]} | _experts(file, keys, name)
    config |= {
        "vocab_size": _vocab_size(file, keys),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": OUTPUT not in file.tensors,
    }
    config = {key: value for key, value in config.items() if value is not None}
    config |= _heads(keys, config)
    config |= _rope(file, keys, config)
    config |= _windows(keys, config)
    if MODEL_TYPES[name] == "gemma3_text":
        config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
        is_large = config.get("num_hidden_layers") == _GEMMA3_27B_LAYERS
        scalar = config["hidden_size"] // config["num_attention_heads"] if is_large else config["head_dim"]
        config["query_pre_attn_scalar"] = scalar
    if config["model_type"] in ("glm4", "llama"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if config["model_type"] == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    return config | keys.left()


def _count_experts(file: GgufFile) -> int:
    """Return the experts that a layer has tensors of."""
    stacked = [tensor.shape[0] for name, tensor in file.tensors.items() if name.endswith(_OF_ALL_EXPERTS)]
    single = [int(found[1]) + 1 for name in file.tensors if (found := _OF_EXPERT.fullmatch(name))]
    return max(stacked + single, default=0)


def _experts(file: GgufFile, keys: _Keys, name: str) -> dict[str, Any]:
    """Of a mixture, with its model type; llama.cpp makes the weights of Qwen3's that are taken sum to 1. As with
    layers, more experts than the file has tensors of are refused before anything is made for each.
    """
    count = keys.size("expert_count", 0) or 0
    if bool(count) != (name in _MIXTURES) and name != "llama":
        wanted = "a positive number" if name in _MIXTURES else "0: of its mixtures of experts none is served"
        raise keys.refused("expert_count", count, wanted)
    if not count:
        return {}
    if count != _count_experts(file):
        raise keys.refused("expert_count", count, f"{_count_experts(file)}, of which the file has tensors")
    found = {"model_type": _MIXTURES[name], "num_experts_per_tok": _positive(keys, "expert_used_count")}
    if name == "llama":
        return found | {"num_local_experts": count}
    size = _positive(keys, "expert_feed_forward_length")
    return found | {"num_experts": count, "moe_intermediate_size": size, "norm_topk_prob": True}


def _positive(keys: _Keys, key: str) -> int:
    value = keys.size(key, 1)
    if value is None:
        raise keys.refused(key, value, "a whole number of 1 or more")
    return value


def _vocab_size(file: GgufFile, keys: _Keys) -> int:
    """Rows of the embedding, of which there is one a token."""
    rows = file.tensors[EMBEDDING].shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, list):
        raise ModelError(f"model: {file.path}: tokenizer.ggml.tokens is {shown(tokens)}; wanted a list of texts")
    stated = keys.size("vocab_size", 1) or rows
    for what, count in ((f"{keys.prefix}vocab_size", stated), ("tokenizer.ggml.tokens", len(tokens or ()) or rows)):
        if count != rows:
            raise ModelError(f"model: {file.path}: {what} says {count} tokens, and {EMBEDDING} has {rows} rows")
    return rows


def _heads(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = config.get("hidden_size") or 0, config.get("num_attention_heads") or 1
    dim = keys.size("attention.key_length", 1) or hidden // heads
    if not dim:
        raise keys.refused("attention.head_count", heads, f"at most as many as the hidden size, {hidden}")
    value_dim = keys.size("attention.value_length", 1) or dim
    if value_dim != dim:
        raise keys.refused("attention.value_length", value_dim, f"as many as keys have, {dim}")
    rotated = keys.number("rope.dimension_count", dim)
    return {"head_dim": dim} | ({"partial_rotary_factor": rotated / dim} if rotated not in (0, dim) else {})


def _windows(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """`sliding_window_pattern` is a number, or says of each layer whether it has a window. A window of a model that has
    none here is left, to be refused.
    """
    if config["model_type"] not in _WINDOWED:
        return {}
    window, pattern = keys.number("attention.sliding_window", 0), keys.take("attention.sliding_window_pattern")
    found: dict[str, Any] = {"sliding_window": window or None}
    if config["model_type"] == "llama" and window:
        found["model_type"] = "mistral"
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if is_window else "full_attention" for is_window in pattern]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern
    return {key: value for key, value in found.items() if value is not None or config["model_type"] == "phi3"}


def _rope(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Scaling by its name, or by the factors that a file has for every frequency. As in llama.cpp, a factor without a
    name is linear, and may stand under an older key.
    """
    kind = keys.word("rope.scaling.type", "linear")
    factor, older = keys.number("rope.scaling.factor"), keys.number("rope.scale_linear")
    factor = older if factor is None else factor
    is_scaled = factor not in (None, 0, 1)
    kind = "none" if kind == "linear" and not is_scaled else kind
    original = keys.number("rope.scaling.original_context_length")
    attention = keys.number("rope.scaling.attn_factor")
    known = {name: file.tensors[name].read_numbers() for name in ROPE_TENSORS if name in file.tensors}
    if known:
        of_all, of_long, of_short = (known.get(name) for name in ROPE_TENSORS)
        if kind not in ("none", "longrope") or (of_all is None) != (of_long is not None and of_short is not None):
            raise ModelError(
                f"model: {file.path}: {keys.prefix}rope.scaling.type is {kind!r} beside {' and '.join(known)}; wanted "
                f"none, and {ROPE_TENSORS[0]} or the two others"
            )
        if kind == "longrope" and is_scaled:
            raise keys.refused("rope.scaling.factor", factor, f"1 beside {' and '.join(known)}")
        original = original if of_all is None else config.get("max_position_embeddings")
        scaling = {
            "rope_type": "longrope", "long_factor": of_all or of_long, "short_factor": of_all or of_short,
            "attention_factor": attention or 1.0, "original_max_position_embeddings": original,
        }  # fmt: skip
        return {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}
    if attention not in (None, 1.0):
        raise keys.refused("rope.scaling.attn_factor", attention, f"1.0 beside {kind!r}")
    if kind == "none":
        return {}
    betas = {key: keys.number(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original} | betas
    return {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}
