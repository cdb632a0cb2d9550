"""Define a deployment that is resolved for a machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpu.memory.plan import MemoryPlan
from gpu.model.architecture import Architecture
from gpu.profiles import Profile
from server.deployment import Deployment
from transfer.machine import MachineProfile


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    deployment: Deployment
    architecture: Architecture
    memory: MemoryPlan
    profiles: Mapping[str, Profile]
    machine: MachineProfile
    notes: tuple[str, ...]
