"""A GGUF file, or several that were split: what its header says, and where its tensors' bytes are. No torch.

Read with the `gguf` package. It refuses to know what keys and tensors mean. Invariant: a file that ends early is told
before anything of it is used; tensors stay in the mapped file.
"""

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gpu.model.gguf.kinds import SERVED
from gpu.model.spec import ModelError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """kind: as `gguf` names it; shape: rows first; offset: in the file; data: of the mapped file, numbers or uint8
    blocks, rows first.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class GgufFile:
    """paths: one, or those of all parts; metadata: of the first part; tensors: of all, by their names in the file."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def name(self) -> str:
        """Without what says that it is a part."""
        part = _PART.fullmatch(self.path.name)
        return part[1] if part else self.path.stem


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, and not of a folder."""
    return path.suffix == ".gguf" or path.is_file()


def read_gguf(path: Path) -> GgufFile:
    """Raises ModelError for a file that is missing, broken or no GGUF, and for tensors of a kind that is not served.

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


def part_paths(path: Path) -> tuple[Path, ...]:
    """All parts of a split file, by the name of its first. Raises ModelError for another one, and if one is missing."""
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
        said = fields.get("split.count", 0) or 1, fields.get("split.no", 0)
        if said != (len(stamps), number):
            raise ModelError(
                f"model: {path} says that it is part {said[1] + 1} of {said[0]}; by its name it is {number + 1} of "
                f"{len(stamps)}"
            )
        metadata = metadata or fields
        for tensor in found:
            if tensor.name in tensors:
                raise ModelError(f"model: {path}: tensor {tensor.name} is in {tensors[tensor.name].path}, too")
            tensors[tensor.name] = tensor
    return GgufFile(tuple(path for path, _, _ in stamps), metadata, tensors)


def _read_part(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    with path.open("rb") as file:
        begins = file.read(len(_MAGIC))
    if begins != _MAGIC:
        raise ModelError(f"model: {path} is no GGUF file: it begins with {begins!r}; wanted {_MAGIC!r}, or a folder")
    reader_class = _reader_class()
    try:
        reader = reader_class(path, "c")  # torch wants memory that could be written to; nothing writes
        if reader.byte_order != "I":
            raise ModelError(f"model: {path} is of the other byte order; wanted a little-endian file")
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(f"model: {path} is not a whole GGUF file ({' '.join(str(error).split())})") from None
    return metadata, [_tensor(path, found) for found in reader.tensors]


def _tensor(path: Path, found: Any) -> GgufTensor:
    kind = found.tensor_type.name
    if kind not in SERVED:
        raise ModelError(f"model: {path}: tensor {found.name} is {kind}; served: {', '.join(SERVED)}")
    shape = tuple(int(size) for size in reversed(found.shape))
    return GgufTensor(found.name, kind, shape, path, int(found.data_offset), np.asarray(found.data))


@lru_cache(maxsize=1)
def _reader_class() -> Any:
    """`gguf`'s reader, told where the file ends, and with arrays in one step: 128K tokens take 0.5 s, not 9."""
    import gguf  # where a model is a folder, none of this is loaded

    types, strings = gguf.GGUFValueType, gguf.GGUFValueType.STRING

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it has {len(self.data):,} bytes, and its header wants {end:,}; fetch it again")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != types.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = types(int(self._get(orig_offs, np.uint32)[0])), int(self._get(orig_offs + 4, np.uint64)[0])
            begin = orig_offs + 12
            if kind in self.gguf_scalar_to_np:
                values = self._get(begin, self.gguf_scalar_to_np[kind], length)
                return 12 + values.nbytes, [values], [0], [types.ARRAY, kind]
            if kind != strings:
                return super()._get_field_parts(orig_offs, raw_type)
            parts = list(_strings(memoryview(np.asarray(self.data)), begin, length))
            size = 12 + sum(8 + len(part) for part in parts)
            return size, parts, list(range(length)), [types.ARRAY, kind]

    return Reader


def _strings(data: memoryview, begin: int, count: int) -> Iterable[memoryview]:
    for _ in range(count):
        try:
            (size,) = struct.unpack_from("<Q", data, begin)
        except struct.error:
            size = len(data)
        begin += 8
        if begin + size > len(data):
            raise ValueError(f"it has {len(data):,} bytes, and ends within an array of {count:,} strings")
        yield data[begin : begin + size]
        begin += size
