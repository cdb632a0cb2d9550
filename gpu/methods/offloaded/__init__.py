"""Full attention over a context whose middle is in host memory: the CPU reads all that is there."""

from gpu.methods.deposit_keys import DEPOSIT_KEYS
from gpu.methods.kept import keep_as_set
from gpu.methods.method import Method, NoSettings, any_token, no_bytes, possible
from transfer.reading import Reading

METHOD = Method(
    name="offloaded",
    summary="The middle of a long context is in host memory, and the CPU reads all of it.",
    slot="host",
    settings=NoSettings,
    shared_key=None,
    kv_settings={},
    kv_host=DEPOSIT_KEYS,
    slot_bytes=no_bytes,
    rings=None,
    refuses={},
    why_impossible=possible,
    reading=Reading.WHOLE,
    keeps=keep_as_set,
    device_side=None,
    prefill_side=None,
    align_tokens=any_token,
    scored=(),
)
