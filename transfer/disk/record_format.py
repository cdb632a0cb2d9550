"""Define a record's file: a header that identifies it, then its parts. Bytes only, no torch.

A record of keys and values has a part for each layer, so that each can be read and trusted alone. Every byte of a file
is checked: the header must equal, bit by bit, the one that the reader would write, and each part must match its
checksum in the header.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import xxhash

MAGIC = b"TANDEMCX"
VERSION = 1
ALIGN_BYTES = 4096  # parts begin on a page of the file
NAME_DIGITS = 32
_PREFIX = struct.Struct("<8sII16s")  # magic, version, bytes of the header, digest of the rest of the header
_CHECKSUM_DIGITS = 32  # XXH3, 128 bits


class RecordError(Exception):
    """A record that is gone, or whose bytes are not those that were stored. The caller computes it again."""


@dataclass(frozen=True, slots=True)
class RecordShape:
    """The sizes of the parts of all records of a kind in a model's folder. kind: the extension of their files."""

    kind: str
    part_bytes: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        text = _describe("0" * 32, self, "0" * NAME_DIGITS, ["0" * _CHECKSUM_DIGITS] * len(self.part_bytes))
        return -(-(_PREFIX.size + len(text)) // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + sum(self.part_bytes)

    def part_ranges(self) -> list[tuple[int, int]]:
        """Return where each part begins and ends in the file."""
        return list(pairwise(accumulate(self.part_bytes, initial=self.header_bytes)))


def checksum(part: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(part)


def name_model(*whole: object) -> str:
    """Return the name of a model's folder, 32 hexadecimal digits. whole: everything that records' bytes depend on."""
    return hashlib.blake2b(json.dumps([VERSION, *map(str, whole)]).encode(), digest_size=16).hexdigest()


def write_header(model: str, shape: RecordShape, name: str, checksums: Sequence[str]) -> bytes:
    """Return a header. model: the folder's name. name: the record's, 32 hexadecimal digits. checksums: of each part."""
    size = shape.header_bytes
    body = _describe(model, shape, name, checksums).ljust(size - _PREFIX.size)
    return _PREFIX.pack(MAGIC, VERSION, size, hashlib.blake2b(body, digest_size=16).digest()) + body


def read_header(raw: bytes, model: str, shape: RecordShape, name: str) -> list[str]:
    """Return the parts' checksums. Raises RecordError if the header is not that of this record of this model."""
    if len(raw) < _PREFIX.size or not raw.startswith(MAGIC):
        raise RecordError("it does not begin with the mark of a record")
    _, version, _, _ = _PREFIX.unpack_from(raw)
    if version != VERSION:
        raise RecordError(f"its format is {version}, wanted {VERSION}")
    try:
        said = json.loads(raw[_PREFIX.size :])
        checksums = [str(one) for one in said["checksums"]]
        owner = str(said["model"]), str(said["name"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RecordError(f"its header cannot be read ({error!r})") from None
    if owner != (model, name):
        raise RecordError(f"it is {owner[1]} of the model {owner[0]}, wanted {name} of {model}")
    if raw != write_header(model, shape, name, checksums):
        raise RecordError("its header does not match its digest, or its parts are of other sizes")
    return checksums


def _describe(model: str, shape: RecordShape, name: str, checksums: Sequence[str]) -> bytes:
    sizes = sorted(set(shape.part_bytes))
    fields = {"model": model, "name": name, "kind": shape.kind, "parts": len(shape.part_bytes), "sizes": sizes}
    return json.dumps({**fields, "checksums": list(checksums)}, separators=(",", ":")).encode()
