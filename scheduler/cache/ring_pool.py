"""Rings of the methods that reuse: give one to a sequence at admission, and take it back when it leaves.

Invariant: a ring is free, or held by one sequence that holds a slot.
"""

from collections.abc import Iterable, Mapping

from gpu.methods.method import ProfilePart
from gpu.step import PartId, RingCopy, RingWrite
from scheduler.sequences.sequence import Sequence


class Rings:
    """The rings of each part of a profile, held by slots. counts: of each part of a profile that keeps rings."""

    def __init__(self, counts: Mapping[PartId, int], page_tokens: int) -> None:
        self._free = {part: list(range(count - 1, -1, -1)) for part, count in counts.items()}
        self._page_tokens = page_tokens
        self._writes: list[RingWrite] = []

    @property
    def num_free(self) -> dict[PartId, int]:
        """Count the free rings by part."""
        return {part: len(free) for part, free in self._free.items()}

    def lacks(self, sequence: Sequence) -> bool:
        """Tell whether it needs a ring and none is free."""
        part = self._part_of(sequence)
        return part is not None and not self._free[part.id]

    def take(self, sequence: Sequence, begin: int, running: Iterable[Sequence]) -> None:
        """Give a sequence a ring from the next plan on, if it needs one.

        begin: where its prefill starts. If a running sequence computed what is in front with a ring of the kind, its
        entries are copied.
        """
        part = self._part_of(sequence)
        if part is None:
            return
        ring = self._free[part.id].pop()
        sequence.ring = part.id, ring
        source = self._find_source(sequence, begin, running)
        self._writes.append(RingWrite(sequence.slot, part.id, ring, sequence.profile.reading, source))

    def give_back(self, sequence: Sequence) -> None:
        """Take a ring back from a sequence that leaves its slot."""
        if sequence.ring is not None:
            part, ring = sequence.ring
            self._free[part].append(ring)
            sequence.ring = None

    def take_writes(self) -> list[RingWrite]:
        """Return the rings given since the last call."""
        writes, self._writes = self._writes, []
        return writes

    def _part_of(self, sequence: Sequence) -> ProfilePart | None:
        """Return the part whose ring a sequence needs, by its prompt and longest answer, or None."""
        part = sequence.profile.ring_part
        if part is None:
            return None
        longest = sequence.num_prompt_tokens + sequence.request.max_tokens
        return part if longest >= part.method.least_ring_tokens(part.settings) else None

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
