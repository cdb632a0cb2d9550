"""One request's state in the engine: waiting, prefilling, running, finished. A preempted one waits again."""

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from gpu.profiles import Profile
from gpu.step import Lane, PartId, PlacedChunk, WindowBranch
from scheduler.constraints.constraints import Constraint
from scheduler.messages import EngineRequest
from scheduler.sequences.offloaded_context import HostContext

MOST_OVERTAKEN = 64


class State(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens known so far, and what the sequence holds while it is prefilling or running.

    `prompt` is int32 `[tokens]`, shared with those of the same prompt; `hashes` are of the full blocks of prompt and
    output known so far. While it waits, `num_pages` is what its tokens take, its prefill may begin at each multiple of
    `border_blocks`, `num_usable_blocks` need no computing where they are known, the first `num_final_blocks` do not
    depend on where the tokens end (others may find these, and what is drawn behind them), and its offloaded run ends at
    `run_end`, or 0. At the last look `num_known_blocks` were in the prefix cache, `num_held_blocks` of these in pages
    that somebody held: there the next look begins; `num_seen_blocks` were there in pages, if not with the window that
    ends them. `shares`: a sequence that computes blocks of this one, and how many they have in common. `num_in_flight`
    counts tokens launched and not collected, draws and what comes without one, so the next draw is number `num_drawn`
    and the last token (known or not) stands at `next_position`. `num_left_out`: of the steps before this one, running,
    those that went without it. `num_overtaken`: how often one of less priority, that came later, was let pass it.
    """

    request: EngineRequest
    profile: Profile
    prompt: np.ndarray
    hashes: list[bytes]
    output: list[int] = field(default_factory=list)
    state: State = State.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    lane: Lane = Lane.DEVICE  # that its last step was launched in
    ring: tuple[PartId, int] | None = None  # while it holds one: of which part of its profile, and the number
    constraint: Constraint | None = None  # what its draws are held to
    window: int | None = None  # while it holds one: its number
    branch: WindowBranch | None = None  # the window that its prefill leaves further to the front
    context: HostContext | None = None  # in host memory, while it holds one
    left: HostContext | None = None  # the one that it gave back last, to begin with again if it only gave way
    num_in_flight: int = 0
    num_left_out: int = 0
    num_pages: int = 0
    border_blocks: int = 1
    num_usable_blocks: int = 0
    num_final_blocks: int = 0
    run_end: int = 0
    num_known_blocks: int = 0
    num_seen_blocks: int = 0
    num_held_blocks: int = 0
    shares: "tuple[Sequence, int] | None" = None
    num_published: int = 0
    num_cached_tokens: int = 0
    chunks: list[PlacedChunk] = field(default_factory=list)
    missing: list[PlacedChunk] = field(default_factory=list)
    holds_chunks: bool = False
    num_found_tokens: int | None = None
    num_dropped: int = 0  # of its prompt's tokens, once that is done: so many cells before its positions it goes on
    figures: dict[str, int] = field(default_factory=dict)
    started_s: float | None = None
    num_bypassed: int = 0
    num_overtaken: int = 0
    has_reported: bool = False
    has_failed: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def priority(self) -> float:
        """Return the priority, of which less is earlier; one that was overtaken often enough is before all."""
        return -math.inf if self.num_overtaken >= MOST_OVERTAKEN else self.request.priority

    def goes_before(self, other: "Sequence") -> bool:
        """Tell whether it may have what the other one came for first."""
        return self.request.priority < other.priority

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def num_drawn(self) -> int:
        return self.num_output_tokens + self.num_in_flight

    @property
    def open_context(self) -> HostContext | None:
        """Return its context in host memory, if tokens are offloaded."""
        return self.context if self.context is not None and self.context.is_open else None

    @property
    def next_position(self) -> int:
        """Return where the input token of the next draw stands."""
        return self.num_prompt_tokens + self.num_drawn - 1

    @property
    def next_cell(self) -> int:
        """Return where its keys and values are written."""
        return self.next_position - self.num_dropped

    @property
    def wants_draw(self) -> bool:
        """Tell whether another token may be drawn without knowing those in flight."""
        return self.state is State.RUNNING and self.num_drawn < self.request.max_tokens

    @property
    def needs_every_token(self) -> bool:
        """Tell whether its whole prompt is computed, whatever is known of it."""
        pooling = self.request.pooling
        return self.request.sampling.num_prompt_logprobs is not None or (pooling is not None and pooling.reads_all)

    def tokens_from(self, begin: int) -> np.ndarray:
        """Return prompt and output from token `begin` on, int32; the prompt itself is not copied."""
        first = max(0, begin - len(self.prompt))
        if not self.output:
            return self.prompt[begin:]
        output = np.array(self.output[first:], np.int32)
        return np.concatenate([self.prompt[begin:], output]) if begin < len(self.prompt) else output
