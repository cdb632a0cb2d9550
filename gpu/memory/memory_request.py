"""Define the input of memory planning: the model, the settings, the machine, and what methods keep."""

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
    """The configured sizes of steps and contexts. max_running: sequences. chunk_tokens: of a prefill chunk.
    max_context_tokens: of the longest context; max_hidden_tokens: of all prompts under prefill together; None: as many
    as fit. prefill_graph_sizes: sizes of units whose layers are captured.
    """

    max_running: int
    chunk_tokens: int
    max_context_tokens: int | None
    max_hidden_tokens: int | None
    prefill_graph_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """The input of `plan_memory`.

    kept: what stays on the device of offloaded contexts (`gpu.profiles.find_kept`); None without `host`.
    states: what attention methods keep for running sequences (`gpu.profiles.list_states`).
    documents, disk: settings of document chunks and of contexts on disk, or None.
    computed_rows, draft: see `MemoryPlan`.
    adapters: adapters beside the weights.
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
