"""What of a context that goes down stays on the device whatever else is released: tokens in front and behind, layers.

It refuses to know pages and lengths of contexts. No torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpu.model.architecture import Architecture
from transfer.config import HostConfig


@dataclass(frozen=True, slots=True)
class Kept:
    """sink_tokens, window_tokens: of each context in front and behind, before they are rounded up to whole pages;
    dense_layers: those of which all tokens stay, sorted.
    """

    sink_tokens: int
    window_tokens: int
    dense_layers: tuple[int, ...]


def keep_as_set(settings: Any, host: HostConfig, architecture: Architecture) -> Kept:
    """What the `host` section says; layers that it leaves open are 0 and half the depth. Window layers go nowhere."""
    layers = (0, architecture.num_layers // 2) if host.dense_layers is None else host.dense_layers
    return Kept(host.sink_tokens, host.window_tokens, tuple(sorted({*layers, *architecture.window_layers})))


def join_kept(kept: Iterable[Kept]) -> Kept:
    """What all of these keep: the most tokens, and every layer that one of them keeps."""
    every = list(kept)
    return Kept(
        max((one.sink_tokens for one in every), default=0),
        max((one.window_tokens for one in every), default=0),
        tuple(sorted({layer for one in every for layer in one.dense_layers})),
    )
