"""GGUF files: their numbers, names, rotations and texts are those of the checkpoint that they mean, or one line says
what is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.kernels.packed import Packed
from gpu.model.architecture import read_architecture
from gpu.model.checkpoint import load_packed, load_weights
from gpu.model.gguf.blocks import Blocks, read_numbers, widen_blocks
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.matrix import as_matrix
from gpu.model.matrix_formats import step_weight_bytes, weight_bytes
from gpu.model.weights import Weights
from tests.gpu.family_checkpoints import checkpoint, generate, load
from tests.gpu.gguf_files import BYTES, draw_blocks, wanted_numbers, write

CPU = torch.device("cpu")
MATRICES = ("qkv", "output", "gate_up", "down")
WIDE = {"hidden_size": 256, "intermediate_size": 512}


def all_of(kind: str, embedding: str = "F16") -> Any:
    return lambda name: embedding if name.startswith("token_embd") else kind


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M: values and half of the down projections are finer, and so is the output matrix."""
    if name.startswith(("output", "token_embd")) or "attn_v" in name or name == "blk.1.ffn_down.weight":
        return "Q6_K"
    return {"blk.2.ffn_down.weight": "Q5_K", "blk.2.attn_k.weight": "Q8_0", "blk.0.attn_output.weight": "BF16",
            "blk.1.ffn_gate.weight": "F16"}.get(name, "Q4_K")  # fmt: skip


MIXES = {kind: all_of(kind, kind) for kind in BYTES} | {"mixed": mixed, "F16": all_of("F16"), "BF16": all_of("BF16")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each written once, when it is asked for."""

    class Files(dict):
        def __missing__(self, name: str) -> Path:
            path = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
            self[name] = write(checkpoint("llama2", **WIDE).folder, path, MIXES[name])
            return self[name]

    return Files()


def plain_of(path: Path) -> Path:
    return path.with_name(path.stem + "-plain")


def packed(path: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_packed(path, read_architecture(path), dtype, CPU, lambda _: None)


def whole(folder: Path) -> Weights:
    return load_weights(folder, read_architecture(folder), torch.float32, CPU, lambda _: None)


@pytest.mark.parametrize("kind", BYTES)
def test_blocks_of_any_bytes_are_the_numbers_of_their_published_layout(kind: str) -> None:
    assert {name: (layout.block, layout.num_bytes) for name, layout in BLOCK_KINDS.items()} == BYTES
    data = draw_blocks(np.random.default_rng(1), kind, 5, 768)
    blocks, wanted = Blocks(kind, torch.from_numpy(data)), wanted_numbers(kind, data, 768)
    got = read_numbers(blocks).widen()
    assert blocks.shape == got.shape == wanted.shape
    assert np.array_equal(got.numpy(), wanted.astype(np.float32))
    place = torch.full((5, 768), float("nan"), dtype=torch.bfloat16)
    widen_blocks(blocks, place)
    assert torch.equal(place, torch.from_numpy(wanted.astype(np.float32)).bfloat16())


@pytest.mark.parametrize("name", MIXES)
def test_every_matrix_holds_the_numbers_of_the_file(name: str, files) -> None:
    got, wanted = packed(files[name]), whole(plain_of(files[name]))
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in MATRICES:
            stored = getattr(ours, matrix)
            if name not in ("mixed", "F16", "BF16"):
                assert isinstance(stored, Packed)
            assert torch.equal(as_matrix(stored).unpack(), getattr(theirs, matrix)), matrix
    assert torch.equal(as_matrix(got.logits).unpack(), wanted.logits)
    assert torch.equal(got.embedding, wanted.embedding)
    assert torch.equal(got.final_norm, wanted.final_norm)


def test_what_is_one_product_takes_the_finest_groups_of_its_parts(files) -> None:
    got = packed(files["mixed"])
    kinds = [
        {name: isinstance(one, Packed) and (one.kind, one.group, one.run) for name in MATRICES
         if (one := getattr(layer, name)) is not None}
        for layer in got.layers
    ]  # fmt: skip
    four, eight = ("int4", 32, 256), ("int8", 16, 256)
    assert kinds[0] == {"qkv": eight, "output": False, "gate_up": four, "down": four}
    assert kinds[1] == {"qkv": eight, "output": four, "gate_up": False, "down": eight}
    assert kinds[2] == {"qkv": ("int8", 16, 32), "output": four, "gate_up": four, "down": ("int8", 32, 256)}
    assert isinstance(got.logits, Packed)
    assert got.logits.kind == "int8"


@pytest.mark.parametrize("name", MIXES)
def test_bytes_are_those_that_are_held(name: str, files) -> None:
    shape, got = read_architecture(files[name]), packed(files[name], torch.bfloat16)
    tensors = [
        tensor for layer in got.layers for part in layer.__slots__ if (tensor := getattr(layer, part)) is not None
    ]
    held = sum(tensor.nbytes for tensor in [*tensors, got.final_norm, got.logits])
    assert step_weight_bytes(shape, 2, is_packed=True) == held
    assert weight_bytes(shape, 2, is_packed=True) == held + got.embedding.nbytes


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "mixed"])
def test_text_and_logits_are_those_of_the_numbers_in_float32(name: str, files) -> None:
    prompt = np.random.default_rng(1).integers(0, 320, 200).astype(np.int32)
    (tokens, logits), (others, wanted) = (
        generate(load(path), prompt, 6) for path in (files[name], plain_of(files[name]))
    )
    assert tokens == others
    assert torch.equal(logits, wanted)
    assert len(set(tokens)) > 2


FAMILIES = {
    "llama3": {}, "mistral": {}, "qwen2 with yarn": {}, "qwen3": {}, "phi3": {}, "glm4": {},
    "gemma3": {"query_pre_attn_scalar": 256},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_checkpoint_that_its_file_was_made_of(family: str, tmp_path: Path) -> None:
    """Names, biases, norms, windows, rotations and their scaling; logits beside transformers' own."""
    plain = checkpoint(family, **FAMILIES[family])
    path = write(plain.folder, tmp_path / "model.gguf", lambda name: "F32")
    ours, theirs = read_architecture(path), read_architecture(plain.folder)
    for field in ("family", "num_heads", "num_kv_heads", "dim", "rotary_dim", "layer_pattern", "query_gain",
                  "embedding_scale", "norm_offset", "tied_embeddings", "rms_norm_eps",
                  "max_context_tokens"):  # fmt: skip
        assert getattr(ours, field) == getattr(theirs, field), field
    prompt = np.random.default_rng(1).integers(0, 320, 150).astype(np.int32)
    (tokens, logits), (others, wanted) = (generate(load(one), prompt, 4) for one in (path, plain.folder))
    assert tokens == others
    assert torch.allclose(logits, wanted, atol=2e-4 if family == "llama3" else 0, rtol=0)
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("family", ["qwen3", "phi3", "glm4", "gemma3"])
def test_other_families_rows_are_put_in_order_in_blocks_too(family: str, tmp_path: Path) -> None:
    path = write(checkpoint(family, **FAMILIES[family]).folder, tmp_path / "model.gguf", all_of("Q8_0", "Q8_0"))
    got, wanted = packed(path), whole(plain_of(path))
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for matrix in MATRICES:
            stored = getattr(ours, matrix)
            assert isinstance(stored, Packed)
            assert torch.equal(as_matrix(stored).unpack(), getattr(theirs, matrix)), matrix
        assert torch.equal(ours.attention_norm, theirs.attention_norm)
