"""Times the hop between device and CPU that a layer of a decode step makes, with nothing to attend: `hop`.

A hop: merge what stands in the slot, leave the next ask with its codes there, see its flags and say that it is
answered. A row `hop` is as a captured step makes them: one graph of HOPS, launched once, in which the device waits for
each answer by itself; it counts the launch of the graph, and the Python between two answers that serving has in
compiled code. `hop behind its answer` is of a graph each, launched when its answer is there; it is all that the CPU
device can do. It refuses to know attention and models; the shape is a layer of Llama 3.1 8B with 150 tables. Peer: the
same by copies into pinned memory and a stream that is waited for. Rows count 1,000 hops, so their milliseconds are
microseconds a hop.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console

from bench.rates import device_name, measure_device_rates
from bench.rows import Row, announce, require, summarise
from gpu.decode.capture import capture
from gpu.decode.steps import LAUNCHES_BLOCK
from gpu.exchange.device_slots import SlotExchange
from gpu.methods.sampled.encode import arrange, encode_queries
from gpu.methods.sampled.projections import draw_projections
from transfer.exchange import wait
from transfer.merge import merge_outputs
from transfer.partial import Partial, merge

HEADS, DIM, BITS, TABLES = 32, 128, 10, 150
HOPS = 32  # of a step
ROUNDS = 7
WAIT_S = 10.0
ROW_HOPS = 1000

Segment = Callable[[], None]


class Hops:
    """A step of hops over one slot, and nothing else: CUDA graphs over static tensors, or eager calls on the CPU."""

    def __init__(self, rows: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rows, self.device = rows, device
        self.hyperplanes = arrange(draw_projections(DIM, BITS, TABLES, 0, dtype, device))
        self.exchange = SlotExchange(rows, HEADS, DIM, TABLES, dtype, device)
        self.slot = self.exchange.slot
        self.query = torch.zeros(rows, HEADS, DIM, dtype=dtype, device=device)
        self.resident = Partial(torch.zeros(rows, HEADS, DIM, device=device), torch.zeros(rows, HEADS, device=device))
        self.can_go_ahead = device.type == "cuda" and not LAUNCHES_BLOCK
        self._begin, self._go_on, self._end = map(self._captured, (self._ask, self._merge_and_ask, self._merge))
        self._whole = self._captured(self._all_segments) if self.can_go_ahead else self._all_segments
        self._copies = self._captured(self._merge_and_copy)

    @property
    def down_bytes(self) -> int:
        return self.query.nbytes + self.rows * HEADS * TABLES * 2

    @property
    def up_bytes(self) -> int:
        return self.slot.out.nbytes + self.slot.lse.nbytes

    def step(self, attend: Callable[[], None], goes_ahead: bool) -> None:
        """HOPS asks and their answers. attend: is called when an ask is there, and leaves its answer in the slot;
        goes_ahead: all of it is launched before the first answer, else each segment behind its own.

        Raises ExchangeError where the device does not ask.
        """
        slot = self.slot
        try:
            slot.advance(self.rows)
            (self._whole if goes_ahead else self._begin)()
            for hop in range(HOPS):
                wait(slot, hop, WAIT_S)
                attend()
                slot.give_answer()
                if hop + 1 < HOPS:
                    slot.advance(self.rows)
                if not goes_ahead:
                    (self._go_on if hop + 1 < HOPS else self._end)()
        except BaseException:
            slot.release()  # no device is left waiting
            raise

    def step_by_copies(self) -> None:
        """The peer's."""
        for _ in range(HOPS):
            self._copies()
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _ask(self) -> None:
        self.exchange.ask(self.query, encode_queries(self.query, self.hyperplanes))

    def _merge(self) -> None:
        self.query.copy_(merge(self.resident, self.exchange.answer(self.rows)).out)

    def _merge_and_ask(self) -> None:
        self._merge()
        self._ask()

    def _all_segments(self) -> None:
        self._ask()
        for _ in range(HOPS - 1):
            self._merge_and_ask()
        self._merge()

    def _merge_and_copy(self) -> None:
        answer = [part.to(self.device, non_blocking=True) for part in (self.slot.out, self.slot.lse)]
        merged, _ = merge_outputs([self.resident.out, answer[0]], [self.resident.lse, answer[1]])
        self.query.copy_(merged)
        assert self.slot.codes is not None
        self.slot.queries.copy_(self.query, non_blocking=True)
        self.slot.codes.copy_(encode_queries(self.query, self.hyperplanes), non_blocking=True)

    def _captured(self, segment: Segment) -> Segment:
        """Nobody answers while it warms up, so the slot is released."""
        if self.device.type != "cuda":
            return segment
        self.slot.release()
        graph, _ = capture(segment, None)
        self.exchange.forget_asks()
        return graph.replay


def check_hops(hops: Hops, goes_ahead: bool) -> None:
    """The gate, over two steps: what the CPU answers is what it is asked next. Raises GateError."""
    asked = 0.0
    number = 0

    def attend() -> None:
        nonlocal asked, number
        number += 1
        # the device's zeros have as much mass as the answer: half of it comes back, to float32 rounding
        is_right = bool((hops.slot.queries.float().round() == asked).all())
        require(is_right, f"hop {number} brought another ask than that of answer {number - 1}")
        asked = float(number)
        hops.slot.out.fill_(2.0 * asked)

    hops.slot.lse.zero_()
    hops.query.zero_()
    for _ in range(2):
        hops.step(attend, goes_ahead)


def time_steps(step: Callable[[], None], hops: int) -> list[float]:
    """Milliseconds that ROW_HOPS hops would take, of each round of `hops` or a few more, in whole steps."""
    steps, times = -(-hops // HOPS), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        times.append(1e3 * (time.perf_counter() - began) * ROW_HOPS / (steps * HOPS))
    return times


def hop_rows(batches: tuple[int, ...], device: torch.device, hops: int, console: Console) -> list[Row]:
    """A row for each batch size, and on CUDA one more of hops behind their answers. Raises GateError."""
    rates, rows = measure_device_rates(device) if device.type == "cuda" else {}, []
    for batch in batches:
        measured = Hops(batch, device)
        floor_ms, floor = None, "none: nothing is on another side"
        if rates:
            down, up = rates["device_to_host_gb_s"], rates["host_to_device_gb_s"]
            floor_ms = ROW_HOPS * (measured.down_bytes / down + measured.up_bytes / up) / 1e6
            floor = f"{measured.down_bytes / 1e3:.1f} KB down at {down:.0f} GB/s, "
            floor += f"{measured.up_bytes / 1e3:.1f} KB up at {up:.0f}"
            announce(console, f"hop, {batch} rows", floor, floor_ms)
        for goes_ahead in (True, False) if measured.can_go_ahead else (False,):
            check_hops(measured, goes_ahead)
            timing = summarise(time_steps(partial(measured.step, _attend_nothing, goes_ahead), hops))
            peer = summarise(time_steps(measured.step_by_copies, hops))
            rows.append(
                Row(
                    name="hop" if goes_ahead else "hop behind its answer",
                    shape=f"1,000 hops of {batch} x {HEADS} x {DIM}, {TABLES} tables", ms=timing.ms,
                    device=device_name(device), p10=timing.p10, p90=timing.p90, floor=floor, floor_ms=floor_ms,
                    peer="copies and a stream that is waited for", peer_ms=peer.ms, rates=rates,
                    config={"rows": batch, "heads": HEADS, "dim": DIM, "bits": BITS, "tables": TABLES, "hops": hops,
                            "rounds": ROUNDS},
                )
            )  # fmt: skip
    return rows


def _attend_nothing() -> None:
    pass
