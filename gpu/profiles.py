"""Resolve attention profiles: named compositions of methods, which a request chooses by `attention_profile`. No torch.

Each method of the slot `host` is a profile of the same name, unless it plans device memory for each sequence. The
section `profiles` of a deployment names others. Invariant: two profiles share KV, and cached prefixes, exactly if
their `kv_key` is the same.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, get_args

from pydantic import ValidationError

from gpu.config import Composition, DraftConfig, MethodChoice
from gpu.methods.kept import Kept, join_kept
from gpu.methods.method import Method, MethodState, ProfilePart, Slot
from gpu.methods.registry import list_methods
from gpu.model.architecture import Architecture
from gpu.step import DENSE, PartId
from transfer.host_config import HostConfig
from transfer.nearest_name import nearest_hint
from transfer.reading import Reading, join_readings
from transfer.settings_model import Settings

FULL_ATTENTION = "exact"
UNCHANGED = "exact"
"""The `kv_key` of KV that no method changes."""


class ProfileError(ValueError):
    """A profile that this deployment does not or cannot have. The message names those it has, or what to change."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A named choice of methods.

    kv_key: identifies the KV that it writes; prefix hashes are seeded with it.
    parts: one for each filled slot; the slot `host` is always filled.
    draft: the source of its drafts, or None.
    draft_part: the part of another profile that drafts for it, or None.
    """

    name: str
    kv_key: str
    parts: tuple[ProfilePart, ...]
    draft: DraftConfig | None = None
    draft_part: ProfilePart | None = None

    @property
    def composition(self) -> str:
        """Return a description: slots, methods and settings."""
        drafts = [] if self.draft is None else [f"draft: {self.draft.name}"]
        return ", ".join([*map(str, self.parts), *drafts])

    @property
    def prefill_method(self) -> PartId:
        """Return the part that attends prompts. Profiles with the same one share prefill jobs and learnt times."""
        return next((part.id for part in self.parts if part.method.slot == "prefill"), DENSE)

    @property
    def align_tokens(self) -> int:
        """Return the block size of the KV that it writes, in tokens (`Method.align_tokens`)."""
        return math.lcm(*(part.method.align_tokens(part.settings) for part in self.parts))

    @property
    def ring_parts(self) -> tuple[ProfilePart, ...]:
        """Return the parts of which a running sequence holds a ring each. Profiles with the same part share rings."""
        return tuple(part for part in self.parts if part.method.has_rings)

    @property
    def held_parts(self) -> tuple[ProfilePart, ...]:
        """Return the parts of which a running sequence holds a ring, for its steps or only for its drafts."""
        return self.ring_parts if self.draft_part is None else (*self.ring_parts, self.draft_part)

    @property
    def host_part(self) -> ProfilePart:
        """Return the part that keeps and reads a context that outgrows the device."""
        return next(part for part in self.parts if part.method.slot == "host")

    @property
    def why_no_epsilon(self) -> str:
        """Return why a request may not set `epsilon`, to follow the profile's name; empty: it may."""
        if self.draft is not None:
            return "has drafts, and budgets would follow errors of tokens that are not drawn"
        if any(part.method.slot == "reuse" for part in self.parts):
            return "takes over attention of earlier queries, whose errors nothing bounds"
        return self.host_part.method.why_no_epsilon(self.host_part.settings)

    @property
    def offloads(self) -> bool:
        """Return whether contexts beyond the resident limit are offloaded."""
        return self.reading is not Reading.NONE

    @property
    def reading(self) -> Reading:
        """Return how a context's part in host memory is read; NONE: every context stays on the device."""
        return join_readings(part.method.reading for part in self.parts)


def resolve_profiles(named: Mapping[str, Composition], host: HostConfig | None) -> dict[str, Profile]:
    """Return the profiles of a deployment by name, built-in ones first. host: its `host` section, or None.

    Raises ProfileError for a composition that cannot be served.
    """
    methods = list_methods()
    built_in = list_built_in()
    profiles = {}
    for name in built_in:
        method = methods[name]
        if method.reading is Reading.NONE or host is not None:
            profiles[name] = _compose(name, Composition(host=MethodChoice(method=name)), methods, host, named)
    for name, composition in named.items():
        if name in built_in:
            raise ProfileError(f"profiles.{name}: is built in and cannot be changed; choose another name")
        profiles[name] = _compose(name, composition, methods, host, named)
    return profiles


def add_by_name(named: Mapping[str, Composition], default: str) -> dict[str, Composition]:
    """Return the named profiles, and one for `default` if that names neither one of them nor a built-in profile.

    It is a profile that a method declares, or a method of the slot `host` with its default settings.
    """
    declared = declared_profiles()
    if default in declared and default not in named:
        return {**named, default: declared[default]}
    method = list_methods().get(default)
    if method is None or method.slot != "host" or is_built_in(method) or default in named:
        return dict(named)
    return {**named, default: Composition(host=MethodChoice(method=default))}


def declared_profiles() -> dict[str, Composition]:
    """Return the profiles that methods declare beside those of their own names. They plan memory for sequences, so a
    deployment has one only if its configuration names it.
    """
    return {name: one for method in list_methods().values() for name, one in method.profiles.items()}


def get_profile(name: str, profiles: Mapping[str, Profile], named_in: str) -> Profile:
    """Return the profile of that name. named_in: the setting that names it. Raises ProfileError if there is none."""
    if name not in profiles:
        raise ProfileError(f"{named_in}: {why_unknown(name, profiles)}")
    return profiles[name]


def why_unknown(name: str, known: Iterable[str]) -> str:
    """Return the reason why a deployment with the profiles `known` has none of this name."""
    method = list_methods().get(name)
    declared = declared_profiles()
    if name in declared:
        return (
            f"{name!r} plans memory for its sequences; name it as scheduler.default_profile, or in `profiles` as "
            f"`{name}: {_written(declared[name].model_dump(exclude_none=True))}`; known: {', '.join(known)}"
        )
    if method is not None and method.slot == "host" and method.has_rings:
        return (
            f"{name!r} plans memory for its sequences; name a profile of it in `profiles`, or it as "
            f"scheduler.default_profile; known: {', '.join(known)}"
        )
    if needs_host(name):
        return f"{name!r} keeps KV in host memory; this deployment has no `host` section"
    return f"unknown profile {name!r}; known: {', '.join(known)}"


def needs_host(name: str) -> bool:
    """Return whether `name` is a built-in profile that needs a `host` section."""
    method = list_methods().get(name)
    return method is not None and method.reading is not Reading.NONE and is_built_in(method)


def list_built_in() -> list[str]:
    """Return the names of the built-in profiles, of which some need a `host` section (`needs_host`)."""
    return [name for name, method in list_methods().items() if is_built_in(method)]


def is_built_in(method: Method) -> bool:
    """Return whether a method has a profile of its name without being configured. Methods with rings do not: their
    memory is planned, and they may need settings without defaults.
    """
    return method.slot == "host" and not method.has_rings


def served_parts(profiles: Iterable[Profile]) -> tuple[ProfilePart, ...]:
    """Return the parts of these profiles, each once. One method with two choices of settings is two parts."""
    parts: list[ProfilePart] = []
    for profile in profiles:
        own = profile.parts if profile.draft_part is None else (*profile.parts, profile.draft_part)
        parts += [part for part in own if part not in parts]
    return tuple(parts)


def list_states(profiles: Iterable[Profile], architecture: Architecture) -> tuple[MethodState, ...]:
    """Return what the methods of these profiles keep on the device: one state for each part.

    Raises ProfileError if a method with rings works in no layer of this model, or if the model has attention sinks and
    a method computes no softmax mass to merge them with.
    """
    profiles, states = list(profiles), []
    for part in served_parts(profiles):
        method, count = part.method, None
        if not method.has_mass and any(spec.sinks for spec in architecture.layer_pattern):
            raise ProfileError(
                f"profiles: {method.name!r} computes no softmax mass, with which {architecture.name} merges its "
                "attention sinks; take it out of the profiles"
            )
        if method.has_rings:
            if not method.works_in(part.settings, architecture):
                raise ProfileError(
                    f"profiles: {method.name!r} has no layer of {architecture.name} to work in: each one has a "
                    "window, or is off; take it out of the profiles"
                )
            count = method.count_rings(part.settings)
        states.append(MethodState(part, count, turns=count_turns(profiles, part)))
    return tuple(states)


def count_turns(profiles: Iterable[Profile], part: ProfilePart) -> int:
    """Return the most rows of a step that use a ring of this part in turn: with drafts there are several."""
    drafts = (one.draft for one in profiles if part in one.parts and part.method.takes_turns)
    return max((1 + draft.most_tokens for draft in drafts if draft is not None), default=1)


def find_kept(profiles: Iterable[Profile], host: HostConfig, architecture: Architecture) -> Kept:
    """Return what stays on the device of offloaded contexts: the union of what the methods of these profiles need.

    Dense layers and the sink are the same for all profiles of a deployment; each profile has its own window.
    """
    kept = (part.method.find_kept(part.settings, host, architecture) for part in served_parts(profiles))
    return join_kept(one for one in kept if one is not None)


def _compose(
    name: str, composition: Composition, methods: Mapping[str, Method], host: HostConfig | None,
    named: Mapping[str, Composition],
) -> Profile:  # fmt: skip
    parts = []
    for slot in get_args(Slot):
        choice: MethodChoice | None = getattr(composition, slot)
        if choice is not None:
            parts.append(_part_of(f"profiles.{name}.{slot}", slot, choice, methods, host))
    _check_together(name, parts)
    draft, draft_part = composition.draft, None
    if draft is not None:
        _check_draft(name, draft, parts)
        if draft.profile is not None:
            draft_part = _find_drafting(name, draft.profile, parts, methods, host, named)
    keys = [key for part in parts if (key := _kv_key(part, host))]
    return Profile(name, " + ".join(keys) or UNCHANGED, tuple(parts), draft, draft_part)


def _part_of(
    where: str, slot: Slot, choice: MethodChoice, methods: Mapping[str, Method], host: HostConfig | None
) -> ProfilePart:
    method = _find_method(where, slot, choice.method, methods)
    if method.reading is not Reading.NONE and host is None:
        raise ProfileError(
            f"{where}: {method.name!r} keeps KV in host memory; this deployment has no `host` section: add one, or "
            "take the profile out"
        )
    part = ProfilePart(method, _settings_of(where, method, choice.settings, host))
    if host is not None and (why := method.find_conflict(part.settings, host)):
        raise ProfileError(f"{where}.{why}")
    return part


def _find_drafting(
    name: str, drafting: str, parts: Iterable[ProfilePart], methods: Mapping[str, Method], host: HostConfig | None,
    named: Mapping[str, Composition],
) -> ProfilePart:  # fmt: skip
    """Return the part that drafts for profile `name`: the method of the slot `host` of profile `drafting`."""
    where, able = f"profiles.{name}.draft.profile", [one.name for one in methods.values() if one.drafts]
    choice = named[drafting].host if drafting in named else MethodChoice(method=drafting)
    method = methods.get(choice.method)
    wanted = f"wanted {', '.join(able)}, or a profile of one"
    if method is None:
        raise ProfileError(f"{where}: {drafting!r} is no profile that drafts for others; {wanted}")
    if not method.drafts:
        why = "it keeps no context in host memory" if method.slot != "host" else method.why_no_drafts
        raise ProfileError(f"{where}: {drafting!r} does not draft for others: {why}; {wanted}")
    verifying = next(part.method for part in parts if part.method.slot == "host")
    if verifying.reading is Reading.NONE:
        raise ProfileError(
            f"{where}: {drafting!r} reads contexts in host memory, and {verifying.name!r} has none there; set "
            "`host: offloaded` beside it"
        )
    return _part_of(where, "host", choice, methods, host)


def _check_together(name: str, parts: Iterable[ProfilePart]) -> None:
    for part, other in permutations(parts, 2):
        if why := part.method.why_not_beside(part.settings, other.method.name):
            raise ProfileError(
                f"profiles.{name}: {part.method.name!r} is not served with {other.method.name!r}: {why}; leave out "
                f"`{part.method.slot}` or `{other.method.slot}`"
            )


def _check_draft(name: str, draft: DraftConfig, parts: Iterable[ProfilePart]) -> None:
    """Raise ProfileError for drafts beside methods that keep something of each token or step."""
    for part in parts:
        method, why = part.method, part.method.why_no_draft(part.settings, draft.most_tokens)
        if not why and method.has_rings and draft.profile is not None:
            why = "a sequence that holds a ring for drafts steps without one"
        if why:
            raise ProfileError(
                f"profiles.{name}.draft: is not served with {method.name!r}: {why}; leave out `draft` or "
                f"`{method.slot}`"
            )


def _find_method(where: str, slot: Slot, name: str, methods: Mapping[str, Method]) -> Method:
    method = methods.get(name)
    if method is not None and method.slot == slot:
        return method
    if method is not None:
        raise ProfileError(f"{where}: method {name!r} fills the slot `{method.slot}`; write `{method.slot}: {name}`")
    known = [other.name for other in methods.values() if other.slot == slot]
    raise ProfileError(f"{where}: unknown method {name!r}{nearest_hint(name, known)} (of {', '.join(known)})")


def _settings_of(where: str, method: Method, given: Mapping[str, Any], host: HostConfig | None) -> Settings:
    """Return the method's settings. Those that are not given come from the `host` section, or are the defaults."""
    shared = None if host is None or method.shared_key is None else getattr(host, method.shared_key)
    known = list(method.settings.model_fields)
    for key in given:
        if key in method.settings.renamed:
            now = method.settings.renamed[key]
            raise ProfileError(f"{where}: {key!r} of {method.name!r} was renamed; write {now!r}")
        if key not in known:
            what = nearest_hint(key, known) or f"; it has {', '.join(known) or 'none'}"
            raise ProfileError(f"{where}: unknown setting {key!r} of {method.name!r}{what}")
    try:
        settings = method.settings.model_validate({**(shared.model_dump() if shared else {}), **given})
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            key = str(first["loc"][-1])
            what = method.settings.model_fields[key].description
            raise ProfileError(f"{where}: {method.name!r} needs the setting `{key}`: {what}") from None
        if not first["loc"]:  # about several settings: the message names them
            raise ProfileError(f"{where}.{first['msg'].removeprefix('Value error, ')}") from None
        key = ".".join(map(str, first["loc"]))
        raise ProfileError(f"{where}.{key}: {first['msg']} (got {first['input']!r})") from None
    if shared is not None and settings != shared:
        raise ProfileError(
            f"{where}: has {_listed(settings)}, host.{method.shared_key} has {_listed(shared)}; all profiles share "
            f"what {method.name!r} keeps in host memory: set host.{method.shared_key} to the settings of this one"
        )
    return settings


def _kv_key(part: ProfilePart, host: HostConfig | None) -> str:
    """Return the method's name and the settings that change the KV, as text; empty if it does not change the KV."""
    method = part.method
    words = [f"{short}={_word(getattr(host, key))}" for short, key in method.kv_host.items()]
    words += [f"{short}={_word(getattr(part.settings, key))}" for short, key in method.kv_settings.items()]
    return " ".join([method.name, *words]) if words else ""


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "default" if value is None else str(value)


def _listed(settings: Settings) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in settings.model_dump(exclude_none=True).items()) + "}"


def _written(tree: Any) -> str:
    """Return a composition, or a part of it, as text for a configuration file."""
    if not isinstance(tree, Mapping):
        return str(tree)
    if set(tree) == {"method"}:
        return str(tree["method"])
    return "{" + ", ".join(f"{key}: {_written(value)}" for key, value in tree.items()) + "}"
