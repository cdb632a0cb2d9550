"""A method that is a serving profile: its name, and the settings that stand in for the deployment's own.

`profile:NAME`, or `profile:sampled:bits_per_table=10,num_tables=200` for other settings of `host.sampled`, so that one
run compares several. It knows no engine. Invariant: two methods that need the same deployment compare equal in it.
"""

from dataclasses import dataclass

from pydantic import ValidationError

from gpu.profiles import ProfileError, get_profile
from server.config import Deployment, describe
from transfer.config import HOST_PROFILES, SampledConfig

PREFIX = "profile:"
"""Of a method that is a serving profile: `profile:exact`."""


@dataclass(frozen=True)
class ServedMethod:
    """deployment: the one that is asked for with the method's settings in it; None: what the machine gives."""

    profile: str
    deployment: Deployment | None
    uses_host: bool


def served_method(method: str, deployment: Deployment | None) -> ServedMethod | None:
    """The profile that a method names, or None if it is no serving profile.

    Raises ProfileError for one that the deployment does not have (None: one without a `host` section), and for
    settings that the profile does not have.
    """
    if not method.startswith(PREFIX):
        return None
    name, _, text = method.removeprefix(PREFIX).partition(":")
    if deployment is None and name in HOST_PROFILES:
        raise ProfileError(
            f"--method {method}: keeps KV in host memory; give --config a deployment with a `host` section"
        )
    profile = get_profile(name, deployment.host if deployment is not None else None)
    if text:
        deployment = _with_settings(method, text, deployment, profile.samples)
    return ServedMethod(profile.name, deployment, profile.uses_host)


def _with_settings(method: str, text: str, deployment: Deployment | None, samples: bool) -> Deployment:
    known = ", ".join(SampledConfig.model_fields)
    if not samples or deployment is None or deployment.host is None:
        raise ProfileError(f"--method {method}: only profile:sampled takes settings ({known}); leave out `:{text}`")
    given = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        sampled = SampledConfig.model_validate({**deployment.host.sampled.model_dump(), **given})
    except ValidationError as error:
        raise ProfileError(f"--method {method}: {describe(error, None)}; settings are {known}") from None
    host = deployment.host.model_copy(update={"sampled": sampled})
    return deployment.model_copy(update={"host": host})


def group_by_deployment(
    methods: list[str], deployment: Deployment | None
) -> list[tuple[Deployment | None, dict[str, str]]]:
    """Deployments to load, and the methods that run in each, with their profiles.

    A profile that keeps all on the device goes with the first one: nothing of `host` touches it.
    """
    served = {method: found for method in methods if (found := served_method(method, deployment)) is not None}
    groups: list[tuple[Deployment | None, dict[str, str]]] = []
    for method, found in sorted(served.items(), key=lambda item: not item[1].uses_host):
        for known, members in groups:
            if known == found.deployment or not found.uses_host:
                members[method] = found.profile
                break
        else:
            groups.append((found.deployment, {method: found.profile}))
    return groups
