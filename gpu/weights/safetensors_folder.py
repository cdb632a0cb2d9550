"""The tensors of a Hugging Face folder, in whichever of its safetensors files they lie."""

from pathlib import Path

from gpu.model.safetensors_index import INDEX_FILE, find_files
from gpu.weights.file_tensor import FileTensor
from gpu.weights.safetensors_file import read_header


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
        header = read_header(path)
        return sorted((header[name] for name in self.files[path]), key=lambda tensor: tensor.offset)
