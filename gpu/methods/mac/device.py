"""Run MAC on the device: match before a layer is read, complete its attention afterwards, and keep the rings.

Invariants: a slot has the ring that plans gave it last, or none. A ring's entries belong to cells of its own sequence,
each written when the cell is, so an entry's index tells its cell. Rows without a ring read what they would without MAC.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.attention.step_rows import StepRows
from gpu.methods.device_side import LayerReads, RingSide, Site
from gpu.methods.mac import COUNTERS, ring_arrays, try_bytes
from gpu.methods.mac.break_even import BreakEven
from gpu.methods.mac.complete import complete
from gpu.methods.mac.match import NUM_COUNTS, Limits, Matched, match
from gpu.methods.mac.rings import Ring, RowRings
from gpu.methods.mac.seed import seed
from gpu.methods.mac.settings import MacSettings
from gpu.model.spec import ModelError
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from gpu.operations.kv.kv_rows import width_of
from gpu.step import RingWrite
from transfer.allocation import allocate_all
from transfer.partial import Owner, Partial, merge_all


@dataclass(frozen=True, slots=True)
class _RingRows:
    """The rings of a step's rows.

    rings: int32 `[rows]`, -1: none. is_estimate: uint8 `[rows]`, whether the host samples for the row.
    """

    rings: Tensor
    is_estimate: Tensor


def make_ring_side(settings: MacSettings, site: Site, num_rings: int) -> RingSide:
    return Mac(settings, site, num_rings)


class Mac(RingSide):
    """The device side with `num_rings` rings of each matching layer, in one store for all layers."""

    def __init__(self, settings: MacSettings, site: Site, num_rings: int) -> None:
        super().__init__(site)
        shape, device = site.architecture, site.device
        if shape.query_growth is not None:
            raise ModelError(
                f"mac: queries of {shape.name} grow with their positions, and a reused summary is of another position; "
                "take `reuse: mac` out of the profiles"
            )
        self.settings = settings
        self.layers = settings.layers(shape)
        self._store = Ring(**allocate_all(ring_arrays(settings, shape, num_rings), device))
        self._store.norms.fill_(torch.inf)
        self._rings = {layer: _map(self._store, lambda field, at=at: field[at]) for at, layer in enumerate(self.layers)}
        self.sink = max(settings.sink_tokens, site.sink_tokens)
        self._limits = {layer: self._limits_of(layer, shape.dim) for layer in self.layers}
        self._kv_heads = shape.num_kv_heads
        offloaded = () if site.tier_shape is None else site.tier_shape.layers
        self.break_even = BreakEven(
            torch.tensor([layer in offloaded for layer in range(shape.num_layers)], device=device),
            row_bytes=2 * width_of(site.stored, shape.dim) * site.stored.itemsize,
            try_bytes=try_bytes(settings, shape),
            group=shape.group,
            stops=settings.stops_matching,
        )
        self._is_estimate = torch.zeros(site.max_running + 1, dtype=torch.uint8, device=device)
        self._no_skips = torch.zeros(3, site.max_running, dtype=torch.int32, device=device)
        self._of_rows: WeakKeyDictionary[StepRows, _RingRows] = WeakKeyDictionary()
        self._host_counts = torch.zeros(
            self.break_even.table.shape, dtype=torch.int64, pin_memory=device.type == "cuda"
        )

    # --- who holds a ring ---------------------------------------------------------------------------------------------

    def assign(self, write: RingWrite) -> None:
        norms, source = self._store.norms[:, write.ring], write.source
        if source is None:
            norms.fill_(torch.inf)
        else:
            for each in fields(Ring):
                store = getattr(self._store, each.name)
                store[:, write.ring].copy_(store[:, source.ring])
            for cells in _wrap(source.begin, source.end, self.settings.capacity):
                norms[..., cells].fill_(torch.inf)
        super().assign(write)
        self._is_estimate[write.slot].fill_(write.reading.is_estimate)

    # --- prompts ------------------------------------------------------------------------------------------------------

    @property
    def sees_prompts(self) -> bool:
        return True

    def see_prompt(self, slot: int, query: PrefillQuery, attend: Callable[[PrefillQuery], Attended]) -> None:
        ring = self._rings.get(query.layer)
        if ring is not None:
            seed(ring, self.held[slot], query, self._limits[query.layer], self.settings.num_seeds, attend)

    # --- decode -------------------------------------------------------------------------------------------------------

    def before(self, reads: LayerReads) -> None:
        ring, rows = self._rings.get(reads.layer), reads.rows
        if ring is None:
            return
        own = self._rows_of(reads)
        skips = rows.skips if reads.skips else self._no_skips[:, : rows.num_rows]
        layer = reads.layer
        matched = match(
            reads.pre_rope_query, RowRings(ring, own.rings, rows.positions), skips, self._limits[layer],
            self.break_even.is_matching[layer], self.break_even.counts[layer], self._kv_heads,
        )  # fmt: skip
        reads.kept[self] = matched
        bounds, wanted = matched.bounds, matched.wanted
        if reads.bounds is not None:  # set for rows that hold another method's ring
            bounds = torch.where((own.rings >= 0)[:, None], bounds, reads.bounds)
        if reads.wanted is not None:
            wanted = wanted & reads.wanted
        reads.bounds, reads.has_far, reads.wanted = bounds, True, wanted

    def after(self, reads: LayerReads, on_device: DevicePartials, filled: Sequence[Partial]) -> None:
        ring = self._rings.get(reads.layer)
        if ring is None:
            return
        assert on_device.far is not None, "mac: far cells have a partial of their own"
        own, matched = self._rows_of(reads), self._matched(reads)
        whole = complete(
            on_device.near, on_device.far, merge_all(filled) if filled else None, reads.pre_rope_query, matched,
            RowRings(ring, own.rings, reads.rows.positions), self._limits[reads.layer], own.is_estimate,
        )  # fmt: skip
        if reads.attended is None:
            reads.attended = whole
            return
        has_ring, other = (own.rings >= 0)[:, None], reads.attended
        out = torch.where(has_ring[..., None], whole.out, other.out)
        reads.attended = Partial(out, torch.where(has_ring, whole.lse, other.lse))

    def covered(self, reads: LayerReads) -> dict[Owner, Tensor]:
        if reads.layer not in self._rings:
            return {}
        matched = self._matched(reads)
        begin, end, _ = matched.bounds
        return {Owner.REUSED: torch.where(matched.entries >= 0, end - begin, 0)}

    def end_step(self) -> None:
        self.break_even.end_step()
        self._host_counts.copy_(self.break_even.table, non_blocking=True)

    def counts(self) -> dict[str, list[int]]:
        columns = self._host_counts.T.tolist()
        matching = [int(layer in self._rings and bool(flag)) for layer, flag in enumerate(columns[-1])]
        return dict(zip(COUNTERS, [*columns[: NUM_COUNTS + 1], matching], strict=True))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _limits_of(self, layer: int, dim: int) -> Limits:
        settings = self.settings
        distance2 = 2 * dim * (1 - settings.tau_of(layer)) ** 2
        return Limits(
            self.sink, settings.band, distance2, settings.most_gap, settings.max_age, settings.min_context_tokens,
            settings.max_prefix_share, settings.min_gap,
        )  # fmt: skip

    def _rows_of(self, reads: LayerReads) -> _RingRows:
        """Return the rings of the step's rows.

        They are looked up in the first matching layer, at each replay, because the rows of a captured step change.
        """
        rows = reads.rows
        if reads.layer == self.layers[0] and self not in reads.kept:
            self._of_rows[rows] = _RingRows(rows.of_slots(self.ring_of_slot), rows.of_slots(self._is_estimate))
        return self._of_rows[rows]

    def _matched(self, reads: LayerReads) -> Matched:
        """Return what `before` matched in this layer."""
        matched: Matched = reads.kept[self]
        return matched


def _map(ring: Ring, change: Callable[[Tensor], Tensor]) -> Ring:
    """Apply a function to every tensor of a ring."""
    return Ring(*(change(getattr(ring, each.name)) for each in fields(Ring)))


def _wrap(begin: int, end: int, capacity: int) -> list[slice]:
    """Return the indices of cells `[begin, end)` in a ring, as slices."""
    if end - begin >= capacity:
        return [slice(0, capacity)]
    first, last = begin % capacity, end % capacity
    return [slice(first, last)] if first <= last else [slice(first, capacity), slice(0, last)]
