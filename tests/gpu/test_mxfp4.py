"""gpt-oss's own files: experts in MXFP4, whose numbers transformers unpacks, and the text that they give."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gpu.model.architecture import named_shape, read_architecture
from gpu.model.matrix_format import ROUNDED, MatrixFormat, Quantisation
from gpu.model.matrix_formats import OF_EXPERTS, rounded, weight_bytes
from gpu.model.spec import ModelError
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.word_layout import pack_words
from gpu.weights.checkpoint import load_packed
from gpu.weights.drawing import random_packed_weights
from gpu.weights.matrix import as_matrix
from gpu.weights.rounding import round_rows
from tests.gpu.family_checkpoints import checkpoint, draw_prompt, generate, load
from tests.gpu.test_families import off
from tests.tolerances import FAMILY_LOGITS

CPU = torch.device("cpu")
QUANTISED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with blocks and scales, and one with the same numbers plain. Every code occurs, and a scale of 0."""
    known, root = checkpoint("gpt_oss"), tmp_path_factory.mktemp("mxfp4")
    tensors, generator = load_file(known.folder / "model.safetensors"), torch.Generator().manual_seed(3)
    plain, packed = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, rows = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, rows, inner // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, blocks.shape[:3], dtype=torch.uint8, generator=generator)
        scales[0, 0, 0], blocks[0, 0, 0] = 0, 0
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
    config = json.loads((known.folder / "config.json").read_text())
    for kind, held in (("plain", plain), ("packed", packed)):
        (root / kind).mkdir()
        save_file(held, root / kind / "model.safetensors", {"format": "pt"})
        more = {"quantization_config": QUANTISED} if kind == "packed" else {}
        (root / kind / "config.json").write_text(json.dumps(config | more))
    return root / "plain", root / "packed"


@pytest.mark.parametrize("on_card", [None, 0, 2])
def test_experts_in_mxfp4_hold_the_numbers_that_transformers_reads(
    folders: tuple[Path, Path], on_card: int | None
) -> None:
    """Bit by bit, in rows of our order, on the card or in host memory; all else is plain."""
    plain, ours = (
        load_packed(folder, read_architecture(folder), torch.float32, CPU, lambda _: None, on_card)
        for folder in folders
    )
    for layer, known in zip(ours.layers, plain.layers, strict=True):
        for name in known.matrices:
            for stack, wanted in zip(layer.stacks(name), known.stacks(name), strict=True):
                assert isinstance(stack, Packed) == (name in OF_EXPERTS)
                assert torch.equal(as_matrix(stack).unpack(), wanted), name


def test_the_text_is_that_of_the_same_numbers_plain(folders: tuple[Path, Path]) -> None:
    prompt = draw_prompt(60)
    (tokens, logits), (others, wanted) = (generate(load(folder), prompt, 6) for folder in folders)
    assert tokens == others
    assert off(logits, wanted) < FAMILY_LOGITS


def test_resident_bytes_are_those_of_the_file_but_for_whole_units_of_words() -> None:
    """Of gpt-oss-20b: within a twentieth of what the blocks and scales of its files take."""
    shape = named_shape("gpt-oss-20b")
    of_experts = 3 * 24 * 32 * 2880 * 2880
    in_file = of_experts * (16 + 1) / 32 + 2 * (shape.num_weights - of_experts)
    assert 1.0 < weight_bytes(shape, 2, is_packed=True) / in_file < 1.05


def test_random_numbers_have_the_deviation_that_was_asked_for() -> None:
    experts = Quantisation("mxfp4", MatrixFormat("fp4", 32, scale_bytes=1), None, ("self_attn",))
    shape = replace(named_shape("tiny-gpt-oss"), quantisation=experts)
    weights = random_packed_weights(shape, 1, torch.float32, CPU, lambda _: None, None)
    wide = as_matrix(weights.layers[0].matrices["experts_gate_up"]).unpack()
    assert float(wide.std()) == pytest.approx(shape.hidden**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.mlp.experts.down_proj_scales", "holds scales that are NaN; wanted exponents up to 254"),
        ("model.layers.0.mlp.experts.down_proj_blocks", r"tensor .*down_proj_blocks is .*; wanted"),
    ],
)
def test_broken_blocks_and_scales_are_refused_by_name(
    folders: tuple[Path, Path], name: str, words: str, tmp_path: Path
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    tensors[name] = torch.full_like(tensors[name], 255) if name.endswith("scales") else tensors[name][:, :-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[1] / "config.json").read_text())
    with pytest.raises(ModelError, match=words) as caught:
        load_packed(tmp_path, read_architecture(tmp_path), torch.float32, CPU, lambda _: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4", "granitemoehybrid"])
@pytest.mark.parametrize("asked", ["int4", "int8", "fp8"])
def test_experts_in_one_tensor_are_rounded_as_they_are_loaded(name: str, asked: str) -> None:
    """Each as its own rows would be, whether these are columns in the file, and come in turns, or not."""
    folder = checkpoint(name).folder
    shape = read_architecture(folder)
    plain = load_packed(folder, shape, torch.float32, CPU, lambda _: None)
    got = load_packed(folder, rounded(shape, asked, "model.weights"), torch.float32, CPU, lambda _: None)
    stored = ROUNDED[asked].layers
    for ours, theirs in zip(got.layers, plain.layers, strict=True):
        for matrix in ("experts_gate_up", "experts_down"):
            packed, wanted = ours.matrices[matrix], theirs.matrices[matrix]
            assert isinstance(packed, Packed)
            rows = len(wanted) // 6  # of an expert
            for expert in range(6):
                own = slice(expert * rows, (expert + 1) * rows)
                numbers, scales, zeros = round_rows(wanted[own], stored)
                assert torch.equal(packed.words[own], pack_words(numbers, packed.bits))
                assert torch.equal(packed.scales[own], scales.to(packed.scales.dtype).expand_as(packed.scales[own]))
                assert zeros is None or torch.equal(packed.zeros[own], zeros)
            assert float((as_matrix(packed).unpack() - wanted).abs().max()) < 0.25 * float(wanted.abs().max())
