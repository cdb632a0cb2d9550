"""What an attention method says of itself: the slot it fills, its settings, the KV it writes, the memory it takes.

It refuses to know profiles and deployments, and imports no torch: the scheduler, the plan and the server's process read
it. Invariant: what a method states is all that others know of it; nobody asks for its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpu.methods.kept import Kept
from gpu.model.architecture import Architecture
from transfer.config import HostConfig
from transfer.reading import Reading
from transfer.settings import Settings

Slot = Literal["prefill", "reuse", "host"]


class NoSettings(Settings):
    """Of a method that has nothing to set."""


@dataclass(frozen=True, slots=True)
class BlockFetch:
    """What a KV head reads of a long context's middle in blocks that are fetched from host memory: `budget_tokens`, all
    of them other ones every `every_steps` steps at most; the keys of one in `looked_blocks` blocks in each step, or of
    none where that is 0; and those of all blocks in one step of `full_every_steps`, or in none where that is 0.
    """

    budget_tokens: int
    every_steps: int
    looked_blocks: int
    full_every_steps: int

    @property
    def full_share(self) -> float:
        """Of steps, those that attend to everything."""
        return 1 / self.full_every_steps if self.full_every_steps else 0.0

    def most_fetched_tokens(self, down_tokens: int) -> float:
        """Return how many tokens' keys and values a KV head fetches a step, at most, of so many in host memory."""
        share = (1 / self.looked_blocks if self.looked_blocks else 0.0) * (1 - self.full_share) + self.full_share
        looked = share * down_tokens / 2  # keys are half of a token
        return min(self.budget_tokens, down_tokens) / self.every_steps + looked


@dataclass(frozen=True, slots=True)
class RingUse:
    """Of a method whose state is too large for all that may run: who has one holds a **ring**, and one that finds none
    free waits in admission. count: rings there are, by settings, None: what memory bears; least_tokens: a shorter
    prompt and answer together does without one, and so without the method. num_rows: rows of one KV head in a ring,
    stored as in pages, beside the method's `slot_bytes`; work_bytes: what its steps and prompts pass through, by
    settings, model and the most sequences that run. fetches: it reads blocks of a run in the host's place, by settings.
    """

    count: Callable[[Any], int | None]
    least_tokens: Callable[[Any], int]
    num_rows: Callable[[Any, Architecture], int]
    work_bytes: Callable[[Any, Architecture, int], int]
    fetches: Callable[[Any], BlockFetch] | None

    @property
    def excludes(self) -> bool:
        """Whether it takes blocks of a run off the host, so that asks have bits for all blocks."""
        return self.fetches is not None


@dataclass(frozen=True, slots=True)
class MethodState:
    """What a method with some settings, a `part`, keeps on the device for a sequence: `bytes`, and `num_rows` rows of
    one KV head, stored as in pages. is_ring: it is not there for all that may run, but `count` of it are, or, None,
    what memory bears. work_bytes: by the most sequences that run. excludes: see `RingUse`.
    """

    part: str
    method: str
    bytes: int
    is_ring: bool
    count: int | None
    num_rows: int
    work_bytes: Callable[[int], int]
    excludes: bool

    def size(self, row_bytes: int) -> int:
        """Bytes for one sequence."""
        return self.bytes + self.num_rows * row_bytes


@dataclass(frozen=True, slots=True)
class Method:
    """One method; `gpu/methods/<name>/__init__.py` has it as `METHOD`.

    slot: of a composition. settings: their model, with descriptions. shared_key: the key of the `host` section that has
    these settings for all profiles of a deployment, or None: then each profile has its own. kv_settings, kv_host: what
    changes the KV that it writes, of its settings and of the `host` section, each under its short name in `kv_key`;
    both empty: it writes what the model itself would. slot_bytes: device memory for one running sequence, by settings
    and model. rings: which of them have that, or None: all. refuses: methods that it cannot be composed with, by how
    their names begin, and why. why_impossible: these settings beside a `host` section, or None where they are not.
    reading: how a context's part in host memory is read; NONE: nothing goes there.
    keeps: what of a context that goes down it needs on the device, by settings, `host` section and model, or
    None: it asks for nothing.
    device_side: the module with torch whose `make_device_side(settings, site)` makes what the method does on the device
    (`gpu.methods.device_side`), or None: nothing; of one with rings, `make_ring_side(settings, site, num_rings)`.
    prefill_side: likewise, with a `make_prefill_side(settings, site, dense)` of what attends to prompts
    (`gpu.methods.prefill_side`); every method of that slot has one, and no other.
    align_tokens: of the KV that it writes, by settings: units end at multiples of it, and what others find of a prompt
    ends at one, in front of the prompt's last block of so many tokens, which may be computed otherwise; 1: there are no
    such blocks.
    scored: the settings at which the evals' set of serving profiles has the profile of the method's name; where they
    are not shared, its defaults or none.
    """

    name: str
    summary: str
    slot: Slot
    settings: type[Settings]
    shared_key: str | None
    kv_settings: Mapping[str, str]
    kv_host: Mapping[str, str]
    slot_bytes: Callable[[Any, Architecture], int]
    rings: RingUse | None
    refuses: Mapping[str, str]
    why_impossible: Callable[[Any, HostConfig], str | None]
    reading: Reading
    keeps: Callable[[Any, HostConfig, Architecture], Kept] | None
    device_side: str | None
    prefill_side: str | None
    align_tokens: Callable[[Any], int]
    scored: tuple[Settings, ...]


def any_token(settings: Settings) -> int:
    """Of a method whose KV does not depend on blocks of tokens."""
    return 1


def possible(settings: Settings, host: HostConfig) -> None:
    """Of a method whose settings go with every `host` section."""


def no_bytes(settings: Settings, architecture: Architecture) -> int:
    """Of a method that keeps no state for a running sequence, or none of a kind."""
    return 0


def no_work_bytes(settings: Settings, architecture: Architecture, max_running: int) -> int:
    """Of a method whose steps need no memory that other ones' do not."""
    return 0


@dataclass(frozen=True, slots=True)
class ProfilePart:
    """A slot of a composition that is filled."""

    method: Method
    settings: Settings

    def __str__(self) -> str:
        given = ", ".join(f"{key} {value}" for key, value in self.settings.model_dump(exclude_none=True).items())
        return f"{self.method.slot}: {self.method.name}" + (f" ({given})" if given else "")
