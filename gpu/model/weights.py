"""Weights on the device: read from a Hugging Face folder, or drawn at random for a named shape.

It refuses to know how they are used, beyond that Q, K and V are one matrix and gate and up another. Invariant: a tensor
goes from its memory-mapped file straight into its place on the device; host memory never holds a copy of the model. A
folder is checked whole, names and shapes, before the first byte is allocated.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu.model.architecture import Architecture, ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
STORED_DTYPES = ("BF16", "F16", "F32")
RANDOM_LOGIT_SPREAD = 3.0  # standard deviation of random weights' logits: neither flat nor one-hot

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """attention_norm, mlp_norm `[hidden]`; qkv `[(heads + 2 kv_heads) * dim, hidden]`; output `[hidden, heads * dim]`;
    gate_up `[2 * intermediate, hidden]`, gate first; down `[hidden, intermediate]`."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """embedding, logits `[vocab, hidden]` (one tensor if they are tied); final_norm `[hidden]`."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    logits: Tensor


def load_weights(folder: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device,
                 on_progress: Progress) -> Weights:  # fmt: skip
    """Read `folder`'s safetensors, sharded or single, into new device tensors of `dtype`.

    Raises ModelError, one line, for a file that is missing or broken and for a tensor that is missing, extra or of
    another shape or type than the architecture's.
    """
    files = _find_files(folder)
    wanted = _wanted_shapes(architecture)
    _check_tensors(files, wanted, architecture, folder)
    weights = _allocate(architecture, dtype, device)
    places = _places(weights, architecture)
    done, total = 0, sum(place.numel() for place in places.values())
    for path, names in files.items():
        with _open(path) as shard:
            for name in names:
                if name not in places:
                    continue
                places[name].copy_(shard.get_tensor(name))
                done += places[name].numel()
                on_progress(done / total)
    return weights


def random_weights(architecture: Architecture, seed: int, dtype: torch.dtype, device: torch.device,
                   on_progress: Progress) -> Weights:  # fmt: skip
    """Draw weights on the device: activations stay of order one, and logits have a spread of RANDOM_LOGIT_SPREAD."""
    weights = _allocate(architecture, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    residual_scale = (2 * architecture.num_layers) ** -0.5

    def draw(matrix: Tensor, scale: float) -> None:
        matrix.normal_(0.0, scale * matrix.shape[-1] ** -0.5, generator=generator)

    for index, layer in enumerate(weights.layers):
        layer.attention_norm.fill_(1.0)
        layer.mlp_norm.fill_(1.0)
        draw(layer.qkv, 1.0)
        draw(layer.output, residual_scale)
        draw(layer.gate_up, 1.0)
        draw(layer.down, residual_scale)
        on_progress((index + 1) / (architecture.num_layers + 1))
    weights.final_norm.fill_(1.0)
    draw(weights.logits, RANDOM_LOGIT_SPREAD)
    if not architecture.tied_embeddings:
        weights.embedding.normal_(0.0, 1.0, generator=generator)
    on_progress(1.0)
    return weights


def _allocate(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> Weights:
    a = architecture

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embedding = empty(a.vocab_size, a.hidden)
    layers = [
        LayerWeights(
            attention_norm=empty(a.hidden),
            qkv=empty((a.num_heads + 2 * a.num_kv_heads) * a.dim, a.hidden),
            output=empty(a.hidden, a.num_heads * a.dim),
            mlp_norm=empty(a.hidden),
            gate_up=empty(2 * a.intermediate, a.hidden),
            down=empty(a.hidden, a.intermediate),
        )
        for _ in range(a.num_layers)
    ]
    logits = embedding if a.tied_embeddings else empty(a.vocab_size, a.hidden)
    return Weights(embedding, layers, empty(a.hidden), logits)


def _places(weights: Weights, architecture: Architecture) -> dict[str, Tensor]:
    """The device tensor (a slice of a fused one, mostly) that each tensor of a checkpoint goes to."""
    query, key = architecture.num_heads * architecture.dim, architecture.num_kv_heads * architecture.dim
    places = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not architecture.tied_embeddings:
        places["lm_head.weight"] = weights.logits
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        places[prefix + "input_layernorm.weight"] = layer.attention_norm
        places[prefix + "self_attn.q_proj.weight"] = layer.qkv[:query]
        places[prefix + "self_attn.k_proj.weight"] = layer.qkv[query : query + key]
        places[prefix + "self_attn.v_proj.weight"] = layer.qkv[query + key :]
        places[prefix + "self_attn.o_proj.weight"] = layer.output
        places[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
        places[prefix + "mlp.gate_proj.weight"] = layer.gate_up[: architecture.intermediate]
        places[prefix + "mlp.up_proj.weight"] = layer.gate_up[architecture.intermediate :]
        places[prefix + "mlp.down_proj.weight"] = layer.down
    return places


def _wanted_shapes(architecture: Architecture) -> dict[str, list[int]]:
    meta = _allocate(architecture, torch.bfloat16, torch.device("meta"))
    return {name: list(place.shape) for name, place in _places(meta, architecture).items()}


def _find_files(folder: Path) -> dict[Path, list[str]]:
    """Each safetensors file with the names of its tensors (of the index, where there is one)."""
    index_path, single_path = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index_path.exists():
        if not single_path.exists():
            raise ModelError(f"model: {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; wanted one of them")
        with _open(single_path) as shard:
            return {single_path: list(shard.keys())}
    try:
        index = json.loads(index_path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"model: {index_path} is not valid JSON ({error})") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"model: {index_path}: weight_map is {weight_map!r}; wanted tensor names to file names")
    files: dict[Path, list[str]] = {}
    for name, file_name in weight_map.items():
        files.setdefault(folder / str(file_name), []).append(name)
    for path in files:
        if not path.exists():
            raise ModelError(f"model: {path} is missing; {INDEX_FILE} lists {len(files[path])} tensors in it")
        with _open(path) as shard:
            lost = sorted(set(files[path]) - set(shard.keys()))
        if lost:
            raise ModelError(f"model: {path}: tensor {lost[0]} is missing; {INDEX_FILE} says that it is there")
    return files


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"model: {path} is not a whole safetensors file ({error}); fetch it again") from None


def _check_tensors(files: dict[Path, list[str]], wanted: dict[str, list[int]], architecture: Architecture,
                   folder: Path) -> None:  # fmt: skip
    found: set[str] = set()
    for path, names in files.items():
        with _open(path) as shard:
            for name in names:
                if _is_derived(name, architecture):
                    continue
                if name not in wanted:
                    raise ModelError(f"model: {path}: tensor {name} is not one of a Llama of {len(wanted)} tensors")
                stored = shard.get_slice(name)
                if stored.get_shape() != wanted[name]:
                    raise ModelError(
                        f"model: {path}: tensor {name} is {stored.get_shape()}; wanted {wanted[name]} by config.json"
                    )
                if stored.get_dtype() not in STORED_DTYPES:
                    raise ModelError(
                        f"model: {path}: tensor {name} is {stored.get_dtype()}; wanted {', '.join(STORED_DTYPES)}"
                    )
                found.add(name)
    missing = [name for name in wanted if name not in found]
    if missing:
        where = next(iter(files)) if len(files) == 1 else folder / INDEX_FILE
        raise ModelError(f"model: {where}: tensor {missing[0]} is missing ({len(missing)} of {len(wanted)} are)")


def _is_derived(name: str, architecture: Architecture) -> bool:
    """Tensors of old checkpoints that repeat what is known: RoPE frequencies, and an output matrix that is tied."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and architecture.tied_embeddings)
