"""Track one round of admission: what it has admitted and refused so far."""

from dataclasses import dataclass, field

from gpu.step import DENSE, PageWrite, PartId, PrefillJob
from scheduler.residence.offloaded_prompts import Start
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence

_MANY_PAGES = 1 << 62


@dataclass(slots=True)
class Round:
    """The state of one round of admission.

    batches: the prompts of each new prefill job, in order. Prompts of a job use one prefill method and have at most
        `chunk_tokens` together. room, method: of the last job.
    num_hidden: tokens with hidden states, over all prefills.
    num_coming_pages: pages that admitted sequences may take soon.
    is_offloading: a prefill that offloads is running or admitted.
    kept: idle contexts that preempted sequences will start with.
    has_others: other sequences hold pages.
    fewest_refused: the smallest number of pages that was not available, so that no larger request is tried.
    refused: the first request that gets no memory from the host while no other request could free any.
    seconds_left: of prefills that other requests wait for.
    """

    chunk_tokens: int
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
    batches: list[list[tuple[Sequence, Start]]] = field(default_factory=list)
    room: int = 0
    method: PartId = DENSE

    def add(self, sequence: Sequence, start: Start) -> None:
        """Add a prompt to the last job or to a new one. A prompt that is offloaded, has document chunks or reads blocks
        from disk has a job of its own.
        """
        num_new, method = sequence.num_tokens - start.first_computed, sequence.profile.prefill_method
        is_alone = bool(start.end or sequence.chunks or start.disk_end)
        if not is_alone and num_new <= self.room and method == self.method:
            self.batches[-1].append((sequence, start))
            self.room -= num_new
        else:
            self.batches.append([(sequence, start)])
            self.room = 0 if is_alone else self.chunk_tokens - num_new
            self.method = method


@dataclass(frozen=True, slots=True)
class Admitted:
    """New prefill jobs, and the pages of their sequences. refused: a sequence that gets no memory from the host,
    although no other holds any.
    """

    jobs: tuple[PrefillJob, ...] = ()
    page_writes: tuple[PageWrite, ...] = ()
    refused: Sequence | None = None
