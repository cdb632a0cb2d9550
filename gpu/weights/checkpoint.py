"""Load checkpoints: each tensor of a Hugging Face folder's safetensors, or of a GGUF file, to its place on the device.

Rows are read from their file to their place, directly if that is host memory of their type; host memory never holds a
copy of the model. All names, shapes and types of a checkpoint are checked before the first byte is allocated.
"""

import logging
import re
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from gpu.model.gguf.file import is_gguf
from gpu.model.spec import Architecture, ModelError
from gpu.model.weight_format import find_format
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.weights.file_reader import FileRange, ReadError, read_ranges
from gpu.weights.file_tensor import FileTensor
from gpu.weights.gguf_source import GgufSource
from gpu.weights.placing import placings
from gpu.weights.safetensors_folder import SafetensorsFolder
from gpu.weights.shares import own_part
from gpu.weights.stored import StoredTensor
from gpu.weights.tensor_places import canonical, family_of, places, wanted_tensors
from gpu.weights.weight_allocation import allocate_weights
from gpu.weights.weights import Progress, Weights, served

log = logging.getLogger(__name__)

_MOST_WEIGHTS_PER_BYTE = 8  # more than any format has
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}  # dtypes of integers' scales
SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_KEYS_OF_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.[kv]_(?:proj|norm)\.")
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
# Scales of a KV cache, by the names that publishers of quantised files use.
_KV_SCALE = re.compile(r"\.(self_attn|mixer)\.(([kv]_proj\.)?(k|v|kv)_(scale|zero_point)|[kv]_proj\.output_scale)$")


class Source(Protocol):
    """The files of a checkpoint.

    files: the names of their tensors, as a Hugging Face checkpoint has them.
    described_by: the file that determines which tensors are wanted, for errors.
    listed_by: the file that would list a missing tensor, for errors.
    """

    files: Mapping[Path, list[str]]
    described_by: str
    listed_by: Path

    def stored_name(self, name: str) -> str:
        """Return a tensor's name in the source's own files."""

    def tensors(self, path: Path) -> list[FileTensor]:
        """Return the tensors of a file, in the order of their bytes."""


def open_source(path: Path, architecture: Architecture) -> Source:
    """Open a folder or a GGUF file. Raises ModelError for files that are missing or broken."""
    return GgufSource(path, architecture) if is_gguf(path) else SafetensorsFolder(path)


def load_weights(folder: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device,
                 on_progress: Progress, experts_on_card: int | None = None) -> Weights:  # fmt: skip
    """Read `folder`'s safetensors, or a GGUF file of one or several parts, into new device tensors of `dtype`. For one
    device's share of an architecture, only that share is read.

    experts_on_card: as in `allocate_weights`; the other experts are read to host memory.

    Matrices of few bits, stored so or rounded by the architecture's quantisation, stay packed, except on a CPU that has
    no code for them (`weights.served`). Raises ModelError for a file that is missing or broken, and for a tensor that
    is missing, extra, or of another shape or type than the architecture's.
    """
    weights = load_packed(folder, architecture, dtype, device, on_progress, experts_on_card)
    return served(weights, architecture, device)


def check_checkpoint(folder: Path, architecture: Architecture) -> Source:
    """Check a checkpoint by the headers of its files, without reading weights. Loading begins with it, and
    `tandem plan` uses it. Raises ModelError for a file that is missing or broken, and for a tensor that is missing,
    extra, or of another shape or type than the architecture's.
    """
    source = open_source(folder, architecture)
    _check_size(source, architecture)
    _check_tensors(source, wanted_tensors(architecture), architecture)
    _find_scales(source, architecture)
    return source


def load_packed(folder: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device,
                on_progress: Progress, experts_on_card: int | None = None) -> Weights:  # fmt: skip
    """Load weights as `load_weights` does, but leave them packed on every CPU."""
    share = architecture.share
    source = check_checkpoint(folder, architecture if share is None else share.whole)
    weights = allocate_weights(architecture, dtype, device, _find_scales(source, architecture), experts_on_card)
    found = places(weights, architecture)
    tensors = [
        (path, own, own_place)
        for path in source.files
        for tensor in source.tensors(path)
        if (place := found.get(name := canonical(tensor.name, architecture) or "")) is not None
        and place.fill is not None
        for own, own_place in own_part(tensor, place, name, architecture)
    ]

    total_bytes = sum(tensor.num_bytes for _, tensor, _ in tensors)
    began, done_bytes = time.perf_counter(), 0
    with ExitStack() as opened:
        numbers = {path: opened.enter_context(path.open("rb", buffering=0)).fileno() for path in source.files}
        for comes_first in (True, False):
            ranges = (
                file_range
                for path, tensor, place in tensors
                if place.comes_first == comes_first
                for placing in placings(tensor, place, str(path), source.stored_name(tensor.name), device)
                for file_range in placing.ranges(numbers[path])
            )
            for num_bytes in _read(ranges, device):
                done_bytes += num_bytes
                on_progress(done_bytes / total_bytes)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # frees the workspace in which matrices were unpacked and rounded
    _log_rate(folder, total_bytes, time.perf_counter() - began)
    return _without_idle_orders(weights)


def _read(ranges: Iterator[FileRange], device: torch.device) -> Iterator[int]:
    """Yield the bytes of each range, once it is placed."""
    try:
        yield from read_ranges(ranges, device)
    except ReadError as error:
        raise ModelError(f"model: {error}") from None


def _without_idle_orders(weights: Weights) -> Weights:
    """Return the weights without column orders that change nothing."""

    def drop_order(stored: Stored) -> Stored:
        if not isinstance(stored, Packed) or stored.order is None:
            return stored
        is_same = torch.equal(stored.order, torch.arange(stored.inner, device=stored.order.device))
        return replace(stored, order=None) if is_same else stored

    layers = [layer.changed(drop_order) for layer in weights.layers]
    return replace(weights, layers=layers, logits=drop_order(weights.logits))


def _log_rate(folder: Path, num_bytes: int, seconds: float) -> None:
    """Log how much was read, how fast, and the peak memory of this process."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    log.debug(
        "weights folder=%s gib=%.2f seconds=%.1f gib_s=%.2f peak_rss_gib=%.2f",
        folder, num_bytes / 2**30, seconds, num_bytes / 2**30 / max(seconds, 1e-9), peak_bytes / 2**30,
    )  # fmt: skip


def _check_size(source: Source, architecture: Architecture) -> None:
    """Raise ModelError if the files are too small for the weights that the configuration asks for."""
    num_bytes = sum(path.stat().st_size for path in source.files)
    if architecture.num_weights > _MOST_WEIGHTS_PER_BYTE * num_bytes:
        raise ModelError(
            f"model: {source.listed_by}: {source.described_by} asks for {architecture.num_weights:,} weights; its "
            f"files have {num_bytes:,} bytes"
        )


def _check_tensors(source: Source, wanted: dict[str, StoredTensor], architecture: Architecture) -> None:
    found: set[str] = set()
    for path in source.files:
        for tensor in source.tensors(path):
            place = canonical(tensor.name, architecture)
            if place is None or _is_passed_over(place, architecture):
                continue
            if place not in wanted:
                family = architecture.family
                raise ModelError(
                    f"model: {path}: tensor {tensor.name} is not one of a {family} of {len(wanted)} tensors"
                )
            asked, called, dtype = wanted[place], source.stored_name(tensor.name), tensor.dtype
            if tensor.shape not in asked.shapes:
                shapes, described = " or ".join(str(list(one)) for one in asked.shapes), source.described_by
                raise ModelError(
                    f"model: {path}: tensor {called} is {list(tensor.shape)}; wanted {shapes} by {described}"
                )
            if dtype not in asked.dtypes:
                raise ModelError(f"model: {path}: tensor {called} is {dtype}; wanted {', '.join(asked.dtypes)}")
            found.add(place)
    needed = [name for name, tensor in wanted.items() if tensor.is_needed]
    missing = [name for name in needed if name not in found]
    if missing:
        lost = source.stored_name(missing[0])
        raise ModelError(f"model: {source.listed_by}: tensor {lost} is missing ({len(missing)} of {len(needed)} are)")


def _find_scales(source: Source, architecture: Architecture) -> torch.dtype:
    """Return the dtype of integers' scales. Raises ModelError unless all scales of the checkpoint have it."""
    if architecture.quantisation is None:
        return torch.bfloat16
    stored = find_format(architecture.quantisation.scheme)
    if stored.scale_dtype is not None:
        return SCALE_DTYPES[stored.scale_dtype]
    scales = [
        (path, tensor)
        for path in source.files
        for tensor in source.tensors(path)
        if stored.scale_suffixes and tensor.name.endswith(stored.scale_suffixes)
    ]
    for path, tensor in scales:
        first = scales[0][1]
        if tensor.dtype != first.dtype:
            raise ModelError(
                f"model: {path}: tensor {tensor.name} is {tensor.dtype}, {first.name} is {first.dtype}; wanted one type"
            )
    return _SCALES.get(scales[0][1].dtype, torch.bfloat16) if scales else torch.bfloat16


def _is_passed_over(name: str, architecture: Architecture) -> bool:
    """Return whether a tensor may be ignored: RoPE frequencies of old checkpoints; scales of a quantised checkpoint's
    KV cache, since 8-bit rows have scales of their own here; projections of keys and values in a layer that uses
    another layer's; layers of draft heads.
    """
    of_layer = _OF_LAYER.match(name)
    if of_layer is not None and int(of_layer[1]) >= architecture.num_layers:
        return family_of(architecture).has_further_layers
    of_keys = _KEYS_OF_LAYER.match(name)
    layer = architecture.num_layers if of_keys is None else int(of_keys[1])
    if layer < architecture.num_layers and architecture.layers[layer].kv_of is not None:
        return True
    is_kv_scale = architecture.quantisation is not None and _KV_SCALE.search(name) is not None
    return name.endswith("rotary_emb.inv_freq") or is_kv_scale
