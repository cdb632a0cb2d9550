"""Tiny random checkpoints of every family, made by transformers, whose own forward pass is the oracle.

Configurations are spelled as published files are, of models that transformers has. A family that transformers lacks has
an oracle in a test file of its own, as `test_new_family.py` has. Weights are drawn so that attention is neither flat
nor one-hot and norms and biases matter.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    MuseGlimmerTextConfig,
)

from gpu.config import GpuConfig, ModelConfig
from gpu.load import load_runner
from gpu.model.architecture import read_architecture
from gpu.ranks import Ranks
from gpu.runner import Runner
from gpu.runner_settings import LoadSettings
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, PageWrite, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan, WindowWrite
from gpu.weights.expert_shares import MOST_COMPUTED_ROWS
from tests.gpu.poison import poison_buffers, poison_pool
from transfer.expert_exchange import OpenExperts

WITH_MAMBA = ("granitemoehybrid", "nemotron_h")
READS_MAMBA_LAYERS = Version("5.23")  # the first transformers known to take `mamba` for a layer; 5.17 does not
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
          "pos_emb_height": 4, "pos_emb_width": 4, "merge_size": 2}  # fmt: skip


class WholeGlimmer:
    """A Muse Glimmer of a text's configuration: transformers has no causal model of its text alone."""

    @classmethod
    def _from_config(cls, config: MuseGlimmerTextConfig, **more: Any) -> MuseGlimmerForConditionalGeneration:
        whole = MuseGlimmerConfig(
            text_config=config, vision_config=VISION, out_hidden_size=128, projector_hidden_size=16
        )
        return MuseGlimmerForConditionalGeneration._from_config(whole, **more)

    @classmethod
    def from_pretrained(cls, folder: Path, config: MuseGlimmerTextConfig, **more: Any) -> Any:
        model = cls._from_config(config, dtype=torch.float32)
        model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        return model


# Models of text that transformers' AutoModelForCausalLM does not find, and which some versions refuse to register.
NOT_FOUND: dict[type, Any] = {Mistral4Config: Mistral4ForCausalLM, MuseGlimmerTextConfig: WholeGlimmer}
PAGE_TOKENS = 16
CHUNK_TOKENS = 128
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {"type": "longrope", "short_factor": [1.0 + 0.02 * i for i in range(36)],
            "long_factor": [1.0 + 0.5 * i for i in range(36)]}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6, "sliding_window": 32,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 320,
    "attention_bias": False, "tie_word_embeddings": True, "pad_token_id": 0, "use_bidirectional_attention": None,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2, "attention_k_eq_v": False,
    "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
    "num_global_key_value_heads": None, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
}  # fmt: skip
HYBRID = {
    "head_dim": 32, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "attention_bias": False,
    "hidden_act": "silu", "pad_token_id": 0,
}  # fmt: skip
GRANITE_HYBRID = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention"] * 2,
    "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 24, "mamba_d_head": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 96, "attention_bias": False,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 4.0,
    "position_embedding_type": "nope", "hidden_act": "silu", "normalization_function": "rmsnorm",
    "rope_theta": 10_000.0, "pad_token_id": 0,
}  # fmt: skip
# transformers has no step of time below `time_step_min`, of which the models know nothing. It is 0.001 in files.
NEMOTRON = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "MEM*--*EM", "num_hidden_layers": 9, "head_dim": 32,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "conv_kernel": 4, "expand": 2,
    "chunk_size": 128, "use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False, "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2", "mlp_bias": False, "attention_bias": False, "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "residual_in_fp32": False, "rescale_prenorm_residual": True,
    "sliding_window": None, "hidden_dropout": 0.0, "num_logits_to_keep": 1, "time_step_limit": [0.0, float("inf")],
    "time_step_min": 1e-30, "time_step_max": 0.1, "time_step_floor": 0.0001, "use_mamba_kernels": True,
    "partial_rotary_factor": 1.0, "rope_theta": 10_000.0, "pad_token_id": 0,
}  # fmt: skip
SECTIONED = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.5,
             "mrope_section": [4, 2, 2], "mrope_interleaved": True}  # fmt: skip
MLA = {
    "hidden_act": "silu", "attention_bias": False, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 40,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 40, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4, "rope_theta": 10_000.0, "pretraining_tp": 1,
               "hidden_act": "silu", "rope_scaling": None, "architectures": ["LlamaForCausalLM"]},
    "llama3": {"model_type": "llama", "head_dim": 64, "rope_theta": 500_000.0, "rope_scaling": LLAMA3,
               "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    "llama with biases": {"model_type": "llama", "head_dim": 64, "rope_theta": 10_000.0, "attention_bias": True,
                          "mlp_bias": True},
    "mistral": {"model_type": "mistral", "head_dim": 64, "rope_theta": 10_000.0, "sliding_window": 64},
    "ministral": {"model_type": "ministral", "head_dim": 32, "rope_theta": 10_000.0, "sliding_window": 48,
                  "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1_000_000.0, "use_sliding_window": False, "sliding_window": 4096,
              "max_window_layers": 28, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112},
    "qwen2 with yarn": {"model_type": "qwen2", "rope_theta": 10_000.0, "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1_000_000.0, "attention_bias": False,
              "max_window_layers": 3, "sliding_window": None, "use_sliding_window": False,
              "num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 128, "rope_theta": 1_000_000.0, "attention_bias": False,
                  "max_window_layers": 3, "sliding_window": None, "use_sliding_window": False, "norm_topk_prob": True,
                  "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
                  "mlp_only_layers": [1], "router_aux_loss_coef": 0.001, "output_router_logits": False,
                  "num_attention_heads": 8, "num_key_value_heads": 1},
    "mixtral": {"model_type": "mixtral", "head_dim": 32, "rope_theta": 1_000_000.0, "sliding_window": None,
                "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
                "output_router_logits": False},
    "phi3": {"model_type": "phi3", "hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1,
             "rope_scaling": LONGROPE, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
             "rope_theta": 10_000.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "sliding_window": 262144,
             "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 1,
             "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "pad_token_id": 0},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
               "query_pre_attn_scalar": 168, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
               "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 32,
               "sliding_window_pattern": 3, "num_hidden_layers": 4, "tie_word_embeddings": True,
               "final_logit_softcapping": None, "attn_logit_softcapping": None, "cache_implementation": "hybrid"},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
                "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 4, "experts_per_token": 4,
                "hidden_act": "silu", "attention_bias": True, "sliding_window": 32, "swiglu_limit": 7.0,
                "rope_theta": 150_000, "initial_context_length": 128, "max_position_embeddings": 4096,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                 "truncate": False, "original_max_position_embeddings": 128},
                "output_router_logits": False, "router_aux_loss_coef": 0.9, "pad_token_id": 0},
    "ministral3": {"model_type": "ministral3", "head_dim": 32, "sliding_window": None,
                   "rope_parameters": {"type": "yarn", "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0,
                                       "original_max_position_embeddings": 64, "max_position_embeddings": 4096,
                                       "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                       "llama_4_scaling_beta": 0.4}},
    "granite": {"model_type": "granite", "rope_theta": 10_000.0, "embedding_multiplier": 3.0,
                "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 4.0,
                "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_scaling": None},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "rope_theta": 5_000_000.0, "attention_bias": False,
                "no_rope_layers": [1, 1, 0, 1, 0], "no_rope_layer_interval": 4, "mlp_bias": False,
                "sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 5,
                "max_window_layers": 28, "tie_word_embeddings": True, "pad_token_id": 0},
    "qwen3_next": HYBRID | {"model_type": "qwen3_next", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
                            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                            "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1,
                            "mlp_only_layers": [1], "full_attention_interval": 2, "router_aux_loss_coef": 0.001,
                            "output_router_logits": False},
    "qwen3_5": HYBRID | {"model_type": "qwen3_5_text", "rope_parameters": SECTIONED, "attn_output_gate": True,
                         "layer_types": [*["linear_attention"] * 3, "full_attention"], "full_attention_interval": 4,
                         "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
    "qwen3_5_moe": HYBRID | {"model_type": "qwen3_5_moe_text", "rope_parameters": SECTIONED, "attn_output_gate": True,
                             "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                             "shared_expert_intermediate_size": 32, "router_aux_loss_coef": 0.001,
                             "output_router_logits": False,
                             "layer_types": ["linear_attention", "full_attention"] * 2},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 5, "rope_theta": 500_000.0, "attention_bias": False,
              "hidden_act": "silu", "sliding_window": 32,
              "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0,
                                                       "original_max_position_embeddings": 512, "beta_slow": 1.0,
                                                       "attention_factor": 1.2079441541679836},
              "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]},
    "glm4_moe_lite": MLA | {"model_type": "glm4_moe_lite", "num_nextn_predict_layers": 1, "n_group": 1,
                            "topk_group": 1, "partial_rotary_factor": 1.0, "rope_theta": 1_000_000, "pad_token_id": 0,
                            "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.8},
    "deepseek_v3": MLA | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "rope_theta": 10_000,
                          "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
                          "routed_scaling_factor": 2.5, "v_head_dim": 24, "moe_layer_freq": 1, "ep_size": 1,
                          "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                                           "mscale": 1.0, "mscale_all_dim": 1.0,
                                           "original_max_position_embeddings": 128}},
    "deepseek_v2": MLA | {"model_type": "deepseek_v2", "q_lora_rank": None, "n_group": 1, "topk_group": 1,
                          "n_shared_experts": 2, "scoring_func": "softmax", "topk_method": "greedy", "v_head_dim": 48,
                          "norm_topk_prob": False, "routed_scaling_factor": 1.0, "rope_theta": 10_000,
                          "aux_loss_alpha": 0.001, "seq_aux": True, "moe_layer_freq": 1, "ep_size": 1,
                          "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                                           "mscale": 0.707, "mscale_all_dim": 0.707,
                                           "original_max_position_embeddings": 128}},
    "mistral4": MLA | {"model_type": "mistral4", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                       "routed_scaling_factor": 1.0, "rope_interleave": True,
                       "rope_parameters": {"type": "yarn", "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0,
                                           "original_max_position_embeddings": 64, "max_position_embeddings": 4096,
                                           "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                           "llama_4_scaling_beta": 0.4, "partial_rotary_factor": 0.4}},
    "muse_glimmer": {"model_type": "muse_glimmer_text", "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 32,
                     "hidden_activation": "silu", "attention_bias": False, "final_logit_softcapping": 20.0,
                     "qk_scale_factor": 3.87, "output_multiplier": 0.5, "post_norm_eps": 0.01,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}, "pad_token_id": None,
                     "layer_rope_theta": [0, 50_000.0, 50_000.0, 0, 50_000.0],
                     "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]},
    "lfm2": {"model_type": "lfm2", "num_hidden_layers": 5, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5,
             "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "block_auto_adjust_ff_dim": True,
             "block_ffn_dim_multiplier": 1.2, "block_multiple_of": 16, "tie_word_embeddings": True, "pad_token_id": 0,
             "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]},
    "granitemoehybrid": GRANITE_HYBRID,
    "granitemoehybrid attending": GRANITE_HYBRID | {"layers_block_type": ["attention"] * 4,
                                                    "position_embedding_type": "rope", "num_local_experts": 0},
    "granitemoehybrid dense": GRANITE_HYBRID | {"num_local_experts": 0, "mamba_n_groups": 2, "mamba_d_conv": 3,
                                                "position_embedding_type": "rope"},
    "nemotron_h": NEMOTRON,
    "nemotron_h dense": NEMOTRON | {"hybrid_override_pattern": None, "num_hidden_layers": 5, "n_groups": 1,
                                    "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"],
                                    "conv_kernel": 3},
    "gemma4": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
                        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4 with inputs": GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3,
                                    "use_double_wide_mlp": True, "num_hidden_layers": 8,
                                    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2
                                    + ["sliding_attention", "full_attention"]},
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """folder: as published, `config.json` and safetensors; model: transformers' own, which is to be agreed with."""

    folder: Path
    model: Any
    owner: TemporaryDirectory

    @torch.inference_mode()
    def logits(self, token_ids: np.ndarray) -> torch.Tensor:
        """float32 `[tokens, vocab]`."""
        return self.model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0]


def load_model(folder: Path) -> Any:
    """Return transformers' own model of the checkpoint in `folder`, float32."""
    config = AutoConfig.from_pretrained(folder)
    model = NOT_FOUND.get(type(config), AutoModelForCausalLM)
    return model.from_pretrained(folder, config=config, dtype=torch.float32).eval()


@cache
def checkpoint(name: str, **changes: Any) -> Checkpoint:
    """Drawn once a process; the folder is gone at its end."""
    owner = TemporaryDirectory(prefix="tandem-family-")
    folder = Path(owner.name)
    written = SIZES | CONFIGS[name] | changes
    (folder / "config.json").write_text(json.dumps(written))
    if written["model_type"] in WITH_MAMBA and Version(transformers.__version__) < READS_MAMBA_LAYERS:
        pytest.skip(f"transformers {transformers.__version__} refuses `mamba` among this family's layers")
    config = AutoConfig.from_pretrained(folder)
    found = NOT_FOUND.get(type(config))
    make = AutoModelForCausalLM.from_config if found is None else found._from_config
    model = make(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(11)
    is_offset = written["model_type"].startswith(("gemma3", "qwen3_next", "qwen3_5", "muse"))
    is_unscaled = written["model_type"].startswith("gemma4")
    for key, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if "norm" in key or key.endswith(("router.scale", "per_expert_scale")):
            drawn = 0.3 * drawn + (0.0 if is_offset and "linear_attn" not in key else 1.0)
            if is_unscaled and "q_norm" in key:
                drawn *= 0.3
        elif key.endswith("bias"):
            drawn *= 0.5
        elif key.endswith(("A_log", "dt_bias")):
            drawn = drawn - 3.0  # states that remember some hundred tokens
        elif key.endswith("sinks"):
            drawn = drawn + 2.0
        else:
            drawn *= (0.4 if "embed" in key and written["tie_word_embeddings"] else 1.5) * parameter.shape[-1] ** -0.5
        parameter.data.copy_(drawn)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        if key.endswith("layer_scalar"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(written))  # as published, not as it was saved
    return Checkpoint(folder, model, owner)


def load(folder: Path, max_context_tokens: int = 4096, dtype: str = "float32", is_counted: bool = True,
         num_windows: int = 2, spare_pages: int = 0, experts_on_card: int | None = None,
         open_experts: OpenExperts | None = None, computed_rows: int = MOST_COMPUTED_ROWS,
         num_states: int = 2, ranks: Ranks | None = None) -> Runner:  # fmt: skip
    """A runner whose pages are NaN until written. is_counted: coverage is checked, and nothing is compiled whole.
    num_windows: kept by themselves, if the model has any, and `spare_pages` longer than need be; 0: pages hold all.
    experts_on_card: of each layer, the others are fetched, or computed by `open_experts` in steps of up to
    `computed_rows`; None: all. num_states: of recurrent layers. ranks: of a model that is split, or None.
    """
    windows = [spec.window_tokens for spec in read_architecture(folder).layer_pattern if spec.window_tokens is not None]
    runner = load_runner(
        ModelConfig(path=folder, products="own"),  # multiplies floats, as its peers do
        GpuConfig(device="cpu", dtype=dtype, threads=None, page_tokens=PAGE_TOKENS, check_coverage=is_counted),
        LoadSettings(
            max_running=2,
            max_context_tokens=max_context_tokens,
            chunk_tokens=CHUNK_TOKENS,
            max_hidden_tokens=4096,
            num_pages=260,
            tier=None,
            parts=(),
            num_windows=num_windows if windows else num_states,
            window_pages=-(-max(windows, default=1) // PAGE_TOKENS) + spare_pages,
            experts_on_card=experts_on_card,
            open_experts=open_experts,
            computed_rows=computed_rows,
            ranks=ranks,
        ),
        on_progress=lambda stage, fraction: None,
    )
    poison_pool(runner.pool)
    if runner._prefill.windows is not None:
        poison_buffers(runner._prefill.windows)
    return runner


def generate(runner: Runner, prompt: np.ndarray, steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens `[1 + steps]`, and the logits that each was chosen by, float32 `[1 + steps, vocab]`; the prompt in
    chunks of CHUNK_TOKENS.
    """
    return generate_each(runner, [prompt], steps)[0]


def generate_each(runner: Runner, prompts: list[np.ndarray], steps: int) -> list[tuple[list[int], torch.Tensor]]:
    """As `generate`, of up to two prompts, which are decoded as one batch."""
    seen: list[torch.Tensor] = []
    sampler = runner._sampler
    sample = sampler.sample

    def recording(logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(logits.clone())
        return sample(logits, *rest)

    sampler.sample = recording
    has_windows = runner.pool.windows.shape.count or runner.pool.states is not None
    slots, taken, firsts = list(range(len(prompts))), 0, []
    for slot, prompt in enumerate(prompts):
        length = len(prompt)
        num_pages = -(-(length + steps) // PAGE_TOKENS)
        pages = list(range(taken, taken + num_pages))[::-1]
        taken += num_pages
        job = PrefillJob(slot, [PrefillPrompt(slot, prompt, 0, length, SamplingParams(temperature=0.0), "exact")])
        units = [
            PrefillUnit(slot, layer, begin, min(begin + CHUNK_TOKENS, length))
            for layer in range(runner.architecture.num_layers)
            for begin in range(0, length, CHUNK_TOKENS)
        ]
        windows = [WindowWrite(1 - slot, None, slot)] if has_windows else []
        plan = StepPlan(page_writes=[PageWrite(slot, 0, pages)], window_writes=windows, new_jobs=[job], units=units)
        firsts.append(runner.launch(plan).collect().tokens[0].token_id)
    tokens = [[first] for first in firsts]
    for step in range(steps):
        group = DecodeGroup(slots, [len(prompt) + step for prompt in prompts], [1 + step] * len(slots))
        for token in runner.launch(StepPlan(decode=[group])).collect().tokens:
            tokens[token.slot].append(token.token_id)
    runner.launch(StepPlan(released_slots=slots)).collect()
    sampler.sample = sample
    firsts_seen, steps_seen = seen[: len(slots)], seen[len(slots) :]
    return [
        (tokens[slot], torch.cat([firsts_seen[slot], *(one[slot : slot + 1] for one in steps_seen)])) for slot in slots
    ]


def draw_prompt(length: int, vocab: int = SIZES["vocab_size"]) -> np.ndarray:
    return np.random.default_rng(length).integers(3, vocab, length, dtype=np.int32)
