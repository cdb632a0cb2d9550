"""The shape of a Llama-family model, from the `config.json` of its Hugging Face folder or from a name. No torch.

Refuses what the decoder does not compute (other families, attention or MLP biases, other activations), by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROPE_TYPES = ("default", "llama3", "linear", "dynamic", "yarn")


class ModelError(Exception):
    """A model folder or shape that cannot be served; the message names file, key, value and what was wanted."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE frequencies: `kind` is one of ROPE_TYPES, `settings` the remaining keys of the config as they are."""

    kind: str
    theta: float
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dim: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    tied_embeddings: bool
    rope: RopeScaling
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_layer_weights(self) -> int:
        attention = self.hidden * self.dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def num_embedding_weights(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def num_weights(self) -> int:
        embeddings = self.num_embedding_weights * (1 if self.tied_embeddings else 2)
        return self.num_layers * self.num_layer_weights + embeddings + self.hidden

    @property
    def num_weights_read_per_token(self) -> int:
        """All layers, the final norm and the output projection; of the input embedding a step reads one row a token."""
        return self.num_layers * self.num_layer_weights + self.num_embedding_weights + self.hidden

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.dim * dtype_bytes


def read_architecture(folder: Path) -> Architecture:
    """Read `folder/config.json`.

    Raises ModelError for a missing or broken file, a missing key, or a model that the decoder does not compute.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"model: {path} is missing; give a Hugging Face folder with config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"model: {path} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"model: {path} holds {type(config).__name__}; wanted a JSON object")
    return parse_architecture(config, folder.resolve().name, str(path))


def parse_architecture(config: dict[str, Any], name: str, source: str) -> Architecture:
    """An Architecture from the keys of a Hugging Face config; `source` names it in errors."""

    def get(key: str, kind: type) -> Any:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            raise ModelError(f"model: {source}: {key} is {value!r}; wanted a positive {kind.__name__}")
        return value

    if config.get("model_type") != "llama":
        raise ModelError(f"model: {source}: model_type is {config.get('model_type')!r}; served: 'llama'")
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, wanted) != wanted:
            raise ModelError(f"model: {source}: {key} is {config[key]!r}; served: {wanted!r}")
    heads = get("num_attention_heads", int)
    kv_heads = get("num_key_value_heads", int) if config.get("num_key_value_heads") is not None else heads
    hidden = get("hidden_size", int)
    if heads % kv_heads:
        raise ModelError(f"model: {source}: {heads} query heads over {kv_heads} KV heads; wanted a multiple")
    dim = get("head_dim", int) if config.get("head_dim") is not None else hidden // heads
    eos = config.get("eos_token_id")
    return Architecture(
        name=name,
        hidden=hidden,
        intermediate=get("intermediate_size", int),
        num_layers=get("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=kv_heads,
        dim=dim,
        vocab_size=get("vocab_size", int),
        max_context_tokens=get("max_position_embeddings", int),
        rms_norm_eps=float(get("rms_norm_eps", float)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope=_parse_rope(config, source),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
    )


def _parse_rope(config: dict[str, Any], source: str) -> RopeScaling:
    """Both layouts: `rope_theta` beside `rope_scaling` (to transformers 4) and `rope_parameters` (from 5 on)."""
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    theta = float(settings.pop("rope_theta", config.get("rope_theta", 10000.0)))
    if kind not in ROPE_TYPES:
        raise ModelError(f"model: {source}: rope scaling {kind!r}; served: {', '.join(ROPE_TYPES)}")
    return RopeScaling(kind, theta, settings)


def _llama(name: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int,
           context: int, theta: float) -> Architecture:  # fmt: skip
    return Architecture(name, hidden, intermediate, layers, heads, kv_heads, hidden // heads, vocab, context, 1e-5,
                        False, RopeScaling("default", theta, {}), None, ())  # fmt: skip


NAMED_SHAPES = {
    shape.name: shape
    for shape in (
        _llama("tiny", 256, 512, 4, 4, 2, 1024, 262_144, 500_000.0),
        _llama("llama-3.2-1b", 2048, 8192, 16, 32, 8, 128_256, 131_072, 500_000.0),
        _llama("llama-3.1-8b", 4096, 14_336, 32, 32, 8, 128_256, 131_072, 500_000.0),
        _llama("prolong-8b-512k", 4096, 14_336, 32, 32, 8, 128_256, 524_288, 128_000_000.0),
        _llama("llama-2-13b", 5120, 13_824, 40, 40, 40, 32_000, 16_384, 10_000.0),
        _llama("codellama-34b", 8192, 22_016, 48, 64, 8, 32_016, 16_384, 1_000_000.0),
    )
}


def named_shape(name: str) -> Architecture:
    """A shape for random weights. Raises ModelError with the list for an unknown name."""
    if name not in NAMED_SHAPES:
        raise ModelError(f"model.random_weights: unknown shape {name!r}; known: {', '.join(NAMED_SHAPES)}")
    return NAMED_SHAPES[name]
