"""Llama 2 to 3.3, CodeLlama, ProLong, and LongChat, whose condensed positions are linear scaling by another name."""

from dataclasses import replace

from gpu.model.answers.llama3_json import LLAMA3_JSON
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.families.llama.gguf_form import GGUF
from gpu.model.families.llama.shapes import SHAPES
from gpu.model.family import LAYER_TENSORS, MLP_BIASES, OUTPUT_BIAS, QKV_BIASES, Family, parse_sizes
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
