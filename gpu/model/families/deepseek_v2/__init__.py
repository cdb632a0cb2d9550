"""DeepSeek-V2 and V2-Lite: latent attention, experts that a softmax chooses, of some groups or of all, others that all
tokens take.
"""

from gpu.model.config_keys import ConfigKeys
from gpu.model.family import Family
from gpu.model.latent_config import (
    count_dense,
    dense_first,
    in_groups,
    latent_tensors,
    parse_latent_model,
    parse_shared_experts,
)
from gpu.model.latent_gguf import SOFTMAX, gating, latent_form
from gpu.model.spec import Architecture


def parse(keys: ConfigKeys, name: str) -> Architecture:
    num_layers = keys.positive("num_hidden_layers", int)
    is_grouped = keys.only("topk_method", "greedy", "group_limited_greedy") != "greedy"
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    keys.only("mlp_bias", False)
    experts, shared = parse_shared_experts(keys, is_normalised=False)
    if is_grouped:
        experts = in_groups(keys, experts, group_best=1)
    specs = dense_first(count_dense(keys, num_layers), num_layers, experts, shared)
    return parse_latent_model(keys, name, specs, has_neighbour_pairs=True)


# Those of its architecture whose experts a softmax chooses.
GGUF = latent_form(claims=lambda keys: gating(keys) == SOFTMAX)

FAMILY = Family(
    model_types=("deepseek_v2",),
    parse=parse,
    tensors=latent_tensors,
    defaults={
        "first_k_dense_replace": 0,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "kv_lora_rank": 512,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 1.0,
        "v_head_dim": 128,
        "vocab_size": 102_400,
    },
    harmless=frozenset(  # of groups, which a greedy choice has not, of training, and of other code
        {"aux_loss_alpha", "ep_size", "moe_layer_freq", "n_group", "output_router_logits", "pretraining_tp",
         "qk_head_dim", "rope_interleave", "seq_aux", "topk_group"}
    ),
    gguf=GGUF,
)  # fmt: skip
