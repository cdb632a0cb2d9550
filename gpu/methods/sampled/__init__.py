"""Attention over a sample of what is in host memory, found by hash codes (MagicPIG, arXiv 2410.16179, section 4).

The host tier builds one kind of hash table, whoever asks: so the settings stand once, in `host.sampled`.
"""

from gpu.methods.deposit_keys import DEPOSIT_KEYS
from gpu.methods.kept import keep_as_set
from gpu.methods.method import Method, any_token, no_bytes, possible
from transfer.config import SampledConfig
from transfer.reading import Reading

METHOD = Method(
    name="sampled",
    summary="The middle of a long context is in host memory, and the CPU reads a sample of it, found by hash tables.",
    slot="host",
    settings=SampledConfig,
    shared_key="sampled",
    kv_settings={"bits": "bits_per_table", "tables": "num_tables"},
    kv_host=DEPOSIT_KEYS,
    slot_bytes=no_bytes,
    rings=None,
    refuses={},
    why_impossible=possible,
    reading=Reading.SAMPLE,
    keeps=keep_as_set,
    device_side="gpu.methods.sampled.codes",
    prefill_side=None,
    align_tokens=any_token,
    scored=(SampledConfig(bits_per_table=10, num_tables=150), SampledConfig(bits_per_table=10, num_tables=200)),
)
