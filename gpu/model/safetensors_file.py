"""Where each tensor of a safetensors file lies in it, so that its bytes are read like any other's.

It refuses to know what tensors are for. The file's own reader (the `safetensors` package) has looked at the header
before: that it is whole, and that tensors lie one after another and end with the file.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
}
_LENGTH = "<Q"  # of the header, in front of it


@dataclass(frozen=True, slots=True)
class FileTensor:
    """dtype: by the name that the format has for it, one of DTYPES where it is to be read; offset: in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, FileTensor]:
    """By name, of a file that is known to be whole."""
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
