"""Present a GGUF file's tensors as those of a Hugging Face checkpoint: with its names, row order and norms.

Three changes of llama.cpp are undone here. It stores a Llama's queries and keys in the order in which neighbours are
rotated together, also their parts that are not rotated. It stores Gemma's and Qwen3.5's norms, also those of a draft
head, with the offset that these models add at run time. It stores decays in the form in which they are multiplied.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpu.model.draft_head_shape import TENSORS as HEAD_TENSORS
from gpu.model.family import EACH, families
from gpu.model.gguf.file import read_gguf
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.gguf_translation.tensor_names import checkpoint_names, stored_names
from gpu.model.spec import Architecture
from gpu.weights.file_tensor import FileTensor
from gpu.weights.gguf_blocks import Blocks

_DECAY, _OWN_NORM = ".A_log", "linear_attn.norm.weight"  # llama.cpp stores -exp of the first, the second unchanged
_LAST_NORM = "model.norm.weight"
_QUERY, _KEY = "q_proj", "k_proj"


class GgufSource:
    """A GGUF file as a checkpoint: see `Source`."""

    described_by = "its metadata"

    def __init__(self, path: Path, architecture: Architecture) -> None:
        """Open a file. Raises ModelError for one that is missing or broken."""
        self._file, self._architecture = read_gguf(path), architecture
        self._tensors = checkpoint_names(self._file, architecture)
        self._names = stored_names(architecture)
        form = families()[architecture.family].gguf
        self._is_permuted = form is not None and form.has_neighbour_pairs
        self.listed_by = path
        self.files: dict[Path, list[str]] = {path: [] for path in self._file.paths}
        for name, tensor in self._tensors.items():
            self.files[tensor.path].append(name)

    def stored_name(self, name: str) -> str:
        if name in self._tensors:
            return self._tensors[name].name
        return self._names.get(re.sub(r"\.experts\.\d+\.", f".experts.{EACH}.", name), name)

    def tensors(self, path: Path) -> list[FileTensor]:
        return [self._file_tensor(name) for name in self.files[path]]

    def _file_tensor(self, name: str) -> FileTensor:
        tensor, change = self._tensors[name], self._change(name)
        return FileTensor(name, tensor.kind, tensor.shape, tensor.offset, tensor.num_bytes, change)

    def _change(self, name: str) -> Callable[[Tensor], Tensor | Blocks] | None:
        """Return the function that makes the checkpoint's tensor from the file's; None: they are the same."""
        tensor, a = self._tensors[name], self._architecture
        module = name.split(".")[-2]  # its bias is in the same order
        heads = {_QUERY: a.num_heads, _KEY: a.num_kv_heads}.get(module) if self._is_permuted else None
        order = None
        if heads is not None:
            order = torch.arange(heads * a.dim).view(heads, a.dim // 2, 2).transpose(1, 2).flatten()
        if tensor.kind in BLOCK_KINDS:
            return partial(_as_blocks, tensor.kind, order)
        if name.endswith(_DECAY):
            return lambda decay: (-decay.float()).log()
        is_norm = (name.endswith("norm.weight") and not name.endswith(_OWN_NORM)) or name in HEAD_TENSORS
        offset = a.norm_weight_offset
        if name == _LAST_NORM and a.final_norm_offset is not None:
            offset = a.final_norm_offset
        if len(tensor.shape) == 1 and offset and is_norm:
            return lambda norm: norm.float() - offset
        return None if order is None else lambda rows: rows.index_select(0, order.to(rows.device))


def _as_blocks(kind: str, order: Tensor | None, rows: Tensor) -> Blocks:
    blocks = Blocks(kind, rows)
    return blocks if order is None else blocks.rows(order)
