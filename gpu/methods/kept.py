"""Say which tokens and layers of a context stay on the device when the rest is in host memory. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpu.model.architecture import Architecture
from transfer.host_config import HostConfig

OFFLOAD_KEYS = {
    "rows": "rows",
    "sink": "sink_tokens",
    "window": "window_tokens",
    "dense": "dense_layers",
    "resident": "resident_tokens",
    "residency": "residency",
}
"""Settings of the `host` section that change a decoded token's KV if contexts are offloaded (`Method.kv_host`)."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens and layers of a context that stay on the device.

    sink_tokens, window_tokens: at the front and the end of each context, before rounding up to whole pages.
    dense_layers: layers of which all tokens stay, sorted.
    """

    sink_tokens: int
    window_tokens: int
    dense_layers: tuple[int, ...]


def keep_as_set(host: HostConfig, architecture: Architecture, own_layers: tuple[int, ...] | None = None) -> Kept:
    """Return what the `host` section keeps. Layers with a window stay always.

    own_layers: dense layers where `host.dense_layers` is not set; None: layer 0 and the middle one.
    """
    default = (0, architecture.num_layers // 2) if own_layers is None else own_layers
    layers = default if host.dense_layers is None else host.dense_layers
    return Kept(host.sink_tokens, host.window_tokens, tuple(sorted({*layers, *architecture.layers_apart})))


def join_kept(kept: Iterable[Kept]) -> Kept:
    """Return what all of these keep together: the most tokens, and every layer that one of them keeps."""
    every = list(kept)
    return Kept(
        max((one.sink_tokens for one in every), default=0),
        max((one.window_tokens for one in every), default=0),
        tuple(sorted({layer for one in every for layer in one.dense_layers})),
    )
