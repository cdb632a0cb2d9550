"""Define what an attention method states about itself: a base class with defaults, which each method overrides.

No torch.

No code outside of a method's folder compares its name: what the method states here is all that others know of it.
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
    """Device memory that a method takes.

    sequence_bytes: bytes of a ring, or of each running sequence for a method without rings.
    sequence_rows: further rows (key and value of one KV head), stored as in KV pages.
    sequence_numbers: further numbers, in the compute dtype.
    work_bytes: scratch memory of its steps and prompts, for all sequences together.
    page_bytes: bytes of a page of `page_tokens` tokens, if its rings share pages and take more as contexts grow; 0:
        they share none.
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

    fetched: tokens brought over the link.
    on_device: tokens read on the device after that.
    streamed: tokens read by the CPU one after another.
    sampled: tokens of which the CPU reads only the sample that hash tables choose.
    """

    fetched: float = 0.0
    on_device: int = 0
    streamed: float = 0.0
    sampled: float = 0.0


class Method:
    """An attention method; `gpu/methods/<name>/__init__.py` has an instance as `METHOD`.

    A method that joins two others has `+` in its name and `_` in its folder's; all other names are single words. Only
    `name` and `summary` are required. The defaults are those of full attention on the device.
    """

    # Its name, and the slot of a profile that it fills.
    name: ClassVar[str]
    summary: ClassVar[str]  # one sentence for docs/CONFIGURATION.md
    slot: ClassVar[Slot] = "host"
    refuses: ClassVar[Mapping[str, str]] = {}  # methods it is not composed with: start of their name -> reason
    # Its settings.
    settings: ClassVar[type[Settings]] = NoSettings
    shared_key: ClassVar[str | None] = None  # key of `host` with one set of settings for all profiles; None: none
    # Settings that change the KV it writes, by their short names in a profile's `kv_key`. If both are empty, the method
    # writes the model's own KV. Else its name and these settings are in the key.
    kv_settings: ClassVar[Mapping[str, str]] = {}  # settings of its own
    kv_host: ClassVar[Mapping[str, str]] = {}  # settings of the `host` section
    # What it does with a context in host memory.
    reading: ClassVar[Reading] = Reading.NONE
    # Whether its device side sets `LayerReads.excluded`: blocks of a row's host read, `[sink, evicted)`, that the CPU
    # leaves out. With `residency: adaptive` that range is empty while pages are free, so that nothing is left out. Try
    # the method with `host: {residency: fixed, resident_tokens: 256}`. It also counts those of these tokens that it
    # does not read itself, as DROPPED in `RingSide.covered`.
    excludes_blocks: ClassVar[bool] = False
    # What it does in decode steps and prefill. With a method with rings, a running sequence holds a ring if it has
    # `least_ring_tokens`, and waits for admission while none is free. A step has rows of all profiles, and only
    # `RingSide.ring_of_slot` says which method they belong to. So a method that changes only its own rows has rings,
    # even if it keeps nothing in them.
    has_rings: ClassVar[bool] = False
    # Module with `make_device_side(settings, site)`, or, with rings, `make_ring_side(settings, site,
    # num_rings)`: see `gpu.methods.device_side`.
    device_side: ClassVar[str | None] = None
    # With rings: whether a ring may draft for a sequence whose other steps run without it (`RingSide.rest`).
    drafts: ClassVar[bool] = False
    # Whether several rows of a sequence in one step, such as a draft's, take turns in its ring: `StepRows.turns`.
    takes_turns: ClassVar[bool] = False
    why_no_drafts: ClassVar[str] = "it reads no less than what verifies does"  # if it does not
    # Whether a model that is split over several devices is served with it. It must choose nothing by measured times or
    # over all heads, so that each device takes the same steps for its own heads.
    serves_split_devices: ClassVar[bool] = False
    prefill_side: ClassVar[str | None] = None  # module with make_prefill_side(settings, site, dense)
    # Whether its outputs come with an lse, which attention sinks need to be merged.
    has_mass: ClassVar[bool] = True
    token_outputs: ClassVar[int] = 0  # memory of its sides per token, in arrays as wide as a query
    # What it counts.
    counters: ClassVar[Mapping[str, Counter]] = {}  # of `DeviceSide.counts`, on /metrics
    host_counters: ClassVar[Mapping[str, Counter]] = {}  # what the host tier counts for it, on /metrics
    figures: ClassVar[Mapping[str, RequestFigure]] = {}  # of `RingSide.figures_of`, in an answer's `usage`
    shares: ClassVar[Mapping[str, Share]] = {}  # quotients of counters that evaluations report
    # What `tandem plan` and evaluations say about it.
    plan_name: ClassVar[str] = ""  # empty: `name`
    plan_words: ClassVar[str] = ""  # how contexts are read; empty: "device and host" and its name
    measured: ClassVar[str] = ""  # its measured loss on a pretrained model; empty: it has none, or was not judged
    cpu_time: ClassVar[str] = ""  # measured on a CPU device, if slower than exact; empty: not measured
    scored: ClassVar[tuple[Settings, ...]] = ()  # settings that the evaluations' set of served profiles runs
    # Whether requests without a profile get it, if the deployment names no default and it takes clearly less time
    # than reading everything: only for a method whose quality held on a pretrained model (`measured`).
    is_default_if_faster: ClassVar[bool] = False
    profiles: ClassVar[Mapping[str, Composition]] = {}  # with other methods, by names for `default_profile`

    @property
    def reads_all(self) -> bool:
        """Return whether it decides only where contexts are stored: it reads all of them, and keeps nothing per
        sequence.
        """
        return self.slot == "host" and not self.has_rings and self.reading in (Reading.NONE, Reading.WHOLE)

    def find_conflict(self, settings: Any, host: HostConfig) -> str | None:
        """Return why these settings do not work with a `host` section, or None if they do."""
        return None

    def why_not_beside(self, settings: Any, other: str) -> str:
        """Return why it cannot be composed with the method of this name; empty: it can."""
        return next((why for begin, why in self.refuses.items() if other.startswith(begin)), "")

    def why_no_draft(self, settings: Any, most_tokens: int) -> str:
        """Return why a profile with it can have no drafts of so many tokens; empty: it can."""
        return ""

    def why_no_epsilon(self, settings: Any) -> str:
        """Return why a request may not set its largest error, to follow the profile's name in a message;
        empty: it may.
        """
        return "bounds no error of a step"

    def find_kept(self, settings: Any, host: HostConfig, architecture: Architecture) -> Kept | None:
        """Return which part of an offloaded context it needs on the device, or None if it needs nothing."""
        return None

    def align_tokens(self, settings: Any) -> int:
        """Return the tokens of a block.

        Prefill units and shared prefixes end at multiples of it; 1: there are no blocks.

        The last block of a prompt may be computed differently, and is not shared.
        """
        return 1

    def works_in(self, settings: Any, architecture: Architecture) -> bool:
        """Return whether the model has a layer in which it works. A profile with rings is refused if there is none."""
        return len(architecture.layers_apart) < architecture.num_layers

    def footprint(self, settings: Any, architecture: Architecture, max_running: int) -> Footprint:
        """Return the device memory that it takes with at most `max_running` sequences."""
        return Footprint()

    def count_rings(self, settings: Any) -> int | None:
        """Return the number of rings. None: as many as an eighth of the free memory holds, if they take any memory."""
        return None

    def takes_ring_late(self, settings: Any) -> bool:
        """Return whether a sequence takes its ring only once it has tokens in host memory, and runs without while none
        is free.

        False: a sequence takes its ring at admission.
        """
        return False

    def shared_tokens(self, settings: Any) -> int | None:
        """Return for how many tokens there are pages that its rings share; None: not set, or they share none."""
        return None

    def ring_page_tokens(self, settings: Any) -> int:
        """Return the tokens of a page that its rings share; 0: they share none."""
        return 0

    def least_ring_tokens(self, settings: Any) -> int:
        """Return the prompt and answer tokens below which a sequence runs without a ring, and so without the method."""
        return 0

    def read_cost(self, settings: Any, context_tokens: int, host_tokens: int) -> ReadCost:
        """Return what a step reads of the `host_tokens` of a context that are in host memory."""
        if self.reading is Reading.SAMPLE:
            return ReadCost(sampled=host_tokens)
        return ReadCost(streamed=host_tokens)

    def unread_tokens(self, settings: Any, context_tokens: int, middle_tokens: int) -> int:
        """Return how many tokens fewer a step reads of a context that is whole on the device.

        middle_tokens: tokens between sink and window. What the step reads in place of the saved tokens is subtracted.
        """
        return 0

    def tell_measured(self, settings: Any, where: "Where | None", entries: Sequence[Mapping[str, Any]]) -> str | None:
        """Return what a plan says about times that engines measured, or None.

        where: None without a GPU. entries: of `transfer.measured`, the latest last.
        """
        return None

    def saved_reads(self, settings: Any, counts: Counts, architecture: Architecture) -> SavedReads:
        """Return what decode steps did not read because of it, from the counts of its device side."""
        return SavedReads()


class RingMethod(Method):
    """A method with rings, whose settings have the fields `rings` and `min_context_tokens`."""

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
    """What step times depend on beside a method's settings.

    gpu: the GPU's name. kv: how rows are stored on the device. num_layers: the number of layers that may be offloaded.
    """

    gpu: str
    kv: str
    num_layers: int
    architecture: Architecture


@dataclass(frozen=True, slots=True)
class ProfilePart:
    """A method with its settings, which fills one slot of a profile."""

    method: Method
    settings: Settings

    @property
    def id(self) -> PartId:
        return PartId(self.method.slot, self.method.name, tuple(_flatten(self.settings.model_dump(exclude_none=True))))

    def __str__(self) -> str:
        return str(self.id)


@dataclass(frozen=True, slots=True)
class MethodState:
    """What one part of a profile keeps on the device.

    count: number of its rings; None: not known. pages: number of pages that the rings share. turns: the most rows of a
    step that take turns in one ring.
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
        """Return the bytes of one sequence's state.

        row_bytes: of a row in KV pages. dtype_bytes: of a number in the compute dtype.
        """
        own = self.footprint(architecture, max_running)
        return own.sequence_bytes + own.sequence_rows * row_bytes + own.sequence_numbers * dtype_bytes


def _flatten(tree: Mapping[Any, Any], inside: str = "") -> Iterator[tuple[str, Setting | tuple[Setting, ...]]]:
    """Yield all values of a mapping with their names. Names inside nested mappings are joined by dots."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{inside}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{inside}{key}", tuple(_plain(one) for one in value)
        else:
            yield f"{inside}{key}", _plain(value)


def _plain(value: Any) -> Setting:
    return value if isinstance(value, Setting) else str(value)  # a path, as JSON has it
