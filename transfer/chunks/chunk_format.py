"""Define a chunk's file: a header that identifies its keys and values, then those of each layer. Bytes only, no torch.

A layer is keys `[tokens, kv_heads, row]` before rotation, then values of that shape. A row is bf16 or float32 `[dim]`,
or `dim` 8-bit codes with a float32 scale and bias. Layers follow the header without gaps. Every byte of a file is
checked: the header must equal, bit by bit, the one that the reader would write, and each layer must match its checksum
in the header, so that a layer can be read and trusted alone.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import xxhash

MAGIC = b"TANDEMKV"
VERSION = 1
ALIGN_BYTES = 4096  # layers begin on a page of the file
_PREFIX = struct.Struct("<8sII16s")  # magic, version, bytes of the header, digest of the rest of the header
_CHECKSUM = "0" * 32  # a placeholder for a layer's checksum, XXH3 of 128 bits
_TAIL_BYTES = 8  # scale and bias of a row of codes

Rows = Literal["bfloat16", "float32", "int8"]


class ChunkError(Exception):
    """A chunk whose bytes are not those that were stored. The caller computes it again."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The shape that all chunks of a model share."""

    num_layers: int
    num_kv_heads: int
    dim: int
    rows: Rows

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token and KV head."""
        return {"bfloat16": 2 * self.dim, "float32": 4 * self.dim, "int8": self.dim + _TAIL_BYTES}[self.rows]

    def layer_bytes(self, num_tokens: int) -> int:
        return 2 * num_tokens * self.num_kv_heads * self.row_bytes

    def chunk_bytes(self, num_tokens: int) -> int:
        return self.num_layers * self.layer_bytes(num_tokens)

    def file_bytes(self, num_tokens: int) -> int:
        return header_bytes(self) + self.chunk_bytes(num_tokens)


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The key of a chunk. name: of its file, 64 hexadecimal digits. tokens: the digest of its token ids."""

    name: str
    num_tokens: int
    tokens: str


def name_chunk(token_ids: Sequence[int] | np.ndarray, shape: ChunkShape, kv_key: str) -> ChunkKey:
    """Return the key of a chunk of at least one token. kv_key: everything beside the weights that its KV depends on,
    such as the dtype and the prefill method, and the secret of its owner.
    """
    assert len(token_ids), "a chunk has tokens"
    return name_digest(digest_tokens(token_ids), len(token_ids), shape, kv_key)


def digest_tokens(token_ids: Sequence[int] | np.ndarray) -> str:
    """Return the digest of a chunk's tokens, the same for any model and salt: 64 hexadecimal digits."""
    return _hash(np.asarray(token_ids, "<i8").tobytes())


def name_digest(tokens: str, num_tokens: int, shape: ChunkShape, kv_key: str) -> ChunkKey:
    """Return the key of a chunk whose tokens have that digest."""
    content = json.dumps([VERSION, asdict(shape), kv_key, tokens])
    return ChunkKey(_hash(content.encode("utf-8", "surrogatepass")), num_tokens, tokens)


def checksum(layer: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(layer)


def header_bytes(shape: ChunkShape) -> int:
    """Return the size of a header, the same for all chunks of a shape."""
    longest = ChunkKey("0" * 64, 2**31, "0" * 64)
    text = _describe("0" * 32, longest, shape, [_CHECKSUM] * shape.num_layers)
    return -(-(_PREFIX.size + len(text)) // ALIGN_BYTES) * ALIGN_BYTES


def write_header(model: str, key: ChunkKey, shape: ChunkShape, checksums: Sequence[str]) -> bytes:
    """Return a header. model: the digest of its weights, 32 hexadecimal digits. checksums: one for each layer."""
    size = header_bytes(shape)
    body = _describe(model, key, shape, checksums).ljust(size - _PREFIX.size)
    return _PREFIX.pack(MAGIC, VERSION, size, _digest(body)) + body


def read_header(raw: bytes, model: str, key: ChunkKey, shape: ChunkShape) -> list[str]:
    """Return the layers' checksums. Raises ChunkError if the header is not that of this chunk of this model."""
    if len(raw) < _PREFIX.size or not raw.startswith(MAGIC):
        raise ChunkError("it does not begin with the mark of a chunk file")
    _, version, _, _ = _PREFIX.unpack_from(raw)
    if version != VERSION:
        raise ChunkError(f"its format is {version}, wanted {VERSION}")
    try:
        said = json.loads(raw[_PREFIX.size :])
        checksums = [str(one) for one in said["checksums"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ChunkError(f"its header cannot be read ({error!r})") from None
    wanted = json.loads(_describe(model, key, shape, checksums))
    for field, value in wanted.items():
        if said.get(field) != value:
            raise ChunkError(f"its {field} is {said.get(field)}, wanted {value}")
    if len(checksums) != shape.num_layers:
        raise ChunkError(f"it has checksums of {len(checksums)} layers, wanted {shape.num_layers}")
    if raw != write_header(model, key, shape, checksums):
        raise ChunkError("its header does not match its digest")
    return checksums


def has_finite_scales(layer: memoryview, shape: ChunkShape) -> bool:
    """Return whether all scales and biases of a layer's codes are finite. Always True for rows without scales."""
    if shape.rows != "int8":
        return True
    rows = np.frombuffer(layer, np.uint8).reshape(-1, shape.row_bytes)
    return bool(np.isfinite(np.ascontiguousarray(rows[:, shape.dim :]).view("<f4")).all())


def layer_ranges(shape: ChunkShape, num_tokens: int) -> list[tuple[int, int]]:
    """Return the byte range of each layer of a chunk, relative to the header's end."""
    size = shape.layer_bytes(num_tokens)
    return list(pairwise(range(0, (shape.num_layers + 1) * size, size)))


def _describe(model: str, key: ChunkKey, shape: ChunkShape, checksums: Sequence[str]) -> bytes:
    fields = {"model": model, **asdict(key), **asdict(shape), "checksums": list(checksums)}
    return json.dumps(fields, separators=(",", ":")).encode()


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
