"""What a plan says of contexts on the card that an index may be faster for: what an engine measured there."""

from collections.abc import Mapping

from gpu.memory.plan import MemoryPlan
from gpu.methods.indexed.crossovers import Crossovers, identify, read_crossovers
from gpu.methods.indexed.settings import IndexedSettings
from gpu.model.architecture import Architecture
from gpu.profiles import Profile
from scheduler.planning.engine_memory import find_tier_shape
from server.deployment import Deployment
from transfer.machine import MachineProfile
from transfer.measured import measured_path, read_measured


def tell_resident(
    deployment: Deployment,
    profiles: Mapping[str, Profile],
    memory: MemoryPlan,
    architecture: Architecture,
    machine: MachineProfile,
) -> tuple[str, ...]:
    """Return a line for each profile with `resident: auto`: in which steps its contexts on the card are read by an
    index.
    """
    lines = []
    for name, profile in profiles.items():
        settings = profile.host_part.settings
        if isinstance(settings, IndexedSettings) and settings.resident == "auto":
            lines.append(
                f"profile {name}, resident: auto: {_tell(deployment, settings, memory, architecture, machine)}"
            )
    return tuple(lines)


def _tell(
    deployment: Deployment,
    settings: IndexedSettings,
    memory: MemoryPlan,
    architecture: Architecture,
    machine: MachineProfile,
) -> str:
    tier = find_tier_shape(deployment, architecture, memory)
    if memory.device != "cuda" or machine.gpu is None or tier is None:
        return "without a GPU contexts on the device are read in full"
    of = identify(machine.gpu.name, memory.kv, len(tier.layers), architecture, settings)
    found = read_crossovers(read_measured(measured_path()), of)
    if found is None:
        return (
            "no engine has measured here yet for which contexts on the card an index is faster than all their rows; "
            "the times of this plan count bytes"
        )
    return f"{describe(found)}, as an engine measured here; the times of this plan count bytes"


def describe(crossovers: Crossovers) -> str:
    """Return in words from which contexts on an index is read, by rows of a step."""
    if not any(least is not None for least in crossovers.values()):
        return "contexts on the card are read in full"
    said = [
        f"{'never' if least is None else f'from {least:,} tokens each'} in a step of {rows}"
        for rows, least in sorted(crossovers.items())
    ]
    return f"contexts on the card are read by an index {', '.join(said)}"
