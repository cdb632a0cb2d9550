"""Run block prediction on the device: read fetched blocks, record what was attended to, and fetch the next blocks.

A layer's next blocks are chosen after its own attention, and fetched while later layers run, on streams that layers
take in turn. The step waits for the last fetch at its end, so a block that is read is always there, and a step is one
graph.

Invariants: A choice follows from histories, and histories from what was read exactly, never from a sample. In which
steps a layer chooses follows from its number and the cell alone. Slots change only after their layer's attention. If a
step reads more of a context in host memory than its blocks were chosen from, or is the first of a ring, its blocks are
chosen and fetched before it begins.

If the settings leave late blocks to the host's sample, a step ends without the blocks whose fetch has not begun, and
they leave their slots. Which blocks these are depends on timing, but never on what a table holds. A step of two parts
ends with the second part. The end of the first part waits for nothing; otherwise all of its blocks would be in time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.attention.step_rows import StepRows
from gpu.methods.device_side import LayerReads, Lent, RingSide, Site
from gpu.methods.predicted import COUNTERS
from gpu.methods.predicted.block_choice import choose_blocks
from gpu.methods.predicted.fetching import Lateness, fetch_blocks, look_at_blocks
from gpu.methods.predicted.held_blocks import EMPTY, Blocks, new_blocks
from gpu.methods.predicted.listing import FETCHED, LATE, LOOKED, NUM_COUNTS, READ, SKIP, WHOLE, list_blocks
from gpu.methods.predicted.noting import Fetched, HistoryRows, note_step
from gpu.methods.predicted.prompt import note_prompt
from gpu.methods.predicted.settings import PredictedSettings
from gpu.methods.predicted.turns import NEVER, Choice, RingRows, Turns, find_rings
from gpu.model.architecture import ModelError
from gpu.operations.arguments import runs_on_numba, runs_on_triton
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.numba_decode_attention import paged_decode_attention_cpu
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials, paged_decode_attention, workspace_for
from gpu.predictor.network import PredictorError, load_network
from gpu.predictor.predict import pack, predict_blocks
from gpu.step import HostRead, RingWrite
from gpu.upload import upload
from transfer.copies import Streams
from transfer.partial import Owner, Partial
from transfer.places import COLUMNS, check_places
from transfer.reading import Reading
from transfer.tier_shape import BLOCK_TOKENS

CHAINS = 3
"""Streams that layers take in turn, since a layer's choice and fetch are small kernels that wait for each other."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step's rows, arranged for this side.

    choices: layers take them in turn; empty if nothing is to be chosen. full, partial: int32 `[rows]`, the rings of
    rows that attend to everything in this step, and of those that do not; -1: other rows.
    """

    of_rings: RingRows
    choices: Sequence[Choice]
    full: Tensor
    partial: Tensor


def make_ring_side(settings: PredictedSettings, site: Site, num_rings: int) -> RingSide:
    """Make the side of `predicted` over `num_rings` rings. Raises ModelError if the predictor's file cannot be read."""
    return Predicted(settings, site, num_rings)


class Predicted(RingSide):
    """The device side with `num_rings` rings of each offloaded layer."""

    borrows = True

    def __init__(self, settings: PredictedSettings, site: Site, num_rings: int) -> None:
        assert site.tier_shape is not None, "predicted: the engine has no host tier"
        super().__init__(site)
        shape, device, tier = site.architecture, site.device, site.tier_shape
        self.settings = settings
        self._places = {layer: place for place, layer in enumerate(tier.layers)}
        self._first_layer = tier.layers[0]
        self._kv_heads, self._group, self._dim = shape.num_kv_heads, shape.group, shape.dim
        self._is_int8 = tier.rows == "int8"
        self._first_block, rest = divmod(site.sink_tokens, BLOCK_TOKENS)
        assert rest == 0, "predicted: the offloaded run begins with a whole block"
        try:
            network = load_network(settings.weights)
        except (PredictorError, OSError) as error:
            raise ModelError(
                f"predicted: weights: {error}; give a predictor that `tandem train predictor` made"
            ) from None
        self._network = pack(network, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
        self.blocks = new_blocks(settings, shape, len(tier.layers), num_rings, site.stored, device)
        self._layers = [self.blocks.layer(place) for place in range(len(tier.layers))]
        self._workspace = workspace_for(
            site.max_running * shape.num_kv_heads, shape.group, 1, shape.dim, settings.budget_tokens, device
        )  # fmt: skip
        self._reading = Reading.BLOCKS  # the same for all rings of a part; its copy on the device:
        self._samples = torch.zeros(1, dtype=torch.bool, device=device)
        self.turns = Turns(
            settings, num_rings, shape.num_kv_heads, self._first_block, self.blocks.history.shape[3], device
        )  # fmt: skip
        self._num_rings = num_rings
        self._chosen: dict[int, tuple[int, int]] = {}  # by ring: the cell chosen after, number of blocks
        self._written_places: dict[int, np.ndarray] = {}
        self._of_rows: WeakKeyDictionary[StepRows, _Rows] = WeakKeyDictionary()
        self._streams = Streams(device)
        self._chains = [Streams(device).up for _ in range(CHAINS)]
        self._begun: set[int] = set()  # chains that still have to be waited for
        self._open_parts = torch.zeros(1, dtype=torch.int32, device=device)  # of the step that the device computes
        self._num_open = 0  # open parts of the step that the host launches
        self._used: list[Tensor] = []  # kept alive for the other streams until they are waited for
        self._counts = torch.zeros(len(tier.layers), NUM_COUNTS, dtype=torch.int64, device=device)
        self._host_counts = torch.zeros(self._counts.shape, dtype=torch.int64, pin_memory=device.type == "cuda")

    # --- who holds a ring ---------------------------------------------------------------------------------------------

    def assign(self, write: RingWrite) -> None:
        store, source = self.blocks, write.source
        own = slice(write.ring * self._kv_heads, (write.ring + 1) * self._kv_heads)
        if source is None:
            store.history[:, own] = 0
        else:
            store.history[:, own] = store.history[:, source.ring * self._kv_heads :][:, : self._kv_heads]
            rows = store.history.shape[2]
            foreign = [cell % rows for cell in range(source.begin, min(source.end, source.begin + rows))]
            store.history[:, own, foreign] = 0
        store.ids[:, own] = EMPTY
        store.bits[:, own] = 0
        self.turns.last_cells[write.ring].fill_(NEVER)
        self._chosen.pop(write.ring, None)
        self._reading = write.reading
        self._samples.fill_(not write.reading.drops_rest)
        super().assign(write)

    # --- prompts ------------------------------------------------------------------------------------------------------

    @property
    def sees_prompts(self) -> bool:
        return True

    def see_prompt(self, slot: int, query: PrefillQuery, attend: Callable[[PrefillQuery], Attended]) -> None:
        place = self._places.get(query.layer)
        if place is not None:
            note_prompt(self.blocks.history[place], self.held[slot], query, self._first_block, self.settings.history)

    # --- decode -------------------------------------------------------------------------------------------------------

    def borrow(
        self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None], lent: Lent
    ) -> None:
        self.give_up()  # a step that failed may have left parts open
        behind: dict[int, tuple[int, int]] = {}
        for row, (slot, cell, host_read) in enumerate(zip(slots, cells, host_reads, strict=True)):
            ring = self.held.get(slot)
            if ring is None or host_read is None:
                continue
            self._place(ring, lent.places(row))
            limit = (host_read.end - host_read.begin) // BLOCK_TOKENS
            chosen_behind, chosen_of = self._chosen.get(ring, (NEVER, 0))
            if chosen_behind != cell - 1 or chosen_of < limit:
                behind[ring] = cell - 1, limit
            self._chosen[ring] = cell, limit
        if behind:
            self._choose_now(behind)

    def before(self, reads: LayerReads) -> None:
        place, rows = self._places.get(reads.layer), reads.rows
        if place is None:
            return
        if reads.layer == self._first_layer:  # at each replay, since the rows of a captured step change
            self._of_rows[rows] = self._look_up(rows, reads.reads_host)
            if reads.reads_host:
                self._open_parts.add_(1)
                self._num_open += 1
        own, layer = self._of_rows[rows], self._layers[place]
        if reads.maxima is None:
            size = (rows.num_rows, self._kv_heads * self._group, layer.history.shape[2])
            reads.maxima = torch.empty(size, device=reads.query.device)
        if not reads.reads_host:
            return
        listed = list_blocks(layer.ids, layer.bits, own.of_rings.rings, rows.skips, self._kv_heads, self._counts[place])
        reads.kept[self] = listed
        reads.excluded = listed.excluded if reads.excluded is None else reads.excluded | listed.excluded
        reads.wanted = own.of_rings.wanted if reads.wanted is None else reads.wanted & own.of_rings.wanted
        if self.settings.calibrate_every:
            rest = (rows.skips[1] - rows.skips[0]) * self._kv_heads - listed.tokens.view(rows.num_rows, -1).sum(1)
            self._counts[place, WHOLE].add_(torch.where(own.full >= 0, rest, 0).sum())

    def read(self, reads: LayerReads, on_device: DevicePartials) -> None:
        listed, place = reads.kept.get(self), self._places.get(reads.layer)
        if listed is None or place is None:
            return
        rows, heads, dim = reads.query.shape
        items, slots = listed.pages.shape
        query = reads.query.reshape(items, self._group, dim)
        maxima = torch.empty(items, self._group, slots, device=query.device)
        layer = self._layers[place]
        asked = PagedReads(query, layer.keys, layer.values, listed.pages, listed.rows, listed.tokens, dim**-0.5)
        if runs_on_numba(layer.keys):
            partial = paged_decode_attention_cpu(asked, maxima=maxima).near
        else:
            partial = paged_decode_attention(asked, self._workspace, maxima=maxima).near
        partial = Partial(partial.out.view(rows, heads, dim), partial.lse.view(rows, heads))
        reads.fetched.append(partial)
        reads.kept[self] = Fetched(maxima, listed, partial.lse)

    def after(self, reads: LayerReads, on_device: DevicePartials, filled: Sequence[Partial]) -> None:
        place = self._places.get(reads.layer)
        if place is None:
            return
        assert reads.maxima is not None, "predicted: attention to resident cells has filled the maxima"
        own, layer, fetched, rows = self._of_rows[reads.rows], self._layers[place], reads.kept.get(self), reads.rows
        near_lse = on_device.near.lse
        if self.settings.calibrate_every and reads.reads_host:
            (answer,) = filled[len(reads.fetched) :]  # exact for rows that asked for all the rest
            whole_lse = torch.logaddexp(near_lse, answer.lse.to(near_lse.device, non_blocking=True))
            near_lse = torch.where(self._samples, near_lse, whole_lse)
        lse = note_step(
            layer.history, reads.maxima, near_lse, fetched, HistoryRows(own.of_rings.rings, rows.positions, rows.skips),
            self._first_block, self._kv_heads,
        )  # fmt: skip
        if not own.choices or not reads.reads_host:
            return
        self._used.extend((reads.query, lse))
        counts, stride = self._counts[place], self.settings.look_stride_blocks
        looks = [(own.partial, stride)] if stride else []
        looks += [(own.full, 1)] if self.settings.calibrate_every else []
        with self._aside(place):
            for rings, every in looks:
                look_at_blocks(
                    layer, reads.query, lse, HistoryRows(rings, rows.positions, rows.skips), every, self._dim**-0.5,
                    self._is_int8, counts,
                )  # fmt: skip
            late = Lateness(self._open_parts, layer.bits, counts) if self.settings.leaves_late else None
            self._choose(layer, own.choices[place % len(own.choices)], counts, late)

    def finish(self, rows: StepRows) -> None:
        if not self._of_rows[rows].choices:
            return
        self._open_parts.sub_(1)
        self._num_open -= 1
        if not self._num_open:
            self._join()

    def give_up(self) -> None:
        self._join()
        self._num_open = 0
        self._open_parts.zero_()

    def covered(self, reads: LayerReads) -> dict[Owner, Tensor]:
        fetched = reads.kept.get(self)
        if fetched is None:
            return {}
        skips = reads.rows.skips
        tokens = fetched.listed.tokens.view(reads.rows.num_rows, -1).repeat_interleave(self._group, 1)
        is_partial = (self._of_rows[reads.rows].partial >= 0)[:, None]
        skip = torch.where(is_partial, (skips[1] - skips[0])[:, None] - tokens, 0)
        return {Owner.FETCHED: tokens, Owner.DROPPED: skip if self._reading.drops_rest else torch.zeros_like(skip)}

    def end_step(self) -> None:
        self._host_counts.copy_(self._counts, non_blocking=True)

    def counts(self) -> dict[str, list[int]]:
        sums = self._host_counts.sum(0).tolist()
        dropped = sums[SKIP] - sums[READ] - sums[WHOLE] if self._reading.drops_rest else 0
        totals = sums[SKIP], sums[READ], dropped, sums[FETCHED], sums[LOOKED], sums[LATE]
        return {name: [number] for name, number in zip(COUNTERS, totals, strict=True)}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Wait, in stream order, for the work on other streams.

        Clears the list, since a capture may only wait for its own work.
        """
        for begun in self._begun:
            chain = self._chains[begun]
            if chain is not None:
                torch.cuda.current_stream(chain.device).wait_stream(chain)
        self._begun.clear()
        self._used.clear()

    def _aside(self, place: int) -> AbstractContextManager[None]:
        """Run the following work of a layer on its chain of streams, after what the current stream was given."""
        self._begun.add(place % CHAINS)
        return self._streams.aside(self._chains[place % CHAINS])

    def _look_up(self, rows: StepRows, reads_host: bool) -> _Rows:
        """Arrange a step's rows by ring, in stream order."""
        heads = self._kv_heads * self._group
        if not reads_host:
            own, choices = find_rings(rows, self.ring_of_slot, self._samples, heads), ()
        else:
            own, choices = self.turns.of_rows(rows, self.ring_of_slot, self._samples, heads)
        every = self.settings.calibrate_every
        if not every:
            return _Rows(own, choices, own.rings, own.rings)
        is_full = rows.positions % every == 0
        wanted = own.wanted | is_full[:, None].to(torch.uint8)
        full, partial = torch.where(is_full, own.rings, -1), torch.where(is_full, -1, own.rings)
        return _Rows(replace(own, wanted=wanted), choices, full, partial)

    def _choose(self, layer: Blocks, choice: Choice, counts: Tensor, late: Lateness | None) -> None:
        """Choose a layer's next blocks, and fetch those that are not in slots yet."""
        scores = self._score(layer, choice)
        fresh = choose_blocks(scores, choice.limits, layer.ids, layer.bits, choice.is_in, counts)
        fetch_blocks(layer.ids, fresh, layer.lies, layer.keys, layer.values, self._kv_heads, self._is_int8, late)

    def _score(self, layer: Blocks, choice: Choice) -> Tensor:
        """Return the scores of a layer's blocks, float32 `[places, blocks]`."""
        every, scores = self.settings.predict_every, layer.scores
        if runs_on_triton(layer.history):
            predict_blocks(
                layer.history, choice.oldest, choice.widths, choice.stale, scores, self._network, every
            )  # fmt: skip
            return scores
        own, most = choice.is_in.nonzero().flatten(), int(choice.widths.max())  # the CPU computes only these
        scores[own] = -torch.inf
        if most > 0:
            history, made = layer.history[own, :, :most].contiguous(), torch.empty(len(own), most)
            predict_blocks(
                history, choice.oldest[own], choice.widths[own], choice.stale[own], made, self._network, every
            )  # fmt: skip
            scores[own, :most] = made
        return scores

    def _choose_now(self, behind: dict[int, tuple[int, int]]) -> None:
        """Choose and fetch blocks in all layers before a step.

        behind: by ring, the cell that was its last one, and how many blocks are only in host memory.
        """
        numbers = np.zeros((2, self._num_rings), np.int64)
        numbers[0] = -1
        for ring, own in behind.items():
            numbers[:, ring] = own
        cells, limits = upload(numbers, self.turns.last_cells.device)
        choice = self.turns.choice_now(cells, limits)
        for layer, counts in zip(self._layers, self._counts, strict=True):
            self._choose(layer, choice, counts, None)

    def _place(self, ring: int, places: np.ndarray) -> None:
        """Upload the table of a ring's pieces, in stream order, if its run has moved or grown."""
        known = self._written_places.get(ring)
        if known is not None and np.array_equal(known, places):
            return
        layers, _, most = self.blocks.lies[:, ring].shape
        check_places(places, most)
        table = np.zeros((layers, COLUMNS, most), np.int64)
        table[:, :, : places.shape[2]] = places
        self.blocks.lies[:, ring] = upload(table, self.turns.last_cells.device)
        self._written_places[ring] = places
