"""Time the exchange between device and CPU that a layer of a decode step makes, with nothing to attend.

On CUDA a whole step of exchanges is one graph, in which the device waits for each answer by itself; on the CPU device
each part is launched behind its answer. Rows count 1,000 exchanges, so their milliseconds are microseconds each.
"""

from collections.abc import Callable, Iterator

import torch

from bench.benchmark_rows import require
from bench.op.frame import Asked, Case, Work
from gpu.batching.capture import capture
from gpu.decode.steps import LAUNCHES_BLOCK
from gpu.exchange.device_slots import SlotExchange
from gpu.methods.sampled.encode import arrange, encode_queries
from gpu.methods.sampled.hyperplanes import draw_projections
from transfer.allocation import dtype_name
from transfer.exchange import wait
from transfer.merge import merge_outputs
from transfer.partial import Partial, merge
from transfer.slot_shape import SlotShape

HEADS, DIM, BITS, TABLES = 32, 128, 10, 150
HOPS = 32  # of a step
WAIT_S = 10.0
ROW_HOPS = 1000  # that a row counts

Segment = Callable[[], None]


class Hops:
    """A step of hops over one slot, and nothing else: CUDA graphs over static tensors, or eager calls on the CPU."""

    def __init__(self, rows: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rows, self.device = rows, device
        self.hyperplanes = arrange(draw_projections(DIM, BITS, TABLES, 0, dtype, device))
        self.exchange = SlotExchange(rows, SlotShape(HEADS, DIM, TABLES, dtype_name(dtype)), device)
        self.slot = self.exchange.slot
        self.query = torch.zeros(rows, HEADS, DIM, dtype=dtype, device=device)
        self.resident = Partial(torch.zeros(rows, HEADS, DIM, device=device), torch.zeros(rows, HEADS, device=device))
        self.can_go_ahead = device.type == "cuda" and not LAUNCHES_BLOCK
        self._begin, self._go_on, self._end = map(self._captured, (self._request, self._merge_and_request, self._merge))
        self._whole = self._captured(self._all_segments) if self.can_go_ahead else self._all_segments
        self._copies = self._captured(self._merge_and_copy)

    @property
    def down_bytes(self) -> int:
        return self.query.nbytes + self.rows * HEADS * TABLES * 2

    @property
    def up_bytes(self) -> int:
        return self.slot.out.nbytes + self.slot.lse.nbytes

    def step(self, attend: Callable[[], None], goes_ahead: bool) -> None:
        """Make HOPS asks and their answers.

        Raises ExchangeError where the device sends none.
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
        """Make the same by copies into pinned memory and a stream that is waited for."""
        for _ in range(HOPS):
            self._copies()
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _request(self) -> None:
        self.exchange.request(self.query, encode_queries(self.query, self.hyperplanes))

    def _merge(self) -> None:
        self.query.copy_(merge(self.resident, self.exchange.answer(self.rows)).out)

    def _merge_and_request(self) -> None:
        self._merge()
        self._request()

    def _all_segments(self) -> None:
        self._request()
        for _ in range(HOPS - 1):
            self._merge_and_request()
        self._merge()

    def _merge_and_copy(self) -> None:
        answer = [part.to(self.device, non_blocking=True) for part in (self.slot.out, self.slot.lse)]
        merged, _ = merge_outputs([self.resident.out, answer[0]], [self.resident.lse, answer[1]])
        self.query.copy_(merged)
        assert self.slot.codes is not None
        self.slot.queries.copy_(self.query, non_blocking=True)
        self.slot.codes.copy_(encode_queries(self.query, self.hyperplanes), non_blocking=True)

    def _captured(self, segment: Segment) -> Segment:
        """Capture a segment; nobody answers while it warms up, so the slot is released."""
        if self.device.type != "cuda":
            return segment
        self.slot.release()
        graph, _ = capture(segment, None)
        self.exchange.forget_requests()
        return graph.replay


def check_hops(hops: Hops, goes_ahead: bool) -> None:
    """Require, over two steps, that what the CPU answers is what it is asked next. Raises GateError."""
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


def hop_cases(asked: Asked) -> Iterator[Case]:
    """Yield the exchanges of a step by batch: launched ahead where the device can, and each behind its answer."""
    for batch in asked.batches:
        hops = Hops(batch, asked.device)
        for goes_ahead in (True, False) if hops.can_go_ahead else (False,):
            yield Case(
                "exchange" if goes_ahead else "exchange behind its answer", f"1,000 of {batch} x {HEADS} x {DIM}",
                Work(ROW_HOPS * (hops.down_bytes + hops.up_bytes), "device_copy_gb_s"),
                check=lambda hops=hops, goes_ahead=goes_ahead: check_hops(hops, goes_ahead),
                run=lambda hops=hops, goes_ahead=goes_ahead: hops.step(lambda: None, goes_ahead),
                times=HOPS / ROW_HOPS, as_graph=False, peer_name="copies and a stream that is waited for",
                peer=hops.step_by_copies, peer_times=HOPS / ROW_HOPS, config={"batch": batch, "tables": TABLES},
            )  # fmt: skip
