"""Times the hop between device and CPU that a layer of a decode step makes, with nothing to attend: `hop`.

A hop: launch a segment that merges what stands in the slot and packs the next ask, and see its flags; as it is where
nothing is launched ahead of answers. It refuses to know attention and models; the shape is a layer of Llama 3.1 8B with
150 tables. Peer: the same by copies into pinned memory and a stream that is waited for. Rows count 1,000 hops, so their
milliseconds are microseconds a hop.
"""

import time
from collections.abc import Callable

import torch
from rich.console import Console

from bench.rates import device_name, measure_device_rates
from bench.rows import Row, announce, require, summarise
from gpu.kernels.exchange_pack import catch_up, exchange_pack, new_counters
from transfer.exchange import new_slot, wait
from transfer.merge import merge_outputs

HEADS, DIM, TABLES = 32, 128, 150
HOPS = 1000
ROUNDS = 7
WAIT_S = 10.0


class Hop:
    """Static tensors of one slot, and a segment over them: a CUDA graph, or eager calls on the CPU."""

    def __init__(self, rows: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rows, self.device = rows, device
        self.slot = new_slot(rows, HEADS, DIM, TABLES, dtype, device)
        self.counters = new_counters(self.slot, device)
        self.query = torch.zeros(rows, HEADS, DIM, dtype=dtype, device=device)
        self.codes = torch.zeros(rows, HEADS, TABLES, dtype=torch.uint16, device=device)
        self.out = torch.zeros(rows, HEADS, DIM, device=device)
        self.lse = torch.zeros(rows, HEADS, device=device)
        self._run = self._captured(self._segment)
        self._run_copies = self._captured(self._copies)
        catch_up(self.counters, self.slot)

    @property
    def down_bytes(self) -> int:
        return self.query.nbytes + self.codes.nbytes

    @property
    def up_bytes(self) -> int:
        return self.slot.out.nbytes + self.slot.lse.nbytes

    def hop(self) -> None:
        self._run()
        self.slot.advance(self.rows)
        wait(self.slot, 0, WAIT_S)

    def hop_by_copies(self) -> None:
        self._run_copies()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _segment(self) -> None:
        merged, _ = merge_outputs(self.out, self.lse, self.slot.out, self.slot.lse)
        self.query.copy_(merged)
        exchange_pack(self.query, self.codes, self.counters, self.slot)

    def _copies(self) -> None:
        answer = [part.to(self.device, non_blocking=True) for part in (self.slot.out, self.slot.lse)]
        merged, _ = merge_outputs(self.out, self.lse, *answer)
        self.query.copy_(merged)
        self.slot.queries.copy_(self.query, non_blocking=True)
        self.slot.codes.copy_(self.codes, non_blocking=True)

    def _captured(self, segment: Callable[[], None]) -> Callable[[], None]:
        if self.device.type != "cuda":
            return segment
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            segment()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            segment()
        return graph.replay


def check_hop(hop: Hop) -> None:
    """The gate: what the CPU answers is what it is asked next. Raises GateError."""
    for number in range(1, 9):
        hop.slot.out.fill_(2.0 * number)  # as much mass as the device's zeros have: half of it comes back
        hop.hop()
        require(bool((hop.slot.queries == number).all()), f"hop {number} brought another ask")


def time_hops(call: Callable[[], None], hops: int) -> list[float]:
    """Milliseconds that 1,000 would take, of each round."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(hops):
            call()
        times.append((time.perf_counter() - began) * 1e6 / hops)
    return times


def hop_rows(batches: tuple[int, ...], device: torch.device, hops: int, console: Console) -> list[Row]:
    """A row for each batch size. Raises GateError."""
    rates, rows = measure_device_rates(device), []
    for batch in batches:
        hop = Hop(batch, device)
        check_hop(hop)
        name, floor_ms, floor = f"hop, {batch} rows", None, "none: nothing is on another side"
        if rates:
            down, up = rates["device_to_host_gb_s"], rates["host_to_device_gb_s"]
            floor_ms = HOPS * (hop.down_bytes / down + hop.up_bytes / up) / 1e6
            floor = f"{hop.down_bytes / 1e3:.1f} KB down at {down:.0f} GB/s, {hop.up_bytes / 1e3:.1f} KB up at {up:.0f}"
            announce(console, name, floor, floor_ms)
        timing, peer = summarise(time_hops(hop.hop, hops)), summarise(time_hops(hop.hop_by_copies, hops))
        rows.append(
            Row(
                name="hop", shape=f"1,000 hops of {batch} x {HEADS} x {DIM}, {TABLES} tables", ms=timing.ms,
                device=device_name(device), p10=timing.p10, p90=timing.p90, floor=floor, floor_ms=floor_ms,
                peer="copies and a stream that is waited for", peer_ms=peer.ms, rates=rates,
                config={"rows": batch, "heads": HEADS, "dim": DIM, "tables": TABLES, "hops": hops, "rounds": ROUNDS},
            )
        )  # fmt: skip
    return rows
