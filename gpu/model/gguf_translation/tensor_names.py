"""Name a GGUF file's tensors as a Hugging Face checkpoint does, and say how its matrices of few bits are stored.

A tensor that no layer wants keeps its own name, so that the check of a checkpoint reports it.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from gpu.model.draft_head_shape import GGUF_TENSORS, PREFIXES
from gpu.model.family import EACH, families
from gpu.model.gguf.file import GgufFile, GgufTensor
from gpu.model.gguf.keys import OF_LAYER
from gpu.model.gguf.kinds import BLOCK_KINDS, format_of
from gpu.model.gguf_translation.config_translation import ROPE_TENSORS
from gpu.model.matrix_format import MatrixFormat, Quantisation
from gpu.model.matrix_formats import matrix_shapes, module_names
from gpu.model.spec import Architecture, ModelError

SCHEME = "gguf"
TIED_KINDS = ("int4", "int8")  # of few bits, of an output matrix whose rows are looked up as well
# Of one expert, as files had them before llama.cpp put all of a layer into one tensor.
_OF_ONE_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")
_OF_ONE_AXIS = (".A_log", ".D", "mixer.norm.weight", "mamba.norm.weight")  # numbers, which files have in groups
_OF_HEADS = ("self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight")  # whose rows of heads are one axis here
_GATE_UP = "_gate_up_exps.weight"  # of all experts: rows of gate, and behind them those of up
_WHOLE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_INPUTS = (
    "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight",
    "model.per_layer_projection_norm.weight",
)  # fmt: skip


def checkpoint_names(file: GgufFile, architecture: Architecture) -> dict[str, GgufTensor]:
    """Return tensors by canonical names, in the file's order, without those of the rotation, and of layers that guess
    tokens and that no family of theirs has.
    """
    names = {theirs: ours for ours, theirs in stored_names(architecture).items()}
    num_layers = architecture.main_layers + architecture.draft_heads
    form = families()[architecture.family].gguf
    read_before = ROPE_TENSORS if form is None else (*ROPE_TENSORS, *form.read_before)
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        of_layer = OF_LAYER.match(name)
        if name.endswith(read_before) or (of_layer and int(of_layer[1]) >= num_layers):
            continue
        one = _OF_ONE_EXPERT.fullmatch(name)
        all_of_layer = f"{one[1]}_exps.weight" if one else name
        if one and all_of_layer in names and all_of_layer not in file.tensors:
            found[names[all_of_layer].replace(EACH, one[2])] = tensor
        elif name not in names and (parts := _gate_and_up(name, tensor, names)):
            found |= parts
        else:
            found |= _each_expert(names.get(name, name), tensor)
    return found


def _gate_and_up(name: str, tensor: GgufTensor, names: Mapping[str, str]) -> dict[str, GgufTensor]:
    """Return each expert's gate and up, of a file that has both in one tensor and a family that has them apart; none of
    another tensor.
    """
    stem = name.removesuffix(_GATE_UP)
    ours = [names.get(f"{stem}_{what}_exps.weight") for what in ("gate", "up")]
    if stem == name or None in ours or len(tensor.shape) != 3 or tensor.shape[1] % 2:
        return {}
    experts, rows, columns = tensor.shape
    num_bytes = tensor.num_bytes // experts // 2
    return {
        str(ours[half]).replace(EACH, str(expert)): replace(
            tensor, shape=(rows // 2, columns), offset=tensor.offset + (2 * expert + half) * num_bytes,
            num_bytes=num_bytes,
        )
        for expert in range(experts) for half in (0, 1)
    }  # fmt: skip


def _each_expert(name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
    """Return a tensor of all experts as one of each: they lie one after another. Axes that a checkpoint's tensor lacks
    are taken off.
    """
    if name.endswith(_OF_ONE_AXIS):
        return {name: replace(tensor, shape=(prod(tensor.shape),))}
    if name.endswith(_OF_HEADS) and len(tensor.shape) == 3:
        heads, rows, columns = tensor.shape
        return {name: replace(tensor, shape=(heads * rows, columns))}
    if EACH not in name or len(tensor.shape) != (2 if name.endswith(".bias") else 3):
        return {name: tensor}
    num_experts = tensor.shape[0]
    num_bytes = tensor.num_bytes // num_experts
    return {
        name.replace(EACH, str(expert)): replace(
            tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * num_bytes, num_bytes=num_bytes
        )
        for expert in range(num_experts)
    }


def stored_names(architecture: Architecture) -> dict[str, str]:
    """Return what a file calls each tensor that a checkpoint of this architecture may have.

    Those of all experts of a layer are one, EACH in a name.
    """
    family = families()[architecture.family]
    first, heads = architecture.main_layers, architecture.draft_heads
    num_layers = first + heads
    table, form = family.tensors(architecture), family.gguf
    assert form is not None, "a GGUF file's architecture was read by its form"
    experts = [spec.experts for spec in architecture.layer_pattern if spec.experts is not None]
    # Of most mixtures llama.cpp knows no layers without experts.
    is_alone = len(experts) == len(architecture.layer_pattern) and not experts[0].beside_mlp
    dense = ("gate", "up", "down") if is_alone else ()
    layer_names = tuple(name for name, what in table.items() if EACH in name or what not in dense)
    known = _names(
        form.tensor_names or form.architecture, num_layers,
        tuple(name for name in layer_names if name not in form.own_names), architecture.layer_inputs is not None,
    )  # fmt: skip
    known |= {
        f"model.layers.{layer}.{name}": f"blk.{layer}.{form.own_names[name]}"
        for layer in range(num_layers) for name in layer_names if name in form.own_names
    }  # fmt: skip
    for head in range(heads):
        begin, own = f"model.layers.{first + head}.", f"{PREFIXES[0]}layers.{head}."
        known = {own + name[len(begin) :] if name.startswith(begin) else name: theirs for name, theirs in known.items()}
        further = PREFIXES[0] if head == 0 else f"{PREFIXES[0]}{head}."  # of which none is read
        known |= {
            further + name.removeprefix(PREFIXES[0]): f"blk.{first + head}.nextn.{theirs}"
            for name, theirs in GGUF_TENSORS.items()
        }
    return known


def find_quantisation(file: GgufFile, architecture: Architecture) -> Quantisation | None:
    """Return which matrices have few bits; None where all matrices of layers, and the output matrix, are plain."""
    tensors = checkpoint_names(file, architecture)
    matrices: dict[tuple[int, str], MatrixFormat | None] = {}
    repacked: Counter[str] = Counter()
    for layer in range(architecture.num_layers):
        for matrix in matrix_shapes(architecture, architecture.layers[layer]):
            names = [f"{module}.weight" for module in module_names(architecture, layer, matrix).values()]
            kinds = [tensors[name].kind for name in names if name in tensors]
            stored = format_of(kinds)
            matrices[layer, matrix] = stored
            in_file = {tensors[name].name: tensors[name].kind for name in names if name in tensors}
            repacked.update(kind for kind in in_file.values() if _is_repacked(kind, stored))
    output = tensors.get("model.embed_tokens.weight" if architecture.tied_embeddings else "lm_head.weight")
    output_stored = None if output is None else format_of([output.kind])
    if architecture.tied_embeddings and output_stored is not None and output_stored.kind not in TIED_KINDS:
        output_stored = None
    counts = Counter(stored for stored in matrices.values() if stored is not None)
    if not counts and output_stored is None:
        return None
    commonest = counts.most_common(1)[0][0] if counts else output_stored
    assert commonest is not None, "one of them is of few bits"
    if output is not None and _is_repacked(output.kind, output_stored):
        repacked[output.kind] += 1
    note = _describe(matrices, output_stored, repacked)
    return Quantisation(SCHEME, commonest, output_stored, matrices=matrices, note=note)


def stored_as(architecture: Architecture, kind: str) -> Architecture:
    """Return the shape of a file whose matrices are all of this kind, but for the output matrix, which is Q6_K as in
    most files. Raises ModelError for rows that are no whole blocks.
    """
    output = None if architecture.tied_embeddings else format_of(["Q6_K"])
    stored = format_of([kind])
    if stored is None:
        raise ModelError(f"model: {kind} is widened at load; wanted a kind of few bits")
    shapes = (matrix_shapes(architecture, spec) for spec in set(architecture.layer_pattern))
    for inner in {columns for shape in shapes for _, columns in shape.values()}:
        if inner % BLOCK_KINDS[kind].block:
            block = BLOCK_KINDS[kind].block
            raise ModelError(f"model: {architecture.name} has rows of {inner}; {kind} has blocks of {block}")
    return replace(architecture, quantisation=Quantisation(SCHEME, stored, output, note=f"all matrices {kind}"))


def _is_repacked(kind: str, stored: MatrixFormat | None) -> bool:
    block = BLOCK_KINDS.get(kind)
    return block is not None and (stored is None or block.is_repacked or block.stored != stored.kind)


def _describe(
    matrices: dict[tuple[int, str], MatrixFormat | None], output: MatrixFormat | None, repacked: Counter[str]
) -> str:
    counts = Counter("plain" if one is None else f"{one.kind} in groups of {one.group}" for one in matrices.values())
    words = [f"{count} matrices {what}" for what, count in counts.most_common()]
    words.append(f"output matrix {'plain' if output is None else f'{output.kind} in groups of {output.group}'}")
    if repacked:
        of = ", ".join(f"{count} of {kind}" for kind, count in sorted(repacked.items()))
        words.append(f"repacked to more bits or plain: {of}")
    return ", ".join(words)


@lru_cache(maxsize=2)
def _names(architecture: str, num_layers: int, layer_names: tuple[str, ...], has_inputs: bool) -> dict[str, str]:
    """Return llama.cpp's names by a checkpoint's. has_inputs: whether layers have inputs beside hidden states."""
    import gguf

    (known,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    table: Any = gguf.get_tensor_name_map(known, num_layers)
    ours = [
        *_WHOLE,
        *(_INPUTS if has_inputs else ()),
        *(f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in layer_names),
    ]
    found = {name: table.get_name(name.replace(f".{EACH}", ""), try_suffixes=(".weight", ".bias")) for name in ours}
    found |= {name: f"{theirs}.weight" for name, theirs in found.items() if not name.endswith((".weight", ".bias"))}
    assert len(set(found.values())) == len(ours), "no two tensors have one name"
    return found
