"""Find where each tensor of a safetensors file lies in it.

The `safetensors` package has checked the header before: it is whole, and tensors lie one after another to the end.
"""

import json
import struct
from pathlib import Path

from gpu.weights.file_tensor import FileTensor

_LENGTH = "<Q"  # of the header, in front of it


def read_header(path: Path) -> dict[str, FileTensor]:
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
