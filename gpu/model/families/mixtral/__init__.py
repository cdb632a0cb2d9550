"""Mixtral: Mistral with a mixture of experts in each layer; the weights of those that are taken sum to 1."""

from functools import partial

from gpu.model.answers.mistral import MISTRAL_JSON
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.experts_config import parse_experts
from gpu.model.family import LAYER_TENSORS, Family, find_windows, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    num_layers = keys.positive("num_hidden_layers", int)
    windows = find_windows(keys, keys.optional("sliding_window", int), [True] * num_layers, parse_rope(keys)[1])
    experts = parse_experts(keys, "num_local_experts", "intermediate_size", True)
    return parse_sizes(keys, name, [LayerSpec(window_tokens=window, experts=experts) for window in windows])


def tensors(shape: Architecture) -> dict[str, str]:
    attention = {name: what for name, what in LAYER_TENSORS.items() if not name.startswith("mlp.")}
    return attention | {
        "block_sparse_moe.gate.weight": "router",
        "block_sparse_moe.experts.*.w1.weight": "gate",
        "block_sparse_moe.experts.*.w3.weight": "up",
        "block_sparse_moe.experts.*.w2.weight": "down",
    }


def is_mixtral(keys: GgufKeys) -> bool:
    return keys.has("expert_count")


# Called a Llama with experts in GGUF files.
GGUF = GgufForm("llama", claims=is_mixtral, has_experts=True, has_neighbour_pairs=True)

_shape = partial(published_sizes, model_type="mixtral", sliding_window=None)
SHAPES = {
    "tiny-mixtral": _shape(256, 256, 4, 4, 2, 1024, 262_144, 1_000_000.0, num_local_experts=4),
    "mixtral-8x7b": _shape(4096, 14_336, 32, 32, 8, 32_000, 32_768, 1_000_000.0),
}  # fmt: skip

FAMILY = Family(
    model_types=("mixtral",),
    parse=parse,
    tensors=tensors,
    defaults={
        "intermediate_size": 14_336,
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}),  # of training
    gguf=GGUF,
    shapes=SHAPES,
    calls=(MISTRAL_JSON,),
)
