"""Show a resolved plan for `tandem plan`: as tables, or as plain data."""

from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from gpu.disk.record_shapes import disk_format, kv_record
from gpu.memory.host_demand import HostDemand
from gpu.page_layout import row_bytes
from scheduler.planning.engine_memory import find_host_demand
from scheduler.sequences.capacity import plan_capacity
from server.deployment import SEVERAL, Deployment
from server.planning.resolved_plan import ResolvedPlan
from transfer.host_memory import bytes_of_context, bytes_per_token, table_bytes_of_context, without_tables
from transfer.machine import GIB


def describe_plan(plan: ResolvedPlan) -> dict[str, Any]:
    """Return the plan as plain data: `machine, deployment, memory {items, limits, ...}, notes`. Bytes are integers."""
    memory = plan.memory
    items = [{"name": item.name, "place": item.place, "bytes": item.bytes, "note": item.note} for item in memory.items]
    places = {
        place: {
            "limit_bytes": limit,
            "used_bytes": memory.used_bytes(place),
            "start_bytes": memory.start_bytes(place),
        }
        for place, limit in memory.limit_bytes.items()
    }
    return {
        "machine": plan.machine.model_dump(mode="json"),
        "deployment": dump_deployment(plan.deployment),
        "memory": {
            "device": memory.device,
            "dtype": memory.dtype,
            "kv": memory.kv,
            "token_bytes": describe_token(plan),
            "num_pages": memory.num_pages,
            "host_tokens": memory.host_tokens,
            "page_tokens": memory.page_tokens,
            "max_context_tokens": memory.max_context_tokens,
            "max_hidden_tokens": memory.max_hidden_tokens,
            "places": places,
            "items": items,
        },
        "host": describe_host(plan),
        "disk": describe_disk(plan),
        "profiles": describe_profiles(plan),
        "notes": list(plan.notes),
    }


def describe_token(plan: ResolvedPlan) -> dict[str, int]:
    """Return the bytes of one token of a context in all layers, by place.

    `device`: in resident pages. `windows`: besides, while a layer with a window sees the token. For an offloaded token:
    `device_dense` for the layers that stay on the device, `host` with its hash tables, and `host_unsampled` without.
    """
    memory, shape = plan.memory, plan.architecture
    layer = shape.rows_of_head * shape.num_kv_heads * row_bytes(memory.kv, shape.dim, shape.latent is not None)
    found = {"device": (shape.num_layers - len(memory.window_layers)) * layer}
    if memory.window_pages:
        own = shape.window_heads
        found["windows"] = len(memory.window_layers) * 2 * own.count * row_bytes(memory.kv, own.dim)
    if plan.deployment.host is not None:
        tier_shape = _demand(plan).tier_shape
        dense = [one for one in memory.dense_layers if one not in memory.window_layers]
        found |= {
            "device_dense": len(dense) * layer,
            "host": bytes_per_token(tier_shape),
            "host_unsampled": bytes_per_token(without_tables(tier_shape)),
        }
    return found


def describe_host(plan: ResolvedPlan) -> dict[str, Any] | None:
    """Return where a long context's tokens lie, and its host bytes by how it is read; None without a host tier.

    `longest_bytes`: of the longest context if it is sampled. `longest_table_bytes`: the part of these that is hash
    tables (MagicPIG, arXiv 2410.16179, Table 7). `on_card`: by length, the tokens of a context that stay on the device
    if it is alone there.
    """
    memory, host = plan.memory, plan.deployment.host
    if host is None:
        return None
    demand = _demand(plan)
    longest_offloaded_tokens = demand.offloaded_tokens(memory.max_context_tokens)
    return {
        "resident_tokens": memory.resident_tokens,
        "sink_tokens": memory.sink_tokens,
        "window_tokens": memory.window_tokens,
        "offload_block_tokens": memory.offload_block_tokens,
        "sampled_token_bytes": bytes_per_token(demand.tier_shape),
        "offloaded_token_bytes": bytes_per_token(without_tables(demand.tier_shape)),
        "longest_bytes": bytes_of_context(demand.tier_shape, longest_offloaded_tokens),
        "longest_table_bytes": table_bytes_of_context(demand.tier_shape, longest_offloaded_tokens),
        "tokens": memory.host_tokens,
        "residency": host.residency,
        "on_card": {
            length: demand.resident_tokens_of(length, memory.num_pages)
            for length in _lengths(memory.resident_tokens, memory.max_context_tokens)
        },
    }


def describe_disk(plan: ResolvedPlan) -> dict[str, Any] | None:
    """Return what is kept on disk: the folder, its bytes, and the tokens of contexts; None without a disk."""
    disk, memory = plan.deployment.disk, plan.memory
    if disk is None:
        return None
    record = kv_record(plan.architecture, memory.window_layers, disk_format(disk.rows, memory.kv), disk.block_tokens)
    return {
        "folder": str(disk.resolved_folder),
        "limit_bytes": int(disk.limit_gib * GIB),
        "block_bytes": record.file_bytes,
        "tokens": int(disk.limit_gib * GIB) // record.file_bytes * disk.block_tokens,
        "day_bytes": None if disk.written_gib_a_day is None else int(disk.written_gib_a_day * GIB),
    }


def describe_profiles(plan: ResolvedPlan) -> dict[str, dict[str, Any]]:
    """Return the parts of each profile, and its most tokens of prompt and answer when nothing else runs."""
    host = plan.deployment.host
    capacity = plan_capacity(plan.memory, None if host is None else _demand(plan).tier_shape)
    return {
        name: {"composition": profile.composition, "longest_tokens": capacity.longest_tokens(profile)}
        for name, profile in plan.profiles.items()
    }


def _demand(plan: ResolvedPlan) -> HostDemand:
    return find_host_demand(plan.deployment, plan.architecture, plan.memory)


def _lengths(shortest: int, longest: int) -> list[int]:
    """Return the lengths of offloaded contexts: each twice the one before, and the longest."""
    lengths = [length for doubling in range(1, 40) if (length := shortest << doubling) < longest]
    return [*lengths, longest]


def dump_deployment(deployment: Deployment) -> dict[str, Any]:
    """Return the tree as plain data, with API keys counted and not shown: it goes to logs and benchmark rows."""
    tree: dict[str, Any] = deployment.model_dump(mode="json")
    tree["server"]["api_keys"] = f"{len(deployment.server.api_keys)} keys" if deployment.server.api_keys else []
    return tree


def dump_deployments(deployments: Sequence[Deployment]) -> dict[str, Any]:
    """Return the tree of one deployment, or a file's with all of several."""
    trees = [dump_deployment(one) for one in deployments]
    if len(trees) == 1:
        return trees[0]
    servers = [tree.pop("server") for tree in trees]
    return {SEVERAL: trees, "server": servers[0]}


def print_plan(plan: ResolvedPlan, console: Console) -> None:
    """Print the resolved tree, then a table for each place: bytes, share of the limit, and the reason."""
    console.print(f"[bold]{plan.architecture.name}[/] on [bold]{plan.machine.name}[/]\n")
    console.print(yaml.safe_dump(dump_deployment(plan.deployment), sort_keys=False), highlight=False, markup=False)
    for place, limit in plan.memory.limit_bytes.items():
        console.print(_tabulate(plan, place, limit))
        start = plan.memory.start_bytes(place)
        if start < plan.memory.used_bytes(place):
            console.print(
                f"held at the start: {start / GIB:.2f} GiB at most; the rest comes with requests, up to the limit of "
                f"{limit / GIB:.2f} GiB",
                highlight=False,
            )
    print_token(plan, console)
    host = describe_host(plan)
    if host is not None:
        console.print(
            "a context beyond {resident_tokens:,} tokens keeps {sink_tokens} in front and a window of {window_tokens} "
            "to {longest} on the device; the rest is offloaded, {sampled_token_bytes:,} bytes a token with hash "
            "tables, {offloaded_token_bytes:,} without; {tokens:,} tokens with hash tables fit; of the longest context "
            "{sampled_gib:.2f} GiB are offloaded, {table_gib:.2f} of them hash tables".format(
                **host,
                longest=host["window_tokens"] + host["offload_block_tokens"],
                sampled_gib=host["longest_bytes"] / GIB,
                table_gib=host["longest_table_bytes"] / GIB,
            ),
            highlight=False,
        )
        kept = ", ".join(
            f"{length:,}: {'all' if tokens == length else f'{tokens:,}'}" for length, tokens in host["on_card"].items()
        )
        console.print(f"resident tokens of one context, by its length: {kept}", highlight=False)
    print_disk(plan, console)
    console.print(_tabulate_profiles(plan))
    for note in plan.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)


def print_disk(plan: ResolvedPlan, console: Console) -> None:
    """Print what is kept on disk, if anything is."""
    disk, settings = describe_disk(plan), plan.deployment.disk
    if disk is None or settings is None:
        return
    day = "any bytes" if disk["day_bytes"] is None else f"up to {disk['day_bytes'] / GIB:.2f} GiB"
    console.print(
        f"contexts on disk, in {disk['folder']}: {disk['limit_bytes'] / GIB:.2f} GiB, {disk['tokens']:,} tokens in "
        f"blocks of {settings.block_tokens} ({disk['block_bytes'] / 2**20:.2f} MiB), {day} written a day",
        highlight=False, markup=False,
    )  # fmt: skip


def print_token(plan: ResolvedPlan, console: Console) -> None:
    """Print the bytes of one token of a context, by place."""
    token, rows = describe_token(plan), plan.memory.kv
    said = f"a token takes {token['device']:,} bytes in resident pages, rows in {rows}"
    if "windows" in token:
        said += f"; {token['windows']:,} in windows, while their layers see it"
    if plan.deployment.host is not None:
        dense = f"{token['device_dense']:,} there, of the dense layers, and " if token["device_dense"] else ""
        said += (
            f"; an evicted token takes {dense}{token['host']:,} in host memory, {token['host_unsampled']:,} without "
        )
        said += "hash tables"
        said += f", rows in {plan.deployment.host.rows}"
    console.print(said, highlight=False)


def _tabulate_profiles(plan: ResolvedPlan) -> Table:
    table = Table(title="attention profiles", title_justify="left")
    table.add_column("name")
    table.add_column("what it is made of", overflow="fold")
    table.add_column("longest context", justify="right")
    for name, profile in describe_profiles(plan).items():
        table.add_row(name, profile["composition"], f"{profile['longest_tokens']:,}")
    return table


def _tabulate(plan: ResolvedPlan, place: str, limit: int) -> Table:
    kind, devices = "GPU memory" if place == "gpu" else "host memory", plan.deployment.gpu.devices
    kind += f" of each of {devices} devices" if devices > 1 else ""
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
