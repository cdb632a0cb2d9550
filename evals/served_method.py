"""Parse the name of a method that is a serving profile, with settings that replace the deployment's own.

The form is `profile:NAME`, or `profile:sampled:bits_per_table=10,num_tables=200` for other settings of the profile's
method, so that one run compares several. Values are read as YAML, as in a deployment's file. Settings of the `host`
section that change answers may be replaced, too: `dense_layers=0+15`, or `dense_layers=none`. Invariant: two methods
that need the same deployment have equal ones.
"""

from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from gpu.config import Composition, MethodChoice
from gpu.methods.method import Slot
from gpu.profiles import Profile, ProfileError, get_profile, needs_host, resolve_profiles
from server.deployment import Deployment, describe
from transfer.host_config import HostConfig

PREFIX = "profile:"
"""Prefix of a method that is a serving profile: `profile:exact`."""


@dataclass(frozen=True)
class ServedMethod:
    """A serving profile as a method. deployment: the requested one with the method's settings; None: the machine's
    default. profile: the name of the profile in the deployment.
    """

    deployment: Deployment | None
    profile: Profile


def served_method(method: str, deployment: Deployment | None) -> ServedMethod | None:
    """Return the profile that a method names, or None if it is no serving profile.

    Raises ProfileError for a profile that the deployment does not have, and for settings that the profile does not
    have. deployment None: one without a `host` section.
    """
    if not method.startswith(PREFIX):
        return None
    name, _, text = method.removeprefix(PREFIX).partition(":")
    if deployment is None and needs_host(name):
        raise ProfileError(
            f"--method {method}: keeps KV in host memory; give --config a deployment with a `host` section"
        )
    found = ServedMethod(deployment, _resolve(deployment, name, method))
    if not text:
        return found
    varied = _with_settings(method, text, found)
    return ServedMethod(varied, _resolve(varied, name, method))


def _resolve(deployment: Deployment | None, name: str, method: str) -> Profile:
    named, host = ({}, None) if deployment is None else (deployment.all_profiles, deployment.host)
    return get_profile(name, resolve_profiles(named, host), f"--method {method}")


def _with_settings(method: str, text: str, found: ServedMethod) -> Deployment:
    """Return the deployment in which the profile's method has the settings of `text`."""
    profile, deployment = found.profile, found.deployment
    parts = [part for part in profile.parts if part.method.settings.model_fields]
    given = {key: yaml.safe_load(value) for key, _, value in (part.partition("=") for part in text.split(","))}
    own = {key for part in parts for key in part.method.settings.model_fields}
    if of_host := {key: given.pop(key) for key in _host_keys(profile) - own if key in given}:
        deployment = _with_host_settings(method, of_host, deployment)
        if not given:
            return deployment
    if not parts or deployment is None:
        raise ProfileError(f"--method {method}: profile {profile.name!r} takes no settings; leave out `:{text}`")
    part = next((part for part in parts if given.keys() <= part.method.settings.model_fields.keys()), parts[0])
    try:
        settings = part.method.settings.model_validate({**part.settings.model_dump(), **given})
    except ValidationError as error:
        known = ", ".join([*part.method.settings.model_fields, *sorted(_host_keys(profile))])
        raise ProfileError(f"--method {method}: {describe(error, None)}; settings are {known}") from None
    slot, name = part.method.slot, part.method.name
    if part.method.shared_key is not None:
        assert deployment.host is not None, "evals: shared settings stand in the section `host`"
        host = deployment.host.model_copy(update={part.method.shared_key: settings})
        profiles = {key: _without_settings(one, slot, name) for key, one in deployment.profiles.items()}
        return deployment.model_copy(update={"host": host, "profiles": profiles})
    named = deployment.all_profiles
    if profile.name not in named:
        raise ProfileError(f"--method {method}: {profile.name!r} is built in; name a profile of it in --config")
    choice = MethodChoice(method=name, **settings.model_dump())
    own = named[profile.name].model_copy(update={slot: choice})
    return deployment.model_copy(update={"profiles": deployment.profiles | {profile.name: own}})


def _host_keys(profile: Profile) -> set[str]:
    """Return the settings of the `host` section that change what the profile answers."""
    return {key for part in profile.parts for key in part.method.kv_host.values()}


def _with_host_settings(method: str, given: dict[str, Any], deployment: Deployment | None) -> Deployment:
    """Return the deployment with other settings of its `host` section. Layers are joined by `+`; `none` is no layer."""
    assert deployment is not None, "evals: a profile that offloads has a deployment"
    assert deployment.host is not None, "evals: a profile that offloads has a section `host`"
    layers = given.get("dense_layers")
    if layers is not None:
        given = given | {"dense_layers": () if layers == "none" else str(layers).split("+")}
    try:
        host = HostConfig.model_validate({**deployment.host.model_dump(), **given})
    except ValidationError as error:
        raise ProfileError(f"--method {method}: host.{describe(error, None)}") from None
    return deployment.model_copy(update={"host": host})


def _without_settings(composition: Composition, slot: Slot, name: str) -> Composition:
    """Return a composition without its own values of settings that all profiles share."""
    choice: MethodChoice | None = getattr(composition, slot)
    if choice is None or choice.method != name:
        return composition
    return composition.model_copy(update={slot: MethodChoice(method=name)})


def group_by_deployment(
    methods: list[str], deployment: Deployment | None
) -> list[tuple[Deployment | None, dict[str, str]]]:
    """Return the deployments to load, each with its methods and their profiles.

    A profile that keeps everything on the device runs in the first deployment that has the same profile, since settings
    of `host` do not matter to it.
    """
    served = {method: found for method in methods if (found := served_method(method, deployment)) is not None}
    groups: list[tuple[Deployment | None, dict[str, str]]] = []
    for method, found in sorted(served.items(), key=lambda item: not item[1].profile.offloads):
        profile = found.profile
        for known, members in groups:
            is_same = not profile.offloads and _resolve(known, profile.name, method).parts == profile.parts
            if known == found.deployment or is_same:
                members[method] = profile.name
                break
        else:
            groups.append((found.deployment, {method: profile.name}))
    return groups
