"""DeepSeek-V3 and R1, and smaller models of their kind: latent attention, experts in groups that sigmoids choose."""

from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.family import Family
from gpu.model.latent_config import count_dense, dense_first, latent_tensors, parse_latent_model, parse_sigmoid_experts
from gpu.model.latent_gguf import latent_form
from gpu.model.spec import Architecture


def parse(keys: ConfigKeys, name: str) -> Architecture:
    num_layers = keys.positive("num_hidden_layers", int)
    experts, shared = parse_sigmoid_experts(keys)
    specs = dense_first(count_dense(keys, num_layers), num_layers, experts, shared)
    return parse_latent_model(keys, name, specs, bool(keys.only("rope_interleave", True, False)))


GGUF = latent_form()

FAMILY = Family(
    model_types=("deepseek_v3",),
    parse=parse,
    tensors=latent_tensors,
    defaults={
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
        "vocab_size": 129_280,
    },
    harmless=frozenset(
        {"ep_size", "moe_layer_freq", "num_mtp_layers", "num_nextn_predict_layers", "output_router_logits",
         "pretraining_tp", "qk_head_dim"}
    ),
    gguf=GGUF,
    has_further_layers=True,
    reasoning=(THINK,),
)  # fmt: skip
