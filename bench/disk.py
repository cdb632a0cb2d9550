"""Run `tandem bench disk`: time the first token of a prompt whose first blocks are on disk, against computing it.

For each profile and length, a prompt is computed and written to disk. Then it is dropped from pages, host memory and
the system's page cache, and sent again with a question after it. The floor is its blocks' bytes over the disk's rate as
measured at the start. The peer is the computation of a prompt of the same length in the same engine.
"""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from bench.benchmark_rows import Row, announce, require
from bench.long_client import GREEDY, Client
from bench.rates import device_name
from gpu.profiles import get_profile, resolve_profiles
from scheduler.engine.load_engine import load_engine
from server.deployment import Deployment
from server.planning.deployment_plan import resolve_plan
from transfer.disk.context_store import ContextStore
from transfer.machine import probe_machine

_ANSWER_TOKENS = 2
_WRITTEN_SECONDS = 600.0  # timeout for writing all blocks of a prompt


@dataclass(frozen=True, slots=True)
class DiskBenchmark:
    """The settings of `tandem bench disk`. lengths: of prompts in tokens, ascending. question: tokens that are added
    when a prompt is sent again. repeats: how often it is sent again.
    """

    lengths: tuple[int, ...]
    profiles: tuple[str, ...]
    question: int
    repeats: int


def run_disk_benchmark(benchmark: DiskBenchmark, deployment: Deployment, console: Console) -> Iterator[list[Row]]:
    """Yield the rows so far, after each length. Blocks are in a folder of their own, which is removed at the end."""
    assert deployment.disk is not None, "disk: a deployment with a disk section"
    served = resolve_profiles(deployment.all_profiles, deployment.host)
    for name in benchmark.profiles:
        get_profile(name, served, "--profiles")
    folder = deployment.disk.resolved_folder / f"bench-{os.getpid()}"
    disk = deployment.disk.model_copy(update={"folder": folder, "choose": "always", "written_gib_a_day": None})
    plan = resolve_plan(deployment.model_copy(update={"disk": disk}), probe_machine())
    engine, ready = load_engine(plan.deployment, plan.memory, lambda *_: None)
    try:
        client = Client(engine, ready.vocab_size, ready.profiles)
        bench = _Bench(benchmark, plan.deployment, client, console)
        rows: list[Row] = []
        for name in benchmark.profiles:
            for length in benchmark.lengths:
                if length + benchmark.question + _ANSWER_TOKENS > ready.profiles[name]:
                    console.print(f"{name}: {length:,} tokens do not fit", highlight=False)
                    continue
                rows.append(bench.row(name, length))
                yield rows
    finally:
        engine.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class _Bench:
    def __init__(
        self, benchmark: DiskBenchmark, deployment: Deployment, client: Client, console: Console
    ) -> None:  # fmt: skip
        self._benchmark, self._deployment, self._client, self._console = benchmark, deployment, client, console
        side = client.engine.scheduler.residence.disk.side
        assert side is not None
        self._store: ContextStore = side.store
        self._rate = self._store.rate.bytes_a_second
        self._told_s = 0.0  # when the last first token came

    def row(self, profile: str, length: int) -> Row:
        """Measure one length: compute the prompt, write it, and read it back."""
        question = self._benchmark.question
        blocks = length // self._store.block_tokens
        floor_ms = 1e3 * blocks * self._store.kv.file_bytes / self._rate
        text = f"{blocks * self._store.kv.file_bytes / 1e9:.2f} GB over {self._rate / 1e9:.2f} GB/s"
        announce(self._console, f"from disk, {profile}, {length:,} tokens", text, floor_ms)
        self._first_token(self._client.prompt(length + question), profile)
        self._forget()
        prompt = self._client.prompt(length)
        before = self._store.folder.bytes_written
        computed, _ = self._first_token([*prompt, *self._client.prompt(question)], profile)
        self._write()
        write_seconds = time.perf_counter() - self._told_s
        written = self._store.folder.bytes_written - before
        again, cached, drawn = [], [], []
        for is_dropped in [True] * self._benchmark.repeats + [False]:
            self._forget()
            if is_dropped:
                self._drop_copies()
            asked = [*prompt, *self._client.prompt(question)]
            seconds, num_cached = self._first_token(asked, profile)
            require(num_cached >= (blocks - 1) * self._store.block_tokens, f"{num_cached} tokens came from the disk")
            (again if is_dropped else cached).append(1e3 * seconds)
            drawn.append(num_cached)
            self._write()
        self._console.print(
            f"{profile}, {length:,} tokens: computed {computed:.3f} s, from disk {median(again) / 1e3:.3f} s "
            f"({median(again) / floor_ms:.2f} of the floor), from the system's copy {cached[0] / 1e3:.3f} s; "
            f"{written / 1e9:.2f} GB written in {write_seconds:.2f} s",
            highlight=False,
        )
        return Row(
            name=f"from disk, {profile}",
            shape=f"{question} tokens over {length:,}",
            device=device_name(self._client.engine._runner.device),
            ms=median(again),
            p10=min(again),
            p90=max(again),
            floor=text,
            floor_ms=floor_ms,
            peer="computed, in the same engine",
            peer_ms=1e3 * computed,
            rates={"disk_bytes_s": self._rate, "disk_bytes_s_learnt": self._store.rate.bytes_a_second},
            extras={
                "cached_tokens": drawn[0], "from_copy_ms": cached[0], "written_bytes": written,
                "write_seconds": write_seconds,
            },
            config=self._deployment.model_dump(mode="json") | {"benchmark": asdict(self._benchmark)},
        )  # fmt: skip

    def _first_token(self, prompt: list[int], profile: str) -> tuple[float, int]:
        """Return the seconds to the first token, and the number of tokens that were cached."""
        request_id = self._client.submit(prompt, _ANSWER_TOKENS, profile, GREEDY)
        before = self._client.engine.stats().prefix_hits_tokens
        seconds = self._client.until_first_token(request_id)
        self._told_s = time.perf_counter()
        self._client.drain([request_id])
        return seconds, self._client.engine.stats().prefix_hits_tokens - before

    def _write(self) -> None:
        """Step until all waiting blocks are written."""
        ends = time.perf_counter() + _WRITTEN_SECONDS
        while self._client.engine.has_work:
            require(time.perf_counter() < ends, f"blocks are written within {_WRITTEN_SECONDS:.0f} s")
            self._client.advance()
        self._store.run_write(lambda: None).result()

    def _forget(self) -> None:
        """Drop all cached prefixes from pages and host memory."""
        residence = self._client.engine.scheduler.residence
        if residence.contexts is not None:
            self._client.forget_contexts()
        pages = residence.pages
        pages.release(pages.allocate(pages.num_available))

    def _drop_copies(self) -> None:
        """Drop the files from the page cache, so that they are read from the disk."""
        for path in Path(self._store.folder.root).glob("*/*.kv"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
