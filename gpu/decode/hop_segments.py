"""What the device computes between two questions to the CPU in a decode step over contexts that are partly down.

It refuses to know the tier, half batches and graphs. A step over L deposited layers has L + 1 segments: segment i ends
with the query of the i-th of them in the exchange slot and its resident partial (sink and window) computed, and segment
i + 1 begins with the merge of that partial and the CPU's. Dense layers lie inside segments, exact over their whole
context. Invariant: what a row attends to in a deposited layer is its resident tokens and its deposited run, each once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu.decode.attention import DecodeAttention, DecodeQuery
from gpu.decode.steps import DecodeInputs
from gpu.host.slot_exchange import SlotExchange
from gpu.kernels.paged_decode_attention import Workspace
from gpu.model.decoder import Decoder
from transfer.partial import Partial


class HopInputs:
    """What a step reads of its rows, in one buffer on the device: `DecodeInputs` and, for the deposited layers,
    resident_lens: int32 `[rows]`, a context without its deposited run.
    """

    def __init__(self, buffer: Tensor, rows: int) -> None:
        self.buffer = buffer  # uint8 [28 * rows]
        self.rows = DecodeInputs(buffer[: 24 * rows], rows)
        self.resident_lens = buffer[24 * rows :].view(torch.int32)

    @staticmethod
    def pack(slots: Sequence[int], positions: Sequence[int], deposited_tokens: Sequence[int], rows: int,
             padding_token_slot: int) -> np.ndarray:  # fmt: skip
        """The buffer's bytes, padded to `rows`."""
        resident_lens = np.zeros(rows, np.int32)
        resident_lens[: len(slots)] = np.array(positions, np.int64) + 1 - np.array(deposited_tokens, np.int64)
        packed = DecodeInputs.pack(slots, positions, rows, padding_token_slot)
        return np.concatenate([packed, resident_lens.view(np.uint8)])


class Carry(NamedTuple):
    """What a segment leaves for the next: hidden `[rows, hidden]`, and the resident partial of the layer asked."""

    hidden: Tensor
    resident: Partial


@dataclass(frozen=True, slots=True)
class HopSegments:
    """The segments of a step. deposited_layers: indices, ascending; last_tokens: int64 `[max_slots + 1]`."""

    decoder: Decoder
    attention: DecodeAttention
    deposited_layers: tuple[int, ...]
    last_tokens: Tensor
    workspace: Workspace

    @property
    def num_asks(self) -> int:
        return len(self.deposited_layers)

    def begin(self, inputs: HopInputs, exchange: SlotExchange) -> Carry:
        """The first segment: embedding, and layers up to the first query for the CPU."""
        hidden = self.decoder.embed(self.last_tokens.index_select(0, inputs.rows.token_slots))
        return self._ask(0, self._dense(0, self.deposited_layers[0], hidden, inputs), inputs, exchange)

    def go_on(self, ask: int, carry: Carry, inputs: HopInputs, exchange: SlotExchange) -> Carry:
        """From the answer to `ask` to the query of the one after it."""
        hidden = self._leave(ask, carry, exchange)
        first, last = self.deposited_layers[ask] + 1, self.deposited_layers[ask + 1]
        return self._ask(ask + 1, self._dense(first, last, hidden, inputs), inputs, exchange)

    def end(self, carry: Carry, inputs: HopInputs, exchange: SlotExchange) -> Tensor:
        """From the answer to the last ask to the logits, float32 `[rows, vocab]`."""
        hidden = self._leave(self.num_asks - 1, carry, exchange)
        layers = self.decoder.architecture.num_layers
        return self.decoder.logits(self._dense(self.deposited_layers[-1] + 1, layers, hidden, inputs))

    def _leave(self, ask: int, carry: Carry, exchange: SlotExchange) -> Tensor:
        return self.decoder.leave(self.deposited_layers[ask], carry.hidden, exchange.merge_answer(carry.resident))

    def _dense(self, first: int, last: int, hidden: Tensor, inputs: HopInputs) -> Tensor:
        """Layers `[first, last)`, whose KV is on the device, whole."""
        rows, page_table = inputs.rows, self.decoder.pool.page_table
        for layer in range(first, last):
            query, pre_rope_query = self.decoder.enter(layer, hidden, rows.positions, rows.slots, None)
            attended = self._attend(layer, query, pre_rope_query, page_table, rows.slots, rows.context_lens)
            hidden = self.decoder.leave(layer, hidden, attended)
        return hidden

    def _ask(self, ask: int, hidden: Tensor, inputs: HopInputs, exchange: SlotExchange) -> Carry:
        layer, rows, table = self.deposited_layers[ask], inputs.rows, self.decoder.pool.resident_table
        query, pre_rope_query = self.decoder.enter(layer, hidden, rows.positions, rows.slots, None)
        exchange.ask(query)  # first, so that the CPU reads while the device attends to what is resident
        return Carry(hidden, self._attend(layer, query, pre_rope_query, table, rows.slots, inputs.resident_lens))

    def _attend(self, layer: int, query: Tensor, pre_rope_query: Tensor, page_table: Tensor, slots: Tensor,
                lens: Tensor) -> Partial:  # fmt: skip
        pool = self.decoder.pool
        return self.attention(
            DecodeQuery(
                layer, query, pre_rope_query, pool.key_pages[layer], pool.value_pages[layer], page_table, slots, lens,
                self.decoder.scale, self.workspace,
            )
        )  # fmt: skip
