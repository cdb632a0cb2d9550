"""Models by name for commands: a deployment of one, and `tandem models`, which lists those that were fetched."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu.memory.plan import PlanError
from gpu.model.spec import ModelError
from gpu.profiles import ProfileError
from server.deployment import ConfigError, Deployment, load_deployment
from server.hub.hub_models import CachedModel, fetch_model
from server.hub.hub_name import PREFIX, read_name
from server.planning.deployment_plan import resolve_plan
from transfer.machine import GIB, MachineProfile


@dataclass(frozen=True, slots=True)
class FittingModel:
    """Hold a model and the longest context that the plan finds room for; None: it does not fit, as `why_not` says."""

    model: CachedModel
    context_tokens: int | None
    why_not: str


def open_deployment(config: Path, is_offline: bool) -> Deployment:
    """Return the deployment of a file or folder, or of a model's name on the hub, which is fetched first.

    Raises ConfigError and HubError.
    """
    if not str(config).startswith(PREFIX):
        return load_deployment(config)
    name = read_name(str(config))
    deployment = load_deployment(fetch_model(name, is_offline))
    return deployment.model_copy(update={"model": deployment.model.model_copy(update={"name": name.repository})})


def plan_models(models: Sequence[CachedModel], machine: MachineProfile) -> list[FittingModel]:
    """Return each model with the longest context that the machine has room for."""
    found = []
    for model in models:
        try:
            memory = resolve_plan(load_deployment(model.path), machine).memory
            found.append(FittingModel(model, memory.max_context_tokens, ""))
        except (ConfigError, ModelError, PlanError, ProfileError) as error:
            found.append(FittingModel(model, None, " ".join(str(error).split())))
    return found


def describe_models(found: Sequence[FittingModel], machine: MachineProfile) -> dict[str, Any]:
    models = [
        {
            "name": one.model.name,
            "path": str(one.model.path),
            "size_bytes": one.model.size_bytes,
            "fits": one.context_tokens is not None,
            "max_context_tokens": one.context_tokens,
            "why_not": one.why_not or None,
        }
        for one in found
    ]
    return {"machine": machine.name, "models": models}


def print_models(found: Sequence[FittingModel], machine: MachineProfile, folder: Path, console: Console) -> None:
    if not found:
        console.print(f"no models in {folder}; fetch one: tandem serve {PREFIX}OWNER/NAME", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for heading, side in (("model", "left"), ("size", "right"), (f"on {machine.name}", "left")):
        table.add_column(heading, justify=side, overflow="fold")  # type: ignore[arg-type]
    for one in found:
        fits = f"contexts of {one.context_tokens:,} tokens" if one.context_tokens is not None else f"no: {one.why_not}"
        table.add_row(one.model.name, f"{one.model.size_bytes / GIB:.2f} GiB", fits)
    console.print(table)
    console.print(f"in {folder}", soft_wrap=True)
