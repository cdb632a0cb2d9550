"""Twin runners of which the one that offloads serves profiles whose methods keep a ring for each sequence."""

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from gpu.config import Composition
from gpu.methods.device_side import DeviceSide
from gpu.methods.method import ProfilePart
from gpu.profiles import resolve_profiles
from gpu.step import RingCopy, RingWrite, StepPlan
from tests.gpu.twin_runners import Twins
from transfer.host_config import HostConfig


def ring_parts(**composition: dict[str, Any]) -> tuple[ProfilePart, ...]:
    """Return the parts with rings of a profile of that composition."""
    own = Composition.model_validate(composition)
    return resolve_profiles({"own": own}, HostConfig())["own"].ring_parts


class RingTwins(Twins):
    """Slots of `ringed` hold the rings of their numbers, of each of `parts`; `before` and `beside` are served, too."""

    def __init__(
        self, parts: Many[ProfilePart], ringed: tuple[int, ...] = (0,), before: Many[ProfilePart] = (),
        beside: Many[ProfilePart] = (), **more: Any,
    ) -> None:  # fmt: skip
        self.parts = parts
        super().__init__(more_parts=[*before, *parts, *beside], **more)
        for slot in ringed:
            self.assign(slot, slot)

    def assign(self, slot: int, ring: int, source: RingCopy | None = None, *given: Any, **more: Any) -> None:
        writes = [RingWrite(slot, part.id, ring, self.reading, source, *given, **more) for part in self.parts]
        self.offloading.launch(StepPlan(ring_writes=writes)).collect()

    def change(self, slot: int, draw: np.random.Generator, copied: int) -> None:
        """Evict or reload a slot's pages, give it its ring anew, or slot 1 a copy of slot 0's. What, is drawn."""
        sequence, what = self.sequences[slot], draw.choice(["evict", "evict", "reload", "assign", "fork", "grow"])
        has_ring = [any(self.offloading._reusing[part.id].has_ring(one) for part in self.parts) for one in (0, 1)]
        if what == "evict" and sequence.run_end > max(sequence.released, 16):
            first = max(sequence.released, 16) // 16
            self.evict(sequence, 16 * int(draw.integers(first + 1, sequence.run_end // 16 + 1)))
        elif what == "reload" and sequence.released > 16:
            begin = 16 * int(draw.integers(1, sequence.released // 16))
            self.restore(self.fetch(sequence, begin))
            sequence.released = begin if begin > 16 else 0
        elif what == "assign" and has_ring[slot]:  # as after a preemption
            self.assign(slot, slot)
        elif what == "fork" and not has_ring[1]:
            self.assign(1, 1, RingCopy(0, 200, copied))

    def side_of(self, kind: type[DeviceSide]) -> Any:
        return next(side for part in self.parts if isinstance(side := self.offloading._reusing[part.id], kind))

    @property
    def part(self) -> ProfilePart:
        """Return the only one."""
        (part,) = self.parts
        return part

    @property
    def side(self) -> Any:
        """Return that of the only part."""
        return self.offloading._reusing[self.part.id]
