"""Settings of a runner beside its model: as the loader resolves them, and as its caller states them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gpu.kv.windows import NO_WINDOWS, WindowShape
from gpu.methods.method import ProfilePart
from gpu.model.adapter_file import AdapterFile
from gpu.page_layout import KvFormat
from gpu.ranks import Ranks
from gpu.step import PartId
from transfer.chunks.chunk_library import ChunkLibrary
from transfer.disk.context_store import ContextStore
from transfer.expert_exchange import OpenExperts
from transfer.host_tier import HostTier


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """The sizes and parts of a runner.

    max_hidden_tokens: of all prefill jobs under way.
    tier: memory of offloaded contexts, or None; the caller made it.
    parts: of the profiles that are served (`gpu.profiles.served_parts`); if the tier has tables, one makes their codes.
    num_rings: of the parts that keep some.
    ring_pages: of those whose rings share pages.
    sink_tokens, window_tokens: what an offloaded context keeps in front and at its end.
    checks_coverage: count in every decode step who covers which tokens, and end with CoverageError where that is not
        the whole context; a debug run, without graphs.
    library: where document chunks are, or None.
    windows: of layers that keep no more; of the others pages hold all of a context.
    kv: how pages hold rows; None: in `dtype`.
    open_experts: the CPU computes experts in host memory for decode steps of up to `computed_rows` rows; None: they are
        fetched.
    num_states: of recurrent layers (`gpu.kv.states`), 0: one a slot.
    state_dtype: of these.
    num_host_states: copies of them in host memory.
    disk: where contexts are kept beside, or None.
    compile_settings: of a child that compiles the CPU's decode step, None: the first step does
        (`gpu.decode.step_code`).
    link_share: of what attention reads in full in host memory, read by the device; None: by measured rates.
    adapters: that prompts may have, numbered from 1 on.
    ranks: of a model that is split over devices, or None.
    turns: that rows of a step take in a ring at most.
    """

    num_pages: int
    page_tokens: int
    max_running: int
    max_context_tokens: int
    max_hidden_tokens: int
    dtype: torch.dtype
    device: torch.device
    tier: HostTier | None = None
    parts: Sequence[ProfilePart] = ()
    num_rings: Mapping[PartId, int] = field(default_factory=dict)
    ring_pages: Mapping[PartId, int] = field(default_factory=dict)
    sink_tokens: int = 0
    window_tokens: int = 0
    checks_coverage: bool = False
    library: ChunkLibrary | None = None
    disk: ContextStore | None = None
    windows: WindowShape = NO_WINDOWS
    kv: KvFormat | None = None
    open_experts: OpenExperts | None = None
    computed_rows: int = 0
    adapters: Sequence[AdapterFile] = ()
    num_states: int = 0
    state_dtype: torch.dtype = torch.float32
    num_host_states: int = 0
    compile_settings: str | None = None
    link_share: float | None = 0.0
    ranks: Ranks | None = None
    turns: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What the caller of `gpu.load.load_runner` decides; the other settings come from the configuration.

    max_context_tokens: None: the model's.
    chunk_tokens: most tokens of a prefill unit.
    num_windows: of `window_pages` pages (`gpu.kv.windows`); 0: all layers have all of every context in pages.
    experts_on_card: of each layer's, the other experts lie in host memory; None: all are on the card.
    prefill_graph_sizes: see MemoryPlan.
    compiles_ahead: a child process compiles the CPU's decode step, where that is to be done.
    drafts: the checkpoint's head does. Further fields as in RunnerSettings.
    """

    max_running: int
    max_context_tokens: int | None
    chunk_tokens: int
    max_hidden_tokens: int
    num_pages: int
    tier: HostTier | None = None
    parts: Sequence[ProfilePart] = ()
    num_rings: Mapping[PartId, int] = field(default_factory=dict)
    ring_pages: Mapping[PartId, int] = field(default_factory=dict)
    sink_tokens: int = 0
    window_tokens: int = 0
    library: ChunkLibrary | None = None
    disk: ContextStore | None = None
    num_windows: int = 0
    window_pages: int = 1
    experts_on_card: int | None = None
    open_experts: OpenExperts | None = None
    computed_rows: int = 0
    prefill_graph_sizes: tuple[int, ...] = ()
    num_host_states: int = 0
    compiles_ahead: bool = False
    drafts: bool = False
    link_share: float | None = 0.0
    adapters: Sequence[AdapterFile] = ()
    ranks: Ranks | None = None
    turns: int = 1
