"""Send queries and their codes through one exchange slot, and receive the CPU's partial.

Every call is ordered by the device's stream alone, so it may be captured in a graph. The host's side is `slot.advance`
and `slot.give_answer`.
"""

import torch
from torch import Tensor

from gpu.operations.exchange.await_answer import await_answer
from gpu.operations.exchange.exchange_pack import catch_up, exchange_pack, new_counters
from transfer.exchange import ExchangeSlot, new_slot
from transfer.partial import Partial
from transfer.slot_shape import SlotShape


class SlotExchange:
    """A new slot of `max_rows` rows."""

    def __init__(self, max_rows: int, shape: SlotShape, device: torch.device) -> None:
        self.slot: ExchangeSlot = new_slot(max_rows, shape, device)
        self._counters = new_counters(self.slot, device)

    def request(
        self, query: Tensor, codes: Tensor | None, wanted: Tensor | None = None, excluded: Tensor | None = None
    ) -> None:
        """Write a request to the slot: rotated queries `[rows, heads, dim]`, their codes if the slot has some, the
        excluded blocks (see `exchange_pack`), and the next stamp.
        """
        exchange_pack(query, codes, self._counters, self.slot, wanted, excluded)

    def answer(self, num_rows: int) -> Partial:
        """Return the answer to the last request, which the device awaits; in host memory until the next request."""
        await_answer(self._counters, self.slot)
        slot = self.slot
        covered = None if slot.covered is None else slot.covered[:num_rows].to(self._counters.device, copy=True)
        return Partial(slot.out[:num_rows], slot.lse[:num_rows], covered)

    def forget_requests(self) -> None:
        """Treat requests of a warm-up, or of failed steps whose slot was released, as answered on both sides. The host
        has not counted them. Waits for the device.
        """
        catch_up(self._counters, self.slot)
