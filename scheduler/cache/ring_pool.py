"""Give rings of methods to a sequence at admission, and take them back when it leaves.

Some methods work only on tokens in host memory. A sequence whose prompt has none there takes the ring of such a method
when it first offloads tokens.

A ring that is only for drafts is taken whenever one is free; no sequence waits or is preempted for it.

A profile with several such methods needs a ring of each. A sequence waits until it can take all that it needs at
admission.

The rings of some methods share a pool of pages, and take pages as their sequences grow. A sequence with the same prefix
as a running one also holds the running one's pages, as far as all their tokens are common and their rows are on the
device. Such a page is never written again: the last page, in which the sequences differ, is not shared.

Invariants: a ring is free, or held by one sequence that has a slot. A page is free, or held by sequences that have the
same tokens in it. A sequence with a ring has pages for all its tokens.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpu.methods.method import ProfilePart
from gpu.step import PartId, RingCopy, RingGrowth, RingWrite
from scheduler.sequences.sequence import HeldRing, Sequence, State


class Rings:
    """The rings of all parts of profiles. counts: rings of each part that has some. pages: shared pages of each part
    whose rings share some. sink_tokens: the first tokens of a sequence, which have no place in such pages.
    """

    def __init__(
        self,
        counts: Mapping[PartId, int],
        page_tokens: int,
        pages: Mapping[PartId, int] | None = None,
        sink_tokens: int = 0,
    ) -> None:
        self._free = {part: list(range(count - 1, -1, -1)) for part, count in counts.items()}
        self._free_pages = {part: list(range(count - 1, -1, -1)) for part, count in (pages or {}).items()}
        self._holders = {part: [0] * count for part, count in (pages or {}).items()}
        self._page_tokens = page_tokens
        self._sink_tokens = sink_tokens
        self._writes: list[RingWrite] = []

    @property
    def num_free(self) -> dict[PartId, int]:
        """Count the free rings by part."""
        return {part: len(free) for part, free in self._free.items()}

    @property
    def num_free_pages(self) -> dict[PartId, int]:
        """Count the free pages by part."""
        return {part: len(free) for part, free in self._free_pages.items()}

    def lacks(self, sequence: Sequence, holding: Iterable[Sequence], begin: int | None = None) -> bool:
        """Return whether a sequence needs a ring at admission but no ring, or too few pages, are free.

        holding: sequences with slots; running ones may share pages with it. begin: where its prefill would start; None:
        unknown, and True then means that pages are short for any start.
        """
        for part in _parts_of(sequence):
            if self._is_late(part, sequence) or _is_for_drafts(sequence, part):
                continue
            if self._has_room(part, sequence.num_tokens):
                continue
            source = self._find_source(part, sequence, begin, holding) if self._free[part.id] else None
            if source is None or not self._has_room(part, sequence.num_tokens, source):
                return True
        return False

    def take(self, sequence: Sequence, begin: int, holding: Iterable[Sequence]) -> None:
        """Give a sequence the rings that it needs from the next plan on.

        begin: where its prefill starts. If a running sequence has the same tokens before that in such a ring, its
        entries are copied, apart from pages that both hold from now on.
        """
        for part in _parts_of(sequence):
            if self._is_late(part, sequence):
                continue
            source = self._find_source(part, sequence, begin, holding)
            if not _is_for_drafts(sequence, part) or self._has_room(part, sequence.num_tokens, source):
                self._writes.append(self._give(part, sequence, sequence.num_tokens, source))

    def take_late(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Give a running sequence with tokens in host memory the rings that it did not take at admission.

        It gets those that are free, with enough pages, from the next plan on.
        """
        if sequence.open_context is None:
            return
        for part in _parts_of(sequence):
            if part.id in sequence.rings or not self._free[part.id]:
                continue
            if not (_is_for_drafts(sequence, part) or part.method.takes_ring_late(part.settings)):
                continue
            source = self._find_source(part, sequence, None, running) if part.id in self._free_pages else None
            if self._has_room(part, sequence.next_position + 1, source):
                self._writes.append(self._give(part, sequence, sequence.next_position + 1, source))

    def lacks_page(self, sequence: Sequence) -> bool:
        """Return whether the next token needs a further page of a ring, and none is free."""
        return any(
            self._needs_page(part, sequence) and not self._num_pages_of(part.id)
            for part in sequence.profile.held_parts
            if part.id in sequence.rings and not _is_for_drafts(sequence, part)
        )

    def may_draft(self, sequence: Sequence) -> bool:
        """Return whether a sequence holds a ring for its drafts, with pages for all of its tokens."""
        part = sequence.profile.draft_part
        return part is not None and part.id in sequence.rings and not self._needs_page(part, sequence)

    def grow(self, sequence: Sequence) -> list[RingGrowth]:
        """Allocate the ring pages that the next token needs, if any; `lacks_page` must have returned False."""
        growth = []
        for part in sequence.profile.held_parts:
            held = sequence.rings.get(part.id)
            if held is None or not self._needs_page(part, sequence):
                continue
            if _is_for_drafts(sequence, part) and not self._num_pages_of(part.id):
                continue
            growth.append(RingGrowth(part.id, held.number, self._hold(part.id, 1)))
            held.pages += growth[-1].pages
        return growth

    def give_back(self, sequence: Sequence) -> None:
        """Free the rings of a sequence that leaves its slot, and the pages that no other sequence holds."""
        for part, held in sequence.rings.items():
            self._free[part].append(held.number)
            for page in reversed(held.pages):
                self._holders[part][page] -= 1
                if self._holders[part][page] == 0:
                    self._free_pages[part].append(page)
        sequence.rings = {}

    def take_writes(self) -> list[RingWrite]:
        """Return the rings given since the last call."""
        writes, self._writes = self._writes, []
        return writes

    def _is_late(self, part: ProfilePart, sequence: Sequence) -> bool:
        """Return whether a waiting sequence takes this part's ring only after admission."""
        return not sequence.run_end and part.method.takes_ring_late(part.settings)

    def _has_room(self, part: ProfilePart, num_tokens: int, source: "_Source | None" = None) -> bool:
        """Return whether a ring is free, and pages for `num_tokens` beyond those shared with a source."""
        lacking = self._pages_for(part, num_tokens) - (len(source.pages) if source is not None else 0)
        return bool(self._free[part.id]) and lacking <= self._num_pages_of(part.id)

    def _give(self, part: ProfilePart, sequence: Sequence, num_tokens: int, source: "_Source | None") -> RingWrite:
        ring = self._free[part.id].pop()
        common = () if source is None else source.pages
        pages = None
        if part.id in self._free_pages:
            for page in common:
                self._holders[part.id][page] += 1
            pages = (*common, *self._hold(part.id, self._pages_for(part, num_tokens) - len(common)))
        sequence.rings[part.id] = HeldRing(ring, list(pages or ()))
        copy = None if source is None else RingCopy(source.ring, source.begin, source.end)
        return RingWrite(
            sequence.slot, part.id, ring, sequence.profile.reading, copy, pages, len(common),
            _is_for_drafts(sequence, part), sequence.request.epsilon,
        )  # fmt: skip

    def _hold(self, part: PartId, count: int) -> tuple[int, ...]:
        """Take `count` free pages, and give each one holder."""
        pages = tuple(self._free_pages[part].pop() for _ in range(count))
        for page in pages:
            self._holders[part][page] = 1
        return pages

    def _pages_for(self, part: ProfilePart, num_tokens: int) -> int:
        """Return the pages that so many tokens take."""
        page_tokens = part.method.ring_page_tokens(part.settings) if part.id in self._free_pages else 0
        return -(-num_tokens // page_tokens) if page_tokens else 0

    def _num_pages_of(self, part: PartId) -> int:
        return len(self._free_pages.get(part, []))

    def _needs_page(self, part: ProfilePart, sequence: Sequence) -> bool:
        """Return whether the next token needs a further page of a ring that is held."""
        return self._pages_for(part, sequence.next_position + 1) > len(sequence.rings[part.id].pages)

    def _find_source(
        self, part: ProfilePart, sequence: Sequence, begin: int | None, holding: Iterable[Sequence]
    ) -> "_Source | None":
        """Find a running sequence with a ring of the part and the same tokens before `begin`; None: there is none.

        The hash of the block that ends at `begin` decides. If begin is None, it is the one with the longest common
        prefix.
        """
        best: _Source | None = None
        for other in holding:
            if part.id not in other.rings or other.state is not State.RUNNING:
                continue
            num_blocks = _count_common(sequence, other) if begin is None else begin // self._page_tokens
            if num_blocks == 0 or len(other.hashes) < num_blocks:
                continue
            if other.hashes[num_blocks - 1] != sequence.hashes[num_blocks - 1]:
                continue
            found = self._source_of(part, sequence, other, num_blocks * self._page_tokens if begin is None else begin)
            if begin is not None:
                return found
            if best is None or best.begin < found.begin:
                best = found
        return best

    def _source_of(self, part: ProfilePart, sequence: Sequence, other: Sequence, begin: int) -> "_Source":
        """Return what a running sequence's ring has of the tokens before `begin`; pages that end later are not
        shared.
        """
        held = other.rings[part.id]
        pages: tuple[int, ...] = ()
        if part.id in self._free_pages:
            page_tokens = part.method.ring_page_tokens(part.settings)
            pages = tuple(held.pages[: max(begin - self._sink_tokens, 0) // page_tokens])
        drafted = 0 if other.profile.draft is None else other.profile.draft.most_tokens  # rejected ones wrote rows too
        return _Source(held.number, begin, max(other.next_position + drafted, sequence.num_tokens), pages)


@dataclass(frozen=True, slots=True)
class _Source:
    """The part of another sequence's ring to start from. begin, end: as in `RingCopy`. pages: those that are shared."""

    ring: int
    begin: int
    end: int
    pages: tuple[int, ...]


def _count_common(one: Sequence, other: Sequence) -> int:
    """Count the first blocks that both sequences have. A hash covers all tokens up to its block's end."""
    fewest = min(len(one.hashes), len(other.hashes))
    return bisect_left(range(fewest), True, key=lambda block: one.hashes[block] != other.hashes[block])


def _parts_of(sequence: Sequence) -> list[ProfilePart]:
    """Return the parts of whose rings a sequence needs one, given its prompt and its longest possible answer."""
    longest = sequence.num_prompt_tokens + sequence.request.max_tokens
    held = sequence.profile.held_parts
    return [part for part in held if longest >= part.method.least_ring_tokens(part.settings)]


def _is_for_drafts(sequence: Sequence, part: ProfilePart) -> bool:
    """Return whether a ring of this part is only for the sequence's drafts."""
    return part is sequence.profile.draft_part
