"""Run indexed attention on the device: keep the index up to date, and read for rows that hold one.

Before a step, tokens that were offloaded since the last one are indexed from their rows in host memory. So growth,
preemption, a copied ring and evicted pages are all handled in one place. Within a step the host decides nothing. The
CPU is asked for nothing for rows with an index. Query heads that need no host rows because of another method
(`LayerReads.wanted`) take no part in a choice. A KV head that has only such query heads reads nothing of its index.

With `resident: indexed`, a row without a host read has an index of its pages between sink and window. A step skips what
was indexed before it, and `Upkeep.in_pages` says how much that is: nothing where `resident: auto` finds that reading
everything is faster. A step without any index runs without the method. Steps with host reads and steps without run side
by side, so each kind has its own work arrays.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpu.attention.step_rows import StepRows
from gpu.methods.device_side import LayerReads, Lent, RingSide, Site, TimeSteps
from gpu.methods.indexed import COUNTERS, FIGURES, MASS_UNIT, SPLIT_TOKENS
from gpu.methods.indexed.attending import (
    FETCHED,
    HEADS,
    MASS,
    NUM_COUNTS,
    OFFLOADED,
    READ,
    TOKENS,
    join_parts,
)
from gpu.methods.indexed.auditing import Audits, Reading
from gpu.methods.indexed.crossovers import WHAT, Crossovers, identify, measure_crossovers, pays
from gpu.methods.indexed.layer_step import new_aside, read_scored, spare_heads, spare_shares
from gpu.methods.indexed.reporting import (
    BOUND,
    GENERATION,
    NO_LIMIT,
    OVER,
    READ_MASS,
    new_report,
    report_errors,
)
from gpu.methods.indexed.rereading import read_again
from gpu.methods.indexed.ring import EMPTY, new_work
from gpu.methods.indexed.scoring import RingStep, score_tokens
from gpu.methods.indexed.settings import SHARE_UNIT, IndexedSettings
from gpu.methods.indexed.upkeep import Upkeep
from gpu.methods.method import Where
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from gpu.step import HostRead, RingGrowth, RingWrite
from transfer.measured import keep_measured, measured_path
from transfer.partial import Owner, merge

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step's data by row and by ring.

    rings, num_tokens: int32 `[rows]`: the ring, -1: none, and the number of tokens with an index.
    all_wanted: uint8 `[rows, heads]`, ones.
    turns: for each turn, the rings of its rows and the step of each layer.
    bounds: int32 `[3, rows, heads]`, what the device skips: tokens with an index, and host reads.
    is_in_pages: bool `[rows, 1]`. This and bounds are None unless pages have an index.
    """

    rings: Tensor
    num_tokens: Tensor
    all_wanted: Tensor
    turns: tuple[tuple[Tensor, tuple[RingStep, ...]], ...]
    bounds: Tensor | None = None
    is_in_pages: Tensor | None = None


def make_ring_side(settings: IndexedSettings, site: Site, num_rings: int) -> RingSide:
    return Indexed(settings, site, num_rings)


class Indexed(RingSide):
    """The device side with `num_rings` indexes of every offloaded layer."""

    borrows = True
    reads_alone = True
    takes_turns = True

    def __init__(self, settings: IndexedSettings, site: Site, num_rings: int) -> None:
        assert site.tier_shape is not None, "indexed: the engine has no host tier"
        super().__init__(site)
        shape, tier, device = site.architecture, site.tier_shape, site.device
        self.settings = settings
        self._num_heads = shape.num_heads
        self._report = new_report(shape, len(tier.layers), num_rings, device)
        self.upkeep = Upkeep(settings, site, num_rings, self._report)
        self.index, self._layout, self._pages = self.upkeep.index, self.upkeep.layout, self.upkeep.pages
        self._layers = self.upkeep.layers
        self._places = {layer: place for place, layer in enumerate(tier.layers)}
        self._first_layer = tier.layers[0]
        works = [new_work(settings, shape, num_rings, device) for _ in range(settings.num_works)]
        asides = [new_aside(device) for _ in works]
        self._work = {True: works[0], False: works[-1]}  # by whether a step has host reads
        self._asides = {True: asides[0], False: asides[-1]}
        self._of_layers = [self._report.layer(place) for place in range(len(tier.layers))]
        self.audits = Audits(self._report, settings.errors.audit_steps, shape.num_kv_heads, tier.rows)
        self._of_rows: WeakKeyDictionary[StepRows, _Rows] = WeakKeyDictionary()
        self._counts = torch.zeros(len(tier.layers), NUM_COUNTS, dtype=torch.int64, device=device)
        self._num_layers = shape.num_layers
        self.num_rings, self.num_pages, self.num_layers = num_rings, self.upkeep.num_pages, len(tier.layers)
        self._crossovers: Crossovers | None = {} if settings.resident == "auto" else None  # None: it always pays
        counted = (self._counts, self._report.of_layers, self._report.of_rings)
        is_cuda = device.type == "cuda"
        self._on_host = [torch.zeros(one.shape, dtype=torch.int64, pin_memory=is_cuda) for one in counted]

    def assign(self, write: RingWrite) -> None:
        """Empty a ring's slots. Its index starts empty, or with a copy of another ring's index of the same tokens."""
        generation = self.upkeep.assign(write)
        self._report.of_rings[write.ring].fill_(0)
        self._report.of_rings[write.ring, GENERATION].fill_(generation)
        epsilon = self.settings.epsilon if write.epsilon is None else write.epsilon
        self._report.limits[write.ring].fill_(NO_LIMIT if epsilon is None else epsilon)
        super().assign(write)

    def grow(self, growth: RingGrowth) -> None:
        self.upkeep.add_pages(growth.ring, growth.pages)

    @property
    def goes_by_times(self) -> bool:
        return self.settings.resident == "auto"

    def learn_times(self, time: TimeSteps, sizes: Sequence[int], longest: int, where: Where) -> None:
        """Measure from which context length on an index of pages is faster, and store it for plans."""
        shortest = max(longest // 4, self.settings.min_context_tokens, 2 * SPLIT_TOKENS)
        self._crossovers = measure_crossovers(time, sizes, shortest, longest)
        of = identify(where, self.settings)
        log.info("resident_index from=%s of=%s", self._crossovers, of)
        keep_measured(measured_path(), WHAT, of, {str(rows): least for rows, least in self._crossovers.items()})

    def forget_counts(self) -> None:
        for counts in (self._counts, self._report.of_layers, self._report.of_rings, *self._on_host):
            counts.zero_()

    def takes_part(self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> bool:
        if not super().takes_part(slots, cells, host_reads):
            return False
        reads_host = any(read is not None and slot in self.held for slot, read in zip(slots, host_reads, strict=True))
        return reads_host or self._pays(slots, cells, host_reads)

    def _pays(self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> bool:
        """Return whether rows whose context is whole on the device are read through their indexes."""
        if self.forced is not None or self._crossovers is None:
            return self.forced is not False
        rows = zip(slots, cells, host_reads, strict=True)
        resident = [cell + 1 for slot, cell, read in rows if read is None and slot in self.held]
        return pays(self._crossovers, len(resident), sum(resident))

    def prepare(self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> None:
        """Index what has left the window of rows whose context is whole on the device, if an index is faster."""
        if not self._pages:
            return
        by_index = self._pays(slots, cells, host_reads)
        for slot, cell, read in zip(slots, cells, host_reads, strict=True):
            ring = self.held.get(slot)
            if ring is None or read is not None:
                continue
            if by_index:
                self.upkeep.index_resident(ring, slot, cell)
            else:
                self.upkeep.read_in_pages(ring, 0)

    def borrow(
        self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None], lent: Lent
    ) -> None:
        """Index what rows have offloaded since their last step, and pick what is audited in this one."""
        readings = []
        for row, (slot, read) in enumerate(zip(slots, host_reads, strict=True)):
            ring = self.held.get(slot)
            if ring is None or read is None or slot in slots[:row]:  # rows of one slot have the same host read
                continue
            known = self.upkeep.index_offloaded(ring, read, lent.places(row))
            if read.end > read.begin and known.places is not None:
                readings.append(Reading(ring, read.end - read.begin, known.places, known.audited))
        self.audits.pick(readings, lent)

    def give_up(self) -> None:
        self.audits.give_up()

    def before(self, reads: LayerReads) -> None:
        if reads.layer not in self._places:
            return
        if reads.layer == self._first_layer:  # at each replay, since the rows of a captured step change
            self._of_rows[reads.rows] = self._look_up(reads.rows)
        if not reads.skips and not self._pages:
            return
        own = self._of_rows[reads.rows]
        if own.bounds is not None and own.is_in_pages is not None:
            others = reads.bounds  # set for rows that hold a ring of another part
            reads.bounds = own.bounds if others is None else torch.where(own.is_in_pages, own.bounds, others)
        wanted = reads.wanted if reads.skips and reads.wanted is not None else own.all_wanted
        reads.kept[self] = wanted
        if reads.reads_host:
            reads.wanted = torch.where((own.rings >= 0)[:, None], 0, wanted).to(torch.uint8)

    def read(self, reads: LayerReads, on_device: DevicePartials) -> None:
        wanted, place = reads.kept.get(self), self._places.get(reads.layer)
        if wanted is None or place is None:
            return
        own, layer, counts = self._of_rows[reads.rows], self._layers[place], self._counts[place]
        work, pages = self._work[reads.skips], self._pages[place] if self._pages else None
        query, resident = reads.query, on_device.near.lse
        if on_device.far is not None:
            resident = torch.logaddexp(resident, on_device.far.lse)
        rows, heads, dim = query.shape
        near = on_device.near if on_device.far is None else merge(on_device.near, on_device.far)
        report, is_whole = self._of_layers[place], wanted is own.all_wanted
        if not is_whole:
            resident = spare_shares(resident, wanted)
        for rings, steps in own.turns:
            step = steps[place] if is_whole else spare_heads(steps[place], wanted, self._layout)
            score_tokens(query, resident.contiguous(), layer, work, step, self._layout)
            read_scored(query, layer, work, step, self._layout, counts, pages, self._asides[reads.skips])
            found = join_parts(work, rings, wanted, step, self._layout, (rows, heads, dim), counts)
            reads.fetched.append(found)
            report_errors(query, near, found, wanted, work, report, step, self._layout)
            if self.settings.on_exceed == "reread":
                read_again(query, found, layer, work, report, step, self._layout, pages)

    def covered(self, reads: LayerReads) -> dict[Owner, Tensor]:
        wanted, place = reads.kept.get(self), self._places.get(reads.layer)
        if wanted is None or place is None:
            return {}
        own, kv_heads = self._of_rows[reads.rows], self._layout.kv_heads
        is_own = (own.rings >= 0)[:, None] & (wanted != 0)
        num_read = (self._layers[place].ids != EMPTY).sum(1, dtype=torch.int32).view(-1, kv_heads)
        num_read = num_read[own.rings.clamp_min(0)].repeat_interleave(wanted.shape[1] // kv_heads, 1)
        num_tokens = own.num_tokens[:, None]
        read = torch.where(is_own & (num_tokens > 0), num_read, 0)
        return {Owner.FETCHED: read, Owner.ESTIMATED: torch.where(is_own, num_tokens, 0) - read}

    def end_step(self) -> None:
        for to, counts in zip(
            self._on_host, (self._counts, self._report.of_layers, self._report.of_rings), strict=True
        ):
            to.copy_(counts, non_blocking=True)
        self.audits.follow()

    def counts(self) -> dict[str, list[int]]:
        read, noted, audits = self._on_host[0], self._on_host[1], self.audits
        tokens = read.sum(0)[[OFFLOADED, READ, FETCHED, TOKENS]].tolist()
        of_layers = [
            read[:, HEADS].tolist(),
            read[:, MASS].tolist(),
            *(noted[:, column].tolist() for column in (READ_MASS, BOUND, OVER)),
            [one.heads for one in audits.of_layers],
            [round(one.error * MASS_UNIT) for one in audits.of_layers],
            [one.beyond for one in audits.of_layers],
            [round(float(one) * 1000) for one in audits.factors],
        ]
        worst = [round(audits.worst * MASS_UNIT)]
        numbers = [*([one] for one in tokens), *map(self._by_layer, of_layers), worst]
        return dict(zip(COUNTERS, numbers, strict=True))

    def figures_of(self, slot: int) -> dict[str, int]:
        ring = self.held[slot]
        known, numbers = self.upkeep.known[ring], self._on_host[2][ring].tolist()
        if numbers[GENERATION] != known.generation:
            return {}  # no step of this request has finished yet
        audited = known.audited
        numbers = [*numbers[:GENERATION], audited.heads, round(audited.error * MASS_UNIT)]
        figures = dict(zip(FIGURES, numbers, strict=True))
        return figures if figures["index_heads"] else {}  # {}: no step read by index

    def _by_layer(self, numbers: list[int]) -> list[int]:
        """Return one number per layer of the model, from the numbers of the offloaded layers; 0 for the others."""
        own = dict(zip(self._places, numbers, strict=True))
        return [own.get(layer, 0) for layer in range(self._num_layers)]

    def _look_up(self, rows: StepRows) -> _Rows:
        """Arrange a step's rows by ring, in stream order."""
        rings, num_rings = rows.of_slots(self.ring_of_slot), len(self.upkeep.known)
        of_rows = rows.skips[1] - rows.skips[0]
        to = torch.where(rings >= 0, rings, num_rings).long()
        self._report.is_over.index_fill_(0, to, 0)  # only for this step's rings; others may be in a step beside it
        bounds = is_in_pages = page_slots = None
        if self._pages:
            in_pages = torch.where(of_rows > 0, 0, self.upkeep.in_pages[to])
            is_in_pages, of_rows = in_pages > 0, of_rows + in_pages
            begin, end = self.upkeep.sink_tokens, self.upkeep.sink_tokens + in_pages
            bounds = torch.where(is_in_pages, torch.stack([end.clamp_max(begin), end, end]), rows.skips)
            bounds = bounds[..., None].expand(-1, -1, self._num_heads)
            page_slots, is_in_pages = torch.where(is_in_pages, rows.slots, -1), is_in_pages[:, None]
        all_wanted = torch.ones(rows.num_rows, self._num_heads, dtype=torch.uint8, device=rings.device)
        turns = tuple((own, self._steps_of(own, of_rows, page_slots)) for own in rows.list_turns(rings))
        return _Rows(rings, of_rows, all_wanted, turns, bounds, is_in_pages)

    def _steps_of(self, rings: Tensor, of_rows: Tensor, page_slots: Tensor | None) -> tuple[RingStep, ...]:
        """Return the step of each layer, with at most one row per ring.

        rings, of_rows, page_slots: int32 `[rows]`: the ring, -1: none; tokens with an index; the slot whose pages hold
        them.
        """
        settings, num_rings, device = self.settings, len(self.upkeep.known), rings.device
        to = torch.where(rings >= 0, rings, num_rings).long()  # rows without a ring share the last entry

        def by_ring(of_row: Tensor, other: int) -> Tensor:
            entries = torch.full((num_rings + 1,), other, dtype=torch.int32, device=device)
            return entries.index_copy_(0, to, of_row)[:num_rings]

        numbers = torch.arange(len(rings), dtype=torch.int32, device=device)
        if len(rings) <= num_rings:  # a program for each row: a server of many rings may step with few
            row_of, ring_of = torch.where(rings >= 0, numbers, -1), rings.clamp_min(0)
        else:
            row_of, ring_of = by_ring(numbers, -1), torch.arange(num_rings, dtype=torch.int32, device=device)
        num_tokens = by_ring(of_rows, 0)
        share = (num_tokens.long() * round(settings.budget_share * SHARE_UNIT) + SHARE_UNIT - 1) // SHARE_UNIT
        budgets = share.clamp_min(settings.least_tokens).clamp_max(settings.budget_tokens).int()
        of_places, counts = (one.repeat_interleave(self._layout.kv_heads) for one in (budgets, num_tokens))
        step = RingStep(row_of, ring_of, counts, of_places, None if page_slots is None else by_ring(page_slots, -1))
        doubled = (of_places << self._report.doublings).clamp_max(self.index.ids.shape[2])  # slots
        return tuple(replace(step, budgets=of_layer) for of_layer in doubled)
