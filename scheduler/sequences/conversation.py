"""Define a conversation, in which each prompt continues the one before, and the front that prompts share."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Left:
    """What a conversation's last request left that can be found again.

    token_ids: int32, the tokens of the whole blocks with these hashes, and some after them.
    num_prompt_tokens: how many of them were its prompt.
    profile: the profile that computed them.
    """

    token_ids: np.ndarray
    hashes: list[bytes]
    num_prompt_tokens: int
    profile: str


@dataclass(eq=False, slots=True)
class Conversation:
    """What is known of a conversation.

    hashes: of the blocks of its last prompt and answer; the first `num_blocks` are the prompt's.
    owner, session: as its requests name them.
    work: the operations that computing it again takes.
    is_awaited: its last answer called tools.
    used_s: when its last request began or ended.
    request_id: the id of its last request.
    slot: its number among its owner's conversations.
    left: what its last request left, if contexts are kept on disk.
    records: its records on disk from turns without a session.
    """

    number: int
    owner: str
    session: str
    hashes: list[bytes] = field(default_factory=list)
    num_blocks: int = 0
    num_tokens: int = 0
    num_turns: int = 0
    num_running: int = 0
    is_awaited: bool = False
    work: float = 0.0
    rank: float = 0.0
    num_favours: int = 0  # how often other requests of its session renewed its rank
    used_s: float = 0.0
    request_id: str = ""
    slot: int = 0
    left: Left | None = None
    records: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Front:
    """The blocks with the system message and tools that prompts of several conversations begin with. until_s: when its
    pin ends, if it is pinned.
    """

    number: int
    num_blocks: int
    work: float
    num_running: int = 0
    rank: float = 0.0
    until_s: float = 0.0
