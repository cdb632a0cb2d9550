"""Full attention over a context that stays on the device: what an empty slot `host` means."""

from gpu.methods.method import Method, NoSettings, any_token, no_bytes, possible
from transfer.reading import Reading

METHOD = Method(
    name="exact",
    summary="Every context stays on the device, and all of it is read there.",
    slot="host",
    settings=NoSettings,
    shared_key=None,
    kv_settings={},
    kv_host={},
    slot_bytes=no_bytes,
    rings=None,
    refuses={},
    why_impossible=possible,
    reading=Reading.NONE,
    keeps=None,
    device_side=None,
    prefill_side=None,
    align_tokens=any_token,
    scored=(NoSettings(),),
)
