"""Where each tensor of a safetensors file lies in it, so that its bytes are read like any other's.

It refuses to know what tensors are for. The file's own reader (the `safetensors` package) has looked at the header
before: that it is whole, and that tensors lie one after another and end with the file.
"""

import json
import struct
from pathlib import Path

from gpu.weights.file_tensor import FileTensor

_LENGTH = "<Q"  # of the header, in front of it


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
