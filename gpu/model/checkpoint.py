"""Checkpoints: the safetensors of a Hugging Face folder, each tensor to its place on the device.

It refuses to know where that is (`gpu.model.places`) and how files are read (`gpu.model.reading`). Invariant: rows go
from their file into their place, directly where that is host memory and of their type; host memory never holds a copy
of the model. A folder is checked whole, names, shapes and types, before the first byte is allocated.
"""

import json
import logging
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpu.kernels.packed import Packed
from gpu.model.places import canonical, places, wanted_tensors
from gpu.model.placing import Placing
from gpu.model.reading import Piece, ReadError, read_pieces
from gpu.model.safetensors_file import FileTensor, read_header
from gpu.model.spec import Architecture, ModelError
from gpu.model.stored import StoredTensor
from gpu.model.weights import Progress, Stored, Weights, allocate_weights, unpacked

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}  # of integers
_SCALE_ENDS = (".scales", ".weight_scale")


def load_weights(folder: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device,
                 on_progress: Progress) -> Weights:  # fmt: skip
    """Read `folder`'s safetensors, sharded or single, into new device tensors of `dtype`.

    Matrices of few bits, of the file or rounded as the architecture's quantisation says, stay packed on a GPU and are
    unpacked on the CPU, where a step of plain weights is compiled. Raises ModelError, one line, for a file that is
    missing or broken and for a tensor that is missing, extra or of another shape or type than the architecture's.
    """
    weights = load_packed(folder, architecture, dtype, device, on_progress)
    return unpacked(weights) if device.type == "cpu" and architecture.quantisation is not None else weights


def load_packed(folder: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device,
                on_progress: Progress) -> Weights:  # fmt: skip
    """As `load_weights`, and packed on the CPU, too."""
    files = _find_files(folder)
    _check_tensors(files, wanted_tensors(architecture), architecture, folder)
    weights = allocate_weights(architecture, dtype, device, _find_scales(files, architecture))
    found = places(weights, architecture)
    tensors = [
        (path, tensor, place)
        for path, names in files.items()
        for tensor in _in_order(path, names)
        if (place := found.get(canonical(tensor.name, architecture) or "")) is not None and place.fill is not None
    ]
    total_bytes = sum(tensor.num_bytes for _, tensor, _ in tensors)
    began, done_bytes = time.perf_counter(), 0
    with ExitStack() as opened:
        numbers = {path: opened.enter_context(path.open("rb", buffering=0)).fileno() for path in files}
        for comes_first in (True, False):
            pieces = (
                piece
                for path, tensor, place in tensors
                if place.comes_first == comes_first
                for piece in Placing(tensor, place, str(path), device).pieces(numbers[path])
            )
            for num_bytes in _read(pieces, device):
                done_bytes += num_bytes
                on_progress(done_bytes / total_bytes)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what matrices were unpacked and rounded in
    _log_rate(folder, total_bytes, time.perf_counter() - began)
    return _settled(weights)


def _in_order(path: Path, names: list[str]) -> list[FileTensor]:
    """As they lie in their file."""
    header = read_header(path)
    return sorted((header[name] for name in names), key=lambda tensor: tensor.offset)


def _read(pieces: Iterator[Piece], device: torch.device) -> Iterator[int]:
    """Bytes of each, once it is placed."""
    try:
        yield from read_pieces(pieces, device)
    except ReadError as error:
        raise ModelError(f"model: {error}") from None


def _settled(weights: Weights) -> Weights:
    """Without orders that change nothing."""

    def settle(stored: Stored) -> Stored:
        if not isinstance(stored, Packed) or stored.order is None:
            return stored
        is_same = torch.equal(stored.order, torch.arange(stored.inner, device=stored.order.device))
        return replace(stored, order=None) if is_same else stored

    layers = [
        replace(layer, qkv=settle(layer.qkv), output=settle(layer.output), gate_up=settle(layer.gate_up),
                down=settle(layer.down))
        for layer in weights.layers
    ]  # fmt: skip
    return Weights(weights.embedding, layers, weights.final_norm, settle(weights.logits))


def _log_rate(folder: Path, num_bytes: int, seconds: float) -> None:
    """What was read, how fast, and the most memory that this process has held so far."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    log.info(
        "weights folder=%s gib=%.2f seconds=%.1f gib_s=%.2f peak_rss_gib=%.2f",
        folder, num_bytes / 2**30, seconds, num_bytes / 2**30 / max(seconds, 1e-9), peak_bytes / 2**30,
    )  # fmt: skip


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


def _check_tensors(files: dict[Path, list[str]], wanted: dict[str, StoredTensor], architecture: Architecture,
                   folder: Path) -> None:  # fmt: skip
    found: set[str] = set()
    for path, names in files.items():
        with _open(path) as shard:
            for name in names:
                place = canonical(name, architecture)
                if place is None or _is_derived(place, architecture):
                    continue
                if place not in wanted:
                    family = architecture.family
                    raise ModelError(f"model: {path}: tensor {name} is not one of a {family} of {len(wanted)} tensors")
                stored, asked = shard.get_slice(name), wanted[place]
                shape, dtype = stored.get_shape(), stored.get_dtype()
                if tuple(shape) not in asked.shapes:
                    shapes = " or ".join(str(list(one)) for one in asked.shapes)
                    raise ModelError(f"model: {path}: tensor {name} is {shape}; wanted {shapes} by config.json")
                if dtype not in asked.dtypes:
                    raise ModelError(f"model: {path}: tensor {name} is {dtype}; wanted {', '.join(asked.dtypes)}")
                found.add(place)
    needed = [name for name, tensor in wanted.items() if tensor.is_needed]
    missing = [name for name in needed if name not in found]
    if missing:
        where = next(iter(files)) if len(files) == 1 else folder / INDEX_FILE
        raise ModelError(f"model: {where}: tensor {missing[0]} is missing ({len(missing)} of {len(needed)} are)")


def _find_scales(files: dict[Path, list[str]], architecture: Architecture) -> torch.dtype:
    """The type of integers' scales, which must have one. Raises ModelError."""
    first: tuple[str, str] | None = None
    for path, names in files.items():
        with _open(path) as shard:
            for name in names:
                if architecture.quantisation is None or not name.endswith(_SCALE_ENDS):
                    continue
                dtype = shard.get_slice(name).get_dtype()
                first = first or (name, dtype)
                if dtype != first[1]:
                    raise ModelError(
                        f"model: {path}: tensor {name} is {dtype}, {first[0]} is {first[1]}; wanted one type"
                    )
    return _SCALES.get(first[1], torch.bfloat16) if first else torch.bfloat16


def _is_derived(name: str, architecture: Architecture) -> bool:
    """Tensors of old checkpoints that repeat what is known: RoPE frequencies, and an output matrix that is tied."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and architecture.tied_embeddings)
