"""Times documents' layers from the disk through the store beside plain `preadv` calls of the same bytes: `chunks`.

It refuses to know devices. The shape is chunks of 512 tokens of Llama 3.1 8B in bf16. What is read is compared with
what was stored before anything is timed. Floor: the bytes read once from the page cache and written once, at the host's
rate; of bytes that were dropped from the page cache there is none but the peer, which is the disk.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console

from bench.documents_floors import drop_from_page_cache
from bench.rows import Row, Timing, announce, measure, require
from cpu.rates import measure_host_rates
from transfer.chunks.format import ChunkKey, ChunkShape, header_bytes, name_chunk
from transfer.chunks.store import ChunkStore, open_chunks
from transfer.config import DocumentsConfig

SHAPE = ChunkShape(num_layers=32, num_kv_heads=8, dim=128, rows="bfloat16")
TOKENS = 512
MODEL = "0" * 32
WARMUPS, REPEATS, COLD_REPEATS = 1, 7, 3
CPU = torch.device("cpu")


def chunk_read_rows(
    shape: ChunkShape, num_chunks: int, threads: int, folder: Path | None, console: Console
) -> list[Row]:
    """A row from the page cache and one from the disk. `folder`: where the disk is that counts. Raises GateError."""
    rates = measure_host_rates(threads)
    num_bytes = num_chunks * shape.chunk_bytes(TOKENS)
    floor = f"{num_bytes / 1e6:.0f} MB read and written at {rates['host_stream_gb_s']:.1f} GB/s"
    floor_ms = 2 * num_bytes / rates["host_stream_gb_s"] / 1e6
    announce(console, "chunks from the page cache", floor, floor_ms)
    with TemporaryDirectory(dir=folder) as root, ThreadPoolExecutor(threads) as pool:
        config = DocumentsConfig(folder=Path(root), disk_limit_gib=1e6, threads=threads)
        store = open_chunks(config, 0, MODEL, shape, is_pinned=False)
        keys = [name_chunk([number] * TOKENS, shape, "") for number in range(num_chunks)]
        paths = [Path(root) / MODEL / f"{key.name}.kv" for key in keys]
        out = np.empty((shape.num_layers, num_chunks, shape.layer_bytes(TOKENS)), np.uint8)
        _fill(store, keys, out)

        def time_both(before: Callable[[list[Path]], None], repeats: int) -> tuple[Timing, Timing]:
            def read() -> None:
                before(paths)
                _read(store, keys, out)

            def read_plainly() -> None:
                before(paths)
                _read_plainly(pool, paths, shape, out)

            return measure(read, CPU, WARMUPS, repeats), measure(read_plainly, CPU, WARMUPS, repeats)

        warm = time_both(lambda paths: None, REPEATS)
        cold = time_both(drop_from_page_cache, COLD_REPEATS)
        store.shutdown()
    no_floor = "none: the disk's own rate is the peer"
    return [
        Row(
            name=name, shape=f"{num_chunks} x {shape.chunk_bytes(TOKENS):,} bytes", device=f"{threads} threads",
            ms=timing.ms, p10=timing.p10, p90=timing.p90, floor=words, floor_ms=least,
            peer="preadv of the same layers, unchecked", peer_ms=peer.ms, rates=rates,
            extras={"gb_s": num_bytes / timing.ms / 1e6, "peer_gb_s": num_bytes / peer.ms / 1e6},
            config={"num_chunks": num_chunks, "threads": threads},
        )
        for name, (timing, peer), words, least in (
            ("chunks from the page cache", warm, floor, floor_ms), ("chunks from the disk", cold, no_floor, None),
        )
    ]  # fmt: skip


def _fill(store: ChunkStore, keys: list[ChunkKey], out: np.ndarray) -> None:
    """Store chunks, and see that they come back."""
    generator = np.random.default_rng(0)
    stored = generator.integers(0, 256, out.shape[::2], np.uint8)  # [layers, bytes]
    for key in keys:
        stored[:, :8] = np.frombuffer(bytes.fromhex(key.name[:16]), np.uint8)
        require(store.put(key, list(stored)).result(), "every chunk is stored")
    _read(store, keys, out)
    for number, key in enumerate(keys):
        stored[:, :8] = np.frombuffer(bytes.fromhex(key.name[:16]), np.uint8)
        require(np.array_equal(out[:, number], stored), "chunks come back as they were stored")
    out[:] = 0


def _read(store: ChunkStore, keys: list[ChunkKey], out: np.ndarray) -> None:
    """Layer by layer, all chunks of a layer, as a prefill reads them."""
    leases = [lease for key in keys if (lease := store.find(key)) is not None]
    require(len(leases) == len(keys), "every chunk is found")
    reads = [lease.layer(layer, out[layer, number]) for layer in range(len(out)) for number, lease in enumerate(leases)]
    for read in reads:
        read.result()
    for lease in leases:
        lease.release()


def _read_plainly(pool: ThreadPoolExecutor, paths: list[Path], shape: ChunkShape, out: np.ndarray) -> None:
    files = [os.open(path, os.O_RDONLY) for path in paths]
    begin, size = header_bytes(shape), out.shape[2]
    reads = [pool.submit(os.preadv, file, [out[layer, number].data], begin + layer * size)
             for layer in range(len(out)) for number, file in enumerate(files)]  # fmt: skip
    require(all(read.result() == size for read in reads), "preadv reads whole layers")
    for file in files:
        os.close(file)
