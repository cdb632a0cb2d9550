"""The safetensors of a Hugging Face folder: one file, or shards that an index lists.

It refuses to know what tensors are. Invariant: a file that the index lists is there, whole, with what is listed of it.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gpu.model.file_tensor import FileTensor
from gpu.model.safetensors_file import read_header
from gpu.model.spec import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class SafetensorsFolder:
    """files: names of their tensors; see `gpu.model.checkpoint.Source`."""

    described_by = "config.json"

    def __init__(self, folder: Path) -> None:
        """Raises ModelError for files that are missing or broken."""
        self.files = _find_files(folder)
        self.listed_by = next(iter(self.files)) if len(self.files) == 1 else folder / INDEX_FILE

    def stored_name(self, name: str) -> str:
        return name

    def tensors(self, path: Path) -> list[FileTensor]:
        header = read_header(path)
        return sorted((header[name] for name in self.files[path]), key=lambda tensor: tensor.offset)


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
