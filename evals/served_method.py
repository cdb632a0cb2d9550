"""A method that is a serving profile: its name, and the settings that stand in for the deployment's own.

`profile:NAME`, or `profile:sampled:bits_per_table=10,num_tables=200` for other settings of the profile's method, so
that one run compares several. It knows no engine and no method. Invariant: two methods that need the same deployment
compare equal in it.
"""

from dataclasses import dataclass

from pydantic import ValidationError

from gpu.config import MethodChoice
from gpu.methods.method import Method
from gpu.profiles import Profile, ProfileError, get_profile, needs_host, resolve_profiles
from server.config import Deployment, describe
from transfer.settings import Settings

PREFIX = "profile:"
"""Of a method that is a serving profile: `profile:exact`."""


@dataclass(frozen=True)
class ServedMethod:
    """deployment: the one that is asked for with the method's settings in it; None: what the machine gives."""

    profile: str
    deployment: Deployment | None
    goes_down: bool


def served_method(method: str, deployment: Deployment | None) -> ServedMethod | None:
    """The profile that a method names, or None if it is no serving profile.

    Raises ProfileError for one that the deployment does not have (None: one without a `host` section), and for
    settings that the profile does not have.
    """
    if not method.startswith(PREFIX):
        return None
    name, _, text = method.removeprefix(PREFIX).partition(":")
    if deployment is None and needs_host(name):
        raise ProfileError(
            f"--method {method}: keeps KV in host memory; give --config a deployment with a `host` section"
        )
    profiles = (
        resolve_profiles({}, None) if deployment is None else resolve_profiles(deployment.profiles, deployment.host)
    )
    profile = get_profile(name, profiles, f"--method {method}")
    if text:
        deployment = _with_settings(method, text, deployment, profile)
    return ServedMethod(profile.name, deployment, profile.goes_down)


def _with_settings(method: str, text: str, deployment: Deployment | None, profile: Profile) -> Deployment:
    part = next((part for part in profile.parts if type(part.settings).model_fields), None)
    if part is None or deployment is None:
        raise ProfileError(f"--method {method}: profile {profile.name!r} takes no settings; leave out `:{text}`")
    given = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        settings = part.method.settings.model_validate({**part.settings.model_dump(), **given})
    except ValidationError as error:
        known = ", ".join(part.method.settings.model_fields)
        raise ProfileError(f"--method {method}: {describe(error, None)}; settings are {known}") from None
    if part.method.shared_key is not None:
        return _share(part.method, settings, deployment)
    if profile.name not in deployment.profiles:
        raise ProfileError(f"--method {method}: {profile.name!r} is built in; name a profile of it in --config")
    choice = MethodChoice(method=part.method.name, **settings.model_dump())
    composition = deployment.profiles[profile.name].model_copy(update={part.method.slot: choice})
    return deployment.model_copy(update={"profiles": deployment.profiles | {profile.name: composition}})


def _share(method: Method, settings: Settings, deployment: Deployment) -> Deployment:
    """The deployment with other settings where all profiles share them; none of its profiles says its own any more."""
    assert deployment.host is not None, "evals: shared settings stand in the section `host`"
    assert method.shared_key is not None
    host = deployment.host.model_copy(update={method.shared_key: settings})
    choice = MethodChoice(method=method.name)
    profiles = {
        name: composition.model_copy(update={method.slot: choice})
        if getattr(composition, method.slot) is not None and getattr(composition, method.slot).method == method.name
        else composition
        for name, composition in deployment.profiles.items()
    }
    return deployment.model_copy(update={"host": host, "profiles": profiles})


def group_by_deployment(
    methods: list[str], deployment: Deployment | None
) -> list[tuple[Deployment | None, dict[str, str]]]:
    """Deployments to load, and the methods that run in each, with their profiles.

    A profile that keeps all on the device goes with the first one: nothing of `host` touches it.
    """
    served = {method: found for method in methods if (found := served_method(method, deployment)) is not None}
    groups: list[tuple[Deployment | None, dict[str, str]]] = []
    for method, found in sorted(served.items(), key=lambda item: not item[1].goes_down):
        for known, members in groups:
            if known == found.deployment or not found.goes_down:
                members[method] = found.profile
                break
        else:
            groups.append((found.deployment, {method: found.profile}))
    return groups
