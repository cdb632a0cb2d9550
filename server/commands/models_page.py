"""Show several models in `tandem plan`: the memory of each, and whether they fit side by side."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from rich.console import Console
from rich.table import Table

from server.planning.resolved_plan import ResolvedPlan
from server.planning.side_by_side import Room, find_room, taken_bytes
from transfer.machine import GIB


def describe_models(plans: Sequence[ResolvedPlan], trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the models' plans as plain data, with whether they fit side by side. `trees`: each plan's own."""
    room = _room_of(plans)
    return {
        "models": [{"name": _name_of(plan), **tree} for plan, tree in zip(plans, trees, strict=True)],
        "together": {
            "at_once": plans[0].deployment.server.models_at_once,
            "room_bytes": dict(room.bytes),
            "why_not": room.why_not([plan.memory for plan in plans]),
            "pairs": [{"models": names, "why_not": why_not} for names, why_not in _pairs(plans, room)],
        },
    }


def print_together(plans: Sequence[ResolvedPlan], console: Console) -> None:
    """Print a row for each model, and which of them may be loaded at once."""
    room = _room_of(plans)
    table = Table(title="models", title_justify="left")
    table.add_column("name", overflow="fold")
    for place in room.bytes:
        table.add_column(f"{'GPU' if place == 'gpu' else 'host'}, GiB", justify="right")
    table.add_column("contexts of", justify="right")
    table.add_column("idle for", justify="right")
    for plan in plans:
        memory, idle_s = plan.memory, plan.deployment.idle_seconds
        taken = [f"{taken_bytes(memory, place) / GIB:.2f}" for place in room.bytes]
        table.add_row(
            _name_of(plan), *taken, f"{memory.max_context_tokens:,}", "-" if idle_s is None else f"{idle_s:g} s"
        )
    console.print(table)
    console.print(_say_together(plans, room), highlight=False, markup=False)


def _say_together(plans: Sequence[ResolvedPlan], room: Room) -> str:
    """Return what is loaded at once, in a sentence or two."""
    why_not = room.why_not([plan.memory for plan in plans])
    if not room.is_shared:
        fits = "all would fit side by side" if why_not is None else f"all do not fit side by side: {why_not}"
        return f"one is loaded at a time (server.models_at_once: one); {fits}"
    if why_not is None:
        return "all are loaded side by side, each when it is asked for"
    pairs = [" and ".join(names) for names, why_not_both in _pairs(plans, room) if why_not_both is None]
    beside = f"side by side fit {'; '.join(pairs)}" if pairs and len(plans) > 2 else "one is loaded at a time"
    return f"all do not fit side by side: {why_not}; {beside}"


def _pairs(plans: Sequence[ResolvedPlan], room: Room) -> list[tuple[list[str], str | None]]:
    return [
        ([_name_of(one), _name_of(other)], room.why_not([one.memory, other.memory]))
        for one, other in combinations(plans, 2)
    ]


def _room_of(plans: Sequence[ResolvedPlan]) -> Room:
    return find_room(plans[0].machine, plans[0].deployment.server.models_at_once == "fitting")


def _name_of(plan: ResolvedPlan) -> str:
    return plan.deployment.model.name or plan.architecture.name
