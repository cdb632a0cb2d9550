"""A GGUF file's tensors as a checkpoint's: by its names, rows in its order, norms as it has them.

It refuses to know places. llama.cpp rotates a Llama's queries and keys in neighbouring pairs, so its files have their
rows in another order, and it adds to Gemma's norms what Gemma adds when it runs: both are undone here. Invariant: a
tensor is what the checkpoint that the file was made of has, rounded as the file says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from gpu.model.gguf.blocks import Blocks
from gpu.model.gguf.file import GgufFile, GgufTensor, read_gguf
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.gguf.tensors import checkpoint_names, stored_names
from gpu.model.spec import Architecture

_PERMUTED = "llama"  # of `general.architecture`
_QUERY, _KEY = "self_attn.q_proj.weight", "self_attn.k_proj.weight"


class GgufSource:
    """See `gpu.model.checkpoint.Source`."""

    described_by = "its metadata"

    def __init__(self, path: Path, architecture: Architecture) -> None:
        """Raises ModelError for a file that is missing or broken."""
        self._file, self._architecture = read_gguf(path), architecture
        self._tensors = checkpoint_names(self._file, architecture)
        self._names = stored_names(self._file, architecture)
        self.listed_by = path
        self.files: dict[Path, list[str]] = {path: [] for path in self._file.paths}
        for name, tensor in self._tensors.items():
            self.files[tensor.path].append(name)

    def stored_name(self, name: str) -> str:
        return self._names.get(name, name)

    @contextmanager
    def open(self, path: Path) -> Iterator["_Shard"]:
        yield _Shard(self._file, self._architecture, self._tensors)


class _Slice:
    """What is asked before a tensor is read."""

    def __init__(self, tensor: GgufTensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._tensor.kind


class _Shard:
    def __init__(self, file: GgufFile, architecture: Architecture, tensors: dict[str, GgufTensor]) -> None:
        self._architecture, self._tensors = architecture, tensors
        self._is_permuted = file.metadata["general.architecture"] == _PERMUTED

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor | Blocks:
        tensor, a = self._tensors[name], self._architecture
        stored = _as_torch(tensor)
        if isinstance(stored, Tensor) and stored.ndim == 1 and a.norm_offset and name.endswith("norm.weight"):
            return stored.float() - a.norm_offset
        heads = {_QUERY: a.num_heads, _KEY: a.num_kv_heads}.get(name.split(".", 3)[-1]) if self._is_permuted else None
        if heads is None:
            return stored
        rows = torch.arange(heads * a.dim).view(heads, a.dim // 2, 2).transpose(1, 2).flatten()
        return stored.ordered(rows) if isinstance(stored, Blocks) else stored.index_select(0, rows)


def _as_torch(tensor: GgufTensor) -> Tensor | Blocks:
    data = torch.from_numpy(tensor.data)
    if tensor.kind in BLOCK_KINDS:
        return Blocks(tensor.kind, data)
    return data.view(torch.bfloat16).view(tensor.shape) if tensor.kind == "BF16" else data
