"""Loading a checkpoint: written to disk, read from the page cache, and loaded by a process of its own.

Invariant: what is loaded is what was written, looked at before a number is reported. Weights are one stretch of random
numbers, over and over: of 16 GB that is no less to read, and takes seconds to write. Floor: the checkpoint's bytes over
the rate at which one thread reads the same files out of the page cache.
"""

import json
import multiprocessing
import resource
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from rich.console import Console
from safetensors import safe_open

from bench.benchmark_rows import Row, announce, require, summarise
from gpu.model.architecture import Architecture, ModelError, named_shape, read_architecture
from gpu.model.matrix_formats import rounded
from gpu.model.safetensors_index import INDEX_FILE
from gpu.model.shapes import named_config
from gpu.weights.checkpoint import load_weights as load
from gpu.weights.matrix import as_matrix
from gpu.weights.tensor_places import wanted_tensors
from transfer.host_pages import map_pages

DRAWN_WEIGHTS = 2**25
READ_BYTES = 8 * 2**20
GIB = 2**30
ROUNDING = {"int4": 0.15, "int8": 0.02, "fp8": 0.05}  # of normal numbers, relative; of others it is above 1
LOOK_S = 0.02  # between looks at the loader's own memory


@dataclass(frozen=True, slots=True)
class Loaded:
    """The cost of loading weights. seconds: of the load alone; memory_s: of as much new memory, taken before;
    peak_rss_bytes: with pages of mapped files (libraries); peak_own_bytes: without.
    """

    seconds: float
    memory_s: float | None
    peak_rss_bytes: int
    peak_own_bytes: int
    is_right: bool


def run_load_weights(
    folder: Path, shape_name: str, shards: int, rounds: int, device: str, console: Console, weights: str | None = None
) -> Row:
    """Return a row whose `ms` is the load's; weights: as `model.weights`, to what they are rounded on the way. Raises
    GateError for weights that are not those of the file, ModelError for an unknown shape, OSError for a disk that is
    full.
    """
    shape = named_shape(shape_name)
    num_bytes = 2 * shape.num_weights
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 1.05 * num_bytes:
        raise ModelError(
            f"bench: {shape_name} takes {num_bytes / GIB:.1f} GiB of {folder}, which has {free_bytes / GIB:.1f} left"
        )
    with TemporaryDirectory(dir=folder, prefix="checkpoint-") as name:
        began = time.perf_counter()
        files = write_checkpoint(Path(name), shape, named_config(shape_name), shards)
        stored_bytes = sum(file.stat().st_size for file in files)
        console.print(f"wrote {stored_bytes / GIB:.2f} GiB in {time.perf_counter() - began:.1f} s")
        cache_s = min(_read_all(files) for _ in range(2))
        floor = f"{stored_bytes / GIB:.2f} GiB over {stored_bytes / GIB / cache_s:.2f} GiB/s of the page cache"
        announce(console, "load", floor, 1e3 * cache_s)
        runs = [_load_apart(Path(name), device, weights) for _ in range(rounds)]
    require(all(run.is_right for run in runs), "loaded weights are not those of the file")
    timing = summarise([1e3 * run.seconds for run in runs])
    rss, own = (max(getattr(run, f"peak_{kind}_bytes") for run in runs) / GIB for kind in ("rss", "own"))
    rate = stored_bytes / GIB / timing.ms * 1e3
    console.print(
        f"loaded at {rate:.2f} GiB/s, {cache_s / timing.ms * 1e3:.0%} of the page cache's rate; the process held "
        f"{own:.2f} GiB of its own at most, {rss:.2f} GiB with pages of the files that it had mapped"
    )
    rates = {"page_cache_gib_s": stored_bytes / GIB / cache_s}
    taken = [run.memory_s for run in runs if run.memory_s is not None]
    if taken:
        rates["new_memory_gib_s"] = num_bytes / GIB / min(taken)
        console.print(f"new memory was there at {rates['new_memory_gib_s']:.2f} GiB/s at best")
    note = f", rounded to {weights}" if weights else ""
    return Row(
        name="load weights", shape=f"{shape_name}, {shards} files{note}", device=device, ms=timing.ms, p10=timing.p10,
        p90=timing.p90, floor=floor, floor_ms=1e3 * cache_s, peer=None, peer_ms=None,
        rates=rates,
        extras={"gib_s": rate, "peak_rss_gib": rss, "peak_own_gib": own},
        config={"shards": shards, "rounds": rounds, "bytes": stored_bytes},
    )  # fmt: skip


def write_checkpoint(folder: Path, shape: Architecture, config: dict[str, object], shards: int) -> list[Path]:
    """Return a folder as it is published: `config.json`, safetensors in bfloat16 and their index. Returns the files."""
    (folder / "config.json").write_text(json.dumps(config))
    tensors = [(name, list(tensor.shapes[0])) for name, tensor in wanted_tensors(shape).items()]
    drawn = torch.randn(DRAWN_WEIGHTS, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    numbers = memoryview(drawn.view(torch.uint8).numpy())
    parts = [dict(tensors[first::shards]) for first in range(shards)]
    files = [folder / f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    with ThreadPoolExecutor(shards) as threads:
        for done in [threads.submit(_write, *one, numbers) for one in zip(files, parts, strict=True)]:
            done.result()
    weight_map = {name: file.name for file, part in zip(files, parts, strict=True) for name in part}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return files


def _write(file: Path, shapes: dict[str, list[int]], numbers: memoryview) -> None:
    """safetensors: the header's length, the header, and tensors one after another."""
    header, end = {}, 0
    for name, sizes in shapes.items():
        begin, end = end, end + 2 * torch.Size(sizes).numel()
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(head)) + head)
        for begin in range(0, end, len(numbers)):
            out.write(numbers[: end - begin])


def _read_all(files: list[Path]) -> float:
    """Return seconds."""
    buffer, began = bytearray(READ_BYTES), time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - began


def _load_apart(folder: Path, device: str, rounded_to: str | None) -> Loaded:
    """In a process of its own, whose memory is the load's."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_load, args=(folder, device, rounded_to, theirs))
    process.start()
    theirs.close()
    try:
        loaded: Loaded = ours.recv()
    except EOFError:
        raise ModelError("bench: the process that loads ended before it had loaded; see its words above") from None
    finally:
        process.join()
    return loaded


def _load(folder: Path, device_name: str, rounded_to: str | None, results: Connection) -> None:
    device, shape = torch.device(device_name), rounded(read_architecture(folder), rounded_to, "--weights")
    torch.zeros(1, device=device)  # the context is no part of it
    memory_s = _take_memory(2 * shape.num_weights) if device.type == "cpu" else None
    with _own_memory() as most:
        began = time.perf_counter()
        weights = load(folder, shape, torch.bfloat16, device, lambda fraction: None)
        seconds = time.perf_counter() - began
    index = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    name = f"model.layers.{shape.num_layers - 1}.self_attn.o_proj.weight"
    with safe_open(folder / index[name], framework="pt") as shard:
        stored, held = shard.get_tensor(name), as_matrix(weights.layers[-1].output).unpack().cpu()
    error = float((held.float() - stored.float()).norm() / stored.float().norm())
    is_right = error < ROUNDING[rounded_to] if rounded_to else torch.equal(stored, held)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.send(Loaded(seconds, memory_s, peak, most[0], is_right))


def _take_memory(num_bytes: int) -> float:
    """Return seconds until it is there; it is given back."""
    began = time.perf_counter()
    map_pages(num_bytes)
    return time.perf_counter() - began


@contextmanager
def _own_memory() -> Iterator[list[int]]:
    """Most bytes that this process has held meanwhile, without those of files."""
    process, most, is_over = psutil.Process(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            memory = process.memory_info()
            most[0] = max(most[0], memory.rss - memory.shared)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        is_over.set()
        watcher.join()
