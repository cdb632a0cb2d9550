"""Attend to a sample of what is in host memory, found by hash codes (MagicPIG, arXiv 2410.16179, section 4).

The host tier builds one kind of hash table for all profiles, so its settings are in a single place, `host.sampled`.
"""

from typing import Any

from gpu.methods.kept import OFFLOAD_KEYS, Kept, keep_as_set
from gpu.methods.method import Method
from gpu.model.architecture import Architecture
from transfer.host_config import HostConfig, SampledConfig
from transfer.reading import Reading


class Sampled(Method):
    name = "sampled"
    summary = "The middle of a long context is in host memory, and the CPU reads a sample of it, found by hash tables."
    settings = SampledConfig
    shared_key = "sampled"
    kv_settings = {"bits": "bits_per_table", "tables": "num_tables"}
    kv_host = OFFLOAD_KEYS
    reading = Reading.SAMPLE
    serves_split_devices = True
    why_no_drafts = "a context of which what verifies reads all has no hash tables in host memory"
    device_side = "gpu.methods.sampled.codes"
    plan_words = "device and host, sampled"
    scored = (SampledConfig(bits_per_table=10, num_tables=150), SampledConfig(bits_per_table=10, num_tables=200))
    measured = "loses 9.4 points (12.3 to 6.6) on SmolLM2-135M-Instruct: it does not hold"

    def find_kept(self, settings: Any, host: HostConfig, architecture: Architecture) -> Kept:
        return keep_as_set(host, architecture)


METHOD = Sampled()
