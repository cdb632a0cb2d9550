"""GLM-4.7-Flash: latent attention (MLA), a mixture of experts that sigmoids choose, one that all tokens take.

Layers behind the last one, which draft tokens, are passed over.
"""

from functools import partial

from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.families.glm4_moe_lite.answers import GLM_CALLS
from gpu.model.family import Family
from gpu.model.gguf.header import shown
from gpu.model.latent_config import dense_first, latent_tensors, parse_latent_model, parse_sigmoid_experts
from gpu.model.latent_gguf import SIGMOID, gating, is_glm, latent_form
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, ModelError


def parse(keys: ConfigKeys, name: str) -> Architecture:
    num_layers = keys.positive("num_hidden_layers", int)
    experts, shared = parse_sigmoid_experts(keys)
    specs = dense_first(_count_dense(keys, num_layers), num_layers, experts, shared)
    return parse_latent_model(keys, name, specs, bool(keys.only("rope_interleave", True, False)))


def _count_dense(keys: ConfigKeys, num_layers: int) -> int:
    """Return how many first layers have no experts: as `mlp_layer_types` says, else as `first_k_dense_replace`."""
    types, first = keys.get("mlp_layer_types"), keys.get("first_k_dense_replace")
    if types is None:
        first = 1 if first is None else first
        if type(first) is not int or not 0 <= first < num_layers:
            raise ModelError(
                f"model: {keys.source}: first_k_dense_replace is {shown(first)}; wanted 0 to {num_layers - 1}"
            )
        return first
    known = ("dense", "sparse")
    if not isinstance(types, list) or len(types) != num_layers or any(one not in known for one in types):
        wanted = f"{num_layers} of {', '.join(map(repr, known))}"
        raise ModelError(f"model: {keys.source}: mlp_layer_types is {shown(types)}; wanted {wanted}")
    num_dense = types.count("dense")
    if "dense" in types[num_dense:] or num_dense == num_layers:
        wanted = "wanted dense layers first and at least one sparse layer"
        raise ModelError(f"model: {keys.source}: mlp_layer_types is {shown(types)}; {wanted}")
    return num_dense


_NEXT_SPEAKER = frozenset({"<|user|>", "<|observation|>"})  # which ends a turn

# Files say DeepSeek's architecture.
GGUF = latent_form(claims=lambda keys: is_glm(keys) and gating(keys) == SIGMOID, end_tokens=_NEXT_SPEAKER)

_shape = partial(published_sizes, model_type="glm4_moe_lite")
SHAPES = {
    "tiny-glm4-moe-lite": _shape(
        256, 384, 4, 8, 8, 1024, 131_072, 1_000_000.0, kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=48,
        qk_rope_head_dim=16, v_head_dim=64, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "glm-4.7-flash": _shape(2048, 10_240, 47, 20, 20, 154_880, 202_752, 1_000_000.0),
}  # fmt: skip

FAMILY = Family(
    model_types=("glm4_moe_lite",),
    parse=parse,
    tensors=latent_tensors,
    defaults={
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202_752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154_880,
    },
    harmless=frozenset({"num_nextn_predict_layers", "output_router_logits", "pretraining_tp", "qk_head_dim"}),
    gguf=GGUF,
    has_further_layers=True,
    shapes=SHAPES,
    calls=(GLM_CALLS,),
    reasoning=(THINK,),
)
