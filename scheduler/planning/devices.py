"""Check what a model that is split over several devices can be served with, and share the machine between them."""

from collections.abc import Iterator

from gpu.config import GpuConfig
from gpu.memory.machine_limits import resolve_device
from gpu.memory.plan import PlanError
from gpu.methods.registry import list_methods
from gpu.model.gguf.file import is_gguf
from gpu.model.split import KEY
from gpu.profiles import resolve_profiles
from scheduler.engine_config import EngineConfig
from transfer.machine import MachineProfile


def check_split(config: EngineConfig) -> None:
    """Raise PlanError for what is not served on more than one device."""
    for key, why, instead in _refused(config):
        raise PlanError(f"{KEY}: asked {config.gpu.devices}, and {key} {why}; {instead}, or use 1")


def _refused(config: EngineConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each setting that is not served on several devices, why not, and what to do about it."""
    if config.adapters:
        yield "adapters", "have matrices that are not split", "leave them out"
    if config.documents is not None:
        yield "documents", "have keys and values of all heads in one file", "leave them out"
    if config.disk is not None:
        yield "disk", "has keys and values of all heads in one file", "leave it out"
    if config.gpu.experts_gib is not None:
        yield "gpu.experts_gib", "leaves experts in host memory, which is of one device", "leave it out"
    if config.model.path is not None and is_gguf(config.model.path):
        yield (
            f"model.path {config.model.path.name}",
            "is a GGUF file, whose blocks cannot be read in part",
            ("give a folder of safetensors"),
        )
    for name, profile in resolve_profiles(config.all_profiles, config.host).items():
        if profile.draft is not None and not profile.draft.uses_ngrams:
            yield f"profiles.{name}.draft", f"is by {profile.draft.name!r}, which is not split", "draft by `ngram`"
        for part in profile.parts:
            if not part.method.serves_split_devices:
                served = [method.name for method in list_methods().values() if method.serves_split_devices]
                yield (
                    f"profiles.{name}",
                    f"has {part.method.name!r}, which chooses by times or by all heads",
                    f"take one of {', '.join(served)}",
                )


def device_share(gpu: GpuConfig, machine: MachineProfile) -> MachineProfile:
    """Return one device's share of the machine: a card, and a part of the host's cores and memory.

    Raises PlanError if there are too few cards.
    """
    if gpu.devices == 1:
        return machine
    num_gpus = machine.num_gpus or 1
    if resolve_device(gpu, machine) == "cuda" and num_gpus < gpu.devices:
        raise PlanError(
            f"{KEY}: asked {gpu.devices}, machine {machine.name!r} has {num_gpus} GPU{'s' * (num_gpus > 1)}; lower it, "
            "or name a machine with more by --machine (its file says num_gpus)"
        )
    # A plan is for one device and its process: the other processes have their own parts of the host.
    cores, memory = max(1, machine.physical_cores // gpu.devices), machine.memory_bytes // gpu.devices
    return machine.model_copy(update={"physical_cores": cores, "memory_bytes": memory})
