"""What a model's folder may hold: an output matrix beside a configuration that ties it, tensors that are not as they
should be, and GGUF files in place of a checkpoint.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gpu.config import ModelConfig
from gpu.model.architecture import ModelError, load_architecture, read_architecture
from gpu.model.matrix_formats import output_format, weight_bytes
from gpu.weights.checkpoint import check_checkpoint, load_weights
from gpu.weights.tensor_check import check_model
from gpu.weights.weights import Weights
from server.commands.servable import require_weights
from server.deployment import ConfigError, load_deployment
from tests.gpu.family_checkpoints import checkpoint, draw_prompt, generate, load
from tests.gpu.gguf_files import write as write_gguf
from tests.gpu.test_families import off
from tests.gpu.test_weights import write_shards
from tests.tolerances import FAMILY_LOGITS

CPU = torch.device("cpu")
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"


def load_all(model: ModelConfig) -> Weights:
    return load_weights(model.path, load_architecture(model), torch.float32, CPU, lambda fraction: None)


def own_head(folder: Path, head: torch.Tensor, num_shards: int = 1) -> Path:
    """A folder whose configuration ties its matrices, and whose files have an output matrix of their own."""
    plain = checkpoint("llama3").folder
    shutil.copy(plain / "config.json", folder)
    tensors = load_file(plain / SINGLE) | {HEAD: head}
    if num_shards > 1:
        return write_shards(tensors, folder, num_shards)
    save_file(tensors, folder / SINGLE)
    return folder


def draw_head(seed: int = 3) -> torch.Tensor:
    embedding = load_file(checkpoint("llama3").folder / SINGLE)["model.embed_tokens.weight"]
    return 0.4 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(seed)) * 64**-0.5 * 4


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_files_own_output_matrix_is_used_though_the_configuration_ties_it(
    num_shards: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, prompt = own_head(tmp_path, draw_head(), num_shards), draw_prompt(40)
    with caplog.at_level(logging.WARNING, "gpu.model.architecture"):
        tokens, logits = generate(load(folder), prompt, 8)
    assert f"event=not_tied folder={folder} tensor=lm_head.weight" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = np.concatenate([prompt, tokens[:-1]]).astype(np.int64)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(text)[None]).logits[0, len(prompt) - 1 :]
    assert off(logits, wanted) < FAMILY_LOGITS
    assert off(logits, checkpoint("llama3").logits(text)[len(prompt) - 1 :]) > 0.1, "the tied matrix would be seen"


def test_a_configuration_that_ties_is_believed_where_the_file_has_no_output_matrix() -> None:
    folder = checkpoint("llama3").folder
    assert HEAD not in load_file(folder / SINGLE)
    weights = load_all(ModelConfig(path=folder))
    assert weights.logits is weights.embedding


@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_plan_counts_an_output_matrix_of_its_own(weights: str | None, tmp_path: Path) -> None:
    model = ModelConfig(path=own_head(tmp_path, draw_head()), weights=weights)
    own, tied = (
        load_architecture(model),
        load_architecture(model.model_copy(update={"path": checkpoint("llama3").folder})),
    )
    held = load_all(model).logits
    assert weight_bytes(own, 4, True) - weight_bytes(tied, 4, True) == held.nbytes
    assert (output_format(own) is None) == (weights is None)


# ---- what `plan` and `serve` refuse alike

NORM, MATRIX = "model.layers.1.post_attention_layernorm.weight", "model.layers.2.mlp.down_proj.weight"
Damage = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
DAMAGES: dict[str, Damage] = {
    "missing": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != MATRIX},
    "extra": lambda tensors: tensors | {"model.layers.7.mlp.down_proj.weight": torch.ones(2, 2)},
    "a bias too many": lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(256)},
    "reshaped": lambda tensors: tensors | {MATRIX: tensors[MATRIX].t().contiguous()},
    "a row too few": lambda tensors: tensors | {MATRIX: tensors[MATRIX][:-1].contiguous()},
    "a norm of two axes": lambda tensors: tensors | {NORM: tensors[NORM][None].contiguous()},
    "of another type": lambda tensors: tensors | {NORM: torch.ones(64, dtype=torch.int8)},
}  # fmt: skip


def refusals(model: ModelConfig) -> tuple[str, str]:
    """What loading says, and what `tandem plan` does."""

    def plan() -> None:
        load_architecture(model)
        require_weights(model.path)
        check_model(model)

    with pytest.raises(ModelError) as served:
        load_all(model)
    with pytest.raises(ModelError) as planned:
        plan()
    return str(served.value), str(planned.value)


def assert_alike(model: ModelConfig) -> str:
    served, planned = refusals(model)
    assert served == planned
    assert "\n" not in served
    assert str(model.path) in served
    return served


def write_folder(folder: Path, num_shards: int, damage: Damage) -> ModelConfig:
    plain = checkpoint("llama3").folder
    shutil.copy(plain / "config.json", folder)
    tensors = damage(load_file(plain / SINGLE))
    if num_shards > 1:
        write_shards(tensors, folder, num_shards)
    else:
        save_file(tensors, folder / SINGLE)
    return ModelConfig(path=folder)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_plan_refuses_the_tensors_that_serve_refuses(damage: str, num_shards: int, tmp_path: Path) -> None:
    told = assert_alike(write_folder(tmp_path, num_shards, DAMAGES[damage]))
    assert "tensor model.layers." in told


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def write_damaged_gguf(path: Path, damage: str) -> ModelConfig:
    """A GGUF file of a tiny Llama, one of whose tensors is left out, added, or has another shape."""
    whole = write_gguf(checkpoint("llama3").folder, path.with_name("whole.gguf"), lambda name: "F32", is_alone=True)
    reader, writer = gguf.GGUFReader(whole), gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name == "blk.1.ffn_up.weight":
            if damage == "missing":
                continue
            data = data[:-1].copy() if damage == "a row too few" else data.T.copy() if damage == "reshaped" else data
        writer.add_tensor(tensor.name, data)
    if damage == "extra":
        writer.add_tensor("foo.weight", np.ones((2, 2), np.float32))
    if damage == "a bias too many":
        writer.add_tensor("blk.1.ffn_up.bias", np.ones(96, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelConfig(path=path)


def test_a_whole_gguf_file_passes_the_check(tmp_path: Path) -> None:
    check_model(write_damaged_gguf(tmp_path / "model.gguf", "none"))


# ---- GGUF files in a folder


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write_gguf(checkpoint("llama3").folder, tmp_path / "some.gguf", lambda name: "F32", is_alone=True)
    assert load_deployment(tmp_path).model.path == path
    config = tmp_path.parent / f"{tmp_path.name}.yaml"
    config.write_text(json.dumps({"model": {"path": tmp_path.name, "tokenizer": tmp_path.name}}))
    model = load_deployment(config).model
    assert (model.path, model.tokenizer) == (path, path)
    assert load_architecture(model) == read_architecture(path)


def test_of_a_file_in_parts_the_first_is_taken(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"some-{number:05}-of-00003.gguf").write_bytes(b"GGUF")
    assert load_deployment(tmp_path).model.path == tmp_path / "some-00001-of-00003.gguf"


def test_several_gguf_files_in_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    words = r"no config\.json; .*; name the file, as .*a-Q4_0\.gguf \(there are a-Q4_0\.gguf, b-Q8_0\.gguf\)$"
    with pytest.raises(ConfigError, match=words):
        load_deployment(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json is missing; .*\(there are a-Q4_0\.gguf, b-Q8_0\.gguf\)$"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_bytes((checkpoint("llama3").folder / "config.json").read_bytes())
    assert load_deployment(tmp_path).model.path == tmp_path


def test_of_weights_that_are_still_fetched_the_index_says_whether_a_matrix_is_tied(tmp_path: Path) -> None:
    """A plan for a machine that is elsewhere asks no files."""
    own_head(tmp_path, draw_head(), 3)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert not read_architecture(tmp_path).tied_embeddings
    (tmp_path / "model.safetensors.index.json").unlink()
    assert read_architecture(tmp_path).tied_embeddings


ODD_KEYS = {
    "layers without end": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; wanted 1,024 at most"),
    "a size of thirty digits": ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000; wanted 2,"),
    "heads without end": ({"num_attention_heads": 2**30, "head_dim": 16}, "config.json asks for"),
    "more heads than numbers": ({"num_attention_heads": 2**30}, "head_dim is 0; wanted an even number"),
    "end tokens that are objects": ({"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}; wanted the id of a token"),
    "a list of methods": ({"quantization_config": {"quant_method": ["gptq"]}}, "quant_method is ['gptq']; served:"),
    "an epsilon without end": ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
}


@pytest.mark.parametrize("name", ODD_KEYS)
def test_odd_values_of_a_configuration_are_refused_in_one_line_at_once(name: str, tmp_path: Path) -> None:
    changes, words = ODD_KEYS[name]
    folder = shutil.copytree(checkpoint("llama2").folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError) as refused:
        check_checkpoint(folder, read_architecture(folder))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


UNREADABLE = {"too deep": "[" * 100_000, "a number of 6,000 digits": '{"a": ' + "9" * 6000 + "}", "cut": "{"}


@pytest.mark.parametrize("content", UNREADABLE)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_cannot_be_read_is_refused_by_its_file(file: str, content: str, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("llama2").folder, tmp_path / "model")
    (folder / file).write_text(UNREADABLE[content])
    with pytest.raises(ModelError, match=f"{file} is not valid JSON"):
        check_checkpoint(folder, read_architecture(folder))
