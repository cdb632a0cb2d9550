"""Prefill that attends one query of so many to everything, and the others to the key blocks that these chose.

MOMO ("Measure Once, Mask Once: Delta Refined Block Sparse Attention"). Its output is corrected by a difference
(eq. 2), so it is no softmax over a set of tokens, and is merged with nothing.
"""

from gpu.methods.method import Method, no_bytes, possible
from gpu.methods.momo.settings import MomoSettings
from transfer.reading import Reading


def align_tokens(settings: MomoSettings) -> int:
    """Windows and query blocks are of absolute positions."""
    return settings.query_block


METHOD = Method(
    name="momo",
    summary="Prefill reads everything for one query of 16, and for the others the key blocks that these found.",
    slot="prefill",
    settings=MomoSettings,
    shared_key=None,
    kv_settings={
        "gamma": "gamma",
        "block": "key_block",
        "queries": "query_block",
        "by": "selection",
        "k": "k",
        "exact": "k_exact",
        "trim": "k_trim",
        "dense": "dense_until_tokens",
        "layers": "dense_layers",
    },
    kv_host={},
    slot_bytes=no_bytes,
    rings=None,
    refuses={},
    why_impossible=possible,
    reading=Reading.NONE,
    keeps=None,
    device_side=None,
    prefill_side="gpu.methods.momo.prefill",
    align_tokens=align_tokens,
    scored=(),
)
