"""Attention that reuses what a similar, recent query has read: match, amend, complete (MAC, arXiv 2604.00235).

A head whose query, before RoPE, is near one of the last `capacity` ones takes over that one's summary of the far
context, and reads only a band in front of the match and the tail. Nothing is out of reach: a head that finds none reads
everything, and both leave a summary for those that follow.
"""

from typing import Any

from gpu.methods.kept import Kept
from gpu.methods.mac.settings import MacSettings
from gpu.methods.method import Method, RingUse, any_token, no_bytes, no_work_bytes, possible
from gpu.model.architecture import Architecture
from transfer.config import HostConfig
from transfer.reading import Reading

QUERY_BYTES, NUMBER_BYTES, FLAG_BYTES = 2, 4, 1  # bfloat16 queries; norms, masses and origins; whether mass is sampled
SUMMARY_BYTES = {"float32": 4, "bfloat16": 2}


def entry_bytes(settings: MacSettings, architecture: Architecture) -> int:
    """One query head's, of one position: its query, the summary, and what is said of it."""
    return architecture.dim * (QUERY_BYTES + SUMMARY_BYTES[settings.summaries]) + 3 * NUMBER_BYTES + FLAG_BYTES


def ring_bytes(settings: MacSettings, architecture: Architecture) -> int:
    """One sequence's, all layers that match."""
    layers = len(settings.layers(architecture))
    return layers * architecture.num_heads * settings.capacity * entry_bytes(settings, architecture)


def keep_what_is_matched(settings: MacSettings, host: HostConfig, architecture: Architecture) -> Kept:
    """A band in front of the oldest match is on the device, so that a hit asks the host for nothing."""
    return Kept(settings.sink_tokens, settings.capacity + settings.band, ())


def count_rings(settings: Any) -> int | None:
    return settings.rings


def least_tokens(settings: Any) -> int:
    return settings.min_context_tokens


METHOD = Method(
    name="mac",
    summary="A head whose query is near a recent one takes over what that one read of the far context, and reads the "
    "rest itself.",
    slot="reuse",
    settings=MacSettings,
    shared_key=None,
    kv_settings={
        "tau": "tau",
        "share": "max_prefix_share",
        "k": "capacity",
        "r": "band",
        "sink": "sink_tokens",
        "gap": "most_gap",
        "age": "max_age",
        "seeds": "num_seeds",
        "summaries": "summaries",
        "from": "min_context_tokens",
        "layers": "layer_tau",
        "stops": "stops_matching",
    },
    kv_host={},
    slot_bytes=ring_bytes,
    rings=RingUse(count_rings, least_tokens, no_bytes, no_work_bytes, fetches=None),
    refuses={"predicted": "a head that reuses reads no blocks, so what predicts them would see too few"},
    why_impossible=possible,
    reading=Reading.NONE,
    keeps=keep_what_is_matched,
    device_side="gpu.methods.mac.device",
    prefill_side=None,
    align_tokens=any_token,
    scored=(),
)
