"""Open a GGUF file, or several that were split: what the header says, and where tensors' bytes are.

A file that ends early is refused before anything of it is used.
"""

import mmap
import re
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gpu.model.gguf.header import HeaderError, TensorHeader, read_header, shown
from gpu.model.spec import ModelError

_NUMPY = {"F32": "<f4", "F16": "<f2"}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor(TensorHeader):
    """A tensor of the file `path`."""

    path: Path

    def read_numbers(self) -> list[float]:
        """Return the numbers of a plain tensor. Raises ModelError for one of blocks, or one that is not finite."""
        if self.kind not in _NUMPY:
            raise ModelError(f"model: {self.path}: tensor {self.name} is {self.kind}; wanted {' or '.join(_NUMPY)}")
        with self.path.open("rb") as file:
            file.seek(self.offset)
            values = np.frombuffer(file.read(self.num_bytes), _NUMPY[self.kind]).astype(np.float64)
        if not np.isfinite(values).all():
            raise ModelError(f"model: {self.path}: tensor {self.name} holds numbers that are not finite")
        return values.tolist()


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file, or all parts of one. paths: one, or those of all parts; metadata: of the first part; tensors: of
    all, by their names in the file.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def name(self) -> str:
        """Return the name without what says that it is a part."""
        part = _PART.fullmatch(self.path.name)
        return part[1] if part else self.path.stem


def is_gguf(path: Path) -> bool:
    """Return whether a model's path is that of a GGUF file, and not of a folder."""
    return path.suffix == ".gguf" or path.is_file()


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file. Raises ModelError for one that is missing, broken or no GGUF, and for tensors of a kind that is
    not served.

    What was read last is kept while the files are the same: several readers of one model ask.
    """
    paths = part_paths(path)
    try:
        stamps = tuple((part, part.stat().st_size, part.stat().st_mtime_ns) for part in paths)
        return _read(stamps)
    except OSError as error:
        raise ModelError(
            f"model: {error.filename or path} cannot be read ({error.strerror}); wanted a GGUF file"
        ) from None


def part_number(path: Path) -> int:
    """Return which part of a split file it is by its name, from 1 on; 1 for a file that is whole."""
    named = _PART.fullmatch(path.name)
    return 1 if named is None else int(named[2])


def part_paths(path: Path) -> tuple[Path, ...]:
    """Return all parts of a split file, by its first. Raises ModelError for another one, and if one is missing."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return (path,)
    number, count = int(named[2]), int(named[3])
    if number != 1:
        raise ModelError(f"model: {path} is part {number} of {count}; give the first, and all parts in one folder")
    parts = tuple(path.with_name(f"{named[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1))
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"model: {missing[0]} is missing; {path.name} is of {count} parts ({len(missing)} are missing)"
        )
    return parts


@lru_cache(maxsize=2)
def _read(stamps: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, (path, _, _) in enumerate(stamps):
        fields, found = _read_part(path)
        said = _part_field(path, fields, "split.count") or 1, _part_field(path, fields, "split.no")
        if said != (len(stamps), number):
            raise ModelError(
                f"model: {path} says that it is part {said[1] + 1} of {said[0]}; by its name it is {number + 1} of "
                f"{len(stamps)}"
            )
        metadata = metadata or fields
        _check_same_model(stamps[0][0], metadata, path, fields)
        for tensor in found:
            if tensor.name in tensors:
                raise ModelError(f"model: {path}: tensor {tensor.name} is in {tensors[tensor.name].path}, too")
            tensors[tensor.name] = tensor
    first, wanted = stamps[0][0], metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ModelError(f"model: {first} says that all parts have {shown(wanted)} tensors; found {len(tensors)}")
    return GgufFile(tuple(path for path, _, _ in stamps), metadata, tensors)


def _check_same_model(first: Path, metadata: dict[str, Any], path: Path, fields: dict[str, Any]) -> None:
    """Raise ModelError for a part that says something else of the model than the first. Most say only how many
    tensors all parts have.
    """
    for key in ("split.tensors.count", "general.architecture", "general.name"):
        if key in fields and fields[key] != metadata.get(key):
            raise ModelError(
                f"model: {path} is a part of another model than {first}: {key} is {shown(fields[key])} and not "
                f"{shown(metadata.get(key))}"
            )


def _part_field(path: Path, fields: dict[str, Any], key: str) -> int:
    """Return what a file says of the parts it is one of; 0: nothing. Raises ModelError for what is no number."""
    value = fields.get(key, 0)
    if type(value) is not int:
        raise ModelError(f"model: {path}: {key} is {shown(value)}; wanted a whole number")
    return value


def _read_part(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # ends with what reads it
        metadata, tensors = read_header(memoryview(mapped))
    except HeaderError as error:
        raise ModelError(f"model: {path}: {error}") from None
    except ValueError:  # nothing can be mapped of an empty file
        raise ModelError(f"model: {path}: it is empty; wanted a GGUF file") from None
    return metadata, [GgufTensor(*astuple(one), path) for one in tensors]
