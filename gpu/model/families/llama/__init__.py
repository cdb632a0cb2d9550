"""Llama 2 to 3.3, CodeLlama, ProLong, and LongChat, whose condensed positions are linear scaling by another name."""

from dataclasses import replace
from functools import partial
from typing import Any

from gpu.model.answers.llama3_json import LLAMA3_JSON
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.family import LAYER_TENSORS, MLP_BIASES, OUTPUT_BIAS, QKV_BIASES, Family, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec, ModelError, RopeScaling


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    has_bias = keys.flag("attention_bias")
    spec = LayerSpec(qkv_bias=has_bias, output_bias=has_bias, mlp_bias=keys.flag("mlp_bias"))
    shape = parse_sizes(keys, name, (spec,))
    ratio = keys.optional("rope_condense_ratio", float)
    if ratio is None:
        return shape
    if shape.rope.kind != "default":
        raise ModelError(
            f"model: {keys.source}: rope_condense_ratio is {ratio} beside rope scaling {shape.rope.kind!r}; wanted one"
        )
    rope = RopeScaling("linear", shape.rope.theta, {"factor": ratio})
    return replace(shape, rope=rope, max_context_tokens=int(shape.max_context_tokens * ratio))


def tensors(shape: Architecture) -> dict[str, str]:
    spec = shape.layer_pattern[0]
    return (
        LAYER_TENSORS
        | (QKV_BIASES if spec.qkv_bias else {})
        | (OUTPUT_BIAS if spec.output_bias else {})
        | (MLP_BIASES if spec.mlp_bias else {})
    )


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    tensors = keys.file.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


# llama.cpp calls Mistral and Mixtral a Llama, too.
GGUF = GgufForm("llama", translate=translate_gguf, has_windows=True, has_neighbour_pairs=True)

_shape = partial(published_sizes, model_type="llama", rms_norm_eps=1e-5)
SHAPES = {
    "tiny": _shape(256, 512, 4, 4, 2, 1024, 262_144, 500_000.0),
    "smollm2-135m": _shape(576, 1536, 30, 9, 3, 49_152, 8192, 100_000.0, tie_word_embeddings=True),
    "llama-3.2-1b": _shape(2048, 8192, 16, 32, 8, 128_256, 131_072, 500_000.0),
    "llama-3.2-3b": _shape(3072, 8192, 28, 24, 8, 128_256, 131_072, 500_000.0, tie_word_embeddings=True),
    "llama-3.1-8b": _shape(4096, 14_336, 32, 32, 8, 128_256, 131_072, 500_000.0),
    "llama-3.3-70b": _shape(8192, 28_672, 80, 64, 8, 128_256, 131_072, 500_000.0),
    "prolong-8b-512k": _shape(4096, 14_336, 32, 32, 8, 128_256, 524_288, 128_000_000.0),
    "llama-2-7b": _shape(4096, 11_008, 32, 32, 32, 32_000, 4096, 10_000.0),
    "llama-2-13b": _shape(5120, 13_824, 40, 40, 40, 32_000, 16_384, 10_000.0),
    "longchat-7b-32k": _shape(4096, 11_008, 32, 32, 32, 32_000, 4096, 10_000.0, rope_condense_ratio=8),
    "codellama-7b": _shape(4096, 11_008, 32, 32, 32, 32_016, 16_384, 1_000_000.0),
    "codellama-13b": _shape(5120, 13_824, 40, 40, 40, 32_016, 16_384, 1_000_000.0),
    "codellama-34b": _shape(8192, 22_016, 48, 64, 8, 32_016, 16_384, 1_000_000.0),
}  # fmt: skip

FAMILY = Family(
    model_types=("llama",),
    parse=parse,
    tensors=tensors,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0},
    harmless=frozenset({"pretraining_tp"}),  # how products are cut, not what they are
    gguf=GGUF,
    shapes=SHAPES,
    calls=(LLAMA3_JSON,),
    reasoning=(THINK,),
)
