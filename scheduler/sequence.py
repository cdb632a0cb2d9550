"""One request's life in the engine: waiting, prefilling, running, finished. Preempted means waiting again."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from scheduler.host_contexts import HostContext
from scheduler.messages import EngineRequest


class State(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens known so far, and what the sequence holds while it is prefilling or running.

    `tokens` is prompt and output; `num_in_flight` counts draws launched and not collected, so the next draw is number
    `num_drawn` and the last token (known or not) stands at `next_position`.
    """

    request: EngineRequest
    tokens: list[int]
    state: State = State.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    context: HostContext | None = None  # in host memory, while it holds one
    left: HostContext | None = None  # the one that it gave back last, to begin with again if it only gave way
    num_in_flight: int = 0
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_cached_tokens: int = 0
    started_s: float | None = None
    num_bypassed: int = 0
    has_reported: bool = False
    has_failed: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_drawn(self) -> int:
        return self.num_output_tokens + self.num_in_flight

    @property
    def open_context(self) -> HostContext | None:
        """Its context in host memory, if tokens are down."""
        return self.context if self.context is not None and self.context.is_open else None

    @property
    def next_position(self) -> int:
        """Where the input token of the next draw stands."""
        return self.num_prompt_tokens + self.num_drawn - 1

    @property
    def wants_draw(self) -> bool:
        """Whether another token may be drawn without knowing those in flight."""
        return self.state is State.RUNNING and self.num_drawn < self.request.max_tokens

    def token_array(self) -> np.ndarray:
        return np.asarray(self.tokens, dtype=np.int32)
