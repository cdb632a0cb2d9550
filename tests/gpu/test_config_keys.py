"""Configurations of published models are understood, and a key that is not understood is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Vocabulary

from gpu.config import ModelConfig
from gpu.memory.demand import PlanError
from gpu.memory.host_shares import resolve_host
from gpu.methods.kept import keep_as_set
from gpu.model.architecture import (
    Architecture,
    LayerSpec,
    ModelError,
    load_architecture,
    named_shape,
    parse_architecture,
)
from gpu.model.end_tokens import end_token_ids
from gpu.model.family import families
from gpu.model.library_key_search import find_library_keys
from gpu.model.library_keys import read_library_keys
from gpu.model.spec import RopeScaling
from server.deployment import ConfigError
from server.text.model_tokenizer import Tokenizer
from tests.gpu.family_checkpoints import CONFIGS, SIZES, checkpoint, draw_prompt, load_model
from tests.gpu.reference_model import FOLDER
from transfer.host_config import HostConfig

# Configurations of families that transformers lacks, by name. As in CONFIGS, each has its keys beside those of SIZES.
LACKING: dict[str, dict] = {}

# By name, a configuration that is served.
BASE = {name: SIZES | config for name, config in {**CONFIGS, **LACKING}.items()}


def parse(config: dict, **more) -> Architecture:
    return parse_architecture(config, "test", "config.json", **more)


# That a folder's own code computes the model, which may read any key.
OWN_CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}

# What computes something else, and what the refusal says of it: of each family at least one key.
MEANING = [
    ("glm4_moe_lite", {"norm_topk_prob": False}, "norm_topk_prob is False; served: True"),
    ("glm4_moe_lite", {"attention_bias": True}, "attention_bias is True; served: False"),
    (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        "mlp_layer_types is .*; wanted dense layers first ",
    ),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*; wanted 3 of 'dense', 'sparse'"),
    ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace is 3; wanted 0 to 2"),
    ("glm4_moe_lite", {"n_group": 3}, "n_group is 3 and topk_group 1, of 8 experts; wanted groups"),
    ("glm4_moe_lite", {"n_group": 4}, "num_experts_per_tok is 3; wanted no more than 1 of 4 groups have"),
    ("glm4_moe_lite", {"num_key_value_heads": 2}, "num_key_value_heads is 2, of 4 heads; latent attention has as many"),
    ("glm4_moe_lite", {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15; wanted an even number"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; served: 'sigmoid'"),
    ("deepseek_v3", {"first_k_dense_replace": 3}, "first_k_dense_replace is 3; wanted less than 3"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is .*; served: 'greedy', 'group_limited_greedy'"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3}, "n_group is 3 and topk_group 1, of 8 exper"),
    ("muse_glimmer", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; served: 'silu'"),
    ("muse_glimmer", {"tie_word_embeddings": True}, "tie_word_embeddings is True; served: False"),
    (
        "muse_glimmer",
        {"layer_rope_theta": [0, 1e4, 0, 0, 0]},
        "layer_rope_theta is .*; wanted 50000 or 0 for each of 5",
    ),
    ("lfm2", {"conv_bias": True}, "conv_bias is True; served: False"),
    ("lfm2", {"conv_L_cache": 5}, "conv_L_cache is 5; served: 2 to 4"),
    ("lfm2", {"layer_types": ["conv"] * 5}, "layer_types has .* alone; wanted both kinds"),
    ("lfm2", {"layer_types": None}, "full_attn_idxs is None; wanted numbers of layers from 0 to 4"),
    ("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size is 32; served: None"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; served: 'relu2'"),
    ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias is False; served: True"),
    ("nemotron_h", {"time_step_limit": [0.001, 0.1]}, "time_step_limit is .*; served: .0.0, Infinity"),
    ("nemotron_h", {"mamba_num_heads": 7}, "mamba_num_heads is 7 in 2, n_groups; wanted a multiple"),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "MEM*X"},
        "hybrid_override_pattern is 'MEM.X'; wanted a str of 'M', '.'",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "MEMEMEMEM"}, "wanted a layer that is 'full_attention'"),
    ("nemotron_h", {"num_hidden_layers": 8}, "hybrid_override_pattern has 9 layers; num_hidden_layers is 8"),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "attention"]},
        "layers_block_type and hybrid_override_pattern differ",
    ),
    ("nemotron_h", {"layer_types": ["mamba", "other"]}, "layer_types is .*; wanted a list of 'mamba', 'attention'"),
    ("nemotron_h", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'; a Nemotron-H rotates"),
    ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts is 2; served: 1"),
    ("nemotron_h", {"attention_head_dim": 16}, "attention_head_dim is 16; served: None, 32"),
    ("nemotron_h", {"num_query_groups": 4}, "num_query_groups is 4; served: None, 2"),
    ("nemotron_h", {"head_dim": None, "attention_head_dim": 33}, "head_dim is 33; wanted an even number"),
    ("nemotron_h", {"sliding_window": 32}, "sliding_window is 32; served: None"),
    ("granitemoehybrid", {"mamba_conv_bias": False}, "mamba_conv_bias is False; served: True"),
    ("granitemoehybrid", {"mamba_n_heads": 7}, "mamba_n_heads is 7 of 16; wanted 128 elements together"),
    ("granitemoehybrid", {"mamba_d_conv": 5}, "mamba_d_conv is 5; served: 2 to 4"),
    ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is .*; served: .0.0, Infinity"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; served: None, 'no"),
    ("granitemoehybrid", {"layers_block_type": ["mamba"] * 4}, "layer_types has .* alone; wanted attention"),
    ("granitemoehybrid", {"time_step_limit": 0.1}, "time_step_limit is 0.1; served: .0.0, Infinity"),
    ("mistral4", {"n_group": 8}, "n_group is 8 and topk_group 1, of 8 experts; wanted groups of 2 or more"),
    ("mistral4", {"rope_scaling": {"rope_type": "default"}}, "rope_parameters has llama_4_scaling_beta None"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True; served: False"),
    ("llama2", {"attention_bias": 1}, "attention_bias is 1; wanted true or false"),
    ("llama2", {"per_layer_config": {"1": {"mlp_bias": True}}}, "per_layer_config is .*, and this key is not known"),
    ("llama2", {"is_causal": False}, "is_causal is False, and this key is not known"),
    ("llama2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; served: 'silu'"),
    ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; served: 1.0"),
    ("llama2", {"sliding_window": 4096}, "sliding_window is 4096, and this key is not known"),
    ("llama2", {"num_local_experts": 8} | OWN_CODE, "num_local_experts is 8, and this key is not known"),
    ("llama2", {"logit_scale": 0.5} | OWN_CODE, "logit_scale is 0.5, and this key is not known"),
    ("llama2", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope scaling 'mrope'; served: default, "),
    ("llama2", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "'linear' has beta; known: factor"),
    ("llama2", {"rope_condense_ratio": 8, "rope_scaling": {"type": "linear", "factor": 2.0}}, "8 beside rope scaling"),
    ("llama2", {"quantization_config": {"bits": 4}}, "quantization_config.quant_method is None; served: 'auto-round'"),
    ("olmo3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; served: 'silu'"),
    ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters is .*; wanted one entry for each of full_att"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types is .*; served: None"),
    ("mistral", {"num_experts": 8} | OWN_CODE, "num_experts is 8, and this key is not known"),
    ("ministral", {"layer_types": ["linear_attention"] * 3}, "layer_types is .*; wanted 3 of 'sliding_attention'"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1; wanted true or false"),
    (
        "qwen2",
        {"dual_chunk_attention_config": {"chunk_size": 8}} | OWN_CODE,
        "dual_chunk_attention_config is .*not known",
    ),
    ("qwen2", {"use_mrope": True}, "use_mrope is True; served: False"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True; served: False"),
    ("qwen3", {"num_experts": 128} | OWN_CODE, "num_experts is 128, and this key is not known"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias is True; served: False"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers is .3.; wanted numbers of layers from 0 to 2"),
    ("qwen3_moe", {"mlp_only_layers": "none"}, "mlp_only_layers is 'none'; wanted numbers of layers"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; wanted at most 8, which is how many experts"),
    ("qwen3_moe", {"num_local_experts": 16}, "num_experts is 8, num_local_experts is 16; wanted one number"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; wanted a positive int"),
    (
        "qwen3_moe",
        {"shared_expert_intermediate_size": 64} | OWN_CODE,
        "shared_expert_intermediate_size is 64, and",
    ),
    ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; wanted a positive int"),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; served: 'silu'"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias is True; served: False"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod is 2; served: 1"),
    ("phi3", {"blocksparse_block_size": 64} | OWN_CODE, "blocksparse_block_size is 64, and this key is not known"),
    ("glm4", {"rope_ratio": 500} | OWN_CODE, "rope_ratio is 500, and this key is not known"),
    ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; wanted a share of a head"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias is False; served: True"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; served: 'silu'"),
    ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0; served: 7.0"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0; served: 1.702"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0; wanted a positive float"),
    ("granite", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'; served in a granite"),
    ("ministral3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; served: 'silu'"),
    (
        "ministral3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        "rope_parameters has llama_4_scaling_beta None and original_max_position_embeddings 64; wanted both",
    ),
    ("smollm3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; served: 'silu'"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*; wanted 1 or 0 for each of 5 layers"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; wanted a positive int"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; served: 'silu'"),
    ("qwen3_next", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; wanted at most 6"),
    (
        "qwen3_next",
        {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size is 0; wanted a positive int",
    ),
    ("qwen3_next", {"num_experts": [6]}, r"num_experts is \[6\]; wanted a positive int"),
    ("qwen3_next", {"full_attention_interval": 1}, "full_attention_interval is 1; wanted 2 to 4, the layers"),
    ("qwen3_next", {"full_attention_interval": 5}, "full_attention_interval is 5; wanted 2 to 4, the layers"),
    ("qwen3_5", {"linear_num_value_heads": 3}, "linear_num_value_heads is 3 over 2, .*; wanted a multiple"),
    ("qwen3_5", {"rope_parameters": {"rope_type": "default", "beta": 1}}, "'default' has beta; known: "),
    ("qwen3_5_moe", {"layer_types": ["linear_attention"] * 4}, "layer_types has .* alone; wanted both kinds"),
    ("gemma4", {"hidden_activation": "silu"}, "hidden_activation is 'silu'; served: 'gelu_pytorch_tanh'"),
    ("gemma4", {"attention_bias": True}, "attention_bias is True; served: False"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; served: None, 'vision'"),
    ("gemma4", {"layer_types": ["linear_attention"] * 6}, "layer_types is .*; wanted 6 of 'sliding_attention'"),
    ("gemma4", {"num_global_key_value_heads": 3}, "4 query heads over 3 KV heads; wanted a multiple"),
    ("gemma4", {"global_head_dim": 33}, "head_dim is 33; wanted an even number"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config is .*; served: the same head_dim and"),
    ("gemma4", {"top_k_experts": 7}, "top_k_experts is 7; wanted at most 6, num_experts"),
    ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6; wanted less than 6"),
    ("gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; wanted a layer of each kind before these"),
    ("gemma4", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 319}, "input is 319; wanted 320 or"),
    ("gemma4", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is .*; served: rope_parameters"),
    (
        "gemma4",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
        "partial_rotary_factor 0.5 for sliding_attention; served: 1.0, or of rope_type 'proportional'",
    ),
    ("gemma4", {"attn_logit_softcapping": 50.0} | OWN_CODE, "attn_logit_softcapping is 50.0, and this key is not"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; served: None"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; served: None"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; served: False"),
    ("gemma3", {"altup_num_inputs": 4} | OWN_CODE, "altup_num_inputs is 4, and this key is not known"),
]


@pytest.mark.parametrize(("name", "change", "words"), MEANING)
def test_a_key_that_changes_meaning_is_refused_in_one_line(name: str, change: dict, words: str) -> None:
    parse(BASE[name])
    with pytest.raises(ModelError, match=rf"^model: config\.json: .*{words}") as caught:
        parse(BASE[name] | change)
    assert "\n" not in str(caught.value)


def test_every_family_is_among_those_that_refuse() -> None:
    missing = {family.name for family in families().values()} - {
        families()[BASE[name]["model_type"]].name for name, _, _ in MEANING
    }
    assert not missing, f"add to MEANING a key that these refuse, and a configuration to CONFIGS or LACKING: {missing}"


# Keys of other models that compute something else.
FOREIGN = {
    "num_experts": 8, "num_local_experts": 8, "kv_lora_rank": 512, "num_kv_shared_layers": 3, "clip_qkv": 8.0,
    "logit_scale": 0.5, "logits_scaling": 8.0, "attention_multiplier": 0.1, "residual_multiplier": 0.2,
    "embedding_multiplier": 12.0, "mup_width_multiplier": 2.0, "use_qk_norm": True, "qk_layernorm": True, "alibi": True,
    "no_rope_layers": [1, 0, 1], "attention_chunk_size": 8192, "rope_interleaved": True, "norm_type": "layernorm",
    "rope_ratio": 5, "attention_sinks": 4, "is_causal": False, "add_bias_linear": True, "blocksparse_params": {"a": 1},
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "lm_head_bias": True, "mlp_bias": True,
    "dual_chunk_attention_config": {"a": 1}, "use_mrope": True, "layer_types": ["chunked_attention"] * 3,
    "quantization_config": {"quant_method": "bitsandbytes"}, "tie_word_embeddings": "yes", "use_cla": True,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_refuses_what_only_others_know_where_a_folder_has_code_of_its_own(name: str) -> None:
    for key, value in FOREIGN.items():
        shape = parse(BASE[name])
        has_experts = any(spec.experts is not None for spec in shape.layer_pattern)
        if (key in ("num_experts", "num_local_experts") and has_experts) or (key == "kv_lora_rank" and shape.latent):
            continue
        if key == "mlp_bias" and BASE[name]["model_type"] in ("llama", "smollm3", "granite"):
            continue
        served = ("num_kv_shared_layers", "final_logit_softcapping", "num_experts")  # the last one without a mixture
        is_granite = BASE[name]["model_type"].startswith("granite")
        if key.endswith(("_multiplier", "_scaling")) and is_granite:
            continue
        if key == "num_local_experts" and BASE[name]["model_type"] == "granitemoehybrid":
            continue
        if key in served and BASE[name]["model_type"] == "gemma4_text":
            continue
        if key == "final_logit_softcapping" and BASE[name]["model_type"] == "muse_glimmer_text":
            continue
        with pytest.raises(ModelError, match=rf"^model: config\.json: .*{key}") as caught:
            parse(BASE[name] | {key: value} | OWN_CODE)
        assert "\n" not in str(caught.value)


# What transformers wrote or writes into files for heads, generation and training, and what tools leave there.
BOOKKEEPING = {
    "_attn_implementation_autoset": True, "_commit_hash": "0123", "is_decoder": True, "is_encoder_decoder": False,
    "do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "max_length": 20, "num_beams": 1,
    "repetition_penalty": 1.1, "num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}, "torchscript": False,
    "pruned_heads": {"0": [1]}, "gradient_checkpointing": True, "finetuning_task": "none", "for_llm_compressor": True,
    "mergekit": {"merge_method": "slerp"}, "tie_encoder_decoder": False, "remove_invalid_values": False,
    "suppress_tokens": [1], "output_scores": False, "chunk_size_feed_forward": 0, "problem_type": "regression",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({config["model_type"]: name for name, config in CONFIGS.items()}.values()))
def test_keys_that_pass_change_nothing_that_transformers_computes(name: str, tmp_path: Path) -> None:
    known, passing = checkpoint(name), dict(BOOKKEEPING)
    for key, value in FOREIGN.items():
        try:
            shape = parse(BASE[name] | {key: value})
        except ModelError:
            continue
        if shape == parse(BASE[name]):
            passing[key] = value
    assert len(passing) > len(BOOKKEEPING), "the comparison is of some"
    for file in known.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(BASE[name] | passing))
    prompt = draw_prompt(40)
    model = load_model(tmp_path)
    with torch.inference_mode():
        logits = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0]
    assert torch.equal(logits, known.logits(prompt))


def test_the_kept_keys_are_those_of_the_transformers_that_is_installed() -> None:
    assert find_library_keys(list(families())) == read_library_keys(), "run python -m gpu.model.library_key_search"


@pytest.mark.parametrize("key", ["sliding_window", "layer_types", "is_causal", "per_layer_config", "rope_scaling"])
def test_what_code_that_all_models_share_asks_for_is_harmless_to_none(key: str) -> None:
    keys = read_library_keys()
    assert key not in keys["own"]
    assert all(key in named for named in keys["named"].values())


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "a bitsandbytes checkpoint"),
        ({"quantization_config": {"load_in_8bit": True, "load_in_4bit": False}}, "a bitsandbytes checkpoint"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "an MLX checkpoint"),
        ({key: {"group_size": 64, "bits": 4} for key in ("quantization_config", "quantization")}, "an MLX checkpoint"),
    ],
)
def test_checkpoints_of_other_libraries_are_refused_by_name(part: dict, words: str) -> None:
    with pytest.raises(ModelError, match=rf"^model: config\.json: quantiz.*{words}.*; fetch the plain .*GGUF file$"):
        parse(BASE["llama2"] | part)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "deepseek_v32", "gemma2", "phi", "chatglm", None, 7])
def test_other_families_are_refused_with_those_that_are_served(model_type: object) -> None:
    with pytest.raises(ModelError, match=rf"model_type is .*; served: {', '.join(map(repr, families()))}$"):
        parse(BASE["llama2"] | {"model_type": model_type})


def test_every_family_is_on_the_page_of_models() -> None:
    page = (Path(__file__).parents[2] / "docs" / "MODELS.md").read_text()
    forms = [family.gguf for family in families().values() if family.gguf is not None]
    named = {*families(), *(name for form in forms for name in form.architectures)}
    missing = {name for name in named if f"`{name}`" not in page}
    assert not missing, f"add these to the tables of docs/MODELS.md: {missing}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_persons_word_overrules_a_refusal_and_nothing_else(name: str, tmp_path: Path) -> None:
    own = BASE[name] | OWN_CODE
    unknown = own | {"made_up": 3}
    (tmp_path / "config.json").write_text(json.dumps(unknown))
    with pytest.raises(ModelError, match=r"made_up is 3, .*name it in model\.ignore_config_keys"):
        load_architecture(ModelConfig(path=tmp_path))
    overruled = load_architecture(ModelConfig(path=tmp_path, ignore_config_keys=("made_up",)))
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert overruled == load_architecture(ModelConfig(path=tmp_path))


def test_heads_of_a_nemotron_h_have_either_of_two_names() -> None:
    first = {key: value for key, value in BASE["nemotron_h"].items() if key != "head_dim"} | OWN_CODE
    assert parse(first | {"attention_head_dim": 32}) == parse(BASE["nemotron_h"])
    assert parse(first).dim == 128
    assert parse(BASE["nemotron_h"] | OWN_CODE | {"attention_head_dim": 32}) == parse(BASE["nemotron_h"])


def test_absent_keys_mean_what_their_family_says() -> None:
    without = {name: {k: v for k, v in BASE[name].items() if k != "sliding_window"} for name in ("mistral", "phi3")}
    assert parse(without["mistral"] | {"max_position_embeddings": 32_768}).layers[0].window_tokens == 4096
    assert parse(without["mistral"] | {"sliding_window": None}).window_layers == ()
    assert parse(without["phi3"]).window_layers == ()
    bare = {key: BASE["llama2"][key] for key in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
                                                 "num_attention_heads", "vocab_size")}  # fmt: skip
    shape = parse(bare)
    assert (shape.rms_norm_eps, shape.rope.theta, shape.max_context_tokens, shape.num_kv_heads, shape.dim) == (
        1e-6, 10_000.0, 2048, 4, 16,
    )  # fmt: skip
    assert parse(bare | {"model_type": "glm4"}).layers == (LayerSpec(qkv_bias=True, post_norms=True),) * 3
    with pytest.raises(ModelError, match="hidden_size is None; wanted a positive int"):
        parse({key: value for key, value in bare.items() if key != "hidden_size"})


def test_longchats_condensed_positions_are_linear_scaling() -> None:
    shape = parse(BASE["llama2"] | {"rope_condense_ratio": 8, "max_position_embeddings": 2048})
    assert (shape.rope, shape.max_context_tokens) == (RopeScaling("linear", 10_000.0, {"factor": 8}), 16_384)


def test_yarn_reaches_its_factor_times_its_original_positions() -> None:
    qwen = BASE["qwen2"] | {"max_position_embeddings": 32_768}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert parse(qwen | {"rope_scaling": yarn}).max_context_tokens == 131_072
    own = parse(qwen, rope={"rope_type": "yarn", "factor": 4.0})
    assert own == parse(qwen | {"rope_scaling": yarn})
    longer = parse(BASE["llama2"], rope={"rope_type": "linear", "factor": 4.0, "max_position_embeddings": 16_384})
    assert longer.max_context_tokens == 16_384


def test_a_window_as_long_as_all_positions_is_none() -> None:
    assert parse(BASE["mistral"] | {"sliding_window": 4096}).window_layers == ()
    assert parse(BASE["mistral"] | {"sliding_window": 4095}).window_layers == (0, 1, 2)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    longer = parse(BASE["mistral"] | {"sliding_window": 4096, "rope_scaling": yarn})
    assert (longer.max_context_tokens, longer.window_layers) == (16_384, (0, 1, 2))


def test_which_layers_have_a_window_is_read_however_it_is_written() -> None:
    assert parse(BASE["qwen2"] | {"max_window_layers": None}).window_layers == ()
    qwen = BASE["qwen2"] | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    shape = parse(qwen)
    assert shape.window_layers == tuple(range(1, shape.num_layers))
    gemma = {
        key: value for key, value in BASE["gemma3"].items() if key not in ("sliding_window_pattern", "layer_types")
    }
    shape = parse(gemma | {"_sliding_window_pattern": 2})
    assert shape.window_layers == tuple(range(0, shape.num_layers, 2))


def test_both_spellings_of_a_rotation_are_one() -> None:
    for name in ("llama3", "qwen2 with yarn", "phi3"):
        old = BASE[name]
        new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
        scaling = dict(old["rope_scaling"])
        scaling["rope_type"] = scaling.pop("type", None) or scaling["rope_type"]
        given = scaling | {"rope_theta": old["rope_theta"]}
        if "partial_rotary_factor" in new:
            given["partial_rotary_factor"] = new.pop("partial_rotary_factor")
        assert parse(new | {"rope_parameters": given}) == parse(old)
    old = BASE["gemma3"]
    dropped = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    new = {key: value for key, value in old.items() if key not in dropped} | {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    assert parse(new).layers == parse(old).layers
    assert parse(new).rope == parse(old).rope


# The whole of a published `config.json`, as far as it says anything of the decoder.
PUBLISHED = {
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "image_size": 896},
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_give_the_named_shapes(name: str) -> None:
    shape, named = parse(PUBLISHED[name]), named_shape(name)
    ignored = {"name", "bos_token_id", "eos_token_ids"}
    assert {key: getattr(shape, key) for key in shape.__slots__ if key not in ignored} == {
        key: getattr(named, key) for key in shape.__slots__ if key not in ignored
    }
    assert shape.eos_token_ids


def test_end_tokens_are_the_same_for_who_serves_and_who_measures(tmp_path: Path) -> None:
    """Of both files, of the decoder's part, and the tokenizer's own."""
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    text = Vocabulary.from_file(str(tmp_path / "tokenizer.json")).id_to_token(5)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": text}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}} | BASE["gemma3"]))
    assert end_token_ids(tmp_path) == (2, 5, 7, 9)
    assert Tokenizer(tmp_path, None).eos_ids == [2, 5, 7, 9]
    assert Tokenizer(FOLDER, FOLDER).eos_ids == list(load_architecture(ModelConfig(path=FOLDER)).eos_token_ids)


@pytest.mark.parametrize(("name", "words"), [("tiny", "40, 2 to"), ("glm-4-32b", "128, 24 to")])
def test_heads_that_the_host_does_not_read_are_refused_when_it_is_planned(name: str, words: str) -> None:
    shape = replace(named_shape(name), dim=40) if name == "tiny" else named_shape(name)
    with pytest.raises(
        PlanError,
        match=rf"^host: .*has heads of {words} a KV head; .* 64, 96, 128, 256, up to 16 to a KV head; leave out",
    ):
        resolve_host(HostConfig(), keep_as_set(HostConfig(), shape), shape, 16, 2, 8)


@pytest.mark.parametrize("as_object", [False, True])
def test_tokens_that_the_tokenizers_settings_lack_are_those_of_the_special_tokens_map(
    as_object: bool, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    vocabulary = Vocabulary.from_file(str(FOLDER / "tokenizer.json"))
    first, second, third = (vocabulary.id_to_token(number) for number in (5, 6, 7))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": first, "eos_token": None}))
    tokens = {"bos_token": second, "eos_token": third, "additional_special_tokens": [second]}
    if as_object:
        tokens |= {name: {"content": tokens[name], "special": True} for name in ("bos_token", "eos_token")}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    special = Tokenizer(tmp_path, tmp_path).special_tokens
    assert (special["bos_token"], special["eos_token"]) == (first, third)
    assert "additional_special_tokens" not in special
    (tmp_path / "special_tokens_map.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"special_tokens_map\.json holds list; wanted a JSON object"):
        Tokenizer(tmp_path, tmp_path)
