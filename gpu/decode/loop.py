"""The one loop over layers of a decode step, whatever its rows' profiles.

It refuses to know requests, graphs and how the host attends. A layer is norm, QKV, RoPE and KV write; what methods do
before attention; the ask; attention to what is on the device; the answer; the merge of all partials; output projection
and MLP. Invariants: what a (row, head) reads is stated, by its bounds on the device and by its ask of the host, and
every cell of its context is read once; a step with asks asks, and awaits, in every layer whose KV goes down, whatever
its rows read there, for the host answers as often.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu.decode.attention import Reads, attend
from gpu.decode.rows import StepRows
from gpu.host.slot_exchange import SlotExchange
from gpu.kernels.paged_decode_attention import Workspace
from gpu.model.decoder import Decoder
from transfer.partial import Coverage, Owner, Partial, merge_all

# A step under way: it stops where the host must answer, and returns logits, float32 `[rows, vocab]`.
Step = Generator[None, None, Tensor]


@dataclass(frozen=True, slots=True)
class LayerLoop:
    """asked_layers: those whose KV goes down, which a step with asks asks for; last_tokens: int64 `[max_slots + 1]`,
    the last one for padding; checks_coverage: in a debug run, every layer counts what its partials cover.
    """

    decoder: Decoder
    asked_layers: tuple[int, ...]
    last_tokens: Tensor
    workspace: Workspace
    checks_coverage: bool

    def step(self, rows: StepRows, exchange: SlotExchange | None) -> Step:
        """One token for each row. exchange: where it asks, or None for a step that asks nothing; then no row may have
        a hole. It stops once a layer that asks: what follows reads the answer, or awaits it on the device.
        """
        decoder = self.decoder
        hidden = decoder.embed(self.last_tokens.index_select(0, rows.token_slots))
        for layer in range(decoder.architecture.num_layers):
            query, _ = decoder.enter(layer, hidden, rows.positions, rows.cells, rows.slots, None)
            if exchange is None or layer not in self.asked_layers:
                partials = [self._attend(layer, query, rows, None)]
            else:
                exchange.ask(query)  # first, so that the host reads while the device attends
                partials = [self._attend(layer, query, rows, rows.bounds(query.shape[1]))]
                yield
                partials.append(exchange.answer(rows.num_rows))
            if self.checks_coverage:
                check_coverage(layer, rows, partials)
            hidden = decoder.leave(layer, hidden, merge_all(partials))
        return decoder.logits(hidden)

    def _attend(self, layer: int, query: Tensor, rows: StepRows, bounds: Tensor | None) -> Partial:
        pool = self.decoder.pool
        reads = Reads(
            query, pool.key_pages[layer], pool.value_pages[layer], pool.page_table, rows.slots, rows.context_lens,
            self.decoder.scale, self.workspace, bounds, self.checks_coverage,
        )  # fmt: skip
        return attend(reads).near


def check_coverage(layer: int, rows: StepRows, partials: Sequence[Partial]) -> None:
    """Raises CoverageError unless what was read on the device and by the host is each row's context. Waits for both."""
    ledger = Coverage(layer, [f"of slot {slot}" for slot in rows.slots.tolist()])
    for owner, partial in zip((Owner.RESIDENT, Owner.HOST), partials, strict=False):
        ledger.add(owner, partial.covered)
    ledger.check(rows.context_lens)
