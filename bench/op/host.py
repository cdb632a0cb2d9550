"""Time what the host does: attention over rows in its memory, and reads of stored documents."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F

from bench.benchmark_rows import require
from bench.documents_floors import drop_from_page_cache
from bench.host_rate import attend_alike_rows
from bench.op.frame import Asked, Case, Work
from transfer.chunks.chunk_format import ChunkKey, ChunkShape, header_bytes, name_chunk
from transfer.chunks.chunk_store import ChunkStore, open_chunks
from transfer.host_config import DocumentsConfig
from transfer.tier_shape import TierShape

ROW_KINDS = ("bfloat16", "int8")
PLACES = ("page cache", "disk")
CHUNK_TOKENS = 512
MOST_CHUNKS = 8
MODEL = "0" * 32


def attention_cases(asked: Asked) -> Iterator[Case]:
    """Yield exact attention of one row over a context in host memory, by format of its rows."""
    shape = asked.shape
    query = torch.randn(1, shape.num_kv_heads, shape.group, shape.dim).bfloat16()
    keys, values = (torch.randn(1, shape.num_kv_heads, asked.tokens, shape.dim).bfloat16() for _ in range(2))
    for rows in asked.choose(ROW_KINDS):
        tier = TierShape((0,), shape.num_heads, shape.num_kv_heads, shape.dim, rows, 0, 0)
        attend, num_bytes = attend_alike_rows(tier, torch.bfloat16, asked.threads, asked.tokens)
        yield Case(
            f"attention on the host, {rows}", f"{asked.tokens:,} tokens, {shape.num_heads}/{shape.num_kv_heads} heads",
            Work(num_bytes, "host_stream_gb_s"), check=attend, run=attend, as_graph=False,
            peer_name="torch's attention over all rows in bf16",
            peer=lambda: F.scaled_dot_product_attention(query, keys, values),
            config={"rows": rows, "threads": asked.threads},
        )  # fmt: skip


def chunk_cases(asked: Asked) -> Iterator[Case]:
    """Yield reads of stored chunks, layer by layer, from the page cache and from the disk of the temporary folder."""
    model = asked.shape
    shape = ChunkShape(model.num_layers, model.num_kv_heads, model.dim, rows="bfloat16")
    count = max(1, min(MOST_CHUNKS, asked.tokens // CHUNK_TOKENS))
    num_bytes = count * shape.chunk_bytes(CHUNK_TOKENS)
    with TemporaryDirectory() as root, ThreadPoolExecutor(asked.threads) as pool:
        config = DocumentsConfig(folder=Path(root), disk_limit_gib=1e6, threads=asked.threads)
        store = open_chunks(config, 0, MODEL, shape, is_pinned=False)
        keys = [name_chunk([number] * CHUNK_TOKENS, shape, "") for number in range(count)]
        paths = [Path(root) / MODEL / f"{key.name}.kv" for key in keys]
        out = np.empty((shape.num_layers, count, shape.layer_bytes(CHUNK_TOKENS)), np.uint8)
        for place in asked.choose(PLACES):
            before: Callable[[], None] = (lambda: drop_from_page_cache(paths)) if place == "disk" else (lambda: None)
            rate = "host_stream_gb_s" if place == "page cache" else "host_random_rows_gb_s"
            yield Case(
                f"chunks from the {place}", f"{count} x {shape.chunk_bytes(CHUNK_TOKENS):,} bytes",
                Work(2 * num_bytes, rate),  # read once and written once
                check=lambda: _fill(store, keys, out),
                run=lambda before=before: (before(), _read(store, keys, out)),
                peer_name="preadv of the same layers, unchecked",
                peer=lambda before=before: (before(), _read_plainly(pool, paths, shape, out)), as_graph=False,
                config={"chunks": count, "threads": asked.threads},
            )  # fmt: skip
        store.shutdown()


def _fill(store: ChunkStore, keys: list[ChunkKey], out: np.ndarray) -> None:
    """Store the chunks, and require that they come back as they were."""
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
    """Read layer by layer, all chunks of a layer, as a prefill does."""
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
