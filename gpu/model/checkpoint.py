"""Checkpoints: the safetensors of a Hugging Face folder, each tensor to its place on the device.

It refuses to know how weights are used, beyond that queries and keys are rotated in halves: rows of a checkpoint whose
pairs are neighbours, or of heads that are rotated in part, are put in that order here, which no product of a query and
a key notices. Invariant: a tensor goes from its memory-mapped file straight into its place; host memory never holds a
copy of the model. A folder is checked whole, names and shapes, before the first byte is allocated.
"""

import json
import logging
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu.model.family import Family, families
from gpu.model.spec import Architecture, ModelError
from gpu.model.weights import LayerWeights, Progress, Weights, allocate_weights

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
STORED_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's tensor goes: order, of its rows on the device (int64), or None: as they are; offset is
    added, in float32, and then all multiplied by `gain`.
    """

    tensor: Tensor
    order: Tensor | None = None
    offset: float = 0.0
    gain: float = 1.0

    def fill(self, stored: Tensor) -> None:
        rows = stored if self.order is None else stored.index_select(0, self.order)
        if self.offset or self.gain != 1:
            rows = (rows.float() + self.offset) * self.gain
        self.tensor.copy_(rows)


def load_weights(folder: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device,
                 on_progress: Progress) -> Weights:  # fmt: skip
    """Read `folder`'s safetensors, sharded or single, into new device tensors of `dtype`.

    Raises ModelError, one line, for a file that is missing or broken and for a tensor that is missing, extra or of
    another shape or type than the architecture's.
    """
    files = _find_files(folder)
    wanted = wanted_shapes(architecture)
    _check_tensors(files, wanted, architecture, folder)
    weights = allocate_weights(architecture, dtype, device)
    places = _places(weights, architecture)
    began, stored_bytes = time.perf_counter(), 0
    done, total = 0, sum(place.tensor.numel() for place in places.values())
    for path, names in files.items():
        with _open(path) as shard:
            for name in names:
                place = places.get(_canonical(name, architecture) or "")
                if place is None:
                    continue
                stored = shard.get_tensor(name)
                place.fill(stored)
                stored_bytes += stored.nbytes
                done += stored.numel()
                on_progress(done / total)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _log_rate(folder, stored_bytes, time.perf_counter() - began)
    return weights


def _log_rate(folder: Path, num_bytes: int, seconds: float) -> None:
    """What was read, how fast, and the most memory that this process has held so far, mapped files included."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    log.info(
        "weights folder=%s gib=%.2f seconds=%.1f gib_s=%.2f peak_rss_gib=%.2f",
        folder, num_bytes / 2**30, seconds, num_bytes / 2**30 / max(seconds, 1e-9), peak_bytes / 2**30,
    )  # fmt: skip


def head_order(architecture: Architecture) -> Tensor | None:
    """Which element of a checkpoint's head each of ours is, int64 `[dim]`, so that element i is rotated against
    i + dim / 2; None: the same one. What is not rotated stands behind what is, in both halves.
    """
    dim, rotary = architecture.dim, architecture.rotary_dim or architecture.dim
    if rotary == dim and not architecture.is_interleaved:
        return None
    rotated = torch.arange(rotary).view(-1, 2).T if architecture.is_interleaved else torch.arange(rotary).view(2, -1)
    still = torch.arange(rotary, dim).view(2, -1)
    return torch.cat([rotated, still], 1).flatten()


def _places(weights: Weights, architecture: Architecture) -> dict[str, Place]:
    """Where each tensor of a checkpoint goes, a slice of a fused one, mostly; by canonical name."""
    offset = architecture.norm_offset
    places = {
        "model.embed_tokens.weight": Place(weights.embedding),
        "model.norm.weight": Place(weights.final_norm, offset=offset),
    }
    if not architecture.tied_embeddings:
        places["lm_head.weight"] = Place(weights.logits)
    names = _family(architecture).tensors(architecture)
    for index, layer in enumerate(weights.layers):
        known = _layer_places(layer, architecture)
        places |= {f"model.layers.{index}.{name}": known[what] for name, what in names.items()}
    return places


def _layer_places(layer: LayerWeights, architecture: Architecture) -> dict[str, Place]:
    """Of one layer, by what a family's table calls them (`gpu.model.family`)."""
    a = architecture
    query, key, offset = a.num_heads * a.dim, a.num_kv_heads * a.dim, a.norm_offset
    order, heads = head_order(a), None
    if order is not None:
        rotated = torch.arange(a.num_heads + a.num_kv_heads)[:, None] * a.dim + order
        heads = torch.cat([rotated.flatten(), torch.arange(query + key, query + 2 * key)])
    places = {
        "attention_norm": Place(layer.attention_norm, offset=offset),
        "mlp_norm": Place(layer.mlp_norm, offset=offset),
        "output": Place(layer.output),
        "gate_up": Place(layer.gate_up),
        "gate": Place(layer.gate_up[: a.intermediate]),
        "up": Place(layer.gate_up[a.intermediate :]),
        "down": Place(layer.down),
    }
    for suffix, rows in (("", layer.qkv), ("_bias", layer.qkv_bias)):
        if rows is not None:
            places["qkv" + suffix] = Place(rows, heads)
            places["query" + suffix] = Place(rows[:query], None if heads is None else heads[:query])
            places["key" + suffix] = Place(rows[query : query + key], None if heads is None else heads[:key])
            places["value" + suffix] = Place(rows[query + key :])
    if layer.query_norm is not None and layer.key_norm is not None:
        places["query_norm"] = Place(layer.query_norm, order, offset, a.query_gain)
        places["key_norm"] = Place(layer.key_norm, order, offset)
    if layer.attention_post_norm is not None and layer.mlp_post_norm is not None:
        places["attention_post_norm"] = Place(layer.attention_post_norm, offset=offset)
        places["mlp_post_norm"] = Place(layer.mlp_post_norm, offset=offset)
    return places


def _family(architecture: Architecture) -> Family:
    return families()[architecture.family]


def _canonical(name: str, architecture: Architecture) -> str | None:
    return _family(architecture).canonical(name)


def wanted_shapes(architecture: Architecture) -> dict[str, list[int]]:
    meta = allocate_weights(architecture, torch.bfloat16, torch.device("meta"))
    return {name: list(place.tensor.shape) for name, place in _places(meta, architecture).items()}


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
                place = _canonical(name, architecture)
                if place is None or _is_derived(place, architecture):
                    continue
                if place not in wanted:
                    family = architecture.family
                    raise ModelError(f"model: {path}: tensor {name} is not one of a {family} of {len(wanted)} tensors")
                stored = shard.get_slice(name)
                if stored.get_shape() != wanted[place]:
                    raise ModelError(
                        f"model: {path}: tensor {name} is {stored.get_shape()}; wanted {wanted[place]} by config.json"
                    )
                if stored.get_dtype() not in STORED_DTYPES:
                    raise ModelError(
                        f"model: {path}: tensor {name} is {stored.get_dtype()}; wanted {', '.join(STORED_DTYPES)}"
                    )
                found.add(place)
    missing = [name for name in wanted if name not in found]
    if missing:
        where = next(iter(files)) if len(files) == 1 else folder / INDEX_FILE
        raise ModelError(f"model: {where}: tensor {missing[0]} is missing ({len(missing)} of {len(wanted)} are)")


def _is_derived(name: str, architecture: Architecture) -> bool:
    """Tensors of old checkpoints that repeat what is known: RoPE frequencies, and an output matrix that is tied."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and architecture.tied_embeddings)
