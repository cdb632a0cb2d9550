"""Checkpoints: each tensor of a Hugging Face folder's safetensors, or of a GGUF file, to its place on the device.

It refuses to know where that is (`gpu.model.places`), and how files have tensors (`gpu.model.safetensors_folder`,
`gpu.model.gguf.source`). Invariant: a tensor goes from its memory-mapped file straight into its place; host memory
never holds a copy of the model. A checkpoint is checked whole, names, shapes and types, before the first byte is
allocated.
"""

import logging
import math
import resource
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from gpu.kernels.packed import Packed
from gpu.model.gguf.file import is_gguf
from gpu.model.gguf.source import GgufSource
from gpu.model.gguf.tensors import SCHEME
from gpu.model.places import canonical, places, wanted_tensors
from gpu.model.safetensors_folder import SafetensorsFolder
from gpu.model.spec import Architecture, ModelError
from gpu.model.stored import StoredError, StoredTensor
from gpu.model.weights import Progress, Stored, Weights, allocate_weights, unpacked

log = logging.getLogger(__name__)

_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}  # of integers
_SCALE_ENDS = (".scales", ".weight_scale")


class Shard(Protocol):
    """One file's tensors, as safetensors has them; their types are named as its are, or as GGUF's kinds."""

    def get_slice(self, name: str) -> Any:
        """Of which `get_shape` and `get_dtype` are asked."""

    def get_tensor(self, name: str) -> Any:
        """A tensor, or Blocks of a GGUF file."""


class Source(Protocol):
    """files: names of their tensors, as a Hugging Face checkpoint has them; described_by: what says which ones are
    wanted; listed_by: where one is looked for that is missing.
    """

    files: Mapping[Path, list[str]]
    described_by: str
    listed_by: Path

    def stored_name(self, name: str) -> str:
        """What its own files call a tensor."""

    def open(self, path: Path) -> AbstractContextManager[Shard]: ...


def open_source(path: Path, architecture: Architecture) -> Source:
    """Raises ModelError for files that are missing or broken."""
    return GgufSource(path, architecture) if is_gguf(path) else SafetensorsFolder(path)


def load_weights(folder: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device,
                 on_progress: Progress) -> Weights:  # fmt: skip
    """Read `folder`'s safetensors, or a GGUF file, in one part or several, into new device tensors of `dtype`.

    Matrices of few bits, of the file or rounded as the architecture's quantisation says, stay packed on a GPU and are
    unpacked on the CPU, where a step of plain weights is compiled. Raises ModelError, one line, for a file that is
    missing or broken and for a tensor that is missing, extra or of another shape or type than the architecture's.
    """
    weights = load_packed(folder, architecture, dtype, device, on_progress)
    return unpacked(weights) if device.type == "cpu" and architecture.quantisation is not None else weights


def load_packed(folder: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device,
                on_progress: Progress) -> Weights:  # fmt: skip
    """As `load_weights`, and packed on the CPU, too."""
    source = open_source(folder, architecture)
    total = _check_tensors(source, wanted_tensors(architecture), architecture)
    weights = allocate_weights(architecture, dtype, device, _find_scales(source, architecture))
    found = places(weights, architecture)
    began, stored_bytes, done = time.perf_counter(), 0, 0
    for comes_first in (True, False):
        for path, names in source.files.items():
            with source.open(path) as shard:
                for name in names:
                    place = found.get(canonical(name, architecture) or "")
                    if place is None or place.fill is None or place.comes_first != comes_first:
                        continue
                    stored = shard.get_tensor(name)
                    _fill(place, stored, source.stored_name(name), path)
                    stored_bytes += stored.nbytes
                    done += stored.numel()
                    on_progress(done / total)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what matrices were unpacked and rounded in
    _log_rate(folder, stored_bytes, time.perf_counter() - began)
    return _settled(weights)


def _fill(place: StoredTensor, stored: Any, name: str, path: Path) -> None:
    assert place.fill is not None, "what has no place is passed over"
    try:
        place.fill(stored)
    except StoredError as error:
        raise ModelError(f"model: {path}: tensor {name} {error}") from None


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
    """What was read, how fast, and the most memory that this process has held so far, mapped files included."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    log.info(
        "weights folder=%s gib=%.2f seconds=%.1f gib_s=%.2f peak_rss_gib=%.2f",
        folder, num_bytes / 2**30, seconds, num_bytes / 2**30 / max(seconds, 1e-9), peak_bytes / 2**30,
    )  # fmt: skip


def _check_tensors(source: Source, wanted: dict[str, StoredTensor], architecture: Architecture) -> int:
    """How many numbers there are to be placed."""
    found: set[str] = set()
    total = 0
    for path, names in source.files.items():
        with source.open(path) as shard:
            for name in names:
                place = canonical(name, architecture)
                if place is None or _is_derived(place, architecture):
                    continue
                if place not in wanted:
                    family = architecture.family
                    raise ModelError(f"model: {path}: tensor {name} is not one of a {family} of {len(wanted)} tensors")
                stored, asked, described = shard.get_slice(name), wanted[place], source.described_by
                shape, dtype, called = stored.get_shape(), stored.get_dtype(), source.stored_name(name)
                if tuple(shape) not in asked.shapes:
                    shapes = " or ".join(str(list(one)) for one in asked.shapes)
                    raise ModelError(f"model: {path}: tensor {called} is {shape}; wanted {shapes} by {described}")
                if dtype not in asked.dtypes:
                    raise ModelError(f"model: {path}: tensor {called} is {dtype}; wanted {', '.join(asked.dtypes)}")
                found.add(place)
                total += math.prod(shape) if asked.fill is not None else 0
    needed = [name for name, tensor in wanted.items() if tensor.is_needed]
    missing = [name for name in needed if name not in found]
    if missing:
        lost = source.stored_name(missing[0])
        raise ModelError(f"model: {source.listed_by}: tensor {lost} is missing ({len(missing)} of {len(needed)} are)")
    return total


def _find_scales(source: Source, architecture: Architecture) -> torch.dtype:
    """The type of integers' scales, which must have one; GGUF files' are float16. Raises ModelError."""
    if architecture.quantisation is not None and architecture.quantisation.scheme == SCHEME:
        return torch.float16
    first: tuple[str, str] | None = None
    for path, names in source.files.items():
        with source.open(path) as shard:
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
