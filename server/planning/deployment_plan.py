"""Resolve a deployment for a machine: fill in settings that were left out, and plan where each byte goes.

It uses the configuration, the model's shape and the machine's description, and allocates and loads nothing. So a plan
can be made for another machine and, with `model.shape`, for a model that is not there yet. Resolving returns a new
deployment; resolving that again changes nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType

from gpu.config import ModelConfig
from gpu.memory.demand import Place
from gpu.memory.plan import MemoryPlan
from gpu.methods.method import Method, ProfilePart, Where
from gpu.model.architecture import (
    NAMED_SHAPES,
    Architecture,
    ModelError,
    named_shape,
    read_architecture,
    shape_with_rope,
)
from gpu.model.humming_formats import describe_own, multiplied
from gpu.model.matrix_formats import rounded
from gpu.profiles import Profile, resolve_profiles
from gpu.weights.expert_shares import MOST_COMPUTED_ROWS
from scheduler.planning.devices import device_share
from scheduler.planning.engine_memory import find_expert_shares, find_tier_shape, plan_engine, served_shape
from scheduler.planning.expert_choice import Way, captured_rows
from server.deployment import Deployment
from server.planning.default_profile import choose_default
from server.planning.resolved_plan import ResolvedPlan
from transfer.machine import GIB, MachineProfile
from transfer.measured import measured_path, read_measured

NOT_PLAIN = (
    "documents: answers are near those of plain text, not equal: on SmolLM2-135M-Instruct RULER's tasks lose 3 points "
    "with 3 chunks and 11 with 9; `policy: vanilla` loses nothing; `tandem eval fusion` measures another model"
)


def find_architecture(model: ModelConfig) -> tuple[Architecture, tuple[str, ...]]:
    """Return the model's shape, from its folder or its name, and a note if the folder is not there yet.

    Raises ModelError for a folder that is missing without `model.shape`, or broken, or of another shape than it says.
    """
    shape, notes = _find_shape(model)
    shape = multiplied(rounded(shape, model.weights, "model.weights"), model.products, "model.products")
    own = describe_own(shape) if model.products in ("humming", "fp8") else ""
    return shape, (*notes, f"model.products: {model.products}, but for {own}") if own else notes


def _find_shape(model: ModelConfig) -> tuple[Architecture, tuple[str, ...]]:
    if model.random_weights is not None:
        return shape_with_rope(model.random_weights, model.rope), ("random weights: the generated text has no meaning",)
    assert model.path is not None, "ModelConfig gives a path or random weights"
    if model.shape is not None and model.shape not in NAMED_SHAPES:
        raise ModelError(f"model.shape: unknown shape {model.shape!r}; known: {', '.join(NAMED_SHAPES)}")
    if model.shape is not None and not model.path.exists():
        shape = shape_with_rope(model.shape, model.rope)
        return shape, (f"{model.path} is not there: planned with the shape {model.shape}; serving needs the folder",)
    architecture = read_architecture(model.path, model.rope, model.ignore_config_keys)
    if model.shape is not None and architecture.num_weights != named_shape(model.shape).num_weights:
        raise ModelError(
            f"model.shape: {model.shape} has {named_shape(model.shape).num_weights:,} weights, {model.path} has "
            f"{architecture.num_weights:,}; correct it or leave it out"
        )
    quantisation = architecture.quantisation
    note = quantisation.note if quantisation is not None else None
    return architecture, () if note is None else (f"{model.path.name}: {note}",)


def _states_gib(memory: MemoryPlan, count: int) -> float | None:
    """Return the budget in GiB that gives `count` states; None: there are no states."""
    return (count + 0.5) * memory.window_bytes / GIB if count and memory.snapshot_tokens is not None else None


def resolve_plan(deployment: Deployment, machine: MachineProfile) -> ResolvedPlan:
    """Fill in what the deployment leaves to the machine. Raises ModelError, ProfileError or PlanError with one line."""
    architecture, notes = find_architecture(deployment.model)
    if deployment.gpu.devices > 1:
        architecture = served_shape(deployment, architecture)
    deployment, said = choose_default(deployment, architecture, machine)
    profiles = resolve_profiles(deployment.all_profiles, deployment.host)
    memory = plan_engine(deployment, architecture, machine)
    scheduler, prefill = deployment.scheduler, deployment.scheduler.prefill
    place: Place = "gpu" if memory.device == "cuda" else "host"
    gpu = deployment.gpu.model_copy(
        update={
            "device": memory.device,
            "dtype": memory.dtype,
            "kv": deployment.gpu.kv if memory.kv == memory.dtype else memory.kv,
            "memory_limit_gib": memory.limit_bytes[place] / GIB,
            "kv_cache_gib": memory.kv_bytes / GIB,
            "kv_windows": memory.num_windows if memory.window_pages else None,
            "states_gib": _states_gib(memory, memory.num_windows),
            "host_states_gib": _states_gib(memory, memory.num_host_states),
            "experts_gib": None
            if memory.experts_on_card is None
            else find_expert_shares(architecture, memory).card_gib,
            "host_experts": _name_of_way(deployment, memory, architecture),
            "threads": memory.threads,
            "prefill_graph_sizes": memory.prefill_graph_sizes,
        }
    )
    host = deployment.host and deployment.host.model_copy(
        update={
            "memory_limit_gib": memory.host_limit_bytes / GIB,
            "dense_layers": memory.dense_layers,
            "resident_tokens": memory.resident_tokens,
            "sink_tokens": memory.sink_tokens,
            "window_tokens": memory.window_tokens,
            "threads": deployment.host.threads or device_share(deployment.gpu, machine).physical_cores,
        }
    )
    documents = deployment.documents and deployment.documents.model_copy(
        update={"select_layer": min(deployment.documents.select_layer, architecture.num_layers - 1)}
    )
    resolved_scheduler = scheduler.model_copy(
        update={
            "max_context_tokens": memory.max_context_tokens,
            "prefill": prefill.model_copy(
                update={"max_hidden_tokens": memory.max_hidden_tokens, "chunk_tokens": memory.chunk_tokens}
            ),
        }
    )
    name = deployment.model.name or architecture.name
    model = deployment.model.model_copy(
        update={"name": name, "tokenizer": deployment.model.tokenizer or deployment.model.path}
    )
    resolved = deployment.model_copy(
        update={"model": model, "gpu": gpu, "host": host, "documents": documents, "scheduler": resolved_scheduler}
    )
    notes = (*notes, *said, *memory.notes, *_tell_what_gains_nothing(memory.device, profiles), *_tell_losses(profiles))
    notes = (*notes, *_tell_measured(deployment, profiles, memory, architecture, machine))
    if documents is not None and documents.policy != "vanilla" and documents.ratio < 1:
        notes = (*notes, NOT_PLAIN)
    return ResolvedPlan(resolved, architecture, memory, MappingProxyType(profiles), machine, notes)


def _tell_what_gains_nothing(device: str, profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    """Name the profiles with a method that was measured to be slower than exact, if the CPU is the device."""
    slower = {name: parts for name, profile in profiles.items() if (parts := _measured_on_cpu(profile))}
    if device != "cpu" or not slower:
        return ()
    times = {part.method.name: part.method.cpu_time for parts in slower.values() for part in parts}
    return (
        f"profiles {', '.join(slower)}: slower than exact on a CPU, for demonstration only: with 135M weights on two "
        f"cores, {'; '.join(f'{method} took {time}' for method, time in times.items())}",
    )


def _measured_on_cpu(profile: Profile) -> list[ProfilePart]:
    return [part for part in profile.parts if part.method.cpu_time]


def _tell_losses(profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    """Return a line for each method that reads less than everything: its measured loss, or that it was not judged,
    and the profiles that use it.
    """
    users: dict[Method, list[str]] = {}
    for name, profile in profiles.items():
        for part in profile.parts:
            if part.method.measured or part.method.slot != "host" or not part.method.reading.reads_all:
                users.setdefault(part.method, []).append(name)
    return tuple(f"{method.name} (profile {', '.join(names)}): {_loss_of(method)}" for method, names in users.items())


def _loss_of(method: Method) -> str:
    if method.measured:
        return f"{method.measured}; `tandem eval tasks` measures another model"
    return "not judged on a pretrained model; `tandem eval tasks` measures one"


def _tell_measured(
    deployment: Deployment,
    profiles: Mapping[str, Profile],
    memory: MemoryPlan,
    architecture: Architecture,
    machine: MachineProfile,
) -> tuple[str, ...]:
    """Return notes of methods about times that engines measured on such a machine, with the profiles that use them."""
    if deployment.host is None:
        return ()
    tier = find_tier_shape(deployment, architecture, memory)
    where, entries = None, read_measured(measured_path())
    if memory.device == "cuda" and machine.gpu is not None and tier is not None:
        where = Where(machine.gpu.name, memory.kv, len(tier.layers), architecture)
    told = [
        (name, part.method.tell_measured(part.settings, where, entries))
        for name, profile in profiles.items()
        for part in profile.parts
    ]
    return tuple(f"profile {name}, {said}" for name, said in told if said is not None)


def _name_of_way(deployment: Deployment, memory: MemoryPlan, architecture: Architecture) -> Way:
    """Return `gpu.host_experts`: what the plan does with experts in host memory, if any lie there."""
    if memory.device == "cpu" or not find_expert_shares(architecture, memory).host_bytes:
        return "auto"
    if not memory.computed_rows:
        return "fetch"
    of_all = captured_rows(deployment.gpu, deployment.scheduler.max_running, MOST_COMPUTED_ROWS)
    return "compute" if memory.computed_rows == of_all else memory.computed_rows
