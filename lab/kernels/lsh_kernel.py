"""Time one layer's LSH-sampled attention on the host: tables, lookups, sampled and exact rows, bf16 and int8.

Caches are cold: a large buffer is read between any two measurements. Floors are rows over the rate at which this host
reads rows at random, or in a stream, measured in the same run; the peer is torch's attention over the whole context,
one KV head's query group as its rows, which is how a program without sampling would do it.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention

from bench.benchmark_rows import Row, Timing, require, summarise
from bench.rates import device_name
from cpu.collision import fraction_read, sample_probability
from cpu.host_attention import HostAttention
from cpu.memory_rates import measure_host_rates, read_stream
from cpu.pieces import EXACT, SAMPLED, new_pieces
from cpu.quantise import quantise_keys, quantise_values
from cpu.sample_errors import ERRORS
from cpu.tables import build_tables
from lab.kernels.lsh_layer import DIM, HEADS, KV_HEADS, Layer, make_layer
from transfer.exchange import ExchangeSlot, new_slot
from transfer.host_memory import SEGMENT_TOKENS, num_offsets
from transfer.simd.features import SIMD
from transfer.slot_shape import SlotShape

SCALE = DIM**-0.5
STEPS = 4  # queries of as many tokens, in turn
ENTRY_BYTES, OFFSET_BYTES, LINE_BYTES = 2, 4, 64
WAIT_S = 1.0
COLD_BYTES = 512 * 2**20
HUGE_PAGE_BYTES = 2 * 2**20
MAX_ERROR = {"bf16": 2e-4, "int8": 2e-3}  # of lse and out, absolute; a lost sample moves them by 1e-3 and more
PEER = "torch SDPA over all rows, bf16, query heads grouped"
_TYPES = {"bf16": np.uint16, "int8": np.int8}
ERRORS_KIND = "bf16, errors"  # as bf16, with the standard errors of its answers


@dataclass(frozen=True, slots=True)
class LshBenchmark:
    """The settings of the benchmark. keys: tokens of the context; paper: K = bits, L = tables; repeats: rounds, of
    STEPS steps each.
    """

    keys: int
    threads: int
    bits: int
    tables: int
    repeats: int


def _aligned(values: np.ndarray) -> np.ndarray:
    """Return a copy that begins on a huge page, as slabs do: a row across one line more than it fills reads 1.5x
    slower.
    """
    room = np.empty(values.nbytes + HUGE_PAGE_BYTES, np.uint8)
    begin = -room.ctypes.data % HUGE_PAGE_BYTES
    copy = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


class _Segments:
    """A context cut into segments, with rows of both types and raw codes to build from."""

    def __init__(self, layer: Layer, benchmark: LshBenchmark) -> None:
        self._bits, self._threads = benchmark.bits, benchmark.threads
        self._kept: list[dict[str, np.ndarray]] = []
        for begin in range(0, benchmark.keys, SEGMENT_TOKENS):
            end = min(begin + SEGMENT_TOKENS, benchmark.keys)
            keys, values = (_aligned(rows[:, begin:end]) for rows in (layer.keys, layer.values))
            codes = _aligned(layer.codes[:, :, begin:end])
            offsets = np.zeros((KV_HEADS, benchmark.tables, num_offsets(benchmark.bits, end - begin)), np.int32)
            offsets = _aligned(offsets)
            kept = {"codes": codes, "entries": _aligned(codes), "offsets": offsets, "centre": layer.centre}
            narrow = [_aligned(np.zeros(keys.shape, np.int8)) for _ in range(2)]
            kept["key_scale"] = np.empty(KV_HEADS, np.float32)
            kept["value_scale"] = np.empty(layer.centre.shape, np.float32)
            quantise_keys(keys, narrow[0], kept["key_scale"])
            quantise_values(values, narrow[1], kept["value_scale"])
            kept |= {"bf16 keys": keys, "bf16 values": values, "int8 keys": narrow[0], "int8 values": narrow[1]}
            self._kept.append(kept)

    def restore_codes(self) -> None:
        for kept in self._kept:
            kept["entries"][:] = kept["codes"]

    def build(self) -> None:
        for kept in self._kept:
            entries, offsets = kept["entries"], kept["offsets"]
            tables = KV_HEADS * entries.shape[1]
            flat = entries.reshape(tables, -1), offsets.reshape(tables, -1)
            build_tables(*flat, self._bits, 0, tables, self._threads)

    def real(self, kind: str, head: int) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of a KV head as stored, float64 `[tokens, dim]`; keys less the centre."""
        keys, values = [], []
        for kept in self._kept:
            if _rows_of(kind) == "bf16":
                keys.append(_widen(kept["bf16 keys"][head]))
                values.append(_widen(kept["bf16 values"][head]))
            else:
                keys.append(kept["int8 keys"][head] * kept["key_scale"][head].astype(np.float64))
                values.append(kept["int8 values"][head] * kept["value_scale"][head].astype(np.float64))
        return np.concatenate(keys), np.concatenate(values)

    def pieces(self, kind: str, mode: int) -> np.ndarray:
        kind = _rows_of(kind)
        table = new_pieces(len(self._kept))
        table["run_begin"] = SEGMENT_TOKENS * np.arange(len(table))
        for piece, kept in zip(table, self._kept, strict=True):
            keys, values = kept[f"{kind} keys"], kept[f"{kind} values"]
            piece["mode"], piece["end"], piece["tokens"] = mode, keys.shape[1], keys.shape[1]
            for name, array in (("key", keys), ("value", values)):
                piece[f"{name}s"] = array.ctypes.data
                piece[f"{name}_head_bytes"], piece[f"{name}_row_bytes"] = array.strides[:2]
                piece[f"{name}_scale"] = kept[f"{name}_scale"].ctypes.data
            piece["entries"], piece["offsets"] = kept["entries"].ctypes.data, kept["offsets"].ctypes.data
            piece["entry_head_bytes"], piece["entry_table_bytes"] = kept["entries"].strides[:2]
            piece["offset_head_bytes"], piece["offset_table_bytes"] = kept["offsets"].strides[:2]
            piece["centre"] = kept["centre"].ctypes.data
        return table


def lsh_rows(benchmark: LshBenchmark, console: Console) -> list[Row]:
    """Gate, measure, and a row for each operation. Some gibibytes of memory, a minute or two."""
    torch.set_num_threads(benchmark.threads)
    layer = make_layer(benchmark.keys, benchmark.bits, benchmark.tables, STEPS, 5)
    segments = _Segments(layer, benchmark)
    kernels = {kind: _kernel(benchmark, kind, estimates=False) for kind in _TYPES}
    kernels[ERRORS_KIND] = _kernel(benchmark, ERRORS_KIND, estimates=True)
    segments.build()
    for kind, kernel in kernels.items():
        _gate(benchmark, layer, segments, kernel, kind)
    rates = measure_host_rates(benchmark.threads)
    return _measure(benchmark, layer, segments, kernels, rates, console)


def _kernel(benchmark: LshBenchmark, kind: str, estimates: bool) -> HostAttention:
    return HostAttention(
        heads=HEADS, kv_heads=KV_HEADS, dim=DIM, row_type=_TYPES[_rows_of(kind)], query_type=np.uint16,
        bits=benchmark.bits, tables=benchmark.tables, scale=SCALE, threads=benchmark.threads, estimates=estimates,
    )  # fmt: skip


def _rows_of(kind: str) -> str:
    return kind.partition(",")[0]


def _step(layer: Layer, step: int) -> tuple[np.ndarray, np.ndarray]:
    return layer.queries[step : step + 1], layer.query_codes[step : step + 1]


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _gate(benchmark: LshBenchmark, layer: Layer, segments: _Segments, kernel: HostAttention, kind: str) -> None:
    """Compare a group of the first step with eq. (11) in float64 over raw codes, and with dense attention."""
    queries, codes = _step(layer, 0)
    group = HEADS // KV_HEADS
    sampled = kernel.attend(segments.pieces(kind, SAMPLED), queries, codes, benchmark.threads)
    sampled = sampled._replace(out=sampled.out.copy(), lse=sampled.lse.copy())
    exact = kernel.attend(segments.pieces(kind, EXACT), queries, None, benchmark.threads)
    keys, values = segments.real(kind, 0)
    for head in range(group):
        query = _widen(queries[0, head])
        logits = keys @ query * SCALE
        cosines = keys @ query / np.linalg.norm(keys, axis=1) / np.linalg.norm(query)
        is_chosen = (layer.codes[0] == codes[0, head][:, None]).sum(0) >= 2
        u = sample_probability(cosines, benchmark.bits, benchmark.tables)
        shift = layer.centre[0].astype(np.float64) @ query * SCALE
        for name, result, chosen, weights in (
            ("sampled", sampled, is_chosen, -np.log(u)), ("exact", exact, slice(None), np.zeros(len(u))),
        ):  # fmt: skip
            scores = (logits + weights)[chosen]
            mass = np.exp(scores - scores.max())
            lse = scores.max() + np.log(mass.sum()) + shift
            out = mass @ values[chosen] / mass.sum()
            error = max(abs(result.lse[0, head] - lse), np.abs(result.out[0, head] - out).max())
            require(error < MAX_ERROR[_rows_of(kind)], f"{name} {kind} attention, head {head}: off by {error:.2g}")


def _measure(
    benchmark: LshBenchmark, layer: Layer, segments: _Segments, kernels: dict[str, HostAttention],
    rates: dict[str, float], console: Console,
) -> list[Row]:  # fmt: skip
    cold = np.ones(COLD_BYTES // 8, np.int64)
    times: dict[str, list[float]] = {}
    read: dict[str, list[int]] = {kind: [] for kind in kernels}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        read_stream(cold, benchmark.threads)  # so no core's cache is left out, and no other library's threads spin
        began = time.perf_counter()
        returned = call()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return returned

    def sample(kind: str, table: np.ndarray, step: int) -> None:
        _put_ask(slot, *_step(layer, step))
        asks = kernels[kind].host_requests_in(slot, table[None], errors if kind == ERRORS_KIND else None, None)
        got = timed(f"lookup+attend {kind}", lambda: kernels[kind].answer(asks, benchmark.threads, WAIT_S, None))
        require(got.host_requests == 1, "an ask that stands in the slot was not seen")
        read[kind].append(got.rows)
        times.setdefault(f"lookup {kind}", []).append(got.lookup_ns / 1e6)
        times.setdefault(f"attend {kind}", []).append(got.sampled_ns / 1e6)

    slot = new_slot(1, SlotShape(HEADS, DIM, benchmark.tables, "bfloat16"), torch.device("cpu"))
    errors = np.empty((1, 1, HEADS, ERRORS), np.float32)
    queries, _ = _step(layer, 0)
    peer = [_as_tensor(rows)[None] for rows in (queries.reshape(KV_HEADS, -1, DIM), layer.keys, layer.values)]
    sampled = {kind: segments.pieces(kind, SAMPLED) for kind in kernels}
    exact = segments.pieces("bf16", EXACT)
    console.print(f"reads at best: {rates}; {benchmark.repeats} rounds of {STEPS} steps", highlight=False)
    for repeat in range(-1, benchmark.repeats):
        if repeat == 0:
            times.clear()
        segments.restore_codes()
        timed("build", segments.build)
        for step in range(STEPS):
            for kind, table in sampled.items():
                sample(kind, table, step)
        timed("exact bf16", lambda: kernels["bf16"].attend(exact, queries, None, benchmark.threads))
        timed("peer", lambda: scaled_dot_product_attention(*peer, scale=SCALE))
    timings = {name: summarise(values) for name, values in times.items()}
    return _rows(benchmark, timings, {kind: float(np.mean(rows)) for kind, rows in read.items()}, rates)


def _put_ask(slot: ExchangeSlot, queries: np.ndarray, codes: np.ndarray) -> None:
    """As the device does; the answer is what a decode step waits for."""
    slot.advance(1)
    slot.queries[:] = _as_tensor(queries)
    assert slot.codes is not None
    slot.codes[:] = torch.from_numpy(codes)
    slot.flags.fill_(slot.stamp)


def _as_tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _rows(
    benchmark: LshBenchmark, timings: dict[str, Timing], read: dict[str, float], rates: dict[str, float]
) -> list[Row]:
    keys, lists = benchmark.keys, HEADS * benchmark.tables
    segments = -(-keys // SEGMENT_TOKENS)
    bucket_bytes = lists * (segments * 2 * LINE_BYTES + ENTRY_BYTES * keys / 2**benchmark.bits)
    offsets_bytes = OFFSET_BYTES * num_offsets(benchmark.bits, keys)
    table_bytes = KV_HEADS * benchmark.tables * (2 * ENTRY_BYTES * keys + offsets_bytes)
    row_bytes = {kind: 2 * DIM * np.dtype(_TYPES[kind]).itemsize for kind in _TYPES}  # a key and a value
    stream, random = "host_stream_gb_s", "host_random_rows_gb_s"
    asked: list[tuple[str, str, float, str, bool]] = [
        ("build", "codes, entries, offsets", table_bytes, stream, False),
        ("lookup bf16", "a bucket a table", bucket_bytes, random, False),
    ]
    for kind in read:
        num_bytes = read[kind] * row_bytes[_rows_of(kind)]
        asked.append((f"attend {kind}", "sampled rows", num_bytes, random, False))
        asked.append((f"lookup+attend {kind}", "buckets, sampled rows", num_bytes + bucket_bytes, random, True))
    asked.append(("exact bf16", "all rows", KV_HEADS * keys * row_bytes["bf16"], stream, True))
    shape = f"{keys:,} keys, {HEADS}/{KV_HEADS} heads, ({benchmark.bits}, {benchmark.tables})"
    share = read["bf16"] / (HEADS * keys)
    rows = []
    for name, what, num_bytes, rate, has_peer in asked:
        timing = timings[name]
        rows.append(
            Row(
                name=name.replace("lookup bf16", "lookup"), shape=shape,
                device=f"{device_name(torch.device('cpu'))}, {benchmark.threads} threads, {SIMD}",
                ms=timing.ms, p10=timing.p10, p90=timing.p90,
                floor=f"{num_bytes / 1e6:.1f} MB ({what}) over {rates[rate]:.1f} GB/s",
                floor_ms=num_bytes / rates[rate] / 1e6,
                peer=PEER if has_peer else None, peer_ms=timings["peer"].ms if has_peer else None, rates=rates,
                extras={
                    "gb_per_s": num_bytes / timing.ms / 1e6, "share_read": share,
                    "share_expected_of_even_buckets": fraction_read(benchmark.bits, benchmark.tables),
                },
                config=asdict(benchmark),
            )
        )  # fmt: skip
    return rows
