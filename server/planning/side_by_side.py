"""Decide which engines may have memory at once: one, or those whose plans leave room for each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from gpu.memory.machine_limits import in_gib
from gpu.memory.plan import MemoryPlan
from transfer.machine import MachineProfile

Device = Literal["gpu", "host"]
HOST_SHARE = 0.8  # of the host, for engines; the system, this process and files' pages have the rest


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that engines may take together, by place. is_shared: whether several may be loaded at once."""

    bytes: Mapping[Device, int]
    is_shared: bool = False

    def why_not(self, plans: Sequence[MemoryPlan]) -> str | None:
        """Return why these engines do not fit side by side, or None if they do, whatever `is_shared` says."""
        for place, most in self.bytes.items():
            taken = [taken_bytes(plan, place) for plan in plans]
            if len(plans) > 1 and sum(taken) > most:
                asked = " + ".join(in_gib(one) for one in taken)
                name = "GPU memory" if place == "gpu" else "host memory"
                return f"{asked} of {name} are more than {in_gib(most)}"
        return None

    def holds(self, plans: Sequence[MemoryPlan]) -> bool:
        """Return whether these engines may be loaded at once; a single one always may."""
        return len(plans) <= 1 or (self.is_shared and self.why_not(plans) is None)


ONE_AT_A_TIME = Room(MappingProxyType({}))


def find_room(machine: MachineProfile, is_shared: bool) -> Room:
    """Return the room of a machine: all of the card, and most of host memory."""
    room: dict[Device, int] = {} if machine.gpu is None else {"gpu": machine.gpu.memory_bytes}
    room["host"] = int(machine.memory_bytes * HOST_SHARE)
    return Room(MappingProxyType(room), is_shared)


def taken_bytes(plan: MemoryPlan, place: Device) -> int:
    """Return the bytes that an engine may take: on a card its limit, in host memory its plan's sum over all devices."""
    if place == "gpu":
        return plan.limit_bytes.get("gpu", 0)
    return plan.devices * plan.used_bytes("host")
