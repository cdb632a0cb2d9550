"""Read latent attention in GGUF files, llama.cpp's `deepseek2`: DeepSeek's models, and GLM-4.7-Flash.

Files have what makes keys and values of latents in one matrix (`attn_kv_b`), as a checkpoint, or apart (`attn_k_b`,
transposed head by head, and `attn_v_b`), and then sizes of heads under keys of their own.
"""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys

ARCHITECTURE = "deepseek2"
SOFTMAX, SIGMOID = 1, 2  # of `expert_gating_func`
_LISTED = ("attention.head_count_kv", "attention.key_length")
_OWN_NAMES = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_LOG_FACTOR = 0.1  # of `yarn_log_multiplier`, which llama.cpp's converter multiplies by it
_GLM_CUTS, _GLM_TOKENS = ("glm4", "chatglm-bpe"), 154_880


def is_glm(keys: GgufKeys) -> bool:
    """Return whether the file is of a GLM: by its tokenizer, or by how many tokens it has."""
    cut, embedding = keys.file.metadata.get("tokenizer.ggml.pre"), keys.file.tensors["token_embd.weight"]
    return cut in _GLM_CUTS or embedding.shape[0] == _GLM_TOKENS


def gating(keys: GgufKeys) -> object:
    """Return how experts are chosen; the first files of DeepSeek-V2 do not say, nor do those of GLM."""
    stated = keys.file.metadata.get(f"{keys.prefix}expert_gating_func")
    return stated or (SIGMOID if is_glm(keys) else SOFTMAX)


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a model with latent attention. Raises ModelError for sizes that contradict each other, and for
    what no such model computes.
    """
    own = {"num_hidden_layers": keys.num_layers - keys.count_heads()}
    given, chosen = keys.number("expert_gating_func", 0), gating(keys)
    if chosen not in (SOFTMAX, SIGMOID):
        raise keys.refused("expert_gating_func", given, f"{SOFTMAX}, a softmax, or {SIGMOID}, sigmoids")
    groups = keys.size("expert_group_count", 0) or 1
    of_experts = {
        "n_group": groups,
        "topk_group": keys.size("expert_group_used_count", 0) or 1,
        "n_shared_experts": keys.positive("expert_shared_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "first_k_dense_replace": keys.size("leading_dense_block_count", 0) or 0,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(keys.take("expert_weights_norm", chosen == SIGMOID)),
        "scoring_func": "sigmoid" if chosen == SIGMOID else "softmax",
        "topk_method": "noaux_tc" if chosen == SIGMOID else "greedy" if groups == 1 else "group_limited_greedy",
    }
    own |= _attention(keys, config.get("num_attention_heads")) | of_experts
    return own | _scaling(keys, config.get("rope_scaling"))


def _attention(keys: GgufKeys, heads: int | None) -> dict[str, Any]:
    rank, rotated = keys.positive("attention.kv_lora_rank"), keys.positive("rope.dimension_count")
    key, value = keys.positive("attention.key_length"), keys.positive("attention.value_length")
    own_key, own_value = (keys.size(f"attention.{what}_length_mla", 1) for what in ("key", "value"))
    if own_key is not None and own_value is not None:
        for name, stated, wanted in (("key", key, rank + rotated), ("value", value, rank)):
            if stated != wanted:
                raise keys.refused(f"attention.{name}_length", stated, f"{wanted}, of the rows that tokens leave")
        key, value = own_key, own_value
    kv_heads = keys.number("attention.head_count_kv")
    if kv_heads not in (1, heads, None):
        raise keys.refused("attention.head_count_kv", kv_heads, f"1 or {heads}, as many as query heads")
    if key <= rotated:
        raise keys.refused("attention.key_length", key, f"more than {rotated}, which are rotated")
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": keys.size("attention.q_lora_rank", 1),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "num_key_value_heads": heads,
        "latent_up_is_split": "blk.0.attn_k_b.weight" in keys.file.tensors,
    }


def _scaling(keys: GgufKeys, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Read YaRN's factors of attention, of which llama.cpp keeps one: both are the same in DeepSeek's models."""
    of_all = keys.number("rope.scaling.yarn_log_multiplier")
    if scaling is None or scaling["rope_type"] != "yarn":
        if of_all:
            raise keys.refused("rope.scaling.yarn_log_multiplier", of_all, "0 without YaRN")
        return {}
    if not of_all:
        raise keys.refused("rope.scaling.yarn_log_multiplier", of_all, "a positive number beside YaRN")
    mscale = round(of_all / _LOG_FACTOR, 6)
    return {"rope_scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale}}


def latent_form(**more: Any) -> GgufForm:
    """Return the form of a family's files. more: of its fields."""
    return GgufForm(
        ARCHITECTURE, translate=translate, has_experts=True, listed=_LISTED, own_names=_OWN_NAMES, **more
    )  # fmt: skip
