"""One request's state in the engine: waiting, prefilling, running, finished. A preempted one waits again."""

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
    """A ring that a sequence holds. number: among those of its part; pages: of those that the part's rings share."""

    number: int
    pages: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens known so far, and what the sequence holds while it is prefilling or running."""

    request: EngineRequest
    profile: Profile
    prompt: np.ndarray  # int32 [tokens], shared with sequences of the same prompt
    hashes: list[bytes]  # of the full blocks of prompt and output known so far
    output: list[int] = field(default_factory=list)
    state: State = State.WAITING

    # While it is prefilling or running:
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    lane: Lane = Lane.DEVICE  # that its last step was launched in
    rings: dict[PartId, HeldRing] = field(default_factory=dict)  # that it holds, by part of its profile
    constraint: Constraint | None = None  # what its draws are held to
    window: int | None = None  # while it holds one: its number
    branches: tuple[WindowBranch, ...] = ()  # the windows that its prefill leaves further to the front
    snapshot_cell: int = 0  # where its state was copied last, while it holds one
    context: HostContext | None = None  # in host memory, while it holds one
    num_published: int = 0  # blocks of it that others may find
    num_in_flight: int = 0  # tokens launched and not collected: draws, and tokens that come without one
    num_drafted: int = 0  # of these, those of a draft, which may be refused: it steps no more until that is known
    num_left_out: int = 0  # steps in a row that went without it, while it was running

    # While it waits:
    num_pages: int = 0  # that its tokens take
    border_blocks: int = 1  # its prefill may begin at each multiple of so many blocks
    num_usable_blocks: int = 0  # in front, that need no computing where they are known
    num_final_blocks: int = 0  # in front, that others may find: they do not depend on where the tokens end
    run_end: int = 0  # where its offloaded run ends; 0: it has none
    num_known_blocks: int = 0  # in the prefix cache at the last look, where the next look begins
    num_seen_blocks: int = 0  # likewise in pages, also where the window that ends them is not kept
    on_disk: tuple[int, int, int] | None = None  # blocks there at the last look, behind what it depended on
    passed_over: dict[str, int] = field(default_factory=dict)  # tokens there that are computed, by the reason
    finds_live: bool = False  # what it left is all there, as of the last look
    num_held_blocks: int = 0  # of the known blocks, in pages that somebody held
    shares: "tuple[Sequence, int] | None" = None  # one that computes blocks of this one, and how many are common
    num_bypassed: int = 0  # admissions that passed it, since it did not fit
    num_overtaken: int = 0  # how often a later one of less priority was let pass it

    # Since it came:
    started_s: float | None = None  # when its first prefill began
    num_cached_tokens: int = 0  # that its first prefill found
    is_counted: bool = False  # among the prompts that were prefilled
    preempted_s: float = 0.0  # when it was preempted last, if it was
    num_computed_tokens: int = 0  # of its context, when it was preempted last
    left_context: HostContext | None = None  # in host memory, that it gave back last and may begin with again
    live: list[bytes] = field(default_factory=list)  # its last pages' names, the first its state's, if it left these
    num_live_blocks: int = 0  # in front of these pages
    num_live_tokens: int = 0  # in front of that state
    chunks: list[PlacedChunk] = field(default_factory=list)  # of documents, in its prompt
    missing: list[PlacedChunk] = field(default_factory=list)  # of these, those that are not computed yet
    holds_chunks: bool = False
    num_found_tokens: int | None = None  # of chunks that were there when it came
    figures: dict[str, int] = field(default_factory=dict)  # by the names of `RequestFigure`s
    has_reported: bool = False
    has_failed: bool = False
    conversation: Conversation | None = None  # once it has begun
    front: Front | None = None  # the blocks that its prompt shares with others'

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def priority(self) -> float:
        """Return the priority, of which less is earlier; one that was overtaken often enough is before all."""
        return -math.inf if self.num_overtaken >= MOST_OVERTAKEN else self.request.priority

    def goes_before(self, other: "Sequence") -> bool:
        """Return whether it may have what the other one came for first."""
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
        """Return where the input token of the next draw stands, and its keys and values are written."""
        return len(self.prompt) + len(self.output) + self.num_in_flight - 1

    @property
    def wants_draw(self) -> bool:
        """Return whether another token may be drawn without knowing those in flight."""
        if self.state is not State.RUNNING or self.num_drafted:
            return False
        return len(self.output) + self.num_in_flight < self.request.max_tokens

    @property
    def steps_by_ring(self) -> bool:
        """Return whether its steps use a ring that it holds; they do not use one that is for its drafts alone."""
        return any(part.id in self.rings for part in self.profile.ring_parts)

    @property
    def needs_every_token(self) -> bool:
        """Return whether its whole prompt is computed, whatever is known of it."""
        pooling = self.request.pooling
        return self.request.sampling.num_prompt_logprobs is not None or (pooling is not None and pooling.reads_all)

    def tokens_from(self, begin: int) -> np.ndarray:
        """Return prompt and output from token `begin` on, int32; the prompt itself is not copied."""
        first = max(0, begin - len(self.prompt))
        if not self.output:
            return self.prompt[begin:]
        output = np.array(self.output[first:], np.int32)
        return np.concatenate([self.prompt[begin:], output]) if begin < len(self.prompt) else output
