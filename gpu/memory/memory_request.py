"""What a plan of memory is asked for: the model, the settings, the machine, and what methods keep."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu.config import GpuConfig
from gpu.memory.draft_model_plan import DraftModelPlan
from gpu.methods.kept import Kept
from gpu.methods.method import MethodState
from gpu.model.adapter_file import AdapterFile
from gpu.model.architecture import Architecture
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import DocumentsConfig, HostConfig
from transfer.machine import MachineProfile


@dataclass(frozen=True, slots=True)
class PlannedSizes:
    """What steps and contexts are asked for: sequences that run, tokens of a prefill chunk, of the longest context, and
    of all prompts under way together; None: as many as fit. prefill_graph_sizes: of units whose layers are captured.
    """

    max_running: int
    chunk_tokens: int
    max_context_tokens: int | None
    max_hidden_tokens: int | None
    prefill_graph_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What memory is planned for.

    kept: what of contexts that are offloaded stays on the device (`gpu.profiles.find_kept`), None without `host`.
    states: what attention methods keep for sequences that run (`gpu.profiles.list_states`).
    documents: how their chunks are kept.
    disk: how contexts are kept there.
    computed_rows, draft: see `MemoryPlan`.
    adapters: beside the weights.
    """

    architecture: Architecture
    gpu: GpuConfig
    host: HostConfig | None
    kept: Kept | None
    states: Sequence[MethodState]
    sizes: PlannedSizes
    machine: MachineProfile
    documents: DocumentsConfig | None = None
    disk: DiskConfig | None = None
    computed_rows: int = 0
    draft: DraftModelPlan | None = None
    adapters: Sequence[AdapterFile] = ()
