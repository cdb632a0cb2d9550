"""Attention profiles: what a request may name in `attention_profile`, and how each one attends in a decode step.

No torch here, so that the scheduler can list and check names; what computes is imported when the runner asks for it.
Invariant: two profiles share KV (and cached prefixes) exactly if their `kv_key` is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu.decode_attention import DecodeAttention


class ProfileError(ValueError):
    """A name that no profile has; the message lists those that exist."""


@dataclass(frozen=True, slots=True)
class Profile:
    """`kv_key` marks the KV that this profile writes (prefix hashes are seeded with it).

    `load_decode_attention` imports and returns the function that attends in a decode step.
    """

    name: str
    kv_key: str
    load_decode_attention: Callable[[], DecodeAttention]


def _exact_decode_attention() -> DecodeAttention:
    from gpu.decode_attention import exact_decode_attention

    return exact_decode_attention


PROFILES: dict[str, Profile] = {}


def register(profile: Profile) -> None:
    """Add a profile. Raises ValueError if its name is taken."""
    if profile.name in PROFILES:
        raise ValueError(f"attention profile: {profile.name!r} is registered already; wanted a new name")
    PROFILES[profile.name] = profile


def get_profile(name: str) -> Profile:
    """The profile of that name. Raises ProfileError, which lists the names, if there is none."""
    if name not in PROFILES:
        raise ProfileError(f"attention_profile: unknown profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[name]


register(Profile(name="exact", kv_key="exact", load_decode_attention=_exact_decode_attention))
