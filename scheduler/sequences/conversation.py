"""A conversation, of which each prompt goes on from the one before, and the front that prompts share."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Left:
    """What a conversation's last request left that can be found again.

    token_ids: int32, the tokens of the whole blocks with these hashes, and some behind them.
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

    hashes: of the blocks of its last prompt and answer, of which `num_blocks` are the prompt's.
    owner, session: as its requests name them.
    work: operations that computing it again takes.
    is_awaited: its last answer called tools.
    used_s: when it began or left last.
    request_id: of its last request.
    slot: its number among those of its owner.
    left, records: where contexts are on disk, and what it has there of turns in no session.
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
    num_favours: int = 0  # how often others in its session kept it
    used_s: float = 0.0
    request_id: str = ""
    slot: int = 0
    left: Left | None = None
    records: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Front:
    """The blocks that the prompts of conversations begin with: what the system says, with the tools. `until_s`: where
    they are pinned, they are until then.
    """

    number: int
    num_blocks: int
    work: float
    num_running: int = 0
    rank: float = 0.0
    until_s: float = 0.0
