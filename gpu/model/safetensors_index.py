"""Find the safetensors files of a Hugging Face folder, and the names of the tensors in them.

A file that the index lists must be there, whole, with what is listed of it.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from gpu.model.gguf.folder import name_gguf_files
from gpu.model.gguf.header import shown
from gpu.model.json_files import read_object
from gpu.model.spec import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def find_names(folder: Path) -> list[str]:
    """Return the names of all tensors, by the index where there is one; none where there are no weights yet.

    Raises ModelError for an index that is broken, and for a single file that is.
    """
    if (folder / INDEX_FILE).exists():
        return list(_read_index(folder / INDEX_FILE))
    return _names(folder / SINGLE_FILE) if (folder / SINGLE_FILE).exists() else []


def find_files(folder: Path) -> dict[Path, list[str]]:
    """Return each safetensors file with the names of its tensors, those of the index where there is one.

    Reads headers alone. Raises ModelError, one line, for files that are missing or broken.
    """
    index_path, single_path = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index_path.exists():
        if not single_path.exists():
            wanted = f"wanted one of them{name_gguf_files(folder)}"
            raise ModelError(f"model: {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; {wanted}")
        return {single_path: _names(single_path)}
    files: dict[Path, list[str]] = {}
    for name, file_name in _read_index(index_path).items():
        files.setdefault(folder / str(file_name), []).append(name)
    for path, names in files.items():
        if not path.exists():
            raise ModelError(f"model: {path} is missing; {INDEX_FILE} lists {len(names)} tensors in it")
        lost = sorted(set(names) - set(_names(path)))
        if lost:
            raise ModelError(f"model: {path}: tensor {lost[0]} is missing; {INDEX_FILE} says that it is there")
    return files


def _read_index(path: Path) -> dict[str, object]:
    """Return the name of a file for each tensor."""
    weight_map = (read_object(path) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"model: {path}: weight_map is {shown(weight_map)}; wanted tensor names to file names")
    return weight_map


def _names(path: Path) -> list[str]:
    """Return the names in a file's header, which its length must fit."""
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"model: {path} is not a whole safetensors file ({error}); fetch it again") from None
