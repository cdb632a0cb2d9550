"""Define a model family: a folder of `gpu.model.families` that makes an Architecture from its files. No list names
the families.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any

import gpu.model.families
from gpu.model.answers.formats import CallFormat, ReasoningFormat
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope, rotary_share, with_rope
from gpu.model.gguf.header import shown
from gpu.model.gguf.keys import GgufForm
from gpu.model.library_keys import read_library_keys
from gpu.model.quantisation import parse_quantisation, without_quantisation
from gpu.model.spec import Architecture, LayerSpec, ModelError

# A layer's tensors, without `model.layers.N.`, and what of `weights.LayerWeights` each of them is. A weight that is
# called `*_norm` is before its block, attention or MLP; `*_post_norm` is behind it. Names in files vary: here a
# `post_attention_layernorm` is the norm before the MLP, in other families the one behind attention.
LAYER_TENSORS = {
    "input_layernorm.weight": "attention_norm",
    "self_attn.q_proj.weight": "query",
    "self_attn.k_proj.weight": "key",
    "self_attn.v_proj.weight": "value",
    "self_attn.o_proj.weight": "output",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
QKV_BIASES = {
    "self_attn.q_proj.bias": "query_bias",
    "self_attn.k_proj.bias": "key_bias",
    "self_attn.v_proj.bias": "value_bias",
}
OUTPUT_BIAS = {"self_attn.o_proj.bias": "output_bias"}
MLP_BIASES = {"mlp.gate_proj.bias": "gate_bias", "mlp.up_proj.bias": "up_bias", "mlp.down_proj.bias": "down_bias"}
# As LAYER_TENSORS, of a layer with experts, each of which has a gate, an up and a down of its own.
EACH = "*"
ONE_NORM = "norm"  # what a table calls the one norm of a layer that is a mixer or an MLP alone (`LayerSpec.part`)
EXPERT_TENSORS = {
    "mlp.gate.weight": "router",
    "mlp.experts.*.gate_proj.weight": "gate",
    "mlp.experts.*.up_proj.weight": "up",
    "mlp.experts.*.down_proj.weight": "down",
}
SINKS = {"self_attn.sinks": "sinks"}
QK_NORMS = {"self_attn.q_norm.weight": "query_norm", "self_attn.k_norm.weight": "key_norm"}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class StackLayout:
    """The layout of a tensor with all experts of a layer, `[experts, rows, inner]`. is_transposed: each expert is
    transposed. is_interleaved: rows of gate and up alternate.
    """

    is_transposed: bool = False
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, in terms of its files.

    model_types: values of `model_type` in `config.json`; the first one names the family.
    parse: makes an Architecture from the keys.
    tensors: maps a layer's tensors to weights, as LAYER_TENSORS does.
    defaults: values of absent keys.
    harmless: keys that change nothing.
    unwrap: returns the decoder's part of a configuration.
    prefixes: prefixes of tensors' names that are removed.
    skipped: prefixes of tensors that the decoder does not need.
    stacks: the layout of tensors with all experts of a layer, which `tensors` calls `experts_gate_up` and
        `experts_down`, and of their biases.
    gguf: the form of GGUF files; None: there are none.
    shapes: configurations by name, for random weights.
    has_further_layers: whether a checkpoint may have layers behind the last one, which draft tokens and are not read.
    texts: model types of `text_config` for which another family reads the whole configuration.
    calls, reasoning: formats in which its models write tool calls and reasoning.
    """

    model_types: tuple[str, ...]
    parse: Callable[[ConfigKeys, str], Architecture]
    tensors: Callable[[Architecture], Mapping[str, str]]
    defaults: Mapping[str, Any]
    harmless: frozenset[str] = frozenset()
    unwrap: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda config: config)
    prefixes: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    stacks: StackLayout = StackLayout()
    gguf: GgufForm | None = None
    shapes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    has_further_layers: bool = False
    texts: frozenset[str] = frozenset()
    calls: tuple[CallFormat, ...] = ()
    reasoning: tuple[ReasoningFormat, ...] = ()

    @property
    def name(self) -> str:
        return self.model_types[0]

    def canonical(self, name: str) -> str | None:
        """Return the canonical name, `model. ...`, of a checkpoint's tensor; None: it is skipped."""
        if name.startswith(self.skipped):
            return None
        for prefix, instead in self.prefixes:
            if name.startswith(prefix):
                return instead + name.removeprefix(prefix)
        return name


@cache
def family_folders() -> dict[str, Family]:
    """Return the families by the names of their folders."""
    modules = sorted(module.name for module in pkgutil.iter_modules(gpu.model.families.__path__))
    return {name: import_module(f"gpu.model.families.{name}").FAMILY for name in modules}


def families() -> dict[str, Family]:
    """Return the families by every model type that they serve."""
    return {model_type: family for family in family_folders().values() for model_type in family.model_types}


def find_family(model_type: object, source: str) -> Family:
    """Return the family of a model type. Raises ModelError, which lists the served types, for an unknown type."""
    known = families()
    if not isinstance(model_type, str) or model_type not in known:
        raise ModelError(f"model: {source}: model_type is {model_type!r}; served: {', '.join(map(repr, known))}")
    return known[model_type]


def parse_config(
    config: dict[str, Any], name: str, source: str, ignored_keys: Sequence[str],
    rope: Mapping[str, Any] | None = None, has_other_code: bool = False,
) -> Architecture:  # fmt: skip
    """Return the Architecture of a configuration, which errors call `source`.

    rope: `model.rope`, in place of the configuration's scaling. ignored_keys: keys that mean nothing here.
        has_other_code: whether code other than transformers' reads the keys; so it is too where `auto_map` names code
        in the folder. Raises ModelError for what is not served.
    """
    family, model_type, text = (
        find_family(config.get("model_type"), source),
        config["model_type"],
        config.get("text_config"),
    )
    if isinstance(text, Mapping) and text.get("model_type") in family.texts:
        model_type = text["model_type"]
        family = find_family(model_type, source)
    quantisation = parse_quantisation(config, source)
    named = None if "auto_map" in config or has_other_code else read_library_keys()["named"].get(model_type)
    config = without_quantisation(family.unwrap(config))
    keys = ConfigKeys(config if rope is None else with_rope(config, rope), family.defaults, source)
    shape = family.parse(keys, name)
    keys.refuse_unread(named, family.harmless, ignored_keys)
    return replace(shape, family=family.name, quantisation=quantisation)


def parse_sizes(
    keys: ConfigKeys, name: str, layer_pattern: Sequence[LayerSpec], rotates_part: bool = False, **more: Any
) -> Architecture:
    """Return an Architecture of the keys that all families have.

    rotates_part: whether `partial_rotary_factor` means something; `more`: further fields, in place of these. Raises
    ModelError for sizes that do not fit.
    """
    hidden, intermediate, num_layers, heads, vocab = (keys.positive(key, int) for key in SIZES)
    kv_heads = keys.optional("num_key_value_heads", int) or heads
    if heads % kv_heads:
        raise ModelError(f"model: {keys.source}: {heads} query heads over {kv_heads} KV heads; wanted a multiple")
    dim = keys.optional("head_dim", int) or hidden // heads
    if dim < 2 or dim % 2:
        raise ModelError(f"model: {keys.source}: head_dim is {dim}; wanted an even number")
    rope, max_positions = parse_rope(keys) if "rope" not in more else (more["rope"], more["max_context_tokens"])
    share = rotary_share(keys)
    if share != 1 and not rotates_part:
        raise ModelError(f"model: {keys.source}: partial_rotary_factor is {share}; served: 1.0")
    rotary = int(dim * share)
    if share != 1 and (rotary < 2 or rotary % 2):
        raise ModelError(
            f"model: {keys.source}: partial_rotary_factor is {share}, {rotary} of a head's {dim}; wanted an even number"
        )
    bos = keys.token_ids("bos_token_id")
    fields: dict[str, Any] = {
        "name": name,
        "hidden": hidden,
        "intermediate": intermediate,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "dim": dim,
        "vocab_size": vocab,
        "max_context_tokens": max_positions,
        "rms_norm_eps": float(keys.positive("rms_norm_eps", float)),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
        "rope": rope,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": keys.token_ids("eos_token_id"),
        "layer_pattern": _period(tuple(layer_pattern)),
        "rotary_dim": None if share == 1 else rotary,
    }
    return Architecture(**(fields | more))


def _period(specs: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the shortest pattern of specs whose repetition gives all of these."""
    lengths = range(1, len(specs) + 1)
    return specs[: next(length for length in lengths if specs[length:] == specs[: len(specs) - length])]


def find_windows(
    keys: ConfigKeys, window: int | None, is_window_layer: Sequence[bool], max_positions: int
) -> list[int | None]:
    """Return each layer's window, or None, from `layer_types`, or from `is_window_layer` if that key is absent.

    A window with as many tokens as there are positions, after their scaling, counts as none.
    """
    types = keys.get("layer_types")
    if types is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != len(is_window_layer) or any(t not in known for t in types):
            wanted = f"{len(is_window_layer)} of {', '.join(map(repr, known))}"
            raise ModelError(f"model: {keys.source}: layer_types is {shown(types)}; wanted {wanted}")
        is_window_layer = [one == known[0] for one in types]
    if window is None or window >= max_positions:
        return [None] * len(is_window_layer)
    return [window if is_window else None for is_window in is_window_layer]
