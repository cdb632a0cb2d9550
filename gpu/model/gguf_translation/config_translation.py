"""Translate a GGUF file's metadata into the `config.json` of the same model, for its family to read.

A key is translated here or by its family (`GgufForm`), or passed on by its own name, which the family refuses. A value
of the wrong type, and a count that the file's tensors contradict, is refused by its key.
"""

import math
from typing import Any

from gpu.model.family import Family, family_folders
from gpu.model.gguf.file import GgufFile
from gpu.model.gguf.header import shown
from gpu.model.gguf.keys import GgufKeys
from gpu.model.spec import ModelError

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
# Tensors that say how tokens are rotated, read here and by no layer.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}


def families_of(file: GgufFile) -> list[Family]:
    """Return the families whose files have this file's `general.architecture`."""
    name = file.metadata.get("general.architecture")
    found = family_folders().values()
    return [family for family in found if family.gguf is not None and name in family.gguf.architectures]


def as_config(file: GgufFile) -> dict[str, Any]:
    """Return a configuration as `gpu.model.family.parse_config` takes it. Raises ModelError for a model not served."""
    name, known = file.metadata.get("general.architecture"), families_of(file)
    if not isinstance(name, str) or not known:
        forms = [family.gguf for family in family_folders().values() if family.gguf is not None]
        served = ", ".join(map(repr, sorted({one for form in forms for one in form.architectures})))
        raise ModelError(f"model: {file.path}: general.architecture is {shown(name)}; served: {served}")
    if EMBEDDING not in file.tensors:
        raise ModelError(f"model: {file.path}: tensor {EMBEDDING} is missing; wanted a whole language model")
    if len(file.tensors[EMBEDDING].shape) != 2:
        raise ModelError(
            f"model: {file.path}: tensor {EMBEDDING} is {list(file.tensors[EMBEDDING].shape)}; wanted rows and columns"
        )
    keys = GgufKeys(file, name)
    family = _claimant(known, keys)
    form = family.gguf
    assert form is not None, "it was found by its form"
    config: dict[str, Any] = {
        ours: keys.size(theirs, 1) for theirs, ours in _SIZES.items() if theirs not in form.listed
    }
    config |= {"model_type": family.name} | _experts(keys, form.has_experts)
    config |= {
        "vocab_size": _vocab_size(file, keys),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": OUTPUT not in file.tensors,
    }
    config = {key: value for key, value in config.items() if value is not None}
    if "attention.key_length" not in form.listed:
        config |= _heads(keys, config)
    config |= _rope(file, keys, config)
    if form.has_windows:
        config |= _windows(keys)
    config |= form.translate(keys, config)
    return config | keys.left()


def _claimant(known: list[Family], keys: GgufKeys) -> Family:
    """Return the family that claims the file, or else the one that claims none."""
    others = [family for family in known if family.gguf is not None and family.gguf.claims is None]
    claimants = [one for one in known if one.gguf is not None and one.gguf.claims is not None and one.gguf.claims(keys)]
    return [*claimants, *others][0]


def _experts(keys: GgufKeys, has_experts: bool | None) -> dict[str, Any]:
    """Read the keys that mixtures of experts have alike.

    As with layers, more experts than the file has tensors of are refused before anything is made for each.
    """
    count = keys.size("expert_count", 0) or 0
    if has_experts is not None and bool(count) != has_experts:
        wanted = "a positive number" if has_experts else "0: of its mixtures of experts none is served"
        raise keys.refused("expert_count", count, wanted)
    if not count:
        return {}
    if count != keys.count_experts():
        raise keys.refused("expert_count", count, f"{keys.count_experts()}, of which the file has tensors")
    return {"num_experts": count, "num_experts_per_tok": keys.positive("expert_used_count")}


def _vocab_size(file: GgufFile, keys: GgufKeys) -> int:
    """Return the rows of the embedding, one a token, which all lists of tokens must have. Raises ModelError."""
    rows = file.tensors[EMBEDDING].shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, list):
        raise ModelError(f"model: {file.path}: tokenizer.ggml.tokens is {shown(tokens)}; wanted a list of texts")
    stated = keys.size("vocab_size", 1) or rows
    for what, count in ((f"{keys.prefix}vocab_size", stated), ("tokenizer.ggml.tokens", len(tokens or ()) or rows)):
        if count != rows:
            raise ModelError(f"model: {file.path}: {what} says {count} tokens, and {EMBEDDING} has {rows} rows")
    return rows


def _heads(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = config.get("hidden_size") or 0, config.get("num_attention_heads") or 1
    dim = keys.size("attention.key_length", 1) or hidden // heads
    if not dim:
        raise keys.refused("attention.head_count", heads, f"at most as many as the hidden size, {hidden}")
    value_dim = keys.size("attention.value_length", 1) or dim
    if value_dim != dim:
        raise keys.refused("attention.value_length", value_dim, f"as many as keys have, {dim}")
    rotated = keys.number("rope.dimension_count", dim)
    return {"head_dim": dim} | ({"partial_rotary_factor": rotated / dim} if rotated not in (0, dim) else {})


def _windows(keys: GgufKeys) -> dict[str, Any]:
    """Read windows: `sliding_window_pattern` is a number, or says of each layer whether it has one."""
    window, pattern = keys.number("attention.sliding_window", 0), keys.take("attention.sliding_window_pattern")
    found: dict[str, Any] = {"sliding_window": window} if window else {}
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if is_window else "full_attention" for is_window in pattern]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern
    return found


def _rope(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Read scaling by its name, or by the factors that a file has for every frequency.

    As in llama.cpp, a factor without a name is linear, and may stand under an older key.
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
    _check_attention_factor(keys, kind, factor, attention)
    if kind == "none":
        return {}
    betas = {key: keys.number(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original} | betas
    return {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


def _check_attention_factor(keys: GgufKeys, kind: str, factor: Any, attention: Any) -> None:
    """Check that a factor of attention is none, or the one that YaRN has by itself, which converters copy from a
    `config.json`. Raises ModelError.
    """
    own = 0.1 * math.log(factor) + 1.0 if kind == "yarn" and factor and factor > 1 else 1.0
    copied = keys.number("rope.scaling.yarn_attn_factor") if kind == "yarn" else None
    for key, found in (("attn_factor", attention), ("yarn_attn_factor", copied)):
        if found not in (None, 1.0) and abs(found - own) > 1e-4:
            raise keys.refused(f"rope.scaling.{key}", found, f"1.0 beside {kind!r}" + (f", or {own:g}" * (own != 1)))
