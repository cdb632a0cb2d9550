"""A model family, and a weight format, that stand in a folder outside the project: nothing else is touched."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

import gpu.formats
import gpu.model.families
from gpu.config import ModelConfig
from gpu.model import library_key_search
from gpu.model.answers.formats import Marks
from gpu.model.architecture import ModelError, read_architecture
from gpu.model.declared_formats import call_formats, choose_by_sign
from gpu.model.family import family_folders
from gpu.model.library_keys import read_library_keys
from gpu.model.matrix_formats import layer_tensors
from gpu.model.weight_format import weight_formats
from gpu.weights.checkpoint import load_weights
from gpu.weights.matrix import as_matrix
from server.deployment import Deployment
from server.parsing.answer_formats import choose_format
from server.parsing.answer_parts import join_parts
from server.parsing.message_reader import MessageReader
from server.parsing.offered_tools import Tools
from tests.gpu import gguf_files
from tests.gpu.family_checkpoints import checkpoint, draw_prompt, generate, load
from tests.tolerances import FAMILY_LOGITS

FAMILY = '''"""A Llama whose norms are stored less one, and that calls its MLP by other names."""

from gpu.model.config_keys import ConfigKeys
from gpu.model.families.lessened.answers import CALLS, REASONING
from gpu.model.family import LAYER_TENSORS, Family, parse_sizes
from gpu.model.gguf.keys import GgufForm
from gpu.model.spec import Architecture, LayerSpec


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    return parse_sizes(keys, name, (LayerSpec(),), norm_weight_offset=keys.positive("norm_weight_offset", float))


FAMILY = Family(
    model_types=("lessened",),
    parse=parse,
    tensors=lambda shape: LAYER_TENSORS,
    defaults={"norm_weight_offset": 1.0},
    prefixes=(("decoder.", "model."),),
    gguf=GgufForm("lessened", tensor_names="llama"),
    calls=(CALLS,),
    reasoning=(REASONING,),
)
'''
ANSWERS = '''"""Calls as lines that begin with an arrow, and reasoning between brackets."""

from gpu.model.answers.formats import NAMED_CALL, CallFormat, CallSyntax, Marks, ReasoningFormat

CALLS = CallFormat(
    name="arrow",
    region={"open_pattern": r"->(?P<name>[a-z]+)(?=\\{)", "content": "json", "transform": NAMED_CALL},
    sign="->",
    before=("hermes",),
    syntax=CallSyntax(head=("->{name}",), arguments="json", tail="", between="\\n", opens="->", mark="->"),
)
REASONING = ReasoningFormat(
    "bracket", {"open": "((", "close": "))"}, sign=r"\\(\\(", before=("think",), marks=Marks("((", "))")
)
'''
FORMAT = '''"""Signed bytes with a step for each row."""

from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.weight_format import QuantisationKeys, WeightFormat


def read(keys: QuantisationKeys) -> Quantisation:
    keys.only("bits", 8)
    return Quantisation("steps", MatrixFormat("int8", None), None, keys.names("plain"))


FORMAT = WeightFormat({"steps": read}, ("steps",), "gpu.formats.steps.tensors", scale_suffixes=(".step",))
'''
TENSORS = '''"""Tensors of such modules."""

import torch

from gpu.weights.stored import SCALES, StoredTensor


def stored_tensors(scheme, stored, part, row_block):
    def fill(numbers):
        part.put_numbers(numbers.view(torch.uint8) ^ 128)

    return {
        ".bytes": StoredTensor(((part.rows, part.packed.inner),), ("I8",), fill),
        ".step": StoredTensor(((part.rows,),), SCALES, lambda step: part.put_scales(step.reshape(-1, 1), 1)),
    }
'''
CPU = torch.device("cpu")


def _add(monkeypatch: pytest.MonkeyPatch, package: Any, folder: Path, name: str, files: dict[str, str]) -> None:
    (folder / name).mkdir(parents=True)
    for file, text in files.items():
        (folder / name / file).write_text(text)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])


def _forget(name: str) -> None:
    for cached in (family_folders, read_library_keys, weight_formats, layer_tensors):
        cached.cache_clear()
    for module in [module for module in sys.modules if module == name or module.startswith(name + ".")]:
        del sys.modules[module]


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _add(
        monkeypatch, gpu.model.families, tmp_path / "added", "lessened", {"__init__.py": FAMILY, "answers.py": ANSWERS}
    )
    _forget("gpu.model.families.lessened")
    yield
    monkeypatch.undo()
    _forget("gpu.model.families.lessened")


@pytest.fixture
def steps_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _add(monkeypatch, gpu.formats, tmp_path / "added", "steps", {"__init__.py": FORMAT, "tensors.py": TENSORS})
    _forget("gpu.formats.steps")
    yield
    monkeypatch.undo()
    _forget("gpu.formats.steps")


def _write(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir()
    config = json.loads((checkpoint("llama2").folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _assert_is_the_llama(path: Path) -> None:
    """Its text and its logits are those that transformers has for the Llama of the same numbers."""
    prompt = draw_prompt(40)
    tokens, logits = generate(load(path), prompt, 4)
    wanted = checkpoint("llama2").logits(np.concatenate([prompt, tokens[:-1]]))[len(prompt) - 1 :]
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < FAMILY_LOGITS
    assert wanted.argmax(-1).tolist() == tokens


@pytest.mark.usefixtures("family")
def test_a_family_in_a_folder_of_its_own_is_read_from_a_hugging_face_folder(tmp_path: Path) -> None:
    own = load_file(checkpoint("llama2").folder / "model.safetensors")
    tensors = {
        name.replace("model.", "decoder.", 1): tensor - 1 if "norm" in name else tensor for name, tensor in own.items()
    }
    _assert_is_the_llama(_write(tmp_path / "folder", tensors, model_type="lessened", pretraining_tp=None))


@pytest.mark.usefixtures("family")
def test_a_family_in_a_folder_of_its_own_is_read_from_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such files have norms whole, as llama.cpp writes those of Gemma, and rows of queries as the checkpoint has."""
    own = load_file(checkpoint("llama2").folder / "model.safetensors")
    plain = _write(tmp_path / "plain", own, model_type="lessened", pretraining_tp=None)
    monkeypatch.setitem(gguf_files.ARCHITECTURES, "lessened", "lessened")
    path = gguf_files.write(plain, tmp_path / "model.gguf", lambda _: "F32", is_alone=True)
    assert read_architecture(path).family == "lessened"
    _assert_is_the_llama(path)


@pytest.mark.usefixtures("family")
def test_a_key_that_a_new_family_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = _write(tmp_path / "folder", {}, model_type="lessened", pretraining_tp=None, swing=3)
    with pytest.raises(ModelError, match="swing is 3, and this key is not known"):
        read_architecture(folder)


@pytest.mark.usefixtures("family")
def test_keys_of_a_family_that_transformers_lacks_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(library_key_search, "_write", lambda path, tree: written.append(path.parent.name))
    library_key_search.write_library_keys()
    assert "lessened" not in written
    assert {"model", "llama"} < {*written}


@pytest.mark.usefixtures("family")
def test_an_answer_in_a_format_of_a_new_family_is_read() -> None:
    """Its chat templates have signs of other formats as well, which it goes before."""
    model = Deployment(model=ModelConfig(random_weights="x", tool_parser="arrow", reasoning_parser="bracket")).model
    text = '((hm)) Now:\n->look{"at": "it"}->go{}'
    for chosen in (model, ModelConfig(random_weights="x")):
        found = choose_format(chosen, "{{ '<tool_call>-><think>((' }}", True, {})
        assert found is not None
        assert found.syntax is not None
        assert (found.syntax.head, found.reasoning) == (("->{name}",), Marks("((", "))"))
        reader = MessageReader(found, "", Tools({"look": {}, "go": {}}), False)
        answer = join_parts([*(part for one in text for part in reader.feed(one, False)), *reader.finish()])
        assert (answer.reasoning, answer.content) == ("hm", "Now:")
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
            ("look", {"at": "it"}),
            ("go", {}),
        ]


def test_a_format_that_no_family_declares_is_refused_with_those_that_are() -> None:
    model = ModelConfig(random_weights="x", tool_parser="arrow")
    with pytest.raises(ValidationError, match=r"tool_parser: got 'arrow'; wanted one of auto, none, atem, .*hermes"):
        Deployment(model=model)
    assert choose_by_sign(call_formats(), "->") is None


@pytest.mark.usefixtures("steps_format")
def test_a_weight_format_in_a_folder_of_its_own_is_loaded(tmp_path: Path) -> None:
    """What is unpacked is number times step, exactly."""
    tensors, wanted, generator = {}, {}, torch.Generator().manual_seed(3)
    for name, tensor in load_file(checkpoint("llama2").folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        numbers = torch.randint(-128, 128, tensor.shape, generator=generator, dtype=torch.int8)
        step = (torch.rand(len(tensor), generator=generator) / 512 + 1 / 1024).half()
        tensors |= {f"{module}.bytes": numbers, f"{module}.step": step}
        wanted[module] = numbers.float() * step.float()[:, None]
    config = {"quant_method": "steps", "bits": 8}
    folder = _write(tmp_path / "folder", tensors, quantization_config=config)
    shape = read_architecture(folder)
    weights = load_weights(folder, shape, torch.float32, CPU, lambda _: None)
    for index, layer in enumerate(weights.layers):
        parts = [wanted[f"model.layers.{index}.self_attn.{which}_proj"] for which in "qkv"]
        assert torch.equal(as_matrix(layer.qkv).unpack(), torch.cat(parts))
        assert torch.equal(as_matrix(layer.mlp[1]).unpack(), wanted[f"model.layers.{index}.mlp.down_proj"])
    with pytest.raises(ModelError, match=r"quantization_config\.bits is 4; served: 8"):
        read_architecture(_write(tmp_path / "other", tensors, quantization_config=config | {"bits": 4}))
