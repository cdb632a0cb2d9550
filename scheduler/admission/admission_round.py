"""One round of admission: what it has admitted and refused, and what follows from that."""

from dataclasses import dataclass, field

from gpu.step import DENSE, PageWrite, PartId, PrefillJob
from scheduler.residence.offloaded_prompts import Start
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence

_MANY_PAGES = 1 << 62


@dataclass(slots=True)
class Batches:
    """Prompts that share a prefill job: in order, together at most a chunk of tokens, all of one prefill method. A
    prompt that is offloaded, has documents' chunks or reads its front from the disk has a job of its own.
    """

    chunk_tokens: int
    jobs: list[list[tuple[Sequence, Start]]] = field(default_factory=list)
    room: int = 0
    method: PartId = DENSE

    def add(self, sequence: Sequence, start: Start, method: PartId) -> None:
        num_new = sequence.num_tokens - start.first_computed
        is_alone = bool(start.end or sequence.chunks or start.disk_end)
        if not is_alone and num_new <= self.room and method == self.method:
            self.jobs[-1].append((sequence, start))
            self.room -= num_new
        else:
            self.jobs.append([(sequence, start)])
            self.room = 0 if is_alone else self.chunk_tokens - num_new
            self.method = method


@dataclass(slots=True)
class Round:
    """What one round of admission has given away and refused.

    num_coming_pages: pages that those that hold some may take soon.
    seconds_left: of prefills that others wait for.
    fewest_refused: the smallest number of pages that was not there, so that no larger request is tried again.
    refused: the first request that the host refuses memory while nobody else could give any back.
    """

    batches: Batches
    num_hidden: int
    num_coming_pages: int
    is_offloading: bool
    kept: list[HostContext]
    has_others: bool
    num_admitted: int = 0
    num_tried_offloaded: int = 0
    fewest_refused: int = _MANY_PAGES
    refused: Sequence | None = None
    seconds_left: dict[Sequence, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """New prefill jobs, and the pages of their sequences. refused: the host refuses it memory, though nobody else holds
    any.
    """

    jobs: tuple[PrefillJob, ...] = ()
    page_writes: tuple[PageWrite, ...] = ()
    refused: Sequence | None = None
