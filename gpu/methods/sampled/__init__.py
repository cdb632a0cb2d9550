"""Attend to a sample of what is in host memory, found by hash codes (MagicPIG, arXiv 2410.16179, section 4).

The host tier builds one kind of hash table for all profiles, so its settings are in a single place, `host.sampled`.
"""

from typing import Any

from gpu.methods.counters import Counter
from gpu.methods.kept import OFFLOAD_KEYS, Kept, keep_as_set
from gpu.methods.method import Method
from gpu.model.architecture import Architecture
from transfer.host_config import HostConfig, SampledConfig
from transfer.reading import Reading

HOST_COUNTERS = {
    "host_tables_built": Counter("hash tables of a layer of a segment built"),
    "host_tables_failed": Counter("hash tables that could not be built; that layer of the segment is read exactly"),
    "host_answers_estimated": Counter("sampled answers, of a head in a layer, whose standard error was estimated"),
    "host_answers_heavy": Counter("sampled answers in which a key has more than a tenth of the weight"),
    "host_answers_beyond_bound": Counter(
        "sampled answers without a heavy key whose error exceeds host.sampled.errors.bound"
    ),
    "host_answers_heavy_beyond_bound": Counter(
        "sampled answers with a heavy key whose error exceeds host.sampled.errors.bound"
    ),
    "host_steps_beyond_bound": Counter("decode steps with a sampled answer whose error exceeds the bound"),
    "host_answers_in_full": Counter("answers read in full for host.sampled.errors.epsilon, audits included"),
}


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
    host_counters = HOST_COUNTERS
    plan_words = "device and host, sampled"
    scored = (SampledConfig(bits_per_table=10, num_tables=150), SampledConfig(bits_per_table=10, num_tables=200))
    measured = "loses 9.4 points (12.3 to 6.6) on SmolLM2-135M-Instruct: it does not hold"
    cpu_time = "290 ms a token at 5,900 tokens (exact: 60)"

    def why_no_draft(self, settings: Any, most_tokens: int) -> str:
        if settings.errors is None:
            return ""
        return f"host.{self.shared_key}.errors chooses the heads that it reads in full by the number of the step"

    def find_kept(self, settings: Any, host: HostConfig, architecture: Architecture) -> Kept:
        return keep_as_set(host, architecture)


METHOD = Sampled()
