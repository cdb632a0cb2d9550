"""Read the header of a GGUF file: its metadata, and where each tensor's bytes lie.

The layout is the published one of ggml (docs/gguf.md), versions 2 and 3. Every count, length and offset is compared
with the bytes that there are before anything is allocated, so reading takes time and memory in proportion to the
header. What ggml allows and no published model has is refused: nested arrays, tensors that do not follow one another,
and numbers in the metadata that are not finite.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

from gpu.model.gguf.kinds import BLOCK_KINDS, SERVED

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_DIMENSIONS = 4
MOST_NAME_LENGTH = 256  # ggml's own limit is 64
MOST_SHOWN = 80  # characters of a value, in an error
MOST_ENTRIES = 2**22  # of an array: sixteen times the largest vocabulary
_LEAST_KEY_BYTES = 8 + 1 + 4 + 1  # of a key's length, itself, its type and its value
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # of a name's length, itself, the rank, a size, the type and the offset
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
# Numbers of ggml's types, so that one which is not served is refused by its name.
TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class HeaderError(Exception):
    """The file is damaged or is none that ggml would write; the message says what was found, in one line."""


def shown(value: Any) -> str:
    """Return a value of a file as errors quote it: in one line, and not longer than a person reads."""
    head = value[:MOST_SHOWN] if isinstance(value, str | bytes | list) else value
    text = repr(head)
    if head == value and len(text) <= MOST_SHOWN:
        return text
    size = f" ({len(value):,} in all)" if isinstance(value, str | bytes | list) else ""
    return f"{text[:MOST_SHOWN]}...{size}"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What the header says of a tensor. kind: ggml's type by name; shape: of numbers, rows first; offset: of its first
    byte in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(data: memoryview) -> tuple[dict[str, Any], list[TensorHeader]]:
    """Return the metadata by key, and the tensors in the file's order.

    data: the whole file. Metadata are ints, floats, bools, strings and lists of one of these. Raises HeaderError.
    """
    return _Reader(data).read()


class _Reader:
    """A place in the file, which moves on with each read and never leaves it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], list[TensorHeader]]:
        magic = bytes(self._data[: len(MAGIC)])
        if magic != MAGIC:
            raise HeaderError(f"it begins with {magic!r}; wanted {MAGIC!r}, or a folder")
        self._at = len(MAGIC)
        version = self._number("I", "its version")
        if version and version & 0xFFFF == 0:
            raise HeaderError("it is of the other byte order; wanted a little-endian file")
        if version not in VERSIONS:
            raise HeaderError(f"it is of version {version}; served: {', '.join(map(str, VERSIONS))}")
        num_tensors = self._count("tensors", _LEAST_TENSOR_BYTES)
        num_keys = self._count("keys", _LEAST_KEY_BYTES)
        metadata: dict[str, Any] = {}
        for number in range(num_keys):
            key = self._name(f"key {number}")
            if key in metadata:
                raise HeaderError(f"key {number} is {key!r} for the second time")
            metadata[key] = self._value(key)
        found = [self._tensor_info(number) for number in range(num_tensors)]
        return metadata, self._place(found, _alignment(metadata))

    def _value(self, key: str) -> Any:
        kind = self._number("I", f"the type of {key}")
        if kind == _STRING:
            return self._text(key)
        if kind in _SCALARS:
            return self._scalars(key, kind, 1)[0]
        if kind != _ARRAY:
            raise HeaderError(f"{key} is of type {kind}, which GGUF does not have")
        of, length = self._number("I", f"the type of {key}"), self._number("Q", f"the length of {key}")
        least = 8 if of == _STRING else struct.calcsize(_SCALARS.get(of, "B"))
        if length > MOST_ENTRIES or length * least > len(self._data) - self._at:
            raise HeaderError(
                f"{key} says that it has {length:,} entries, and {len(self._data) - self._at:,} bytes are left of the "
                f"file; wanted {MOST_ENTRIES:,} entries at most"
            )
        if of == _STRING:
            return self._texts(key, length)
        if of in _SCALARS:
            return self._scalars(key, of, length)
        raise HeaderError(f"{key} is an array of {'arrays' if of == _ARRAY else f'type {of}'}; wanted numbers or texts")

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        code = _SCALARS[kind]
        values = list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"), key)))
        if code in "fd" and not all(map(math.isfinite, values)):
            wrong = next(value for value in values if not math.isfinite(value))
            raise HeaderError(f"{key} is {wrong}; wanted a finite number")
        if kind != _BOOL:
            return values
        if any(value > 1 for value in values):
            raise HeaderError(f"{key} is {max(values)}; wanted 0 or 1 for a bool")
        return [bool(value) for value in values]

    def _tensor_info(self, number: int) -> tuple[str, str, tuple[int, ...], int]:
        """Return name, kind, shape (rows first) and the offset behind the header."""
        name = self._name(f"the name of tensor {number}")
        called = f"tensor {name}"
        rank = self._number("I", f"the rank of {called}")
        if not 1 <= rank <= MOST_DIMENSIONS:
            raise HeaderError(f"{called} has {rank} dimensions; wanted 1 to {MOST_DIMENSIONS}")
        sizes = [self._number("Q", f"the shape of {called}") for _ in range(rank)]
        type_number = self._number("I", f"the type of {called}")
        offset = self._number("Q", f"the offset of {called}")
        if 0 in sizes:
            raise HeaderError(f"{called} is {sizes[::-1]}; wanted sizes of 1 or more")
        kind = TENSOR_TYPES.get(type_number, f"of type {type_number}")
        if kind not in SERVED:
            raise HeaderError(f"{called} is {kind}; served: {', '.join(SERVED)}")
        return name, kind, tuple(reversed(sizes)), offset

    def _place(self, found: list[tuple[str, str, tuple[int, ...], int]], alignment: int) -> list[TensorHeader]:
        """Find each tensor's bytes: it begins where the one before it ends, padded, and ends within the file."""
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorHeader] = {}
        expected = 0
        for name, kind, shape, offset in found:
            if name in tensors:
                raise HeaderError(f"tensor {name} is there twice")
            num_bytes = tensor_bytes(name, kind, shape)
            if offset != expected:
                raise HeaderError(
                    f"tensor {name} is at offset {offset:,}; wanted {expected:,}, where the one before it ends"
                )
            if begin + offset + num_bytes > len(self._data):
                ends = begin + offset + num_bytes
                raise HeaderError(
                    f"it has {len(self._data):,} bytes, and tensor {name} ends at {ends:,}; fetch it again"
                )
            tensors[name] = TensorHeader(name, kind, shape, begin + offset, num_bytes)
            expected = -(-(offset + num_bytes) // alignment) * alignment
        return list(tensors.values())

    def _count(self, what: str, least_bytes: int) -> int:
        count = self._number("Q", f"the number of {what}")
        left = len(self._data) - self._at
        if count * least_bytes > left:
            raise HeaderError(f"it says that it has {count:,} {what}, and {left:,} bytes are left of the file")
        return count

    def _name(self, what: str) -> str:
        """Return the name of a key or a tensor, which errors may quote as it is."""
        name = self._text(what)
        if not name or len(name) > MOST_NAME_LENGTH or not name.isprintable():
            raise HeaderError(f"{what} is {shown(name)}; wanted 1 to {MOST_NAME_LENGTH} printable characters")
        return name

    def _text(self, what: str) -> str:
        text = self._take(self._number("Q", f"the length of {what}"), what)
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError:
            raise HeaderError(f"{what} is not UTF-8 ({bytes(text[:20])!r})") from None

    def _texts(self, key: str, count: int) -> list[str]:
        """Read so many texts, without a call for each of a vocabulary's entries."""
        data, at, end, read_size = self._data, self._at, len(self._data), struct.Struct("<Q").unpack_from
        texts = []
        for number in range(count):
            size = read_size(data, at)[0] if at + 8 <= end else end
            if at + 8 + size > end:
                self._raise_short(at, 8 + size, f"entry {number} of {key}")
            try:
                texts.append(str(data[at + 8 : at + 8 + size], "utf-8"))
            except UnicodeDecodeError:
                raise HeaderError(f"entry {number} of {key} is not UTF-8") from None
            at += 8 + size
        self._at = at
        return texts

    def _number(self, code: str, what: str) -> int:
        size = struct.calcsize(f"<{code}")
        (value,) = struct.unpack(f"<{code}", self._take(size, what))
        return int(value)

    def _take(self, num_bytes: int, what: str) -> memoryview:
        begin, self._at = self._at, self._at + num_bytes
        if self._at > len(self._data):
            self._raise_short(begin, num_bytes, what)
        return self._data[begin : self._at]

    def _raise_short(self, begin: int, num_bytes: int, what: str) -> NoReturn:
        raise HeaderError(
            f"it has {len(self._data):,} bytes, and {what} would be {num_bytes:,} from {begin:,} on; fetch it again"
        )


def tensor_bytes(name: str, kind: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of a kind that is served. Raises HeaderError for rows that are no whole blocks."""
    count = math.prod(shape)
    if kind in _FLOAT_BYTES:
        return count * _FLOAT_BYTES[kind]
    block = BLOCK_KINDS[kind]
    if shape[-1] % block.block:
        raise HeaderError(f"tensor {name} has rows of {shape[-1]:,}; {kind} has blocks of {block.block}")
    return count // block.block * block.num_bytes


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and not isinstance(alignment, bool) and alignment.bit_count() == 1
    if not is_power or not 0 < alignment <= 2**20:
        raise HeaderError(f"general.alignment is {shown(alignment)}; wanted a power of two up to {2**20:,}")
    return alignment
