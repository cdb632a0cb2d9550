"""The contract of an attention method: a base class with defaults, filled in by each folder of `gpu.methods`. No torch.

Nobody outside of its folder asks for a method's name: what it states here is all that others know of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gpu.config import Composition
from gpu.methods.counters import Counter, Counts, RequestFigure, SavedReads, Share
from gpu.methods.kept import Kept
from gpu.model.architecture import Architecture
from gpu.step import PartId, Setting
from transfer.host_config import HostConfig
from transfer.reading import Reading
from transfer.settings_model import Settings

Slot = Literal["prefill", "reuse", "host"]


class NoSettings(Settings):
    """Settings of a method that has nothing to set."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Device memory that a method takes, in bytes.

    sequence_bytes: of a ring, or for each running sequence of a method without rings.
    sequence_rows: keys and values of one KV head beside that, stored as in KV pages.
    sequence_numbers: beside both, numbers of the type that computes.
    work_bytes: that its steps and prompts pass through, for all sequences together.
    page_bytes: of a page of `page_tokens` tokens, of those that its rings share and take as contexts grow; 0: they
        share none.
    """

    sequence_bytes: int = 0
    sequence_rows: int = 0
    work_bytes: int = 0
    sequence_numbers: int = 0
    page_bytes: int = 0
    page_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What a decode step reads of one row's context in host memory, in tokens of all its KV heads.

    fetched: brought over the link.
    on_device: read on the device after that.
    streamed: read by the CPU one behind another.
    sampled: of which the CPU reads the sample that hash tables choose.
    """

    fetched: float = 0.0
    on_device: int = 0
    streamed: float = 0.0
    sampled: float = 0.0


class Method:
    """An attention method; `gpu/methods/<name>/__init__.py` has an instance as `METHOD`.

    `_` in a folder's name is `+` in the method's, which joins two methods: the name of one is a single word. Only
    `name` and `summary` are needed. The defaults are those of full attention on the device.
    """

    # What it is called, and where it stands in a profile.
    name: ClassVar[str]
    summary: ClassVar[str]  # one sentence for docs/CONFIGURATION.md
    slot: ClassVar[Slot] = "host"
    refuses: ClassVar[Mapping[str, str]] = {}  # why it is not composed with others, by how their names begin
    # Its settings.
    settings: ClassVar[type[Settings]] = NoSettings
    shared_key: ClassVar[str | None] = None  # of `host`: settings of all profiles there; None: each has its own
    # Settings that change the KV it writes, by their short names in `kv_key`; none: it writes the model's own KV.
    kv_settings: ClassVar[Mapping[str, str]] = {}  # settings of its own
    kv_host: ClassVar[Mapping[str, str]] = {}  # settings of the `host` section
    # What it does with a context in host memory.
    reading: ClassVar[Reading] = Reading.NONE
    excludes_blocks: ClassVar[bool] = False  # its device side sets `LayerReads.excluded`
    # What it does in decode steps and prefill. A sequence of a method with rings holds a ring while it runs, if it has
    # `least_ring_tokens`, and waits in admission while none is free. A step has rows of all profiles, and
    # `RingSide.ring_of_slot` alone says whose they are: a method that changes its own rows only has rings, even if it
    # keeps nothing in them.
    has_rings: ClassVar[bool] = False
    # Module with `make_device_side(settings, site)`, or of a method with rings `make_ring_side(settings, site,
    # num_rings)`: see `gpu.methods.device_side`.
    device_side: ClassVar[str | None] = None
    # Of a method with rings: whether a ring may draft for a sequence whose own steps go without it (`RingSide.rest`).
    drafts: ClassVar[bool] = False
    # Whether rows of one sequence in a step, as a draft has them, take turns in its ring: `StepRows.turns`.
    takes_turns: ClassVar[bool] = False
    why_no_drafts: ClassVar[str] = "it reads no less than what verifies does"  # where it does not
    prefill_side: ClassVar[str | None] = None  # module with make_prefill_side(settings, site, dense)
    # Whether its outputs come with the mass of what they stand for, which attention sinks are merged with.
    has_mass: ClassVar[bool] = True
    token_outputs: ClassVar[int] = 0  # memory that its sides take for a token, in outputs as wide as a query
    # What it counts.
    counters: ClassVar[Mapping[str, Counter]] = {}  # of `DeviceSide.counts`, on /metrics
    figures: ClassVar[Mapping[str, RequestFigure]] = {}  # of `RingSide.figures_of`, in an answer's `usage`
    shares: ClassVar[Mapping[str, Share]] = {}  # quotients of counters that evaluations report
    # What `tandem plan` and evaluations say of it.
    plan_name: ClassVar[str] = ""  # empty: `name`
    plan_words: ClassVar[str] = ""  # how contexts are read; empty: "device and host", and its name
    measured: ClassVar[str] = ""  # what it lost on a pretrained model; empty: it reads everything
    scored: ClassVar[tuple[Settings, ...]] = ()  # settings that the evaluations' set of served profiles runs
    # Whether requests get it that name no profile, where a deployment leaves that open and it takes clearly less time
    # than what reads everything: only of a method that held its promise on a pretrained model (`measured`).
    is_default_if_faster: ClassVar[bool] = False
    profiles: ClassVar[Mapping[str, Composition]] = {}  # with other methods, by names that `default_profile` may say

    @property
    def reads_all(self) -> bool:
        """Return whether it says where contexts lie, and reads all of them without keeping anything of a sequence."""
        return self.slot == "host" and not self.has_rings and self.reading in (Reading.NONE, Reading.WHOLE)

    def find_conflict(self, settings: Any, host: HostConfig) -> str | None:
        """Return why these settings cannot stand beside a `host` section, or None where they can."""
        return None

    def why_not_beside(self, settings: Any, other: str) -> str:
        """Return why it is not composed with the method of this name; empty: it is."""
        return next((why for begin, why in self.refuses.items() if other.startswith(begin)), "")

    def why_no_draft(self, settings: Any, most_tokens: int) -> str:
        """Return why a profile with it has no drafts of so many tokens; empty: it has."""
        return ""

    def why_no_epsilon(self, settings: Any) -> str:
        """Return why a request may not say which error is too large, behind the profile's name; empty: it may."""
        return "bounds no error of a step"

    def find_kept(self, settings: Any, host: HostConfig, architecture: Architecture) -> Kept | None:
        """Return what it needs on the device of a context in host memory, or None where it needs nothing."""
        return None

    def align_tokens(self, settings: Any) -> int:
        """Return the tokens of a block: prefill units and shared prefixes end at its multiples. 1: there are no blocks.

        The last block of a prompt may be computed otherwise and is not shared.
        """
        return 1

    def works_in(self, settings: Any, architecture: Architecture) -> bool:
        """Return whether the model has a layer for it. A profile with rings is refused where there is none."""
        return len(architecture.layers_apart) < architecture.num_layers

    def footprint(self, settings: Any, architecture: Architecture, max_running: int) -> Footprint:
        """Return the device memory that it takes with at most `max_running` sequences."""
        return Footprint()

    def count_rings(self, settings: Any) -> int | None:
        """Return how many rings there are; None: as many as an eighth of the free memory holds, if they take any."""
        return None

    def takes_ring_late(self, settings: Any) -> bool:
        """Return whether a sequence takes its ring once it has tokens in host memory, and goes on without while none is
        free; else at admission.
        """
        return False

    def shared_tokens(self, settings: Any) -> int | None:
        """Return for how many tokens there are pages that its rings share; None: nobody says, or they share none."""
        return None

    def ring_page_tokens(self, settings: Any) -> int:
        """Return the tokens of a page that its rings share; 0: they share none."""
        return 0

    def least_ring_tokens(self, settings: Any) -> int:
        """Return the prompt and answer tokens below which a sequence goes without a ring, and so without the method."""
        return 0

    def read_cost(self, settings: Any, context_tokens: int, host_tokens: int) -> ReadCost:
        """Return what a step reads of `host_tokens` in host memory, of a context of `context_tokens`."""
        if self.reading is Reading.SAMPLE:
            return ReadCost(sampled=host_tokens)
        return ReadCost(streamed=host_tokens)

    def unread_tokens(self, settings: Any, context_tokens: int, middle_tokens: int) -> int:
        """Return how many tokens fewer a step reads of a context that is whole on the device, of the `middle_tokens`
        between sink and window; what it reads in their place counts against it.
        """
        return 0

    def tell_measured(self, settings: Any, where: "Where | None", entries: Sequence[Mapping[str, Any]]) -> str | None:
        """Return what a plan says of times that engines measured, or None. where: None without a GPU; entries: of
        `transfer.measured`, the latest last.
        """
        return None

    def saved_reads(self, settings: Any, counts: Counts, architecture: Architecture) -> SavedReads:
        """Return what decode steps did not read because of it, by what its device side counted of them."""
        return SavedReads()


class RingMethod(Method):
    """A method with rings, whose settings have `rings` and `min_context_tokens`."""

    has_rings = True
    token_outputs = 8  # summaries in two precisions, copies of queries, partials

    def why_no_draft(self, settings: Any, most_tokens: int) -> str:
        return "its rings would keep tokens that are not drawn"

    def count_rings(self, settings: Any) -> int | None:
        return settings.rings

    def least_ring_tokens(self, settings: Any) -> int:
        return settings.min_context_tokens


@dataclass(frozen=True, slots=True)
class Where:
    """What times of steps depend on beside a method's settings. gpu: its name; kv: how rows are stored on the device;
    num_layers: of which contexts may be offloaded.
    """

    gpu: str
    kv: str
    num_layers: int
    architecture: Architecture


@dataclass(frozen=True, slots=True)
class ProfilePart:
    """A method with its settings, which fills its slot of a profile."""

    method: Method
    settings: Settings

    @property
    def id(self) -> PartId:
        return PartId(self.method.slot, self.method.name, tuple(_flatten(self.settings.model_dump(exclude_none=True))))

    def __str__(self) -> str:
        return str(self.id)


@dataclass(frozen=True, slots=True)
class MethodState:
    """What one part of a profile keeps on the device. count: of its rings, None: nobody has said how many; pages: that
    these share; turns: that rows of a step take in a ring at most.
    """

    part: ProfilePart
    count: int | None = None
    pages: int = 0
    turns: int = 1

    @property
    def has_rings(self) -> bool:
        return self.part.method.has_rings

    def footprint(self, architecture: Architecture, max_running: int) -> Footprint:
        return self.part.method.footprint(self.part.settings, architecture, max_running)

    def sequence_bytes(self, architecture: Architecture, max_running: int, row_bytes: int, dtype_bytes: int) -> int:
        """Return the bytes of one sequence's state, with rows of `row_bytes` in KV pages and numbers of `dtype_bytes`
        that compute.
        """
        own = self.footprint(architecture, max_running)
        return own.sequence_bytes + own.sequence_rows * row_bytes + own.sequence_numbers * dtype_bytes


def _flatten(tree: Mapping[Any, Any], inside: str = "") -> Iterator[tuple[str, Setting | tuple[Setting, ...]]]:
    """Yield the values in a mapping by their names; those in a mapping in it have dots."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{inside}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{inside}{key}", tuple(_plain(one) for one in value)
        else:
            yield f"{inside}{key}", _plain(value)


def _plain(value: Any) -> Setting:
    return value if isinstance(value, Setting) else str(value)  # a path, as JSON has it
