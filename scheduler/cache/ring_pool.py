"""Rings of the methods that reuse: give one to a sequence at admission, and take it back when it leaves.

Where a method begins with tokens in host memory, a sequence takes its ring then, if its prompt has none there.

A ring that is for drafts alone is taken where there is one, at any time; nobody waits for it, or gives way.

Rings of a method that shares pages among them take these as their sequences grow. Invariants: a ring is free, or held
by one sequence that holds a slot, and so is a page; a sequence with a ring has pages for all its tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpu.methods.method import ProfilePart
from gpu.step import PartId, RingCopy, RingGrowth, RingWrite
from scheduler.sequences.sequence import Sequence


class Rings:
    """The rings of each part of a profile, held by slots. counts: of each part of a profile that keeps rings; pages: of
    each part whose rings share some.
    """

    def __init__(
        self, counts: Mapping[PartId, int], page_tokens: int, pages: Mapping[PartId, int] | None = None
    ) -> None:
        self._free = {part: list(range(count - 1, -1, -1)) for part, count in counts.items()}
        self._free_pages = {part: list(range(count - 1, -1, -1)) for part, count in (pages or {}).items()}
        self._page_tokens = page_tokens
        self._writes: list[RingWrite] = []

    @property
    def num_free(self) -> dict[PartId, int]:
        """Count the free rings by part."""
        return {part: len(free) for part, free in self._free.items()}

    @property
    def num_free_pages(self) -> dict[PartId, int]:
        """Count the free pages by part."""
        return {part: len(free) for part, free in self._free_pages.items()}

    def lacks(self, sequence: Sequence) -> bool:
        """Tell whether it needs a ring at admission, and none is free or too few pages are."""
        part = self._part_of(sequence)
        if part is None or self._is_late(part, sequence) or _is_for_drafts(sequence):
            return False
        return not self._has_room(part, sequence.num_tokens)

    def take(self, sequence: Sequence, begin: int, running: Iterable[Sequence]) -> None:
        """Give a sequence a ring from the next plan on, if it needs one.

        begin: where its prefill starts. If a running sequence computed what is in front with a ring of the kind, its
        entries are copied.
        """
        part = self._part_of(sequence)
        if part is None or self._is_late(part, sequence):
            return
        if _is_for_drafts(sequence) and not self._has_room(part, sequence.num_tokens):
            return
        write = self._give(part, sequence, sequence.num_tokens)
        self._writes.append(replace(write, source=self._find_source(sequence, begin, running)))

    def take_late(self, sequence: Sequence) -> None:
        """Give a running sequence the ring that it did not take at admission, from the next plan on, once it has tokens
        in host memory and there is one with pages for it.
        """
        if sequence.ring is not None or sequence.open_context is None or (part := self._part_of(sequence)) is None:
            return
        is_late = _is_for_drafts(sequence) or part.method.takes_ring_late(part.settings)
        if is_late and self._has_room(part, sequence.next_cell + 1):
            self._writes.append(self._give(part, sequence, sequence.next_cell + 1))

    def lacks_page(self, sequence: Sequence) -> bool:
        """Tell whether the next token's index needs a page, and none is free."""
        if sequence.ring is None or _is_for_drafts(sequence):
            return False
        return self._needs_page(sequence) and not self._num_pages_of(sequence.ring[0])

    def may_draft(self, sequence: Sequence) -> bool:
        """Tell whether it holds a ring for its drafts, with pages for the tokens that it has."""
        return sequence.ring is not None and _is_for_drafts(sequence) and not self._needs_page(sequence)

    def grow(self, sequence: Sequence) -> list[RingGrowth]:
        """Take the page that the next token needs, if it does; `lacks_page` says that there is one."""
        if sequence.ring is None or not self._needs_page(sequence):
            return []
        part, ring = sequence.ring
        if _is_for_drafts(sequence) and not self._num_pages_of(part):
            return []
        growth = RingGrowth(part, ring, (self._free_pages[part].pop(),))
        sequence.ring_pages += growth.pages
        return [growth]

    def give_back(self, sequence: Sequence) -> None:
        """Take a ring and its pages back from a sequence that leaves its slot."""
        if sequence.ring is not None:
            part, ring = sequence.ring
            self._free[part].append(ring)
            self._free_pages.get(part, []).extend(reversed(sequence.ring_pages))
            sequence.ring, sequence.ring_pages = None, []

    def take_writes(self) -> list[RingWrite]:
        """Return the rings given since the last call."""
        writes, self._writes = self._writes, []
        return writes

    def _part_of(self, sequence: Sequence) -> ProfilePart | None:
        """Return the part whose ring a sequence needs, by its prompt and longest answer, or None."""
        part = sequence.profile.held_part
        if part is None:
            return None
        longest = sequence.num_prompt_tokens + sequence.request.max_tokens
        return part if longest >= part.method.least_ring_tokens(part.settings) else None

    def _is_late(self, part: ProfilePart, sequence: Sequence) -> bool:
        """Tell whether a waiting sequence takes its ring later."""
        return not sequence.run_end and part.method.takes_ring_late(part.settings)

    def _has_room(self, part: ProfilePart, num_tokens: int) -> bool:
        return bool(self._free[part.id]) and self._pages_for(part, num_tokens) <= self._num_pages_of(part.id)

    def _give(self, part: ProfilePart, sequence: Sequence, num_tokens: int) -> RingWrite:
        ring = self._free[part.id].pop()
        sequence.ring = part.id, ring
        pages = None
        if part.id in self._free_pages:
            pages = tuple(self._free_pages[part.id].pop() for _ in range(self._pages_for(part, num_tokens)))
            sequence.ring_pages = list(pages)
        return RingWrite(sequence.slot, part.id, ring, sequence.profile.reading, None, pages, _is_for_drafts(sequence))

    def _pages_for(self, part: ProfilePart, num_tokens: int) -> int:
        """Return the pages that so many tokens take."""
        page_tokens = part.method.ring_page_tokens(part.settings) if part.id in self._free_pages else 0
        return -(-num_tokens // page_tokens) if page_tokens else 0

    def _num_pages_of(self, part: PartId) -> int:
        return len(self._free_pages.get(part, []))

    def _needs_page(self, sequence: Sequence) -> bool:
        part = sequence.profile.held_part
        return part is not None and self._pages_for(part, sequence.next_cell + 1) > len(sequence.ring_pages)

    def _find_source(self, sequence: Sequence, begin: int, running: Iterable[Sequence]) -> RingCopy | None:
        """Find the ring of a running sequence with the same tokens before `begin`, by the hash of the block that ends
        there.
        """
        block = begin // self._page_tokens - 1
        if block < 0 or sequence.ring is None:
            return None
        for other in running:
            if other.ring is None or other.ring[0] != sequence.ring[0] or len(other.hashes) <= block:
                continue
            if other.hashes[block] == sequence.hashes[block]:
                return RingCopy(other.ring[1], begin, max(other.next_position, sequence.num_tokens))
        return None


def _is_for_drafts(sequence: Sequence) -> bool:
    """Tell whether a ring of its profile is for drafts alone."""
    return sequence.profile.draft_part is not None
