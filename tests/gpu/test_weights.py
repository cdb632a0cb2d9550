"""Weights: every tensor to its place, one copy, and one clear line for each way that a folder can be broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu.model.architecture import Architecture, ModelError, named_shape, read_architecture
from gpu.weights.checkpoint import load_weights
from gpu.weights.drawing import random_weights
from gpu.weights.weights import Weights
from tests.gpu.reference_model import FOLDER
from tests.tolerances import PEAK_HOST_COPIES

CPU = torch.device("cpu")
ARCHITECTURE = read_architecture(FOLDER)
NUM_TENSORS = 9 * ARCHITECTURE.num_layers + 2  # embedding and final norm beside the layers'


def load(folder: Path, architecture: Architecture = ARCHITECTURE) -> Weights:
    return load_weights(folder, architecture, torch.float32, CPU, lambda fraction: None)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "model.safetensors")


def write_shards(tensors: dict[str, torch.Tensor], folder: Path, num_shards: int) -> Path:
    names, weight_map = sorted(tensors), {}
    for index in range(num_shards):
        shard = names[index::num_shards]
        save_file({name: tensors[name] for name in shard}, folder / f"model-{index}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{index}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def assert_same(a: Weights, b: Weights) -> None:
    for left, right in zip(flat(a), flat(b), strict=True):
        assert torch.equal(left, right)


def flat(weights: Weights) -> list[torch.Tensor]:
    layers = [
        tensor
        for layer in weights.layers
        for tensor in (layer.attention_norm, layer.qkv, layer.output, layer.mlp_norm, layer.gate_up, layer.down)
    ]
    return [weights.embedding, *layers, weights.final_norm, weights.logits]


def test_fused_tensors_hold_their_parts(tensors: dict[str, torch.Tensor]) -> None:
    weights = load(FOLDER)
    prefix = "model.layers.3."
    qkv = torch.cat([tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(weights.layers[3].qkv, qkv.float())
    assert torch.equal(weights.layers[3].gate_up, gate_up.float())
    assert weights.logits is weights.embedding


def test_shards_load_as_a_single_file_does(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert_same(load(write_shards(tensors, tmp_path, 3)), load(FOLDER))


def test_untied_output_matrix_is_read(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    architecture = Architecture(**{name: getattr(ARCHITECTURE, name) for name in ARCHITECTURE.__slots__}
                                | {"tied_embeddings": False})  # fmt: skip
    head = torch.randn(ARCHITECTURE.vocab_size, ARCHITECTURE.hidden)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path, architecture).logits, head)
    with pytest.raises(ModelError, match=rf"lm_head\.weight is missing \(1 of {NUM_TENSORS + 1} are\)"):
        load(FOLDER, architecture)


def test_derived_tensors_of_old_checkpoints_are_ignored(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), load(FOLDER))


def broken_cases() -> list:
    norm = "model.layers.0.input_layernorm.weight"

    def missing_tensor(folder: Path, tensors: dict) -> None:
        save_file({name: value for name, value in tensors.items() if name != norm}, folder / "model.safetensors")

    def extra_tensor(folder: Path, tensors: dict) -> None:
        save_file(tensors | {"model.layers.99.thing": torch.ones(1)}, folder / "model.safetensors")

    def wrong_shape(folder: Path, tensors: dict) -> None:
        save_file(tensors | {norm: torch.ones(7)}, folder / "model.safetensors")

    def wrong_type(folder: Path, tensors: dict) -> None:
        save_file(tensors | {norm: torch.ones(384, dtype=torch.int8)}, folder / "model.safetensors")

    def truncated(folder: Path, tensors: dict) -> None:
        data = (FOLDER / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])

    def empty_file(folder: Path, tensors: dict) -> None:
        (folder / "model.safetensors").write_bytes(b"")

    def nothing(folder: Path, tensors: dict) -> None:
        pass

    def missing_shard(folder: Path, tensors: dict) -> None:
        write_shards(tensors, folder, 3)
        (folder / "model-1.safetensors").unlink()

    def broken_index(folder: Path, tensors: dict) -> None:
        (folder / "model.safetensors.index.json").write_text("{nonsense")

    def index_without_map(folder: Path, tensors: dict) -> None:
        (folder / "model.safetensors.index.json").write_text("[]")

    def index_that_lies(folder: Path, tensors: dict) -> None:
        write_shards(tensors, folder, 3)
        save_file({"other": torch.ones(1)}, folder / "model-1.safetensors")

    return [
        (missing_tensor, rf"model\.safetensors: tensor {norm} is missing \(1 of {NUM_TENSORS} "),
        (extra_tensor, r"model\.safetensors: tensor model\.layers\.99\.thing is not one of"),
        (wrong_shape, rf"tensor {norm} is \[7\]; wanted \[384\]"),
        (wrong_type, rf"tensor {norm} is I8; wanted BF16, F16, F32"),
        (truncated, r"model\.safetensors is not a whole safetensors file"),
        (empty_file, r"model\.safetensors is not a whole safetensors file"),
        (nothing, r"has neither model\.safetensors nor model\.safetensors\.index\.json"),
        (missing_shard, r"model-1\.safetensors is missing"),
        (broken_index, r"index\.json is not valid JSON"),
        (index_without_map, r"index\.json holds list; wanted a JSON object"),
        (index_that_lies, r"model-1\.safetensors: tensor .* is missing; .* says that it is there"),
    ]


@pytest.mark.parametrize(("damage", "words"), [pytest.param(*case, id=case[0].__name__) for case in broken_cases()])
def test_a_broken_folder_is_refused_in_one_line(
    damage, words: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    damage(tmp_path, tensors)
    with pytest.raises(ModelError, match=words) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


PEAK_SCRIPT = """
import sys, torch
from pathlib import Path
from gpu.model.architecture import read_architecture
from gpu.weights.checkpoint import load_weights

def anonymous_bytes():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

folder = Path(sys.argv[1])
peak = before = anonymous_bytes()
def measure(fraction):
    global peak
    peak = max(peak, anonymous_bytes())
weights = load_weights(folder, read_architecture(folder), torch.float32, torch.device("cpu"), measure)
print(peak - before)
"""


def test_loading_holds_one_copy_of_the_weights(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", PEAK_SCRIPT, str(FOLDER)], capture_output=True, text=True, check=True)
    model_bytes = 4 * ARCHITECTURE.num_weights
    assert int(run.stdout) < PEAK_HOST_COPIES * model_bytes
    assert PEAK_HOST_COPIES * model_bytes < model_bytes + model_bytes // 2, "would not see a second (bf16) copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_repeat_and_are_finite(dtype: torch.dtype) -> None:
    first, again = (random_weights(named_shape("tiny"), 7, dtype, CPU, lambda fraction: None) for _ in range(2))
    assert_same(first, again)
    assert all(tensor.isfinite().all() for tensor in flat(first))
    other = random_weights(named_shape("tiny"), 8, dtype, CPU, lambda fraction: None)
    assert not torch.equal(first.layers[0].qkv, other.layers[0].qkv)
