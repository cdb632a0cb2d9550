"""Rings of the methods that reuse: give one to a sequence at admission, and take it back when it leaves.

If a method begins only where tokens are in host memory, a sequence whose prompt has none there takes its ring when it
offloads the first.

A ring for drafts alone is taken at any time when one is free; nobody waits for it, or is preempted.

A profile of several methods with rings holds one of each. At admission it takes all that do not come later, or waits.

Rings of a method that shares pages among them take these as their sequences grow. A sequence that begins with the
tokens of a running one holds that one's pages as well: those whose tokens are all common, and whose rows the device has
in common. Such a page is never written again, so the last one, in which both go on, is never shared.

Invariants: a ring is free, or held by one sequence that holds a slot; a page is free, or held by sequences whose tokens
in it are the same; a sequence with a ring has pages for all its tokens.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpu.methods.method import ProfilePart
from gpu.step import PartId, RingCopy, RingGrowth, RingWrite
from scheduler.sequences.sequence import HeldRing, Sequence, State


class Rings:
    """The rings of each part of a profile, held by slots. counts: of each part of a profile that keeps rings; pages: of
    each part whose rings share some; sink_tokens: in front of a sequence, that no such page has.
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
        """Return whether it needs a ring at admission, and none is free or too few pages are.

        holding: sequences that hold slots, of which running ones may have pages in common with it. begin: where its
        prefill would start; None: not known yet, and if it lacks pages, it does so wherever that is.
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

        begin: where its prefill starts. If a running sequence computed what is in front with a ring of the kind, its
        entries are copied, but for pages that both hold from now on.
        """
        for part in _parts_of(sequence):
            if self._is_late(part, sequence):
                continue
            source = self._find_source(part, sequence, begin, holding)
            if not _is_for_drafts(sequence, part) or self._has_room(part, sequence.num_tokens, source):
                self._writes.append(self._give(part, sequence, sequence.num_tokens, source))

    def take_late(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Give a running sequence the rings that it did not take at admission, from the next plan on, once it has
        tokens in host memory and there is one with pages for it.
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
        """Return whether the next token's index needs a page, and none is free."""
        return any(
            self._needs_page(part, sequence) and not self._num_pages_of(part.id)
            for part in sequence.profile.held_parts
            if part.id in sequence.rings and not _is_for_drafts(sequence, part)
        )

    def may_draft(self, sequence: Sequence) -> bool:
        """Return whether it holds a ring for its drafts, with pages for the tokens that it has."""
        part = sequence.profile.draft_part
        return part is not None and part.id in sequence.rings and not self._needs_page(part, sequence)

    def grow(self, sequence: Sequence) -> list[RingGrowth]:
        """Take the pages that the next token needs, if it does; `lacks_page` says that there are."""
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
        """Take the rings back from a sequence that leaves its slot, and the pages that nobody else holds."""
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
        """Return whether a waiting sequence takes its ring later."""
        return not sequence.run_end and part.method.takes_ring_late(part.settings)

    def _has_room(self, part: ProfilePart, num_tokens: int, source: "_Source | None" = None) -> bool:
        """Return whether there is a ring, and pages for so many tokens beside those that a source has in common."""
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
        """Take so many free pages, which one sequence holds."""
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
        """Find a running sequence with a ring of the part and the same tokens before `begin`, by the hash of the block
        that ends there. begin: None: whatever is in common; then it is the one with the most.
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
        """Return what a running sequence has of the tokens before `begin`; pages that end behind it are not common."""
        held = other.rings[part.id]
        pages: tuple[int, ...] = ()
        if part.id in self._free_pages:
            page_tokens = part.method.ring_page_tokens(part.settings)
            pages = tuple(held.pages[: max(begin - self._sink_tokens, 0) // page_tokens])
        drafted = 0 if other.profile.draft is None else other.profile.draft.most_tokens  # what a refused one wrote
        return _Source(held.number, begin, max(other.next_position + drafted, sequence.num_tokens), pages)


@dataclass(frozen=True, slots=True)
class _Source:
    """What a sequence may begin with of a ring; begin, end: as `RingCopy` has them. pages: those in common."""

    ring: int
    begin: int
    end: int
    pages: tuple[int, ...]


def _count_common(one: Sequence, other: Sequence) -> int:
    """Return the blocks in front that both have. A hash is of all tokens up to its block's end."""
    fewest = min(len(one.hashes), len(other.hashes))
    return bisect_left(range(fewest), True, key=lambda block: one.hashes[block] != other.hashes[block])


def _parts_of(sequence: Sequence) -> list[ProfilePart]:
    """Return the parts of whose rings a sequence needs one, by its prompt and longest answer."""
    longest = sequence.num_prompt_tokens + sequence.request.max_tokens
    held = sequence.profile.held_parts
    return [part for part in held if longest >= part.method.least_ring_tokens(part.settings)]


def _is_for_drafts(sequence: Sequence, part: ProfilePart) -> bool:
    """Return whether a ring of the part is for the sequence's drafts alone."""
    return part is sequence.profile.draft_part
