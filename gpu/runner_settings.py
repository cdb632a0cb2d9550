"""Define the settings of a runner: as the runner takes them, and as the caller of the loader states them."""

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

    max_hidden_tokens: tokens of all prefill jobs under way.
    tier: the host tier with the offloaded contexts, or None. The caller makes and owns it.
    parts: parts of the served profiles (`gpu.profiles.served_parts`). If the tier has hash tables, one makes the codes.
    num_rings: by part, for the parts with rings.
    ring_pages: by part, for the parts whose rings share pages.
    sink_tokens, window_tokens: the first and the last tokens of an offloaded context that stay on the device.
    checks_coverage: check in every decode step that the whole context is attended to once, or raise CoverageError. For
        debugging; without graphs.
    library: the stored document chunks, or None.
    windows: windows of the layers that keep no more than that; the other layers have pages of the whole context.
    kv: the format of rows in pages; None: `dtype`.
    open_experts: opens the CPU's experts, which decode steps of up to `computed_rows` rows use; None: experts in host
        memory are fetched.
    num_states: states of recurrent layers (`gpu.kv.states`); 0: one for each slot.
    num_host_states: copies of states in host memory.
    disk: the store of contexts on disk, or None.
    compile_settings: settings of the child process that compiles the CPU's decode step (`gpu.decode.step_code`); None:
        the first step compiles it.
    link_share: the share of fully read host contexts that the device reads over the link; None: by measured rates.
    adapters: adapters that prompts may name, numbered from 1.
    ranks: this rank and the others, for a model that is split over devices; None: it is not.
    turns: the most rows of a step that use one ring in turn.
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
    chunk_tokens: the most tokens of a prefill unit.
    num_windows: windows of `window_pages` pages (`gpu.kv.windows`); 0: all layers have pages of the whole context.
    experts_on_card: experts of each layer on the card; the others are in host memory. None: all are on the card.
    prefill_graph_sizes: see MemoryPlan.
    compiles_ahead: whether a child process compiles the CPU's decode step, where it has to be compiled.
    drafts: whether the checkpoint's head drafts. Further fields as in RunnerSettings.
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
