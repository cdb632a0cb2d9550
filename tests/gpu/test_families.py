"""Models of every family agree with transformers' own forward pass, and so do the CPU's two ways to take a step."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.agreement import Agreement
from bench.decode_loop import build_runner, decode
from bench.plain_decode import PlainDecode
from evals.forward import load_decoder
from evals.methods.key_attention import attend_all
from gpu.config import Composition
from gpu.cpu_step.cpu_step import serves
from gpu.cpu_step.step_attention import COLUMN_BLOCK
from gpu.methods.device_side import Site, make_device_sides
from gpu.model.architecture import NAMED_SHAPES, LayerSpec, ModelError, named_shape, read_architecture
from gpu.profiles import resolve_profiles
from gpu.weights.checkpoint import load_weights
from gpu.weights.drawing import random_weights
from tests.gpu.family_checkpoints import CONFIGS, checkpoint, draw_prompt, generate, generate_each, load
from tests.gpu.test_weights import write_shards
from tests.tolerances import FAMILY_LOGITS, FAMILY_LOGITS_FAR

CPU = torch.device("cpu")
TINY = [name for name in NAMED_SHAPES if name.startswith("tiny")]
STEPS = 64
OF_2026 = ("gemma4", "gemma4 with inputs", "ministral3", "smollm3", "muse_glimmer", "glm4_moe_lite", "granite", "olmo3",
           "mistral4")  # fmt: skip
# Windows, layers that share their keys, and latents whose queries grow; the others' are seen behind 200 tokens, too.
FAR_IN_SUITE = ("gemma4", "mistral4", "muse_glimmer")
CASES = [(name, (5, 200)) for name in CONFIGS]  # lengths of prompts of one batch
CASES += [
    pytest.param(name, (3000,), marks=[] if name in FAR_IN_SUITE else pytest.mark.long) for name in CONFIGS
]  # fmt: skip


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest logit."""
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("name", "lengths"), CASES)
def test_logits_and_greedy_text_equal_transformers(name: str, lengths: tuple[int, ...]) -> None:
    """Its choice behind the same text is our choice at every step, so the texts are the same. Coverage is counted."""
    known = checkpoint(name)
    prompts = [draw_prompt(length) for length in lengths]
    texts = generate_each(load(known.folder), prompts, STEPS)
    for prompt, (tokens, logits) in zip(prompts, texts, strict=True):
        wanted = known.logits(np.concatenate([prompt, tokens[:-1]]))[len(prompt) - 1 :]
        assert off(logits, wanted) < (FAMILY_LOGITS if len(prompt) < 1000 else FAMILY_LOGITS_FAR)
        assert wanted.argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"sliding_window": 63}),
        ("ministral", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
        ("glm4", {"partial_rotary_factor": 0.75}),
        ("glm4_moe_lite", {"routed_scaling_factor": 1.75}),
        ("glm4_moe_lite", {"rope_interleave": False}),
        ("deepseek_v3", {"topk_group": 3}),
        ("deepseek_v3", {"n_group": 2}),
        ("deepseek_v3", {"rope_scaling": CONFIGS["deepseek_v3"]["rope_scaling"] | {"mscale_all_dim": 0.9}}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 2}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("gpt_oss", {"sliding_window": 31}),
        ("gpt_oss", {"rope_scaling": CONFIGS["gpt_oss"]["rope_scaling"] | {"truncate": True}}),
        ("gemma3", {"query_pre_attn_scalar": 176}),
        ("granite", {"residual_multiplier": 0.41}),
        ("granite", {"attention_multiplier": 0.21}),
        ("granite", {"embedding_multiplier": 3.1}),
        ("granite", {"logits_scaling": 4.1}),
        ("ministral3", {"rope_parameters": CONFIGS["ministral3"]["rope_parameters"] | {"llama_4_scaling_beta": 0.38}}),
        ("mistral4", {"rope_parameters": CONFIGS["mistral4"]["rope_parameters"] | {"llama_4_scaling_beta": 0.38}}),
        ("mistral4", {"n_group": 4, "topk_group": 2}),
        ("lfm2", {"norm_eps": 2e-3}),
        ("granitemoehybrid", {"residual_multiplier": 0.41}),
        ("granitemoehybrid", {"attention_multiplier": 0.21}),
        ("granitemoehybrid", {"position_embedding_type": "rope"}),
        ("granitemoehybrid dense", {"mamba_n_groups": 1, "mamba_d_state": 48}),
        ("nemotron_h", {"routed_scaling_factor": 2.4}),
        ("nemotron_h", {"norm_topk_prob": False}),
        ("nemotron_h", {"layer_norm_epsilon": 2e-3}),
        ("muse_glimmer", {"qk_scale_factor": 3.8}),
        ("muse_glimmer", {"post_norm_eps": 0.012}),
        ("muse_glimmer", {"layer_rope_theta": [0, 50_000.0, 50_000.0, 0, 0]}),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}),
        ("olmo3", {"sliding_window": 31}),
        ("olmo3", {"rope_scaling": CONFIGS["olmo3"]["rope_scaling"] | {"attention_factor": 1.3}}),
        ("gemma4", {"final_logit_softcapping": 20.0}),
        ("gemma4", {"sliding_window": 31}),
        (
            "gemma4",
            {
                "rope_parameters": CONFIGS["gemma4"]["rope_parameters"]
                | {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}
            },
        ),
        ("gemma4", {"top_k_experts": 3}),
        ("gemma3", {"rope_local_base_freq": 10_100.0}),
        ("phi3", {"original_max_position_embeddings": 4000}),
        (
            "qwen2 with yarn",
            {"rope_scaling": {"type": "yarn", "factor": 4.2, "original_max_position_embeddings": 1024}},
        ),
    ],
)
def test_the_comparison_sees_one_setting_that_is_off(name: str, change: dict, tmp_path) -> None:
    """Power: the same weights under a configuration that differs in one setting, just so."""
    known, prompt = checkpoint(name), draw_prompt(200)
    for file in known.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((known.folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, logits = generate(load(tmp_path), prompt, 2)
    assert off(logits[:1], known.logits(prompt)[-1:]) > FAMILY_LOGITS_FAR > FAMILY_LOGITS


@pytest.mark.parametrize("what", ["correction", "latent_norm", "query_norm", "shared"])
def test_what_a_model_of_latents_has_beyond_others_is_seen_if_it_is_left_out(what: str) -> None:
    known, prompt = checkpoint("glm4_moe_lite"), draw_prompt(60)
    runner = load(known.folder)
    for layer in runner._prefill.decoder.weights.layers:
        if what == "latent_norm":
            layer.latent.norm.fill_(1.0)
        elif what == "query_norm":
            layer.latent.query_norm.fill_(1.0)
        elif layer.experts is not None:
            (layer.experts.correction if what == "correction" else layer.down).zero_()
    assert off(generate(runner, prompt, 2)[1][:1], known.logits(prompt)[-1:]) > 100 * FAMILY_LOGITS


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("glm4_moe_lite", {"q_lora_rank": None, "n_shared_experts": 2}),
        ("glm4_moe_lite", {"n_group": 4, "topk_group": 2, "v_head_dim": 56}),
        ("glm4_moe_lite", {"first_k_dense_replace": None, "rope_interleave": False, "tie_word_embeddings": True}),
        ("deepseek_v2", {"q_lora_rank": 40, "rope_scaling": None, "first_k_dense_replace": 0}),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        ),
        (
            "mistral4",
            {
                "n_group": 4,
                "topk_group": 2,
                "norm_topk_prob": False,
                "first_k_dense_replace": 0,
                "routed_scaling_factor": 1.5,
            },
        ),
        ("mistral4", {"rope_interleave": False, "rope_parameters": None}),
        ("gpt_oss", {"tie_word_embeddings": True}),
        ("gpt_oss", {"rope_scaling": None, "layer_types": None}),
        ("gemma4", {"tie_word_embeddings": False}),
        ("gemma4", {"layer_types": None, "rope_parameters": None, "final_logit_softcapping": None}),
        ("gemma4", {"attention_k_eq_v": False}),  # so that KV heads of other layers are not its own, either
        ("gemma4", {"enable_moe_block": False, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}),
        ("gemma4", {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1}),
        ("gemma4", {"model_type": "gemma4_unified_text", "enable_moe_block": False, "num_kv_shared_layers": 3}),
        ("gemma4", {"head_dim": 32, "num_global_key_value_heads": 2, "sliding_window": 5000}),
        ("gemma4 with inputs", {"use_double_wide_mlp": False, "num_kv_shared_layers": 0}),
        ("smollm3", {"no_rope_layers": None, "layer_types": None, "attention_bias": True, "mlp_bias": True}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 24, "layer_types": None,
                     "tie_word_embeddings": False}),
    ],
)  # fmt: skip
def test_what_a_family_may_leave_out_or_put_together_is_transformers(name: str, change: dict) -> None:
    known, prompt = checkpoint(name, **change), draw_prompt(60)
    tokens, logits = generate(load(known.folder), prompt, 6)
    wanted = known.logits(np.concatenate([prompt, tokens[:-1]]))[len(prompt) - 1 :]
    assert off(logits, wanted) < FAMILY_LOGITS
    assert wanted.argmax(-1).tolist() == tokens


def test_a_past_of_latents_may_be_expanded_in_pieces_and_experts_lie_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpu.prefill.unit_attention.EXPANDED_TOKENS", 48)
    known, prompt = checkpoint("glm4_moe_lite"), draw_prompt(300)
    tokens, logits = generate(load(known.folder, experts_on_card=3), prompt, 4)
    wanted = known.logits(np.concatenate([prompt, tokens[:-1]]))[len(prompt) - 1 :]
    assert off(logits, wanted) < FAMILY_LOGITS


def test_layers_that_draft_tokens_are_passed_over_and_others_behind_the_last_are_not(tmp_path: Path) -> None:
    for name in ("glm4_moe_lite", "qwen3"):
        known = checkpoint(name)
        tensors = load_file(known.folder / "model.safetensors")
        tensors["model.layers.3.self_attn.o_proj.weight"] = torch.ones(3, 3)
        save_file(tensors, tmp_path / "model.safetensors")
        shutil.copy(known.folder / "config.json", tmp_path)
        if name == "qwen3":
            with pytest.raises(ModelError, match=r"tensor model\.layers\.3\.self_attn\.o_proj\.weight is not one of"):
                load(tmp_path)
        else:
            prompt = draw_prompt(20)
            assert off(generate(load(tmp_path), prompt, 2)[1][:1], known.logits(prompt)[-1:]) < FAMILY_LOGITS


def test_sinks_that_are_left_out_are_seen() -> None:
    known, prompt = checkpoint("gpt_oss"), draw_prompt(60)
    runner = load(known.folder)
    for layer in runner._prefill.decoder.weights.layers:
        layer.sinks.fill_(-100.0)
    assert off(generate(runner, prompt, 2)[1][:1], known.logits(prompt)[-1:]) > 100 * FAMILY_LOGITS


@pytest.mark.parametrize("name", ["gemma4", "gemma4 with inputs"])
def test_a_gemma4_that_sees_pictures_loads_its_text_in_either_spelling_and_says_so(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers saves it: its own names of tensors, heads layer by layer, and keys of layers that need none."""
    known, prompt = checkpoint(name), draw_prompt(60)
    tensors = load_file(known.folder / "model.safetensors")
    renamed = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
    config = json.loads((known.folder / "config.json").read_text())
    shape = read_architecture(known.folder)
    for layer, spec in enumerate(shape.layers):
        if spec.kv_of is not None:
            stem = f"model.language_model.layers.{layer}.self_attn"
            renamed |= {f"{stem}.k_proj.weight": torch.ones(2, 2), f"{stem}.k_norm.weight": torch.ones(2)}
    renamed["model.vision_tower.patch_embedder.input_proj.weight"] = torch.ones(4, 4)
    renamed["model.embed_vision.embedding_projection.weight"] = torch.ones(4, 4)
    save_file(renamed, tmp_path / "model.safetensors")
    heads = {"head_dim": 32, "num_key_value_heads": shape.num_kv_heads}
    text = {key: value for key, value in config.items() if key not in ("global_head_dim", "num_global_key_value_heads")}
    text["per_layer_config"] = {
        str(layer): heads for layer, spec in enumerate(shape.layers) if spec.window_tokens is None
    }
    whole = {"model_type": "gemma4", "text_config": text, "vision_config": {"hidden_size": 4}, "audio_config": None}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"image_token_id": 300, "tie_word_embeddings": True}))
    with caplog.at_level("INFO"):
        _, logits = generate(load(tmp_path), prompt, 4)
    assert "vision_config: pictures, video and sound are not served" in caplog.text
    assert off(logits[:1], known.logits(prompt)[-1:]) < FAMILY_LOGITS


@pytest.mark.parametrize("what", ["value_norm", "scale", "gains", "table", "key_norm"])
def test_what_a_gemma4_has_beyond_others_is_seen_if_it_is_left_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, prompt = "gemma4" if what == "gains" else "gemma4 with inputs", draw_prompt(60)
    known = checkpoint(name)
    runner = load(known.folder)
    decoder = runner._prefill.decoder
    for layer, spec in zip(decoder.weights.layers, decoder.specs, strict=True):
        if what == "scale":
            layer.scale.fill_(1.0)
        elif what == "gains":
            layer.experts.beside.gains.fill_(1.0)
        elif what == "key_norm" and spec.kv_of is not None:
            layer.key_norm.fill_(1.0)
    if what == "table":
        decoder.weights.inputs.table.zero_()
    if what == "value_norm":
        specs = tuple(replace(spec, value_norm=False) for spec in decoder.specs)
        monkeypatch.setattr(decoder.projections, "_specs", specs)
    assert off(generate(runner, prompt, 2)[1][:1], known.logits(prompt)[-1:]) > 100 * FAMILY_LOGITS


@pytest.mark.parametrize("name", ["gpt_oss", *OF_2026])
def test_an_output_matrix_may_be_tied_or_not_and_a_checkpoint_in_parts(name: str, tmp_path: Path) -> None:
    """In each family of 2026; a Muse Glimmer's is its own, since its embeddings are normed."""
    is_tied = not CONFIGS[name].get("tie_word_embeddings", False) and name != "muse_glimmer"
    known, prompt = checkpoint(name, tie_word_embeddings=is_tied), draw_prompt(60)
    write_shards(load_file(known.folder / "model.safetensors"), tmp_path, 3)
    shutil.copy(known.folder / "config.json", tmp_path)
    assert read_architecture(tmp_path).tied_embeddings is is_tied
    assert off(generate(load(tmp_path), prompt, 2)[1][:1], known.logits(prompt)[-1:]) < FAMILY_LOGITS


def test_experts_of_a_gemma4_may_lie_in_host_memory() -> None:
    known, prompt = checkpoint("gemma4"), draw_prompt(60)
    tokens, logits = generate(load(known.folder, experts_on_card=2), prompt, 6)
    wanted = known.logits(np.concatenate([prompt, tokens[:-1]]))[len(prompt) - 1 :]
    assert off(logits, wanted) < FAMILY_LOGITS


@pytest.mark.parametrize("is_default", [False, True])
def test_a_ministral3_that_sees_pictures_loads_its_text_and_refuses_mac(is_default: bool, tmp_path: Path) -> None:
    change = {"rope_parameters": None} if is_default else {}
    known, prompt = checkpoint("ministral3", **change), draw_prompt(200)
    tensors = load_file(known.folder / "model.safetensors")
    renamed = {f"language_model.{key}": value for key, value in tensors.items()}
    save_file(renamed | {"vision_tower.patch_conv.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    text = json.loads((known.folder / "config.json").read_text())
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert off(generate(load(tmp_path), prompt, 2)[1][:1], known.logits(prompt)[-1:]) < FAMILY_LOGITS
    assert replace(read_architecture(tmp_path), name="") == replace(read_architecture(known.folder), name="")
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text | {"model_type": "qwen3"}}))
    with pytest.raises(ModelError, match=r"a mistral3 whose text_config\.model_type is 'qwen3'; served"):
        read_architecture(tmp_path)
    shape = read_architecture(known.folder)
    named = {"own": Composition.model_validate({"reuse": {"method": "mac"}})}
    (part,) = resolve_profiles(named, None)["own"].ring_parts
    site = Site(shape, None, 16, 2, torch.float32, torch.float32, CPU)
    with pytest.raises(ModelError, match=r"mac: queries of .* grow with their positions"):
        make_device_sides([part], site, {part.id: 1})


def test_a_mistral4_that_sees_pictures_loads_its_text_with_experts_apart_or_not(tmp_path: Path) -> None:
    known, prompt = checkpoint("mistral4"), draw_prompt(60)
    tensors = load_file(known.folder / "model.safetensors")
    apart = {}
    for key, value in tensors.items():
        stem, end = key.split("experts.")[0] + "experts.", key.split(".")[-1]
        for number, one in enumerate(value if key.endswith(("experts.gate_up_proj", "experts.down_proj")) else ()):
            parts = zip(("gate_proj", "up_proj"), one.chunk(2), strict=True) if end == "gate_up_proj" else [(end, one)]
            apart |= {f"{stem}{number}.{what}.weight": part.contiguous() for what, part in parts}
    text = json.loads((known.folder / "config.json").read_text())
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    stacked = {key: value for key, value in tensors.items() if "mlp.experts." in key}
    assert len(apart) == len(stacked) // 2 * 8 * 3
    for held in (tensors, {key: value for key, value in tensors.items() if key not in stacked} | apart):
        save_file({f"language_model.{key}": value for key, value in held.items()}, tmp_path / "model.safetensors")
        assert off(generate(load(tmp_path), prompt, 2)[1][:1], known.logits(prompt)[-1:]) < FAMILY_LOGITS
    turned = text["rope_parameters"] | {"partial_rotary_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text | {"rope_parameters": turned}}))
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5; wanted 16 of 40"):
        read_architecture(tmp_path)


def test_beyond_its_original_positions_longrope_has_its_other_frequencies() -> None:
    """One set a deployment: the long one, where contexts may be longer than the original; transformers goes by text."""
    known = checkpoint("phi3", original_max_position_embeddings=128)
    prompt = draw_prompt(200)
    _, logits = generate(load(known.folder), prompt, 2)
    assert off(logits[:1], known.logits(prompt)[-1:]) < FAMILY_LOGITS
    short = draw_prompt(64)
    assert off(generate(load(known.folder, 128), short, 2)[1][:1], known.logits(short)[-1:]) < FAMILY_LOGITS
    assert off(generate(load(known.folder), short, 2)[1][:1], known.logits(short)[-1:]) > FAMILY_LOGITS


def test_a_rope_of_ones_own_is_as_if_the_file_had_it() -> None:
    plain, scaled = checkpoint("qwen2"), checkpoint(
        "qwen2", rope_scaling=None, max_position_embeddings=2048, rope_theta=20_000.0
    )  # fmt: skip
    asked = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "rope_theta": 20_000.0}
    shape = read_architecture(plain.folder, asked)
    assert (shape.rope.kind, shape.rope.theta, shape.max_context_tokens) == ("yarn", 20_000.0, 4096)
    written = read_architecture(scaled.folder, {key: asked[key] for key in asked if key != "rope_theta"})
    assert (written.rope, written.max_context_tokens) == (shape.rope, 4096)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_decoder_of_the_evals_agrees_with_transformers(name: str) -> None:
    known, length, steps = checkpoint(name), 90, 4
    text = draw_prompt(length + steps)
    wanted = known.logits(text)
    decoder = load_decoder(known.folder, CPU, torch.float32)
    tokens = torch.from_numpy(text.astype(np.int64))[None]
    cache, hidden = decoder.prefill(tokens[:, :length], torch.tensor([length]), length, length + steps, lambda _: None)
    got = [decoder.logits(hidden)]
    for step in range(steps):
        size = length + step + 1
        got.append(decoder.step(cache, tokens[:, size - 1], torch.tensor([size]), size, attend_all))
    assert off(torch.cat(got), wanted[length - 1 :]) < FAMILY_LOGITS


@pytest.mark.parametrize("name", TINY)
def test_random_weights_of_every_family_are_decoded_as_the_benchmarks_peer_decodes_them(name: str) -> None:
    shape = named_shape(name)
    length = 140 if shape.window_layers else 20  # beyond the window
    weights = random_weights(shape, 5, torch.float32, CPU, lambda fraction: None)
    prompts = np.random.default_rng(0).integers(0, shape.vocab_size, (1, length), dtype=np.int32)
    tokens = decode(build_runner(shape, weights, 1, length + 10, torch.float32, CPU), prompts, 8).tokens
    assert PlainDecode(shape, weights, 1, length + 10, CPU).follow(prompts, tokens) == Agreement(1.0, 0.0)
    assert len(set(tokens[0].tolist())) > 1


def test_the_compiled_step_serves_plain_layers_alone() -> None:
    served = {name for name in TINY if serves(named_shape(name), torch.float32, CPU)}
    assert "tiny" in served
    assert ("tiny-phi3" in served) is (named_shape("tiny-phi3").dim % COLUMN_BLOCK == 0)  # vectors of 16 or 8
    assert all(set(named_shape(name).layers) == {LayerSpec()} for name in served)


def test_fused_and_interleaved_tensors_are_put_in_our_order() -> None:
    known = checkpoint("glm4")
    shape = read_architecture(known.folder)
    layer = load_weights(known.folder, shape, torch.float32, CPU, lambda fraction: None).layers[1]
    stored = dict(known.model.named_parameters())["model.layers.1.self_attn.q_proj.weight"].view(16, 64, -1)
    ours = layer.qkv[: 16 * 64].view(16, 64, -1)
    assert torch.equal(ours[:, 1], stored[:, 2])  # the first element of the second pair
    assert torch.equal(ours[:, 33], stored[:, 3])  # and what it is rotated against
    assert torch.equal(ours[:, 16], stored[:, 32])  # the first element that is not rotated
    gate_up = dict(known.model.named_parameters())["model.layers.1.mlp.gate_up_proj.weight"]
    assert torch.equal(layer.gate_up, gate_up)
