"""Hold one request's state in the engine: waiting, prefilling, running, finished. A preempted one waits again."""

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from gpu.profiles import Profile
from gpu.step import Lane, PartId, PlacedChunk, WindowBranch
from scheduler.constraints.constraints import Constraint
from scheduler.messages import EngineRequest
from scheduler.sequences.conversation import Conversation, Front
from scheduler.sequences.offloaded_context import HostContext

MOST_OVERTAKEN = 64


class State(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class HeldRing:
    """A ring that a sequence holds. number: its number among the part's rings. pages: its pages of the shared ones."""

    number: int
    pages: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Sequence:
    """A request's tokens so far, and what it holds while it is prefilling or running."""

    request: EngineRequest
    profile: Profile
    prompt: np.ndarray  # int32 [tokens], shared with sequences of the same prompt
    hashes: list[bytes]  # of the full blocks of prompt and output known so far
    output: list[int] = field(default_factory=list)
    state: State = State.WAITING

    # While it is prefilling or running:
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    lane: Lane = Lane.DEVICE  # of its last step
    rings: dict[PartId, HeldRing] = field(default_factory=dict)  # that it holds, by part of its profile
    constraint: Constraint | None = None  # on its draws
    window: int | None = None  # the number of the window that it holds
    branches: tuple[WindowBranch, ...] = ()  # windows that its prefill leaves at earlier ends of its prefix
    snapshot_cell: int = 0  # the position at which its recurrent state was last copied
    context: HostContext | None = None  # the context in host memory that it holds
    num_published: int = 0  # its first blocks that others may find
    num_in_flight: int = 0  # tokens in launched steps without a result: drawn, forced and drafted ones
    num_drafted: int = 0  # drafted ones of these; it takes no further step until their result is known
    num_left_out: int = 0  # consecutive steps that left it out while it was running

    # While it waits:
    num_pages: int = 0  # that its tokens take
    border_blocks: int = 1  # its prefill may start at each multiple of so many blocks
    num_usable_blocks: int = 0  # its first blocks that can be reused if they are cached
    num_final_blocks: int = 0  # its first blocks that others may reuse: later tokens do not change them
    run_end: int = 0  # where its offloaded run ends; 0: it has none
    num_known_blocks: int = 0  # its first blocks in the prefix cache, as of the last look
    num_seen_blocks: int = 0  # likewise in pages, even if no window is kept at their end
    on_disk: tuple[int, int, int] | None = None  # the disk's version, known blocks then, blocks found on disk
    passed_over: dict[str, int] = field(default_factory=dict)  # tokens on disk that are computed, by the reason
    finds_live: bool = False  # all that it left when preempted still exists, as of the last look
    num_held_blocks: int = 0  # its first known blocks whose pages were held
    shares: "tuple[Sequence, int] | None" = None  # a sequence that computes blocks of this one, and their number
    num_bypassed: int = 0  # admissions that overtook it because it did not fit
    num_overtaken: int = 0  # how often a later request of lower priority overtook it

    # Since it came:
    started_s: float | None = None  # when its first prefill began
    num_cached_tokens: int = 0  # that its first prefill found
    is_counted: bool = False  # among the prefilled prompts
    preempted_s: float = 0.0  # when it was last preempted
    num_computed_tokens: int = 0  # of its context, when it was last preempted
    left_context: HostContext | None = None  # the host context that it last gave back and may start with again
    live: list[bytes] = field(default_factory=list)  # names of the pages, and of the state, left when preempted
    num_live_blocks: int = 0  # before these pages
    num_live_tokens: int = 0  # that this state has taken in
    chunks: list[PlacedChunk] = field(default_factory=list)  # document chunks in its prompt
    missing: list[PlacedChunk] = field(default_factory=list)  # those of them that are not computed yet
    holds_chunks: bool = False
    num_found_tokens: int | None = None  # of chunks that were in the library when it came
    figures: dict[str, int] = field(default_factory=dict)  # by the names of `RequestFigure`s
    has_reported: bool = False
    has_failed: bool = False
    conversation: Conversation | None = None  # once its prefill has begun
    front: Front | None = None  # the blocks of its system message and tools

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def priority(self) -> float:
        """Return the priority; lower ones go first. A sequence that was overtaken too often goes before all others."""
        return -math.inf if self.num_overtaken >= MOST_OVERTAKEN else self.request.priority

    def goes_before(self, other: "Sequence") -> bool:
        """Return whether it may overtake the other sequence, which came first."""
        return self.request.priority < other.priority

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def num_drawn(self) -> int:
        return len(self.output) + self.num_in_flight

    @property
    def open_context(self) -> HostContext | None:
        """Return its context in host memory, if tokens are offloaded."""
        return self.context if self.context is not None and self.context.is_open else None

    @property
    def next_position(self) -> int:
        """Return the position of the next draw's input token, where its keys and values are written."""
        return len(self.prompt) + len(self.output) + self.num_in_flight - 1

    @property
    def wants_draw(self) -> bool:
        """Return whether another draw may be launched before the results in flight are known."""
        if self.state is not State.RUNNING or self.num_drafted:
            return False
        return len(self.output) + self.num_in_flight < self.request.max_tokens

    @property
    def steps_by_ring(self) -> bool:
        """Return whether its steps use a ring that it holds; a ring that is only for drafts does not count."""
        return any(part.id in self.rings for part in self.profile.ring_parts)

    @property
    def needs_every_token(self) -> bool:
        """Return whether its whole prompt must be computed, even if parts of it are cached."""
        pooling = self.request.pooling
        return self.request.sampling.num_prompt_logprobs is not None or (pooling is not None and pooling.reads_all)

    def tokens_from(self, begin: int) -> np.ndarray:
        """Return prompt and output from token `begin` on, int32; the prompt itself is not copied."""
        first = max(0, begin - len(self.prompt))
        if not self.output:
            return self.prompt[begin:]
        output = np.array(self.output[first:], np.int32)
        return np.concatenate([self.prompt[begin:], output]) if begin < len(self.prompt) else output
