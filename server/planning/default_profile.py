"""Choose the attention profile of requests that name none, if the deployment does not: the fastest accurate one.

A method that reads less than everything is chosen only under three conditions. It has kept its accuracy on a pretrained
model. A `host` section shows that contexts may outgrow the card. And at the longest context, a token takes clearly less
time with it than with the methods that read everything: full attention on the card, or with the CPU. If the card has no
room for one such context, and an index does not pay or fit, the CPU reads what the card does not hold.
"""

from collections.abc import Mapping

from gpu.memory.demand import PlanError
from gpu.memory.plan import MemoryPlan
from gpu.methods.registry import list_methods
from gpu.model.architecture import Architecture
from gpu.profiles import FULL_ATTENTION, Profile, find_kept, resolve_profiles
from scheduler.planning.engine_memory import plan_engine
from server.deployment import Deployment
from server.planning.placements import PAYS, Placement, Planned, place
from transfer.machine import MachineProfile
from transfer.machine_rates import find_rates
from transfer.measured import measured_path

_WITHOUT_DENSE = ". No layer stays whole on the device, for any profile, unless host.dense_layers names it"


def choose_default(
    deployment: Deployment, architecture: Architecture, machine: MachineProfile
) -> tuple[Deployment, tuple[str, ...]]:
    """Return the deployment with its default profile filled in, and notes that explain the choice, if any.

    Raises PlanError and ProfileError if the deployment does not fit even with full attention.
    """
    candidate = _candidate()
    if deployment.scheduler.default_profile is not None:
        return with_layers_of_default(deployment, architecture), ()
    stays = _with_default(deployment, FULL_ATTENTION)
    if deployment.host is None:
        return stays, ()
    memory = plan_engine(stays, architecture, machine)
    if memory.device != "cuda":
        return stays, ()
    if candidate is None:
        return stays, ()
    whole = _read_all(stays, memory, architecture, machine)
    base = FULL_ATTENTION if FULL_ATTENTION in whole else next(iter(whole), FULL_ATTENTION)
    stays = _with_default(deployment, base)
    takes = _keeping_its_own(_with_default(deployment, candidate), architecture)
    why_not, said = _weigh(whole, memory, takes, architecture, machine)
    if why_not is None:
        others = f". Set scheduler.default_profile to {' or '.join(whole_readers())} to use it" if whole else ""
        layers = "" if deployment.host.dense_layers is not None else _WITHOUT_DENSE
        return takes, (f"scheduler.default_profile: {candidate}: {said}{layers}{others}",)
    if base != FULL_ATTENTION:
        why_not = f"{why_not}; {FULL_ATTENTION}: no context of {memory.max_context_tokens:,} tokens fits the card"
    return stays, (f"scheduler.default_profile: {base}, not {candidate}: {why_not}",)


def with_layers_of_default(deployment: Deployment, architecture: Architecture) -> Deployment:
    """Return the deployment with the dense layers that it is served with, if it names its default profile."""
    named = deployment.scheduler.default_profile
    return _keeping_its_own(deployment, architecture) if named and named == _candidate() else deployment


def _candidate() -> str | None:
    """Return the method that becomes the default profile where it is faster than reading all; None: there is none."""
    return next((name for name, method in list_methods().items() if method.is_default_if_faster), None)


def whole_readers() -> list[str]:
    """Return the profiles that read every token, full attention on the device first."""
    found = [name for name, method in list_methods().items() if method.reads_all]
    return sorted(found, key=lambda name: name != FULL_ATTENTION)


def _read_all(
    stays: Deployment, memory: MemoryPlan, architecture: Architecture, machine: MachineProfile
) -> dict[str, Placement]:
    """Return the placements, by profile, that read everything and have room for one longest context."""
    profiles, rates = resolve_profiles(stays.profiles, stays.host), find_rates(machine, measured_path())
    context = memory.max_context_tokens

    def planned(profile: Profile) -> Planned:
        return Planned(profile.host_part, profile.held_parts, stays, memory, architecture, context)

    placed = {name: place(planned(profiles[name]), (1,), 0.0, rates) for name in whole_readers()}
    return {name: one for name, one in placed.items() if one.first is not None}


def _with_default(deployment: Deployment, name: str) -> Deployment:
    scheduler = deployment.scheduler.model_copy(update={"default_profile": name})
    return deployment.model_copy(update={"scheduler": scheduler})


def _keeping_its_own(deployment: Deployment, architecture: Architecture) -> Deployment:
    """Return the deployment with the dense layers of its default profile's methods, if it does not set any.

    So the default profile runs at the setting at which it was judged and timed. Profiles that requests name have no
    dense layers of their own then.
    """
    host = deployment.host
    if host is None or host.dense_layers is not None:
        return deployment
    profile = resolve_profiles(deployment.all_profiles, host)[deployment.scheduler.default_profile or FULL_ATTENTION]
    kept = find_kept([profile], host, architecture).dense_layers
    layers = tuple(layer for layer in kept if layer not in architecture.layers_apart)
    return deployment.model_copy(update={"host": host.model_copy(update={"dense_layers": layers})})


def _weigh(
    whole: Mapping[str, Placement],
    memory: MemoryPlan,
    takes: Deployment,
    architecture: Architecture,
    machine: MachineProfile,
) -> tuple[str | None, str]:
    """Return why the candidate is not chosen, or None, and a comparison of its time with `whole`'s."""
    context = memory.max_context_tokens
    profile = resolve_profiles(takes.all_profiles, takes.host)[takes.default_profile]
    longest = takes.scheduler.model_copy(update={"max_context_tokens": context})
    takes = takes.model_copy(update={"scheduler": longest})
    try:
        room = plan_engine(takes, architecture, machine)
        planned = Planned(profile.host_part, profile.held_parts, takes, room, architecture, context)
    except PlanError as error:
        return f"{context:,} tokens with an index: {error}", ""
    mine = place(planned, (1,), 0.0, find_rates(machine, measured_path()))
    if mine.first is None:
        return f"with it {mine.why_not}", ""
    return _compare(mine, list(whole.values()), context)


def _compare(mine: Placement, whole: list[Placement], context: int) -> tuple[str | None, str]:
    assert mine.first is not None
    own = f"{mine.first.ms:,.1f} ms a token at {context:,} tokens"
    if not whole:
        return None, f"{own}; no profile that reads every token fits"
    best = min(whole, key=_ms)
    beside = f"{own}; {best.words}, which reads every token, takes {_ms(best):,.1f}"
    if _ms(best) < PAYS * mine.first.ms:
        return f"{beside}; it would not be faster", ""
    return None, beside


def _ms(placement: Placement) -> float:
    assert placement.first is not None
    return placement.first.ms
