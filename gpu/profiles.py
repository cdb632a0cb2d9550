"""Attention profiles: what a request may name in `attention_profile`, and how each one attends in a decode step.

No torch here, so that the scheduler can list and check names; what computes is imported when the runner asks for it.
Invariant: two profiles share KV (and cached prefixes) exactly if their `kv_key` is the same.

`exact` keeps a context on the device and reads all of it. `sampled` and `offloaded` exist where the deployment has a
`host` section: they keep the middle of a long context in host memory, where the CPU reads a sample of it by hash codes
(MagicPIG, arXiv 2410.16179, section 4) or all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfer.config import HOST_PROFILES, HostConfig

if TYPE_CHECKING:
    from gpu.decode_attention import DecodeAttention


class ProfileError(ValueError):
    """A name that no profile of this deployment has; the message lists those that it has."""


@dataclass(frozen=True, slots=True)
class Profile:
    """`kv_key` marks the KV that this profile writes (prefix hashes are seeded with it).

    `uses_host`: contexts beyond the resident limit go down; `samples`: the CPU then reads a sample of what is there.
    `load_decode_attention` imports and returns the function that attends in a decode step to what is on the device.
    """

    name: str
    kv_key: str
    uses_host: bool
    samples: bool
    load_decode_attention: Callable[[], DecodeAttention]


def _exact_decode_attention() -> DecodeAttention:
    from gpu.decode_attention import exact_decode_attention

    return exact_decode_attention


PROFILES: dict[str, Profile] = {}
"""Those of every deployment, by name."""


def register(profile: Profile) -> None:
    """Add a profile to every deployment. Raises ValueError if its name is taken."""
    if profile.name in PROFILES or profile.name in HOST_PROFILES:
        raise ValueError(f"attention profile: {profile.name!r} is registered already; wanted a new name")
    PROFILES[profile.name] = profile


def profiles_for(host: HostConfig | None) -> dict[str, Profile]:
    """The profiles of a deployment by name; `host` is its section of that name, or None."""
    if host is None:
        return dict(PROFILES)
    of_host = [
        Profile(name, kv_key(name, host), uses_host=True, samples=name == "sampled",
                load_decode_attention=_exact_decode_attention)
        for name in HOST_PROFILES
    ]  # fmt: skip
    return PROFILES | {profile.name: profile for profile in of_host}


def get_profile(name: str, host: HostConfig | None) -> Profile:
    """The profile of that name in a deployment. Raises ProfileError if there is none."""
    profiles = profiles_for(host)
    if name in profiles:
        return profiles[name]
    if name in HOST_PROFILES:
        raise ProfileError(
            f"attention_profile: {name!r} keeps KV in host memory; this deployment has no `host` section"
        )
    raise ProfileError(f"attention_profile: unknown profile {name!r}; known: {', '.join(profiles)}")


def kv_key(name: str, host: HostConfig) -> str:
    """What decides the KV that a profile of the host tier writes: every setting that moves a decoded token's."""
    dense = "default" if host.dense_layers is None else ",".join(map(str, host.dense_layers))
    key = f"{name} rows={host.rows} sink={host.sink_tokens} window={host.window_tokens} dense={dense} "
    key += f"resident={host.resident_tokens}"
    if name == "sampled":
        key += f" bits={host.sampled.bits_per_table} tables={host.sampled.num_tables}"
    return key


register(
    Profile(name="exact", kv_key="exact", uses_host=False, samples=False, load_decode_attention=_exact_decode_attention)
)
