"""Find the tensors of a Hugging Face folder in its safetensors files.

The `safetensors` package has checked the headers before: files are complete, and their tensors are adjacent.
"""

import json
import struct
from pathlib import Path

from gpu.model.safetensors_index import INDEX_FILE, find_files
from gpu.weights.file_tensor import FileTensor

_LENGTH = "<Q"  # the length of a file's header, stored in front of it


class SafetensorsFolder:
    """A Hugging Face folder as a checkpoint. files: names of their tensors; see `gpu.weights.checkpoint.Source`."""

    described_by = "config.json"

    def __init__(self, folder: Path) -> None:
        """Find a folder's files. Raises ModelError for files that are missing or broken."""
        self.files = find_files(folder)
        self.listed_by = next(iter(self.files)) if len(self.files) == 1 else folder / INDEX_FILE

    def stored_name(self, name: str) -> str:
        return name

    def tensors(self, path: Path) -> list[FileTensor]:
        header = _read_header(path)
        return sorted((header[name] for name in self.files[path]), key=lambda tensor: tensor.offset)


def _read_header(path: Path) -> dict[str, FileTensor]:
    """Return tensors by name, of a file that is known to be whole."""
    with path.open("rb") as file:
        (length,) = struct.unpack(_LENGTH, file.read(struct.calcsize(_LENGTH)))
        header = json.loads(file.read(length))
    first = struct.calcsize(_LENGTH) + length
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        found[name] = FileTensor(name, entry["dtype"], tuple(entry["shape"]), first + begin, end - begin)
    return found
