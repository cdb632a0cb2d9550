"""Check a GGUF file's header by the published format (ggml's docs/gguf.md), with no code of the project or of `gguf`.

The oracle of the tests with damaged files: it says where every tensor's bytes lie, or that the file is not one that may
be served. It is written for clarity and reads number by number.
"""

import math
import struct

# ggml's type number: name, numbers in a block, bytes of a block.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    22: ("IQ2_S", 256, 82), 18: ("IQ3_XXS", 256, 98), 21: ("IQ3_S", 256, 110),
}  # fmt: skip
VALUE_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
Found = dict[str, tuple[str, list[int], bytes]]


class WrongFileError(Exception):
    """The file breaks a rule of the format."""


class _File:
    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0

    def read(self, count: int) -> bytes:
        part = self.content[self.place : self.place + count]
        if count < 0 or len(part) < count:
            raise WrongFileError("the file ends early")
        self.place += count
        return part

    def number(self, code: str) -> int | float:
        value = struct.unpack("<" + code, self.read(struct.calcsize("<" + code)))[0]
        if code in "fd" and not math.isfinite(value):
            raise WrongFileError("a number that is not finite")
        return value

    def text(self) -> str:
        try:
            return self.read(int(self.number("Q"))).decode("utf-8")
        except UnicodeDecodeError:
            raise WrongFileError("a text that is not UTF-8") from None

    def name(self) -> str:
        name = self.text()
        if not 1 <= len(name) <= 256 or not name.isprintable():
            raise WrongFileError("a name that cannot be printed in one line")
        return name

    def value(self, kind: int) -> object:
        if kind == 8:
            return self.text()
        if kind not in VALUE_FORMATS:
            raise WrongFileError("a type of value that there is none of")
        value = self.number(VALUE_FORMATS[kind])
        if kind == 7 and value not in (0, 1):
            raise WrongFileError("a bool that is neither")
        return value

    def key_value(self) -> tuple[str, object]:
        key, kind = self.name(), int(self.number("I"))
        if kind != 9:
            return key, self.value(kind)
        of, count = int(self.number("I")), int(self.number("Q"))
        if of == 9 or count > len(self.content):
            raise WrongFileError("arrays of arrays, or longer than the file")
        return key, [self.value(of) for _ in range(count)]


def check_file(content: bytes) -> Found:
    """Return each tensor's type, sizes (rows first) and bytes. Raises WrongFileError."""
    file = _File(content)
    if file.read(4) != b"GGUF" or file.number("I") not in (2, 3):
        raise WrongFileError("no GGUF file of version 2 or 3, little-endian")
    num_tensors, num_keys = int(file.number("Q")), int(file.number("Q"))
    if max(num_tensors, num_keys) > len(content):
        raise WrongFileError("more entries than bytes")
    metadata = {}
    for _ in range(num_keys):
        key, value = file.key_value()
        if key in metadata:
            raise WrongFileError("a key twice")
        metadata[key] = value
    infos = {}
    for _ in range(num_tensors):
        name, rank = file.name(), int(file.number("I"))
        if name in infos or rank not in (1, 2, 3, 4):
            raise WrongFileError("a tensor without a name, twice, or of a rank that there is not")
        sizes = [int(file.number("Q")) for _ in range(rank)]
        kind, offset = int(file.number("I")), int(file.number("Q"))
        if kind not in TYPES or 0 in sizes or sizes[0] % TYPES[kind][1]:
            raise WrongFileError("a type that is not served, or rows of no whole blocks")
        infos[name] = (TYPES[kind], sizes, offset)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise WrongFileError("an alignment that is no power of two")
    begin, taken = _padded(file.place, alignment), 0
    found: Found = {}
    for name, ((kind, block, block_bytes), sizes, offset) in infos.items():
        num_bytes = math.prod(sizes) // block * block_bytes
        if offset % alignment or offset < taken or offset > _padded(taken, alignment):
            raise WrongFileError("a tensor that overlaps, leaves a gap or is not aligned")
        data = content[begin + offset : begin + offset + num_bytes]
        if len(data) < num_bytes:
            raise WrongFileError("a tensor beyond the end")
        found[name] = (kind, sizes[::-1], data)
        taken = offset + num_bytes
    return found


def _padded(place: int, alignment: int) -> int:
    return (place + alignment - 1) // alignment * alignment
