"""A deployment resolved against a machine: what was left out is filled in, and each byte has its place.

Knows configuration, the model's shape and the machine; allocates and loads nothing, so a plan can be made for a machine
that is elsewhere and, where `model.shape` names it, for a model that is not there yet. Resolving returns a new
deployment, and resolving that one again changes nothing.
"""

from dataclasses import dataclass
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from gpu.config import ModelConfig
from gpu.memory.demand import Place
from gpu.memory.host_demand import HostDemand
from gpu.memory.host_shares import resolve_host
from gpu.memory.plan import MemoryPlan, plan_memory
from gpu.model.architecture import Architecture, ModelError, named_shape, read_architecture
from gpu.profiles import Profile, resolve_profiles, slot_bytes
from scheduler.capacity import plan_capacity
from server.config import Deployment
from transfer.config import HostConfig
from transfer.host_memory import bytes_of_context, bytes_per_token, table_bytes_of_context, without_tables
from transfer.machine import GIB, MachineProfile


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    deployment: Deployment
    architecture: Architecture
    memory: MemoryPlan
    profiles: dict[str, Profile]
    machine: MachineProfile
    notes: tuple[str, ...]


def find_architecture(model: ModelConfig) -> tuple[Architecture, tuple[str, ...]]:
    """The model's shape, from its folder or its name, and a note where the folder is not there yet.

    Raises ModelError for a folder that is missing without `model.shape`, or broken, or of another shape than it says.
    """
    if model.random_weights is not None:
        return named_shape(model.random_weights), ("random weights: the text means nothing",)
    assert model.path is not None, "ModelConfig gives a path or random weights"
    if model.shape is not None and not model.path.exists():
        shape = named_shape(model.shape)
        return shape, (f"{model.path} is not there: planned with the shape {model.shape}; serving needs the folder",)
    architecture = read_architecture(model.path)
    if model.shape is not None and architecture.num_weights != named_shape(model.shape).num_weights:
        raise ModelError(
            f"model.shape: {model.shape} has {named_shape(model.shape).num_weights:,} weights, {model.path} has "
            f"{architecture.num_weights:,}; correct it or leave it out"
        )
    return architecture, ()


def resolve_plan(deployment: Deployment, machine: MachineProfile) -> ResolvedPlan:
    """Fill in what the deployment leaves to the machine. Raises ModelError, ProfileError or PlanError with one line."""
    architecture, notes = find_architecture(deployment.model)
    profiles = resolve_profiles(deployment.profiles, deployment.host)
    scheduler, prefill = deployment.scheduler, deployment.scheduler.prefill
    memory = plan_memory(
        architecture,
        deployment.gpu,
        host=deployment.host,
        slot_bytes=slot_bytes(profiles.values(), architecture),
        max_running=scheduler.max_running,
        chunk_tokens=prefill.chunk_tokens,
        max_context_tokens=scheduler.max_context_tokens,
        max_hidden_tokens=prefill.max_hidden_tokens,
        machine=machine,
    )
    place: Place = "gpu" if memory.device == "cuda" else "host"
    gpu = deployment.gpu.model_copy(
        update={
            "device": memory.device,
            "dtype": memory.dtype,
            "memory_limit_gib": memory.limit_bytes[place] / GIB,
            "kv_cache_gib": memory.kv_bytes / GIB,
            "threads": memory.threads,
        }
    )
    host = deployment.host and deployment.host.model_copy(
        update={
            "memory_limit_gib": memory.host_limit_bytes / GIB,
            "dense_layers": memory.dense_layers,
            "resident_tokens": memory.resident_tokens,
            "sink_tokens": memory.sink_tokens,
            "window_tokens": memory.window_tokens,
            "threads": deployment.host.threads or machine.physical_cores,
        }
    )
    resolved_scheduler = scheduler.model_copy(
        update={
            "max_context_tokens": memory.max_context_tokens,
            "prefill": prefill.model_copy(update={"max_hidden_tokens": memory.max_hidden_tokens}),
        }
    )
    name = deployment.model.name or architecture.name
    model = deployment.model.model_copy(
        update={"name": name, "tokenizer": deployment.model.tokenizer or deployment.model.path}
    )
    resolved = deployment.model_copy(update={"model": model, "gpu": gpu, "host": host, "scheduler": resolved_scheduler})
    return ResolvedPlan(resolved, architecture, memory, profiles, machine, (*notes, *memory.notes))


def describe_plan(plan: ResolvedPlan) -> dict[str, Any]:
    """The plan as plain data: `machine, deployment, memory {items, limits, ...}, notes`. Bytes are integers."""
    memory = plan.memory
    items = [{"name": item.name, "place": item.place, "bytes": item.bytes, "note": item.note} for item in memory.items]
    places = {
        place: {"limit_bytes": limit, "used_bytes": memory.used_bytes(place)}
        for place, limit in memory.limit_bytes.items()
    }
    return {
        "machine": plan.machine.model_dump(mode="json"),
        "deployment": dump_deployment(plan.deployment),
        "memory": {
            "device": memory.device,
            "dtype": memory.dtype,
            "num_pages": memory.num_pages,
            "num_dense_pages": memory.num_dense_pages,
            "host_tokens": memory.host_tokens,
            "page_tokens": memory.page_tokens,
            "max_context_tokens": memory.max_context_tokens,
            "max_hidden_tokens": memory.max_hidden_tokens,
            "places": places,
            "items": items,
        },
        "host": describe_host(plan),
        "profiles": describe_profiles(plan),
        "notes": list(plan.notes),
    }


def describe_host(plan: ResolvedPlan) -> dict[str, int] | None:
    """Where a long context's tokens lie, and what one takes in host memory by how it is read; None without a tier.

    longest_bytes: of the longest context where it is sampled, longest_table_bytes of these for hash tables (MagicPIG,
    arXiv 2410.16179, Table 7).
    """
    memory, host = plan.memory, plan.deployment.host
    if host is None:
        return None
    demand = _demand(plan, host)
    longest_down_tokens = demand.deposited_tokens(memory.max_context_tokens)
    return {
        "resident_tokens": memory.resident_tokens,
        "sink_tokens": memory.sink_tokens,
        "window_tokens": memory.window_tokens,
        "lump_tokens": memory.lump_tokens,
        "sampled_token_bytes": bytes_per_token(demand.tier_shape),
        "offloaded_token_bytes": bytes_per_token(without_tables(demand.tier_shape)),
        "longest_bytes": bytes_of_context(demand.tier_shape, longest_down_tokens),
        "longest_table_bytes": table_bytes_of_context(demand.tier_shape, longest_down_tokens),
        "tokens": memory.host_tokens,
    }


def describe_profiles(plan: ResolvedPlan) -> dict[str, dict[str, Any]]:
    """What each profile is made of, and its longest prompt and answer when nothing else runs."""
    host = plan.deployment.host
    capacity = plan_capacity(plan.memory, None if host is None else _demand(plan, host).tier_shape)
    return {
        name: {"composition": profile.composition, "longest_tokens": capacity.longest_tokens(profile)}
        for name, profile in plan.profiles.items()
    }


def _demand(plan: ResolvedPlan, host: HostConfig) -> HostDemand:
    memory, max_running = plan.memory, plan.deployment.scheduler.max_running
    return resolve_host(host, plan.architecture, memory.page_tokens, memory.dtype_bytes, max_running)


def dump_deployment(deployment: Deployment) -> dict[str, Any]:
    """The tree as plain data, with the API keys counted and not shown: it goes to logs and benchmark rows."""
    tree: dict[str, Any] = deployment.model_dump(mode="json")
    tree["server"]["api_keys"] = f"{len(deployment.server.api_keys)} keys" if deployment.server.api_keys else []
    return tree


def print_plan(plan: ResolvedPlan, console: Console) -> None:
    """The resolved tree, then a table for each place: bytes, share of the limit, and why."""
    console.print(f"[bold]{plan.architecture.name}[/] on [bold]{plan.machine.name}[/]\n")
    console.print(yaml.safe_dump(dump_deployment(plan.deployment), sort_keys=False), highlight=False, markup=False)
    for place, limit in plan.memory.limit_bytes.items():
        console.print(_tabulate(plan, place, limit))
    host = describe_host(plan)
    if host is not None:
        console.print(
            "a context beyond {resident_tokens:,} tokens keeps {sink_tokens} in front and a window of {window_tokens} "
            "to {longest} on the device; the rest goes down, {sampled_token_bytes:,} bytes a token if it is sampled, "
            "{offloaded_token_bytes:,} if not; {tokens:,} sampled tokens fit; of the longest context {sampled_gib:.2f} "
            "GiB go down if it is sampled, {table_gib:.2f} of them hash tables".format(
                **host,
                longest=host["window_tokens"] + host["lump_tokens"],
                sampled_gib=host["longest_bytes"] / GIB,
                table_gib=host["longest_table_bytes"] / GIB,
            ),
            highlight=False,
        )
    console.print(_tabulate_profiles(plan))
    for note in plan.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)


def _tabulate_profiles(plan: ResolvedPlan) -> Table:
    table = Table(title="attention profiles", title_justify="left")
    table.add_column("name")
    table.add_column("what it is made of", overflow="fold")
    table.add_column("longest context", justify="right")
    for name, profile in describe_profiles(plan).items():
        table.add_row(name, profile["composition"], f"{profile['longest_tokens']:,}")
    return table


def _tabulate(plan: ResolvedPlan, place: str, limit: int) -> Table:
    kind = "GPU memory" if place == "gpu" else "host memory"
    table = Table(title=f"{kind}, limit {limit / GIB:.2f} GiB", title_justify="left", show_footer=True)
    items = [item for item in plan.memory.items if item.place == place]
    used = sum(item.bytes for item in items)
    table.add_column("what", footer="sum")
    table.add_column("GiB", justify="right", footer=f"{used / GIB:.2f}")
    table.add_column("%", justify="right", footer=f"{100 * used / limit:.1f}")
    table.add_column("why", footer=f"{(limit - used) / GIB:.2f} GiB not used", overflow="fold")
    for item in items:
        table.add_row(item.name, f"{item.bytes / GIB:.3f}", f"{100 * item.bytes / limit:.1f}", item.note)
    return table
