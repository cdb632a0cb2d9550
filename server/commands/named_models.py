"""Find models by name for commands: a deployment of one, and `tandem models`, which lists those that were fetched."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gpu.config import ModelConfig
from gpu.memory.plan import PlanError
from gpu.model.spec import ModelError
from gpu.profiles import ProfileError
from server.deployment import HUB_PREFIX, ConfigError, Deployment, is_on_hub, load_deployment, model_name
from server.hub.hub_name import read_name
from server.planning.deployment_plan import resolve_plan
from server.several_models import check_together, load_deployments
from transfer.machine import GIB, MachineProfile

if TYPE_CHECKING:
    from server.hub.hub_models import CachedModel


@dataclass(frozen=True, slots=True)
class FittingModel:
    """A model and the longest context that the plan has room for; None: it does not fit, for the reason `why_not`."""

    model: "CachedModel"
    context_tokens: int | None
    why_not: str


def open_deployments(config: Path, is_offline: bool) -> tuple[Deployment, ...]:
    """Return the deployments of a file, which may have several models, or that of a folder or of a model on the hub.

    Models that `model.path` names on the hub are fetched first. Raises ConfigError and HubError.
    """
    if is_on_hub(config):
        return (_fetched(Deployment(model=ModelConfig(path=config)), is_offline),)
    deployments = tuple(_fetched(one, is_offline) for one in load_deployments(config))
    check_together([(one, model_name(one)) for one in deployments])
    return deployments


def _fetched(deployment: Deployment, is_offline: bool) -> Deployment:
    """Return the deployment with `model.path` replaced by the fetched model's folder or file, if it names the hub."""
    path = deployment.model.path
    if path is None or not is_on_hub(path):
        return deployment
    from server.hub.hub_models import fetch_model  # the hub's client takes 12 MB, which few servers want

    name = read_name(str(path))
    found = load_deployment(fetch_model(name, is_offline)).model
    update = {"path": found.path, "name": deployment.model.name or name.repository}
    return deployment.model_copy(update={"model": deployment.model.model_copy(update=update)})


def plan_models(models: "Sequence[CachedModel]", machine: MachineProfile) -> list[FittingModel]:
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
        console.print(f"no models in {folder}; fetch one: tandem serve {HUB_PREFIX}OWNER/NAME", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for heading, side in (("model", "left"), ("size", "right"), (f"on {machine.name}", "left")):
        table.add_column(heading, justify=side, overflow="fold")  # type: ignore[arg-type]
    for one in found:
        fits = f"contexts of {one.context_tokens:,} tokens" if one.context_tokens is not None else f"no: {one.why_not}"
        table.add_row(one.model.name, f"{one.model.size_bytes / GIB:.2f} GiB", fits)
    console.print(table)
    console.print(f"in {folder}", soft_wrap=True)
