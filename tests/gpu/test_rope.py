"""Inverse frequencies equal Hugging Face's for every served scaling, and so do cosines and sines."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpu.layers.rope import inverse_frequencies, rope_key, rope_tables
from gpu.model.architecture import Architecture, ModelError, RopeScaling, named_shape, parse_architecture
from tests.tolerances import ROPE_FREQUENCY_RTOL, ROPE_TABLE_ATOL

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.01 * pair for pair in range(32)],
    "long_factor": [1.0 + 0.7 * pair for pair in range(32)],
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": YARN,
    "yarn with betas": YARN | {"beta_fast": 24, "beta_slow": 2},
    "yarn with attention_factor": YARN | {"attention_factor": 1.7},
    "yarn with mscale": YARN | {"mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn without truncation": YARN | {"truncate": False},
    "longrope": LONGROPE,
    "proportional": {"rope_type": "proportional", "factor": 2.0},
    "longrope with attention_factor": LONGROPE | {"attention_factor": 1.3},
}
MAX_TOKENS = 16_384


def config_of(scaling: dict) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": scaling | {"rope_theta": 500_000.0},
    }


def architecture_of(scaling: dict) -> Architecture:
    return parse_architecture(config_of(scaling), "test", "test")


def hugging_face(scaling: dict) -> LlamaConfig:
    return LlamaConfig(**config_of(scaling))


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
@pytest.mark.parametrize("length", [MAX_TOKENS, 3 * MAX_TOKENS])
def test_frequencies_equal_hugging_face(name: str, length: int) -> None:
    kind = SCALINGS[name]["rope_type"]
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[kind](hugging_face(SCALINGS[name]), torch.device("cpu"), seq_len=length)
    got, got_factor = inverse_frequencies(architecture_of(SCALINGS[name]), length)
    torch.testing.assert_close(got, wanted, rtol=ROPE_FREQUENCY_RTOL, atol=0)
    assert got_factor == pytest.approx(wanted_factor, rel=ROPE_FREQUENCY_RTOL)


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_hugging_face_at_the_models_length(name: str) -> None:
    embedding = LlamaRotaryEmbedding(hugging_face(SCALINGS[name]))
    positions = torch.arange(MAX_TOKENS)[None]
    cos, sin = (table[0] for table in embedding(torch.zeros(1, dtype=torch.float32), positions))
    got_cos, got_sin = rope_tables(architecture_of(SCALINGS[name]), MAX_TOKENS, torch.device("cpu"))
    half = got_cos.shape[1]
    torch.testing.assert_close(got_cos, cos[:, :half], rtol=0, atol=ROPE_TABLE_ATOL)
    torch.testing.assert_close(got_sin, sin[:, :half], rtol=0, atol=ROPE_TABLE_ATOL)


def test_longrope_has_its_short_factors_where_no_context_is_longer_than_the_original() -> None:
    for length, key in ((4096, "short_factor"), (4097, "long_factor")):
        wanted, _ = ROPE_INIT_FUNCTIONS["longrope"](hugging_face(LONGROPE), torch.device("cpu"), seq_len=length)
        got, _ = inverse_frequencies(architecture_of(LONGROPE), length)
        torch.testing.assert_close(got, wanted, rtol=ROPE_FREQUENCY_RTOL, atol=0)
        with pytest.raises(ModelError, match=rf"'longrope': {key} is 5 numbers; wanted 32"):
            inverse_frequencies(architecture_of(LONGROPE | {key: [1.0] * 5}), length)


def test_what_is_not_rotated_has_angle_zero() -> None:
    shape = replace(architecture_of(YARN | {"attention_factor": 1.7}), rotary_dim=48)
    cos, sin = rope_tables(shape, 64, torch.device("cpu"))
    assert cos.shape == (64, 32)
    assert torch.equal(cos[:, 24:], torch.ones(64, 8))
    assert torch.equal(sin[:, 24:], torch.zeros(64, 8))
    assert cos[0, 0] == pytest.approx(1.7)


def test_table_comparison_sees_a_shift_of_one_position() -> None:
    cos, _ = rope_tables(architecture_of(SCALINGS["default"]), 64, torch.device("cpu"))
    assert (cos[1:] - cos[:-1]).abs().amax(dim=1).min() > ROPE_TABLE_ATOL


def test_frequency_comparison_sees_a_wrong_base() -> None:
    right, _ = inverse_frequencies(architecture_of(SCALINGS["default"]), MAX_TOKENS)
    wrong = architecture_of(SCALINGS["default"] | {"rope_type": "linear", "factor": 1.001})
    assert not np.allclose(inverse_frequencies(wrong, MAX_TOKENS)[0], right, rtol=ROPE_FREQUENCY_RTOL, atol=0)


def test_dynamic_frequencies_depend_on_the_deployment_and_not_on_a_text() -> None:
    short = inverse_frequencies(architecture_of(SCALINGS["dynamic"]), 512)[0]
    model = inverse_frequencies(architecture_of(SCALINGS["dynamic"]), MAX_TOKENS)[0]
    assert torch.equal(short, model)


def test_dynamic_stretches_beyond_the_files_positions_to_those_that_a_person_names() -> None:
    """Its frequencies are Hugging Face's for a text of the deployment's longest context."""
    asked = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 16_384}
    file = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 320, "max_position_embeddings": 4096}  # fmt: skip
    shape = parse_architecture(file, "x", "x", asked)
    assert shape.max_context_tokens == 16_384
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=4096,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    )  # fmt: skip
    for longest in (4096, 9000, 16_384):
        wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=longest)
        torch.testing.assert_close(inverse_frequencies(shape, longest)[0], wanted, rtol=ROPE_FREQUENCY_RTOL, atol=0)
    assert inverse_frequencies(shape, 16_384)[0][1] < 0.9 * inverse_frequencies(shape, 4096)[0][1]


def test_all_that_changes_a_frequency_changes_the_name_of_what_was_computed_with_it() -> None:
    phi, gemma = named_shape("phi-3-mini"), named_shape("gemma-3-4b")
    assert rope_key(phi, 4096) != rope_key(phi, 4097) == rope_key(phi, 131_072)
    llama = named_shape("llama-3.1-8b")
    assert rope_key(llama, 4096) == rope_key(llama, 131_072)
    other = replace(gemma, rope=replace(gemma.rope, theta=2e6))
    window = replace(gemma, layer_pattern=(replace(gemma.layer_pattern[0], rope=other.rope), *gemma.layer_pattern[1:]))
    scaled = replace(llama, rope=RopeScaling("linear", llama.rope.theta, {"factor": 2.0}))
    assert len({rope_key(one, 4096) for one in (phi, gemma, other, window, llama, scaled)}) == 6
