"""Keep the indexes of rings up to date: what of a sequence is indexed, where its rows lie, and what is forgotten.

An index has tokens of the offloaded run, or of a context that is whole on the device, from behind the sink on. Both are
the same tokens, so an index stays when pages are evicted or come back; what changes is where chosen rows are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gpu.methods.device_side import Site
from gpu.methods.indexed import BLOCK_TOKENS, SPLIT_TOKENS
from gpu.methods.indexed.auditing import AuditSums
from gpu.methods.indexed.building import copy_pieces, index_pages, index_tokens
from gpu.methods.indexed.page_rows import Pages, centre_pages
from gpu.methods.indexed.reporting import Report
from gpu.methods.indexed.ring import BEHIND_ALL, EMPTY, new_index, new_layout
from gpu.methods.indexed.settings import IndexedSettings
from gpu.step import HostRead, RingWrite
from gpu.upload import upload
from transfer.places import COLUMNS, RUN_BEGIN, check_places

IN_PAGES = -1  # in place of a context's id
GROWN_TOKENS = 2 * BLOCK_TOKENS  # of a resident run, that are indexed at once


@dataclass(slots=True)
class Known:
    """What of a ring's run is indexed. context_id: whose run it is, or IN_PAGES; num_tokens: from its first token on;
    places: the table of pieces that the device has; pages: of its index; generation: assignments of the ring so far;
    audited: since the last one.
    """

    context_id: int | None = None
    num_tokens: int = 0
    places: np.ndarray | None = None
    pages: list[int] = field(default_factory=list)
    generation: int = 0
    audited: AuditSums = field(default_factory=AuditSums)


class Upkeep:
    """The indexes of `num_rings` rings in all offloaded layers, and what each ring's index has.

    known: by ring. pages: by layer's place; empty: resident tokens are read in full. in_pages: int32 `[rings + 1]`, how
    many tokens of contexts that are whole on the device are indexed.
    """

    def __init__(self, settings: IndexedSettings, site: Site, num_rings: int, report: Report) -> None:
        assert site.tier_shape is not None, "indexed: nothing is offloaded here"
        shape, tier, device = site.architecture, site.tier_shape, site.device
        self.index = new_index(settings, shape, len(tier.layers), num_rings, site.dtype, device, site.ring_pages)
        self.layers = [self.index.layer(place) for place in range(len(tier.layers))]
        self.layout = new_layout(settings, shape, tier.rows, device)
        self.sink_tokens = site.sink_tokens
        self.pages: list[Pages] = []
        if settings.resident == "indexed" and site.pages:
            self.pages = [Pages(*site.pages[layer], site.sink_tokens) for layer in tier.layers]
        self.in_pages = torch.zeros(num_rings + 1, dtype=torch.int32, device=device)
        self.known = [Known(pages=own) for own in self.index.table[0].tolist()]
        self._window_tokens = site.window_tokens
        self._report = report

    def assign(self, write: RingWrite) -> int:
        """Empty a ring's slots; its index begins anew, or with a copy of what another ring has of the same tokens.

        Return how many times the ring was assigned.
        """
        own, index = self._of_ring(write.ring), self.index
        self._empty(write.ring)
        known = self.known[write.ring]
        known.generation, known.audited = known.generation + 1, AuditSums()
        if write.pages is not None:
            known.pages = []
            self.add_pages(write.ring, write.pages)
        if write.source is not None:
            source = self.known[write.source.ring]
            shared = min(source.num_tokens, write.source.begin - self.sink_tokens, len(known.pages) * SPLIT_TOKENS)
            known.num_tokens = max(shared, 0) // BLOCK_TOKENS * BLOCK_TOKENS
            num_pages = -(-known.num_tokens // SPLIT_TOKENS)
            for to, page in zip(known.pages[:num_pages], source.pages, strict=False):
                for array in (index.codes, index.scales, index.value_codes, index.value_scales, index.value_centres):
                    array[:, to] = array[:, page]
            index.centres[:, own] = index.centres[:, self._of_ring(write.source.ring)]
        return known.generation

    def add_pages(self, ring: int, page_ids: Sequence[int]) -> None:
        """Let a ring's index go on in these pages, behind those that it has."""
        known = self.known[ring]
        begin, end = len(known.pages), len(known.pages) + len(page_ids)
        known.pages = [*known.pages, *page_ids]
        self.index.table[:, ring, begin:end] = upload(np.array(page_ids, np.int32), self.index.table.device)

    def index_resident(self, ring: int, slot: int, cell: int) -> None:
        """Index what has left the window of a sequence that is whole on the device. cell: of its next token."""
        known = self.known[ring]
        end = (cell + 1 - self._window_tokens - self.sink_tokens) // GROWN_TOKENS * GROWN_TOKENS
        if known.context_id == IN_PAGES and known.num_tokens >= end:
            return
        known.context_id, known.places = IN_PAGES, None
        if known.num_tokens < end:
            _check_pages(known, end)
            if known.num_tokens == 0:
                for layer, pages in zip(self.layers, self.pages, strict=True):
                    centre_pages(layer, ring, slot, end, pages, self.layout)
            begin = known.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            index_pages(self.index, ring, slot, begin, end, self.pages, self.layout)
            known.num_tokens = end
        self.in_pages[ring].fill_(known.num_tokens)

    def index_offloaded(self, ring: int, read: HostRead, places: np.ndarray) -> Known:
        """Index what a sequence has offloaded since its last step; places: `transfer.places` of its run."""
        known, num_tokens = self.known[ring], read.end - read.begin
        if known.context_id == IN_PAGES:  # of the same tokens
            self._empty_slots(ring)
        elif known.context_id not in (None, read.context_id):
            self._empty(ring)
            known = self.known[ring]
        known.context_id = read.context_id
        self._place(ring, places)
        if known.num_tokens == 0:
            self.index.centres[:, self._of_ring(ring)] = self.index.piece_centres[:, ring, 0]
        if known.num_tokens < num_tokens:
            _check_pages(known, num_tokens)
            begin = known.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            index_tokens(self.index, ring, begin, num_tokens, self.layout)
            known.num_tokens = num_tokens
        return known

    def _empty(self, ring: int) -> None:
        """Forget the run of a ring: what is indexed of it, and what stands in slots."""
        self._empty_slots(ring)
        self.in_pages[ring].fill_(0)
        self._report.doublings[:, self._of_ring(ring)] = 0
        known = self.known[ring]
        self.known[ring] = Known(pages=known.pages, generation=known.generation, audited=known.audited)

    def _empty_slots(self, ring: int) -> None:
        own = self._of_ring(ring)
        self.index.ids[:, own] = EMPTY
        self.index.held[:, own] = 0

    def _of_ring(self, ring: int) -> slice:
        """Return the places of a ring."""
        return slice(ring * self.layout.kv_heads, (ring + 1) * self.layout.kv_heads)

    def _place(self, ring: int, places: np.ndarray) -> None:
        """Write where a ring's run lies, in stream order, if it has moved or grown."""
        known = self.known[ring]
        if known.places is not None and np.array_equal(known.places, places):
            return
        layers, _, most = self.index.lies[:, ring].shape
        check_places(places, most)
        num_pieces = places.shape[2]
        table = np.zeros((layers, COLUMNS, most), np.int64)
        table[:, RUN_BEGIN] = BEHIND_ALL
        table[:, :, :num_pieces] = places
        self.index.lies[:, ring] = upload(table, self.index.lies.device)
        copy_pieces(self.index, ring, num_pieces, self.layout)
        known.places = places


def _check_pages(known: Known, num_tokens: int) -> None:
    have = len(known.pages) * SPLIT_TOKENS
    assert num_tokens <= have, f"indexed: pages for {have} tokens, and {num_tokens} are to be indexed"
