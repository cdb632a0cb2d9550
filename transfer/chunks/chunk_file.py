"""Read an open chunk file layer by layer, each checked against the header. No torch.

A file that is renamed, set aside or evicted while it is open can still be read to its end.
"""

import os

from transfer.chunks.chunk_format import ChunkError, ChunkKey, ChunkShape, checksum, header_bytes, layer_ranges


class ChunkFile:
    """A chunk's file, open for reading by several threads. The code that opened it closes it, once."""

    def __init__(self, descriptor: int, key: ChunkKey, shape: ChunkShape, checksums: list[str]) -> None:
        self.key = key
        self._descriptor = descriptor
        self._checksums = checksums
        self._begin = header_bytes(shape)
        self._ranges = layer_ranges(shape, key.num_tokens)

    def read(self, layer: int, out: memoryview) -> None:
        """Fill `out` with the bytes of one layer. Raises ChunkError if they are not those that were stored."""
        begin, end = self._ranges[layer]
        assert out.nbytes == end - begin, f"out has {out.nbytes} bytes, a layer {end - begin}"
        try:
            num_read = read_bytes(self._descriptor, out, self._begin + begin)
        except OSError as error:
            raise ChunkError(f"layer {layer} cannot be read ({error})") from error
        if num_read < out.nbytes:
            raise ChunkError(f"layer {layer} ends after {num_read:,} of {out.nbytes:,} bytes")
        if checksum(out) != self._checksums[layer]:
            raise ChunkError(f"layer {layer} does not match its checksum")

    def close(self) -> None:
        os.close(self._descriptor)


def read_bytes(descriptor: int, out: memoryview, at: int) -> int:
    """Fill `out` with a file's bytes from offset `at` on, and return how many bytes there were."""
    done = 0
    while done < out.nbytes:
        count = os.preadv(descriptor, [out[done:]], at + done)
        if count == 0:
            break
        done += count
    return done


def write_bytes(descriptor: int, data: memoryview, at: int) -> None:
    """Write all of `data` to a file, from offset `at` on."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(descriptor, data[done:], at + done)
