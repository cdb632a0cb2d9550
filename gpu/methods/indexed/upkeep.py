"""Keep the indexes of rings up to date: which tokens of a sequence are indexed, and where its rows are.

An index covers the offloaded run, or, for a context that is whole on the device, the tokens behind the sink. Both are
the same tokens, so an index stays valid when pages are evicted or reloaded; only where chosen rows are read changes.

Sequences with the same prefix share pages of their indexes. The first sequence to reach a token of a shared page
indexes it, with a centre that all of them use, and no other does it again. A sequence that takes over such tokens,
perhaps on another stream, waits for the work that indexes them.
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
from gpu.step import HostRead, RingCopy, RingWrite
from gpu.upload import upload
from transfer.places import COLUMNS, RUN_BEGIN, check_places

IN_PAGES = -1  # used as context_id while the rows are in pages
GROWN_TOKENS = 2 * BLOCK_TOKENS  # tokens of a resident run that are indexed at once


@dataclass(slots=True)
class Centre:
    """What is subtracted from keys: for one ring, or for all rings that share pages.

    is_known: one of them has tokens.
    """

    rings: list[int]
    is_known: bool = False


@dataclass(slots=True)
class Known:
    """What is indexed for a ring.

    centre: of its keys. context_id: whose run it is, or IN_PAGES. num_tokens: indexed tokens, from the run's first one
        on.
    places: the table of pieces that the device has. in_pages: the ring's entry of `Upkeep.in_pages`. pages: the index's
        pages.
    generation: how often the ring was assigned. audited: sums since the last assignment.
    """

    centre: Centre
    context_id: int | None = None
    num_tokens: int = 0
    places: np.ndarray | None = None
    in_pages: int = 0
    pages: list[int] = field(default_factory=list)
    generation: int = 0
    audited: AuditSums = field(default_factory=AuditSums)


class Upkeep:
    """The indexes of `num_rings` rings in all offloaded layers, and what each of them covers.

    known: by ring. pages: by the layer's place; empty: resident tokens are read in full. in_pages: int32 `[rings + 1]`,
    the number of indexed tokens of contexts that are whole on the device.
    """

    def __init__(self, settings: IndexedSettings, site: Site, num_rings: int, report: Report) -> None:
        assert site.tier_shape is not None, "indexed: the engine has no host tier"
        shape, tier, device = site.architecture, site.tier_shape, site.device
        self.index = new_index(settings, shape, len(tier.layers), num_rings, site.dtype, device, site.ring_pages)
        self.layers = [self.index.layer(place) for place in range(len(tier.layers))]
        self.layout = new_layout(settings, shape, tier.rows, device)
        self.sink_tokens = site.sink_tokens
        self.pages: list[Pages] = []
        if settings.resident != "full" and site.pages:
            self.pages = [Pages(*site.pages[layer], site.sink_tokens) for layer in tier.layers]
        self.in_pages = torch.zeros(num_rings + 1, dtype=torch.int32, device=device)
        self.known = [Known(Centre([ring]), pages=own) for ring, own in enumerate(self.index.table[0].tolist())]
        self._filled = np.zeros(self.index.codes.shape[1], np.int64)  # indexed tokens of each page
        self._written: dict[int, torch.cuda.Event] = {}  # after each stream's last indexing
        self._window_tokens = site.window_tokens
        self._report = report

    @property
    def num_pages(self) -> int:
        """Return the number of pages of all indexes."""
        return len(self._filled)

    def assign(self, write: RingWrite) -> int:
        """Empty a ring's slots, and start its index empty or with another ring's index of the same tokens.

        Both rings then hold the shared pages, and this ring gets copies of the others. Returns how often the ring was
        assigned.
        """
        ring = write.ring
        self._empty_slots(ring)
        self.in_pages[ring].fill_(0)
        self._report.doublings[:, self._places_of_ring(ring)] = 0
        before = self.known[ring]
        before.centre.rings.remove(ring)
        known = Known(Centre([ring]), pages=before.pages, generation=before.generation + 1)
        self.known[ring] = known
        if write.pages is not None:
            known.pages = []
            self.add_pages(ring, write.pages, write.num_shared)
        else:
            self._filled[known.pages] = 0
        if write.source is not None:
            self._begin_with(ring, write.source, write.num_shared)
        return known.generation

    def _begin_with(self, ring: int, copy: RingCopy, num_shared: int) -> None:
        """Start a ring's index with what the index of a source covers. num_shared: pages that both hold."""
        index, known, source = self.index, self.known[ring], self.known[copy.ring]
        assert known.pages[:num_shared] == source.pages[:num_shared], "indexed: the source lacks the shared pages"
        shared = min(self._count_filled(source), copy.begin - self.sink_tokens, len(known.pages) * SPLIT_TOKENS)
        known.num_tokens = max(shared, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        num_pages = -(-known.num_tokens // SPLIT_TOKENS)
        for to, page in zip(known.pages[num_shared:num_pages], source.pages[num_shared:], strict=False):
            for array in (index.codes, index.scales, index.value_codes, index.value_scales, index.value_centres):
                array[:, to] = array[:, page]
        self._note_filled(known, num_shared * SPLIT_TOKENS, known.num_tokens)
        if num_shared:
            known.centre = source.centre
            known.centre.rings.append(ring)
        known.centre.is_known = source.centre.is_known
        index.centres[:, self._places_of_ring(ring)] = index.centres[:, self._places_of_ring(copy.ring)]

    def add_pages(self, ring: int, page_ids: Sequence[int], num_shared: int = 0) -> None:
        """Append these pages to a ring's index.

        num_shared: how many of them, in front, another ring fills or has filled.
        """
        known = self.known[ring]
        begin, end = len(known.pages), len(known.pages) + len(page_ids)
        known.pages = [*known.pages, *page_ids]
        self._filled[list(page_ids[num_shared:])] = 0
        self.index.table[:, ring, begin:end] = upload(np.array(page_ids, np.int32), self.index.table.device)

    def index_resident(self, ring: int, slot: int, cell: int) -> None:
        """Index what has left the window of a sequence that is whole on the device.

        cell: the cell of its next token.
        """
        known = self.known[ring]
        end = (cell + 1 - self._window_tokens - self.sink_tokens) // GROWN_TOKENS * GROWN_TOKENS
        if known.context_id == IN_PAGES and known.num_tokens >= end:
            self.read_in_pages(ring, known.num_tokens)
            return
        known.context_id, known.places = IN_PAGES, None
        if known.num_tokens < end:
            _check_pages(known, end)
            if not known.centre.is_known:
                for layer, pages in zip(self.layers, self.pages, strict=True):
                    centre_pages(layer, ring, slot, end, pages, self.layout)
                self._share_centre(ring)
            begin = self._find_begin(known)
            if begin < end:
                index_pages(self.index, ring, slot, begin, end, self.pages, self.layout)
            self._note_filled(known, begin, end)
        self.read_in_pages(ring, known.num_tokens)

    def read_in_pages(self, ring: int, num_tokens: int) -> None:
        """Set how many tokens of a resident sequence steps read through the index; they read the others in full."""
        known = self.known[ring]
        if known.in_pages != num_tokens:
            known.in_pages = num_tokens
            self.in_pages[ring].fill_(num_tokens)

    def index_offloaded(self, ring: int, read: HostRead, places: np.ndarray) -> Known:
        """Index what a sequence has offloaded since its last step. places: `transfer.places` of its run."""
        known, num_tokens = self.known[ring], read.end - read.begin
        if known.context_id not in (None, read.context_id):  # the same tokens, but their rows have moved
            self._empty_slots(ring)
        known.context_id = read.context_id
        self._upload_places(ring, places)
        if not known.centre.is_known:
            self.index.centres[:, self._places_of_ring(ring)] = self.index.piece_centres[:, ring, 0]
            self._share_centre(ring)
        if known.num_tokens < num_tokens:
            _check_pages(known, num_tokens)
            begin = self._find_begin(known)
            if begin < num_tokens:
                index_tokens(self.index, ring, begin, num_tokens, self.layout)
            self._note_filled(known, begin, num_tokens)
        return known

    def _share_centre(self, ring: int) -> None:
        """Copy the centre that a ring has found to all rings that share pages with it."""
        centre = self.known[ring].centre
        centre.is_known = True
        own = self.index.centres[:, self._places_of_ring(ring)]
        for other in centre.rings:
            if other != ring:
                self.index.centres[:, self._places_of_ring(other)] = own

    def _count_filled(self, known: Known) -> int:
        """Return how many tokens from the first one on are indexed, by this ring or by rings that share its pages."""
        place = known.num_tokens // SPLIT_TOKENS
        while place < len(known.pages) and self._filled[known.pages[place]] == SPLIT_TOKENS:
            place += 1
        return place * SPLIT_TOKENS + (int(self._filled[known.pages[place]]) if place < len(known.pages) else 0)

    def _find_begin(self, known: Known) -> int:
        """Return the token from which on a ring must index: the start of a block, after what others have indexed for
        it.
        """
        filled = self._count_filled(known)
        if filled > known.num_tokens and self._written:
            stream = torch.cuda.current_stream(self.index.codes.device)
            for event in self._written.values():
                stream.wait_event(event)
        return filled // BLOCK_TOKENS * BLOCK_TOKENS

    def _note_filled(self, known: Known, begin: int, end: int) -> None:
        """Record that a ring's index reaches token `end`; what is launched now indexes it from `begin` on."""
        known.num_tokens = end
        for place in range(begin // SPLIT_TOKENS, -(-end // SPLIT_TOKENS)):
            page = known.pages[place]
            self._filled[page] = max(self._filled[page], min(end - place * SPLIT_TOKENS, SPLIT_TOKENS))
        if self.index.codes.is_cuda:
            stream = torch.cuda.current_stream(self.index.codes.device)
            self._written[stream.cuda_stream] = stream.record_event()

    def _empty_slots(self, ring: int) -> None:
        own = self._places_of_ring(ring)
        self.index.ids[:, own] = EMPTY
        self.index.held[:, own] = 0

    def _places_of_ring(self, ring: int) -> slice:
        """Return the places of a ring, as a slice."""
        return slice(ring * self.layout.kv_heads, (ring + 1) * self.layout.kv_heads)

    def _upload_places(self, ring: int, places: np.ndarray) -> None:
        """Upload the table of a ring's pieces, in stream order, if its run has moved or grown."""
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
    """Assert that the ring's pages hold so many tokens."""
    have = len(known.pages) * SPLIT_TOKENS
    assert num_tokens <= have, f"indexed: pages for {have} tokens, but {num_tokens} are to be indexed"
