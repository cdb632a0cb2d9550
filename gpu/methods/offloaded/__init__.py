"""Attend fully to contexts whose middle is in host memory: the CPU reads all that is there."""

from typing import Any

from gpu.methods.kept import OFFLOAD_KEYS, Kept, keep_as_set
from gpu.methods.method import Method
from gpu.model.architecture import Architecture
from transfer.host_config import HostConfig
from transfer.reading import Reading


class Offloaded(Method):
    name = "offloaded"
    summary = "The middle of a long context is in host memory, and the CPU reads all of it."
    kv_host = OFFLOAD_KEYS
    reading = Reading.WHOLE
    serves_split_devices = True
    plan_words = "device and host, exact"

    def find_kept(self, settings: Any, host: HostConfig, architecture: Architecture) -> Kept:
        return keep_as_set(host, architecture)


METHOD = Offloaded()
