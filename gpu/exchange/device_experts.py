"""Send a step's hidden states to the CPU, which computes experts on them, and receive their sums.

On a GPU every call is ordered by the stream alone, so it may be captured, and the host's side gets the list of
requests. The CPU device computes both sides: a request is answered when its answer is read.
"""

import numpy as np
import torch
from torch import Tensor

from gpu.operations.exchange.await_answer import await_answer
from gpu.operations.exchange.exchange_pack import catch_up, new_counters
from gpu.operations.exchange.expert_request import add_answer, request_experts
from transfer.expert_exchange import (
    HOST_REQUEST_COLUMNS,
    ROWS,
    ExpertRequests,
    ExpertSlot,
    ExpertWorker,
    new_expert_slot,
)


class ExpertExchange:
    """A new slot of `max_rows` rows. worker: answers its requests."""

    def __init__(self, max_rows: int, hidden: int, per_token: int, device: torch.device, worker: ExpertWorker) -> None:
        self.slot: ExpertSlot = new_expert_slot(max_rows, hidden, per_token, device)
        self.worker = worker
        self.is_at_once = device.type == "cpu"
        self._counters = new_counters(self.slot, device)
        self._requested: list[tuple[int, int]] = []

    @property
    def max_rows(self) -> int:
        return len(self.slot.flags)

    def request(
        self, layer: int, normed: Tensor, ids: Tensor, shares: Tensor, on_card: int, slots: Tensor | None
    ) -> None:
        """Write a layer's rows, their experts and weights to the slot, and the next stamp. See `request_experts`."""
        request_experts(normed, ids, shares, on_card, slots, self._counters, self.slot)
        self._requested.append((layer, len(normed)))

    def add(self, made: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `made`, float32 `[rows, hidden]`, plus the answer to the last request, which the device awaits."""
        if self.is_at_once:
            requests = self.take_requests()
            self.slot.advance(int(requests.table[0, ROWS]))
            self.worker.answer([(requests, self.slot)])
        await_answer(self._counters, self.slot)
        return add_answer(made, self.slot, dtype)

    def take_requests(self) -> ExpertRequests:
        """Return the requests since the last call, in order. After a capture, these are the requests of each replay."""
        requested, self._requested = self._requested, []
        return ExpertRequests(np.array(requested, np.int64).reshape(-1, HOST_REQUEST_COLUMNS))

    def forget_requests(self) -> None:
        """Treat requests of a warm-up, or of failed steps whose slot was released, as answered on both sides. The host
        has not counted them. Waits for the device.
        """
        catch_up(self._counters, self.slot)
